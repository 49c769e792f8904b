package testenv

import (
	"context"
	"database/sql"
	"fmt"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"strings"

	"github.com/go-sql-driver/mysql"
)

// mysqlInitSQL runs at each start, a statement a line: MySQL creates root for the socket
// only. Both statements are harmless on MariaDB, which has this account already.
const mysqlInitSQL = `CREATE USER IF NOT EXISTS 'root'@'127.0.0.1';
GRANT ALL PRIVILEGES ON *.* TO 'root'@'127.0.0.1' WITH GRANT OPTION;
`

// mysqlPrograms are the files needed to run MySQL or MariaDB.
type mysqlPrograms struct {
	server  string // mysqld or mariadbd
	install string // mariadb-install-db; empty for MySQL, whose server does it itself
}

func findMySQL(ctx context.Context, r root, path searchPath) (mysqlPrograms, error) {
	server, err := path.find("mysqld", "mariadbd")
	if err != nil {
		return mysqlPrograms{}, err
	}
	version, err := r.command(ctx, os.TempDir(), server, "--no-defaults", "--version").Output()
	if err != nil {
		return mysqlPrograms{}, fmt.Errorf("ask %s for its version: %w", server, err)
	}
	if !strings.Contains(string(version), "MariaDB") {
		return mysqlPrograms{server: server}, nil
	}
	install, err := path.find("mariadb-install-db", "mysql_install_db")
	return mysqlPrograms{server, install}, err
}

// startMySQL creates a data folder in dir and starts a server on it, that goes by c if it is not nil.
func startMySQL(ctx context.Context, g *guard, dir string, r root, programs mysqlPrograms, c *clock) (*process, *mysql.Config, error) {
	ports, err := freePorts(1)
	if err != nil {
		return nil, nil, err
	}
	cfg := rootConfig(fmt.Sprintf("127.0.0.1:%d", ports[0]))
	me, err := user.Current()
	if err != nil {
		return nil, nil, fmt.Errorf("find out who we are: %w", err)
	}
	dir = filepath.Join(dir, "mysql")
	if err := os.Mkdir(dir, 0o700); err != nil {
		return nil, nil, err
	}
	tmp := filepath.Join(dir, "tmp")
	if err := os.Mkdir(tmp, 0o700); err != nil {
		return nil, nil, err
	}
	initFile := filepath.Join(dir, "init.sql")
	if err := os.WriteFile(initFile, []byte(mysqlInitSQL), 0o600); err != nil {
		return nil, nil, err
	}
	// Durability as on a MySQL with its defaults: MariaDB's own would flatter benchmarks.
	// loose: a server that does not know the option goes on without it.
	options := []string{
		"--no-defaults",
		"--user=" + me.Username,
		"--datadir=" + filepath.Join(dir, "data"),
		"--tmpdir=" + tmp, // a server that starts deletes the temporary tables in it, also another's
		"--innodb-buffer-pool-size=512M",
		"--loose-innodb-log-file-size=256M",     // MariaDB
		"--loose-innodb-redo-log-capacity=256M", // MySQL
		"--innodb-flush-log-at-trx-commit=1",
		"--secure-file-priv=", // MySQL's default is a folder that need not exist
	}
	p := &process{
		name:  "mysql",
		guard: g,
		log:   filepath.Join(dir, "log"),
		ready: func(ctx context.Context) error { return pingMySQL(ctx, cfg) },
		command: func() *exec.Cmd {
			// It outlives the call that starts it; stop, kill and the guard end it.
			cmd := r.command(context.Background(), dir, programs.server, append(options,
				"--bind-address=127.0.0.1",
				fmt.Sprintf("--port=%d", ports[0]),
				"--loose-mysqlx=OFF",
				"--socket=mysql.sock", // in the data folder; an absolute path could be too long
				"--pid-file="+filepath.Join(dir, "pid"),
				"--init-file="+initFile,
				"--skip-name-resolve",
				"--max-connections=500",
				"--character-set-server=utf8mb4",
				"--server-id=1",
				"--log-bin=binlog",
				"--sync-binlog=1",
				"--loose-binlog-format=ROW",
			)...)
			if c != nil {
				cmd.Env = append(os.Environ(), c.environment()...)
			}
			return cmd
		},
	}
	if c != nil {
		if err := c.make(ctx, dir); err != nil {
			return nil, nil, err
		}
	}
	install := r.command(ctx, dir, programs.server, append(options, "--initialize-insecure")...)
	if programs.install != "" {
		install = r.command(ctx, dir, programs.install, append(options,
			"--auth-root-authentication-method=normal", "--skip-test-db")...)
	}
	g.adopt(install)
	if out, err := install.CombinedOutput(); err != nil {
		return nil, nil, fmt.Errorf("create a data folder with %s: %w\n%s", programs.server, err, out)
	}
	return p, cfg, p.start(ctx)
}

// rootConfig is the DSN, still without a database, of root at addr.
func rootConfig(addr string) *mysql.Config {
	cfg := mysql.NewConfig()
	cfg.User, cfg.Net, cfg.Addr = "root", "tcp", addr
	cfg.ParseTime = true
	return cfg
}

func pingMySQL(ctx context.Context, cfg *mysql.Config) error {
	cfg = cfg.Clone()
	cfg.DBName = ""                 // it may be one that is still to be created
	cfg.Logger = &mysql.NopLogger{} // a server that is still starting is not worth a line
	connector, err := mysql.NewConnector(cfg)
	if err != nil {
		return err
	}
	db := sql.OpenDB(connector)
	defer func() { _ = db.Close() }()
	return db.PingContext(ctx)
}
