package sqltx

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/go-sql-driver/mysql"
)

// CheckDSN returns why Open would refuse dsn, in words that do not quote the password.
func CheckDSN(dsn string) error {
	_, err := parse(dsn)
	return err
}

const looksLike = "it looks like user:password@tcp(host:3306)/database"

// parse takes from a DSN what is the operator's to say; the package comment has the table.
func parse(dsn string) (*mysql.Config, error) {
	given, err := parseDSN(dsn)
	switch {
	case err != nil:
		return nil, err
	case given.DBName == "":
		return nil, errors.New("the DSN names no database; " + looksLike)
	case len(given.Params) > 0:
		names := strings.Join(slices.Sorted(maps.Keys(given.Params)), ", ")
		return nil, fmt.Errorf("the DSN sets %s; leave it out: Backstep itself sets what its sessions need", names)
	}
	cfg := mysql.NewConfig()
	cfg.User, cfg.Passwd, cfg.Net, cfg.Addr, cfg.DBName = given.User, given.Passwd, given.Net, given.Addr, given.DBName
	cfg.TLSConfig, cfg.TLS, cfg.ServerPubKey = given.TLSConfig, given.TLS, given.ServerPubKey
	cfg.AllowCleartextPasswords = given.AllowCleartextPasswords
	cfg.AllowFallbackToPlaintext = given.AllowFallbackToPlaintext
	cfg.AllowNativePasswords = given.AllowNativePasswords
	var errs []error
	for _, t := range []struct {
		name           string
		field          *time.Duration
		given          time.Duration
		def, low, high time.Duration
	}{
		{"timeout", &cfg.Timeout, given.Timeout, 5 * time.Second, time.Second, time.Minute},
		// Longer than a statement may wait for a lock, else one that waits looks like a dead server.
		{"readTimeout", &cfg.ReadTimeout, given.ReadTimeout, 30 * time.Second, 10 * time.Second, 5 * time.Minute},
		{"writeTimeout", &cfg.WriteTimeout, given.WriteTimeout, 30 * time.Second, 10 * time.Second, 5 * time.Minute},
	} {
		*t.field = t.given
		if t.given == 0 {
			*t.field = t.def
		} else if t.given < t.low || t.given > t.high {
			errs = append(errs, fmt.Errorf("the DSN sets %s=%s; it may be %s to %s", t.name, t.given, t.low, t.high))
		}
	}
	return cfg, errors.Join(errs...)
}

// parseDSN is the driver's. Its message may quote the DSN, password included, and it panics
// over an option that it once had.
func parseDSN(dsn string) (cfg *mysql.Config, err error) {
	defer func() {
		if recover() != nil {
			err = errors.New("the DSN sets strict, which the driver does not have any more; leave it out")
		}
	}()
	if cfg, err = mysql.ParseDSN(dsn); err != nil {
		return nil, errors.New("the DSN cannot be read; " + looksLike)
	}
	return cfg, nil
}

// Redact returns dsn fit for a person who looks for a mistake in it: without the password.
func Redact(dsn string) string {
	cfg, err := parseDSN(dsn)
	if err != nil {
		return "(a DSN that cannot be read)"
	}
	return fmt.Sprintf("%s@%s(%s)/%s", cfg.User, cfg.Net, cfg.Addr, cfg.DBName)
}

// Address returns the server and the database that dsn names, and nothing else, for a log.
func Address(dsn string) string {
	cfg, err := parseDSN(dsn)
	if err != nil {
		return "(a DSN that cannot be read)"
	}
	return cfg.Addr + "/" + cfg.DBName
}
