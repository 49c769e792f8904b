package sqltx

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"io"
	"net"

	"github.com/go-sql-driver/mysql"
)

var (
	// ErrOutcomeUnknown means the connection was lost during COMMIT: the transaction may have
	// happened or not.
	ErrOutcomeUnknown = errors.New("sqltx: outcome of COMMIT unknown")
	// ErrNotBegun means that no transaction could be begun, whatever the server said: nothing has
	// happened, and what was to be done in it is not to blame.
	ErrNotBegun = errors.New("sqltx: no transaction could be begun")
	// ErrEnded means a statement was refused because the server had already ended the
	// transaction (a deadlock): sent all the same, it would have committed by itself.
	ErrEnded = errors.New("sqltx: transaction already ended by the server")
)

// Class says what a database error means for the caller.
type Class int

const (
	// None is the class of nil.
	None Class = iota
	// Conflict: a deadlock, a lock wait that ran out, a changed record. Roll back the whole
	// transaction and run it again.
	Conflict
	// Lost: the server cannot be reached, is shutting down, or takes no more connections. It
	// says nothing about the work in hand: wait for the server.
	Lost
	// ReadOnly: the server refuses writes for now, as after a fail-over.
	ReadOnly
	// Full: the server has no room for what is to be written, on its disk as a rule. Wait until
	// somebody makes some.
	Full
	// Duplicate: a unique key has this value already.
	Duplicate
	// Permanent: the statement or its values can never work.
	Permanent
	// Canceled: our own context ended.
	Canceled
	// Other: everything else, errors that are not the database's included.
	Other
)

func (c Class) String() string {
	return [...]string{"none", "conflict", "lost", "read-only", "full", "duplicate", "permanent", "canceled", "other"}[c]
}

// Server error numbers, from the MySQL 8.4 and MariaDB 10.11 error references. What becomes of a
// message is in docs/architecture.md.
var classes = map[uint16]Class{
	1205: Conflict, // ER_LOCK_WAIT_TIMEOUT: undoes the statement only; we undo the rest
	1213: Conflict, // ER_LOCK_DEADLOCK: the server has rolled back everything
	1020: Conflict, // ER_CHECKREAD: MariaDB, innodb_snapshot_isolation

	1040: Lost, // ER_CON_COUNT_ERROR
	1047: Lost, // ER_UNKNOWN_COM_ERROR: a Galera node that is not ready
	1053: Lost, // ER_SERVER_SHUTDOWN
	1129: Lost, // ER_HOST_IS_BLOCKED
	1203: Lost, // ER_TOO_MANY_USER_CONNECTIONS
	1226: Lost, // ER_USER_LIMIT_REACHED
	1317: Lost, // ER_QUERY_INTERRUPTED: KILL QUERY
	1927: Lost, // ER_CONNECTION_KILLED (MariaDB)
	2006: Lost, // CR_SERVER_GONE_ERROR
	2013: Lost, // CR_SERVER_LOST
	3032: Lost, // ER_SERVER_OFFLINE_MODE
	3169: Lost, // ER_SESSION_WAS_KILLED
	4031: Lost, // ER_CLIENT_INTERACTION_TIMEOUT

	1290: ReadOnly, // ER_OPTION_PREVENTS_STATEMENT
	1792: ReadOnly, // ER_CANT_EXECUTE_IN_READ_ONLY_TRANSACTION
	1836: ReadOnly, // ER_READ_ONLY_MODE

	1021: Full, // ER_DISK_FULL
	1026: Full, // ER_ERROR_ON_WRITE
	1114: Full, // ER_RECORD_FILE_FULL: what InnoDB says when the disk is
	3675: Full, // ER_DISK_FULL_NOWAIT (MySQL)

	1062: Duplicate, // ER_DUP_ENTRY

	1048: Permanent, // ER_BAD_NULL_ERROR
	1054: Permanent, // ER_BAD_FIELD_ERROR
	1064: Permanent, // ER_PARSE_ERROR
	1146: Permanent, // ER_NO_SUCH_TABLE
	1153: Permanent, // ER_NET_PACKET_TOO_LARGE
	1264: Permanent, // ER_WARN_DATA_OUT_OF_RANGE
	1364: Permanent, // ER_NO_DEFAULT_FOR_FIELD
	1366: Permanent, // ER_TRUNCATED_WRONG_VALUE_FOR_FIELD
	1406: Permanent, // ER_DATA_TOO_LONG
	1690: Permanent, // ER_DATA_OUT_OF_RANGE
	3819: Permanent, // ER_CHECK_CONSTRAINT_VIOLATED
	4025: Permanent, // ER_CONSTRAINT_FAILED (MariaDB)
}

// Classify returns the class of err, or of the database error it wraps.
func Classify(err error) Class {
	if err == nil {
		return None
	}
	if errors.Is(err, ErrNotBegun) {
		if errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) {
			return Canceled
		}
		return Lost // a wrong password, say: somebody is changing it
	}
	if me, ok := errors.AsType[*mysql.MySQLError](err); ok {
		if c, ok := classes[me.Number]; ok {
			return c
		}
		return Other
	}
	if errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) {
		return Canceled
	}
	var ne net.Error
	switch {
	case errors.Is(err, mysql.ErrPktTooLarge):
		return Permanent
	case errors.Is(err, ErrOutcomeUnknown),
		errors.Is(err, driver.ErrBadConn), errors.Is(err, mysql.ErrInvalidConn),
		errors.Is(err, mysql.ErrMalformPkt), errors.Is(err, mysql.ErrPktSync),
		errors.Is(err, sql.ErrConnDone), errors.Is(err, net.ErrClosed),
		errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF), errors.As(err, &ne):
		return Lost
	}
	return Other
}
