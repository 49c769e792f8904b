// Package sqltx is how Backstep talks to MySQL: it opens the pool with the settings our
// promises need, runs transactions that can neither be committed nor rolled back by the code
// inside them, and sorts the server's errors into classes callers can act on.
//
// It keeps three outcomes of a transaction apart: it did not happen (any error but one), it
// happened (nil), and nobody knows (ErrOutcomeUnknown: the connection went away during
// COMMIT). An unknown one may be run again only where a repeat is harmless; for the inbox it
// is, because the inbox rows decide.
package sqltx
