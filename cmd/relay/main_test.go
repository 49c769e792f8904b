package main

import (
	"slices"
	"testing"

	"backstep/internal/app"
)

func TestVariablesAreKnown(t *testing.T) {
	for _, name := range app.Names(&config{}) {
		if !slices.Contains(app.Variables, name) {
			t.Errorf("%s is missing from app.Variables", name)
		}
	}
}
