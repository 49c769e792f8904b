// Command paymentgateway is a payment service for tests and demonstrations; package gateway has what
// it answers. Its ledger is in memory.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/signal"
	"syscall"
	"time"

	"backstep/internal/testenv/gateway"
)

func main() {
	listen := flag.String("listen", "127.0.0.1:8090", "host:port to listen on; port 0 is any that is free")
	var f gateway.Fault
	flag.StringVar((*string)(&f.Kind), "fault", "", fmt.Sprintf("what goes wrong: one of %v", gateway.Kinds))
	flag.StringVar(&f.On, "on", "", "on charges or refunds; both if it is not set")
	flag.IntVar(&f.Times, "times", 0, "how often it goes wrong; 0 is always")
	flag.DurationVar(&f.Delay, "delay", 5*time.Second, "how long a slow one waits")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM) // a main has no other
	defer stop()
	if err := run(ctx, *listen, f); err != nil {
		fmt.Fprintln(os.Stderr, "paymentgateway:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, listen string, f gateway.Fault) error {
	var g gateway.Gateway
	if err := g.Break(f); err != nil {
		return err
	}
	l, err := net.Listen("tcp", listen)
	if err != nil {
		return err
	}
	fmt.Printf("export BACKSTEP_PAYMENT_URL=http://%s\n", l.Addr())
	server := &http.Server{Handler: &g, ReadHeaderTimeout: 10 * time.Second}
	stop := context.AfterFunc(ctx, func() { _ = server.Close() }) // what it says is what Serve says
	defer stop()
	if err := server.Serve(l); !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return nil
}
