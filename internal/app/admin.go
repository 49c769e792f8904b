package app

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"strings"
	"time"
)

// Admin is the port operators and probes talk to.
type Admin struct {
	// Ready returns what keeps the process from doing its work, in words, or nil.
	Ready func(ctx context.Context) error
	// Stats returns counters since the process started, for /stats as JSON.
	Stats func() any
}

// Run serves /livez, /readyz and /stats until ctx ends. /livez depends on no server: a
// restart would not bring one back.
func (a Admin) Run(ctx context.Context, addr string, log *slog.Logger) error {
	ln, err := net.Listen("tcp", addr)
	if err != nil {
		return fmt.Errorf("admin port: %w; set BACKSTEP_ADMIN_ADDR to a free address", err)
	}
	log.Info("admin listening", "addr", ln.Addr().String())
	mux := http.NewServeMux()
	mux.HandleFunc("GET /livez", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprintln(w, "ok") })
	mux.HandleFunc("GET /readyz", func(w http.ResponseWriter, r *http.Request) {
		if err := a.Ready(r.Context()); err != nil {
			http.Error(w, err.Error(), http.StatusServiceUnavailable)
			return
		}
		fmt.Fprintln(w, "ok")
	})
	mux.HandleFunc("GET /stats", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		if err := json.NewEncoder(w).Encode(a.Stats()); err != nil {
			log.Debug("stats not written", "error", err) // the client went away
		}
	})
	srv := &http.Server{Handler: mux, ReadHeaderTimeout: 5 * time.Second}
	stop := context.AfterFunc(ctx, func() { srv.Close() }) //nolint:errcheck // nothing of worth is in flight
	defer stop()
	if err := srv.Serve(ln); !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("admin port: %w", err)
	}
	return nil
}

// checkAlive asks the process at the configured admin port for /livez, says what it answers,
// and returns the exit code.
func checkAlive(stdout, stderr io.Writer) int {
	var s Service
	if err := Load(&s); err != nil {
		fmt.Fprintln(stderr, err)
		return exitUsage
	}
	if strings.HasSuffix(s.AdminAddr, ":0") {
		fmt.Fprintf(stderr, "%s_ADMIN_ADDR is %s, any free port, so nobody knows whom to ask; set it to a fixed port for the process and for --check\n", Prefix, s.AdminAddr)
		return exitUsage
	}
	url := "http://" + s.AdminAddr + "/livez"
	// Its own transport: a proxy that the environment names has no business between us.
	client := &http.Client{Timeout: 3 * time.Second, Transport: &http.Transport{DisableKeepAlives: true}}
	resp, err := client.Get(url)
	if err != nil {
		fmt.Fprintf(stderr, "no answer: %v; is the process running, with the same %s_ADMIN_ADDR?\n", err, Prefix)
		return exitFailed
	}
	defer func() { _ = resp.Body.Close() }() // it is not even read
	if resp.StatusCode != http.StatusOK {
		fmt.Fprintf(stderr, "%s answers %s; is that the admin port of a Backstep process?\n", url, resp.Status)
		return exitFailed
	}
	fmt.Fprintf(stdout, "%s answers %s\n", url, resp.Status)
	return exitOK
}
