package app

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
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

// checkAlive asks the admin port at addr for /livez.
func checkAlive(addr string) error {
	client := &http.Client{Timeout: 3 * time.Second}
	resp, err := client.Get("http://" + addr + "/livez")
	if err != nil {
		return fmt.Errorf("no answer from the admin port: %w; BACKSTEP_ADMIN_ADDR must name the port of the running process", err)
	}
	defer func() { _ = resp.Body.Close() }()
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("the admin port answers %s", resp.Status)
	}
	return nil
}
