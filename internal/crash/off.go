//go:build !crashpoints

// Package crash lets tests kill a process at a named instruction, or on a message. Without the
// build tag crashpoints that is nothing: the calls are compiled away.
package crash

// Point is where a crash test may kill this process.
func Point(string) {}

// Message is where a crash test may kill this process for a message.
func Message(string) {}
