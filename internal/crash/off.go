//go:build !crashpoints

// Package crash lets tests kill a process at a named instruction. Without the build tag
// crashpoints a point is nothing: the call is compiled away.
package crash

// Point is where a crash test may kill this process.
func Point(string) {}
