// Package sqltx is how Backstep talks to MySQL: it opens the pool with the settings our
// promises need, runs transactions that can neither be committed nor rolled back by the code
// inside them, and sorts the server's errors into classes callers can act on.
//
// It keeps three outcomes of a transaction apart: it did not happen (any error but one), it
// happened (nil), and nobody knows (ErrOutcomeUnknown: the connection went away during
// COMMIT). An unknown one may be run again only where a repeat is harmless; for the inbox it
// is, because the inbox rows decide.
//
// # What a DSN may say
//
// Where the server is, as whom to connect, and how:
//
//	user, password, network, address, database
//	tls, serverPubKey, allowCleartextPasswords, allowFallbackToPlaintext, allowNativePasswords
//	timeout                      1 s to 1 min, default 5 s
//	readTimeout, writeTimeout    10 s to 5 min, default 30 s; longer than a statement waits for a lock,
//	                             else one that waits looks like a dead server
//
// The driver's other options have no effect: Open sets them, so that the results are the same
// whatever the DSN says.
//
//	parseTime, loc, timeTruncate    times are UTC, and none is cut
//	charset, collation              utf8mb4; in some others interpolating parameters is not safe
//	clientFoundRows                 off: a guarded UPDATE counts the rows it changed
//	interpolateParams               on: one round trip instead of three
//	multiStatements, allowAllFiles, allowOldPasswords, columnsWithAlias, compress    off
//	checkConnLiveness, rejectReadOnly    on: a connection that went bad is found before it is used
//	maxAllowedPacket                the server's: more is an error of the statement, not of the connection
//	connectionAttributes
//
// What the driver does not know is a system variable for the session (time_zone, sql_mode,
// autocommit, transaction_isolation, …). Many would break a promise: autocommit=0 loses
// commits, unique_checks=0 lets duplicates in, sql_select_limit hides rows. So they are
// refused by name. Open sets those our sessions need, and their isolation level.
package sqltx
