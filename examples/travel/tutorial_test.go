package travel_test

import (
	"os"
	"regexp"
	"strings"
	"testing"
)

// The tutorial's Go code is these files, whole and in this order, and its first saga with all that
// belongs to it has less than 100 lines. What compiles and passes here is what its reader types.
func TestTutorialIsThisCode(t *testing.T) {
	doc, err := os.ReadFile("../../docs/tutorial.md")
	if err != nil {
		t.Fatal(err)
	}
	blocks := regexp.MustCompile("(?ms)^```go\n(.*?)^```$").FindAllStringSubmatch(string(doc), -1)
	lines := 0
	files := []string{"travel.go", "hotel.go", "travel_test.go", "insured.go", "insured_test.go"}
	for i, name := range files {
		code, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		if i < 3 {
			lines += strings.Count(string(code), "\n")
		}
		if i >= len(blocks) || blocks[i][1] != string(code) {
			t.Errorf("block %d of docs/tutorial.md is not %s", i+1, name)
		}
	}
	if len(blocks) != len(files) {
		t.Errorf("docs/tutorial.md has %d blocks of Go; %d are this example's files", len(blocks), len(files))
	}
	if lines >= 100 {
		t.Errorf("the first saga has %d lines, not fewer than 100", lines)
	}
}
