package testenv

import (
	"log/slog"
	"os/exec"
	"testing"
)

// PythonWithPika returns a Python 3 that has the AMQP client pika. It is installed if that can be
// done on this machine; else the test is skipped: it is about a program that needs a runtime which
// nothing else of ours does.
func PythonWithPika(t testing.TB) string {
	t.Helper()
	python, err := findPython()
	if err == nil {
		return python
	}
	if e := install(t.Context(), newSearchPath(""), slog.New(slog.DiscardHandler), "python3", "python3-pika"); e != nil {
		t.Skipf("no Python 3 that has pika (%v), and it cannot be installed (%v): install Debian's python3-pika, or pika by pip", err, e)
	}
	if python, err = findPython(); err != nil {
		t.Fatalf("testenv: no Python 3 that has pika, though python3-pika is installed: %v", err)
	}
	return python
}

// findPython looks in every folder: a Python without Debian's modules may come first.
func findPython() (python string, err error) {
	for _, dir := range newSearchPath("") {
		python, e := searchPath{dir}.find("python3")
		if e == nil {
			e = exec.Command(python, "-c", "import pika, sqlite3").Run()
		}
		if e == nil {
			return python, nil
		}
		err = e
	}
	return "", err
}
