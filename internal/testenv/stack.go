package testenv

import (
	"context"
	"errors"
	"fmt"
	"os"
)

// Current is the stack of MySQL and RabbitMQ that Debian's unstable suite packages: years newer
// than those of a stable one. They run from a folder of their own; nothing of this machine is
// used or changed.
const Current = "current"

const (
	stackVariable = "TEST_STACK"
	// privateStackVariable goes with TEST_MYSQL_DSN and TEST_AMQP_URL, if those are servers of a
	// stack: what a test starts for itself shall be of the same.
	privateStackVariable = "TEST_PRIVATE_STACK"
)

// StackFromEnvironment returns o with the stack that TEST_STACK names. Servers that are given
// are what they are: to name a stack as well is an error.
func (o Options) StackFromEnvironment() (Options, error) {
	o.Stack = os.Getenv(stackVariable)
	if o.Stack != "" && (o.MySQLDSN != "" || o.AMQPURL != "") {
		return o, errors.New(stackVariable + " starts servers, but servers to use are given as well: unset it," +
			" or their addresses (BACKSTEP_MYSQL_DSN and BACKSTEP_AMQP_URL; for tests TEST_MYSQL_DSN and TEST_AMQP_URL)")
	}
	return o, nil
}

// privateStack is the stack of servers that a test has for itself.
func privateStack() string {
	if stack := os.Getenv(stackVariable); stack != "" {
		return stack
	}
	return os.Getenv(privateStackVariable)
}

// startStack starts what is still missing with the programs of o's stack.
func (s *Servers) startStack(ctx context.Context, o Options) error {
	if o.Stack != Current {
		return fmt.Errorf("%s is %q; it may be %q or unset", stackVariable, o.Stack, Current)
	}
	d, err := currentStack(o.log())
	if err != nil {
		return err
	}
	r, err := d.root(ctx)
	if err != nil {
		return err
	}
	files, _, err := s.lookUp(ctx, r, r.searchPath())
	if err != nil {
		return fmt.Errorf("%w; remove %s to have it made anew", err, d.dir)
	}
	return s.startPrivate(ctx, o, files)
}

// Environment returns variables by which Given finds these servers in another process, and
// Private starts servers of the same stack.
func (s *Servers) Environment() []string {
	return []string{
		"TEST_MYSQL_DSN=" + s.DSN(""),
		"TEST_AMQP_URL=" + s.AMQPURL(""),
		"TEST_AMQP_MANAGEMENT_URL=" + s.ManagementURL(),
		stackVariable + "=",
		privateStackVariable + "=" + s.stack,
	}
}
