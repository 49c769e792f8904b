package app

import (
	"errors"
	"fmt"
	"reflect"
	"strings"
)

// Prefix is that of every environment variable.
const Prefix = "BACKSTEP"

// Variables are all that some Backstep binary knows. One environment often serves several, so
// a binary accepts those of the others and refuses what none of them knows: a misspelt name
// would otherwise be a default nobody asked for. Each binary's tests hold its own against
// this list.
var Variables = []string{
	"BACKSTEP_ADMIN_ADDR",
	"BACKSTEP_ALLOW_UNTESTED_SERVER",
	"BACKSTEP_AMQP_MANAGEMENT_URL",
	"BACKSTEP_AMQP_URL",
	"BACKSTEP_BATCH",
	"BACKSTEP_INBOX_RETENTION",
	"BACKSTEP_JAEGER_URL",
	"BACKSTEP_LANES",
	"BACKSTEP_LOG_LEVEL",
	"BACKSTEP_MAX_BODY",
	"BACKSTEP_MAX_HOLD",
	"BACKSTEP_MYSQL_DSN",
	"BACKSTEP_OUTBOX_RETENTION",
	"BACKSTEP_PAYMENT_URL",
	"BACKSTEP_PREFETCH",
	"BACKSTEP_QUEUES",
	"BACKSTEP_RELAY_LEASE_TTL",
	"BACKSTEP_RELAY_PARK_AFTER",
	"BACKSTEP_RELAY_WINDOW",
	"BACKSTEP_RESCUE_AFTER",
	"BACKSTEP_SAGA_RETENTION",
}

// secrets hold passwords. Each can be given as a file, <name>_FILE, as mounted secrets are.
var secrets = []string{"BACKSTEP_AMQP_MANAGEMENT_URL", "BACKSTEP_AMQP_URL", "BACKSTEP_MYSQL_DSN"}

// Load reads the environment into cfg, a pointer to a struct with envconfig tags, and reports
// all faults at once, one for each variable: what is missing though its tag or needs require
// it, unreadable secrets, values that do not parse or are out of range, what cfg's Validate
// says, and unknown variables. Besides envconfig's the tags are
//
//	range    "1 to 64", "1s to 1m", or what a value must be, in words; numbers and durations must have one
//	example  what a value looks like
//
// No tag gives a field another name: envconfig would fall back to that name without prefix.
func Load(cfg any, needs ...string) error {
	var errs []error
	for _, f := range fields(Prefix, reflect.ValueOf(cfg).Elem()) {
		errs = append(errs, f.read(needs))
	}
	if v, ok := cfg.(interface{ Validate() error }); ok {
		errs = append(errs, v.Validate())
	}
	errs = append(errs, unknown())
	if err := errors.Join(errs...); err != nil {
		lines := strings.ReplaceAll(err.Error(), "\n", "\n  ")
		return fmt.Errorf("configuration:\n  %s\n--help lists the variables", lines)
	}
	return nil
}

// Names returns the variables that cfg, a pointer to a struct, is read from.
func Names(cfg any) []string {
	var names []string
	for _, f := range fields(Prefix, reflect.ValueOf(cfg).Elem()) {
		names = append(names, f.name)
	}
	return names
}
