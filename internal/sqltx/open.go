package sqltx

import (
	"context"
	"database/sql"
	"fmt"
	"regexp"
	"strconv"
	"strings"
	"time"

	"github.com/go-sql-driver/mysql"
)

// Config bounds a pool. Zero fields mean the defaults.
type Config struct {
	MaxOpen         int           // connections; default 16
	LockWaitTimeout time.Duration // innodb_lock_wait_timeout, whole seconds; default 5 s
	ProgramName     string        // shown by the server's connection attributes
	AllowUntested   bool          // accept servers this version was never tested on
	LongStatements  bool          // a statement may take as long as it takes: for migrations
}

// Open returns a pool on the server dsn names. It does no I/O. Every connection of the pool
// has UTC as its time zone, strict SQL mode, READ COMMITTED, and gives up: reads and writes after
// 30 s, idle ones after 30 s, and the server drops those it has not heard from for 45 s, so that a client
// lost in a network fault lets go of its row locks within a minute, the wait of its last statement
// for a lock included. A DSN that would change any of that is refused; the package comment says
// what it may say.
func Open(dsn string, c Config) (*sql.DB, error) {
	if c.MaxOpen == 0 {
		c.MaxOpen = 16
	}
	if c.LockWaitTimeout == 0 {
		c.LockWaitTimeout = 5 * time.Second
	}
	cfg, err := parse(dsn)
	if err != nil {
		return nil, err
	}
	cfg.ParseTime = true
	cfg.InterpolateParams = true // one round trip instead of three
	cfg.RejectReadOnly = true    // a fail-over must not leave us on the old primary
	cfg.Logger = &mysql.NopLogger{}
	cfg.MaxAllowedPacket = 0 // the server's: it closes the connection over more, which looks like an outage
	if c.ProgramName != "" {
		cfg.ConnectionAttributes = "program_name:" + c.ProgramName
	}
	cfg.Params = map[string]string{
		"autocommit":               "1",
		"time_zone":                "'+00:00'",
		"sql_mode":                 "'STRICT_ALL_TABLES,NO_ENGINE_SUBSTITUTION,ERROR_FOR_DIVISION_BY_ZERO'",
		"wait_timeout":             "45",
		"innodb_lock_wait_timeout": strconv.Itoa(max(1, int(c.LockWaitTimeout.Seconds()))),
	}
	if c.LongStatements {
		cfg.ReadTimeout = 0
		cfg.Params["wait_timeout"] = "28800" // another connection holds the migrations' lock meanwhile
	}
	plain, err := mysql.NewConnector(cfg)
	if err != nil {
		return nil, fmt.Errorf("MySQL settings: %w", err)
	}
	db := sql.OpenDB(connector{plain})
	db.SetMaxOpenConns(c.MaxOpen)
	db.SetMaxIdleConns(c.MaxOpen)
	db.SetConnMaxIdleTime(30 * time.Second)
	db.SetConnMaxLifetime(3 * time.Minute)
	return db, nil
}

// Probe returns nil if the server can be reached and takes writes.
func Probe(ctx context.Context, db *sql.DB) error {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	var readOnly bool
	if err := db.QueryRowContext(ctx, `SELECT @@global.read_only`).Scan(&readOnly); err != nil {
		return fmt.Errorf("probe MySQL: %w", err)
	}
	if readOnly {
		return &mysql.MySQLError{Number: 1836, Message: "the server is read-only"}
	}
	return nil
}

var versionNumber = regexp.MustCompile(`^(\d+)\.(\d+)\.(\d+)`)

// CheckServer refuses servers Backstep was never tested on: it supports MySQL 8.0.16+, 8.4
// and 9.x, and MariaDB 10.6+.
func CheckServer(ctx context.Context, db *sql.DB, c Config) error {
	var version, comment string
	if err := db.QueryRowContext(ctx, `SELECT VERSION(), @@version_comment`).Scan(&version, &comment); err != nil {
		return fmt.Errorf("read MySQL version: %w", err)
	}
	if c.AllowUntested || tested(version, comment) {
		return nil
	}
	return fmt.Errorf("MySQL server %s (%s) is not supported: MySQL 8.0.16+, 8.4, 9.x or MariaDB 10.6+ is needed; "+
		"set BACKSTEP_ALLOW_UNTESTED_SERVER=true to try all the same", version, comment)
}

func tested(version, comment string) bool {
	m := versionNumber.FindStringSubmatch(strings.TrimPrefix(version, "5.5.5-"))
	if m == nil || strings.Contains(version+comment, "TiDB") {
		return false
	}
	var v [3]int
	for i := range v {
		v[i], _ = strconv.Atoi(m[i+1]) // digits by the pattern
	}
	n := v[0]*1_000_000 + v[1]*1_000 + v[2]
	if strings.Contains(version+comment, "MariaDB") {
		return n >= 10_006_000
	}
	return n >= 8_000_016 && v[0] < 10
}
