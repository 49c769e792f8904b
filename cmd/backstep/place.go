package main

import (
	"context"
	"crypto/rand"
	"database/sql"
	"encoding/hex"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"time"

	"backstep/internal/testenv"
)

// place is a database and a virtual host that a demo or a benchmark has for itself, on servers
// that may be somebody else's.
type place struct {
	servers *testenv.Servers
	given   config // the servers that are somebody else's
	name    string
	config  config
}

// newPlace makes both, for the demo or a benchmark. What it made is dropped again if it fails.
func newPlace(ctx context.Context, purpose string, servers *testenv.Servers, given config) (*place, error) {
	var b [4]byte
	_, _ = rand.Read(b[:]) // never fails
	p := &place{servers: servers, given: given, name: "backstep_" + purpose + "_" + hex.EncodeToString(b[:])}
	p.config.MySQL.DSN = servers.DSN(p.name)
	p.config.AMQP.URL = servers.AMQPURL(p.name)
	p.config.AMQP.ManagementURL = servers.ManagementURL()
	p.config.Inbox.Retention = 14 * 24 * time.Hour
	if err := p.make(ctx); err != nil {
		return nil, errors.Join(err, p.drop())
	}
	return p, nil
}

func (p *place) make(ctx context.Context) error {
	if err := p.exec(ctx, "CREATE DATABASE "+p.name+" CHARACTER SET utf8mb4"); err != nil {
		return fmt.Errorf("create database %s: %w; the user in BACKSTEP_MYSQL_DSN needs the right to", p.name, err)
	}
	u, err := url.Parse(p.config.AMQP.URL)
	if err != nil {
		return errors.New("the broker's address is not a URL") // err would quote the password
	}
	if err := p.servers.Manage(ctx, http.MethodPut, nil, nil, "vhosts", p.name); err != nil {
		return fmt.Errorf("create virtual host %s: %w; the user in BACKSTEP_AMQP_URL needs the administrator tag", p.name, err)
	}
	all := map[string]string{"configure": ".*", "write": ".*", "read": ".*"}
	if err := p.servers.Manage(ctx, http.MethodPut, all, nil, "permissions", p.name, u.User.Username()); err != nil {
		return fmt.Errorf("permit %s on virtual host %s: %w", u.User.Username(), p.name, err)
	}
	return nil
}

// drop deletes what would stay: on servers of ours it goes with them.
func (p *place) drop() error { return p.remove(p.given.AMQP.URL != "", p.given.MySQL.DSN != "") }

// remove deletes the virtual host, the database, or both. It needs no context: it has to be
// done when everything else has ended.
func (p *place) remove(vhost, database bool) error {
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	var errs []error
	if vhost {
		if err := p.servers.Manage(ctx, http.MethodDelete, nil, nil, "vhosts", p.name); err != nil {
			errs = append(errs, fmt.Errorf("delete virtual host %s: %w", p.name, err))
		}
	}
	if database {
		if err := p.exec(ctx, "DROP DATABASE IF EXISTS "+p.name); err != nil {
			errs = append(errs, fmt.Errorf("drop database %s: %w", p.name, err))
		}
	}
	return errors.Join(errs...)
}

// exec runs a statement that needs no database.
func (p *place) exec(ctx context.Context, query string) error {
	db, err := sql.Open("mysql", p.servers.DSN(""))
	if err != nil {
		return err
	}
	defer db.Close() //nolint:errcheck // the statement has been executed or not
	_, err = db.ExecContext(ctx, query)
	return err
}

// versions returns those of the servers.
func (p *place) versions(ctx context.Context, db *sql.DB) (mysql, rabbit string, err error) {
	if err := db.QueryRowContext(ctx, `SELECT VERSION()`).Scan(&mysql); err != nil {
		return "", "", fmt.Errorf("ask MySQL for its version: %w", err)
	}
	var overview struct {
		Version string `json:"rabbitmq_version"`
	}
	if err := p.servers.Manage(ctx, http.MethodGet, nil, &overview, "overview"); err != nil {
		return "", "", fmt.Errorf("ask RabbitMQ for its version: %w", err)
	}
	return mysql, overview.Version, nil
}
