package sqltx

import (
	"reflect"
	"strings"
	"testing"

	"github.com/go-sql-driver/mysql"
)

const base = "user:hunter2@tcp(127.0.0.1:3306)/d"

// Each would break a promise, or change what a lost server looks like.
func TestDSNOptionsThatAreRefused(t *testing.T) {
	tests := []struct{ options, says string }{
		{"time_zone=%27-11:00%27", "the DSN sets time_zone; leave it out"},
		{"sql_mode=%27%27", "the DSN sets sql_mode; leave it out"},
		{"autocommit=0", "the DSN sets autocommit; leave it out"},
		{"transaction_isolation=%27SERIALIZABLE%27", "the DSN sets transaction_isolation; leave it out"},
		{"tx_isolation=%27SERIALIZABLE%27", "the DSN sets tx_isolation; leave it out"},
		{"wait_timeout=1", "the DSN sets wait_timeout; leave it out"},
		{"innodb_lock_wait_timeout=50", "the DSN sets innodb_lock_wait_timeout; leave it out"},
		{"unique_checks=0&parseTime=true&sql_select_limit=1", "the DSN sets sql_select_limit, unique_checks; leave it out"},
		{"parsetime=true", "the DSN sets parsetime; leave it out"},
		{"readTimeout=1s", "the DSN sets readTimeout=1s; it may be 10s to 5m0s"},
		{"readTimeout=-30s", "the DSN sets readTimeout=-30s; it may be"},
		{"writeTimeout=1ms&timeout=1h", "the DSN sets writeTimeout=1ms; it may be 10s to 5m0s"},
		{"timeout=1h", "the DSN sets timeout=1h0m0s; it may be 1s to 1m0s"},
		{"parseTime=perhaps", "cannot be read"},
		{"loc=Nowhere", "cannot be read"},
		{"strict=true", "the DSN sets strict"}, // the driver panics
	}
	for _, tt := range tests {
		t.Run(tt.options, func(t *testing.T) {
			_, err := Open(base+"?"+tt.options, Config{})
			if err == nil || !strings.Contains(err.Error(), tt.says) || strings.Contains(err.Error(), "hunter2") {
				t.Errorf("Open gave %v, want %q", err, tt.says)
			}
			if cerr := CheckDSN(base + "?" + tt.options); cerr == nil || cerr.Error() != err.Error() {
				t.Errorf("CheckDSN gave %v, Open %v", cerr, err)
			}
		})
	}
}

// With these the settings of a connection are the same as without, those of the driver that
// nobody sees included.
func TestDSNOptionsThatChangeNothing(t *testing.T) {
	want, err := parse(base)
	if err != nil {
		t.Fatal(err)
	}
	for _, option := range []string{
		"parseTime=false", "parseTime=true", "loc=Local", "loc=Asia%2FKolkata", "timeTruncate=1h",
		"charset=latin1", "charset=gbk", "collation=gbk_chinese_ci", "collation=utf8mb4_bin",
		"clientFoundRows=true", "interpolateParams=false", "interpolateParams=true", "multiStatements=true",
		"columnsWithAlias=true", "allowAllFiles=true", "allowOldPasswords=true", "checkConnLiveness=false", "rejectReadOnly=false",
		"maxAllowedPacket=1", "compress=true", "connectionAttributes=a:b",
	} {
		t.Run(option, func(t *testing.T) {
			if given, err := mysql.ParseDSN(base + "?" + option); err != nil || len(given.Params) > 0 {
				t.Fatalf("the driver does not know %s: %v", option, err)
			}
			got, err := parse(base + "?" + option)
			if err != nil {
				t.Fatal(err)
			}
			if got.Logger = want.Logger; !reflect.DeepEqual(got, want) {
				t.Errorf("it changes the settings to %+v, want %+v", got, want)
			}
		})
	}
}

// These are where the server is, as whom to connect, and how.
func TestDSNOptionsThatAreTaken(t *testing.T) {
	c, err := parse("user:p@ss/w0rd@unix(/run/my.sock)/d%2Fb?tls=skip-verify&allowCleartextPasswords=true&allowNativePasswords=false" +
		"&allowFallbackToPlaintext=true&timeout=7s&readTimeout=40s&writeTimeout=50s")
	if err != nil {
		t.Fatal(err)
	}
	if c.User != "user" || c.Passwd != "p@ss/w0rd" || c.Net != "unix" || c.Addr != "/run/my.sock" || c.DBName != "d/b" ||
		c.TLS == nil || !c.TLS.InsecureSkipVerify || !c.AllowCleartextPasswords || c.AllowNativePasswords || !c.AllowFallbackToPlaintext ||
		c.Timeout.Seconds() != 7 || c.ReadTimeout.Seconds() != 40 || c.WriteTimeout.Seconds() != 50 {
		t.Errorf("settings %+v", c)
	}
	if got := Address(base); got != "127.0.0.1:3306/d" {
		t.Errorf("Address gave %q", got)
	}
}

func FuzzDSN(f *testing.F) {
	for _, s := range []string{base, base + "?strict=true", base + "?readTimeout=1s", "a/b@c(d)/e", "@/", "", "u:hunter2@tcp(h)/d?x", "u:hunter2@tcp(h/d"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, dsn string) {
		db, err := Open(dsn, Config{})
		if err == nil {
			err = db.Close()
		}
		if cerr := CheckDSN(dsn); err == nil && cerr != nil {
			t.Errorf("Open takes what CheckDSN refuses: %v", cerr)
		}
		_, _ = Redact(dsn), Address(dsn) // no panic
	})
}
