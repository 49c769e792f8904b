package main

import (
	"fmt"
	"strings"
	"testing"
)

func TestReadLines(t *testing.T) {
	long := `{"x":"` + strings.Repeat("y", maxBody) + `"}`
	tests := []struct {
		name, in, want string // want: line:body of each order
		fault          string // of the error; empty: none
	}{
		{"one", `{"a":1}`, `1:{"a":1}`, ""},
		{"line ends of all kinds, blank lines", "{\"a\":1}\r\n\n  \t\n {\"a\":2} \n", `1:{"a":1} 4:{"a":2}`, ""},
		{"any script", `{"customer":"山田 😀"}` + "\n", `1:{"customer":"山田 😀"}`, ""},
		{"larger than a buffer", fmt.Sprintf("{\"x\":%q}\n{}", strings.Repeat("y", 100_000)), fmt.Sprintf("1:{\"x\":%q} 2:{}", strings.Repeat("y", 100_000)), ""},
		{"byte order mark", "\ufeff{\"a\":1}\n{}", `1:{"a":1} 2:{}`, ""},
		{"byte order mark within", "{}\n\ufeff{}", "", "line 2: not JSON"},
		{"UTF-16", "\xff\xfe{\x00}\x00", "", "it is UTF-16"},
		{"UTF-16, big end first", "\xfe\xff\x00{\x00}", "", "it is UTF-16"},
		{"nothing", "", "", "there is no order in it"},
		{"nothing but a byte order mark", "\ufeff", "", "there is no order in it"},
		{"nothing but blank lines", " \n\r\n", "", "there is no order in it"},
		{"two bytes", "{}", "1:{}", ""},
		{"not JSON", "{}\n{\"a\":}\n{}\nnope", "", "line 2: not JSON: at byte 6: "},
		{"all faults are named", "{}\n{\"a\":}\n{}\nnope", "", "line 4: not JSON"},
		{"half a line", "{}\n{\"a\":", "", "line 2: not JSON: at byte 5: unexpected end"},
		{"two values on a line", "{} {}", "", "line 1: not JSON"},
		{"JSON, but no object", "{}\n[1]", "", "line 2: JSON, but not an object"},
		{"null", "null", "", "line 1: JSON, but not an object"},
		{"too long", "{}\n" + long + "\n{}", "", "line 2: longer than 4194304 bytes"},
		{"many faults", strings.Repeat("x\n", 100), "", "and 80 more"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			orders, err := readLines(strings.NewReader(tt.in))
			if tt.fault != "" {
				if err == nil || !strings.Contains(err.Error(), tt.fault) {
					t.Errorf("error %v, want %q", err, tt.fault)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			var got []string
			for _, o := range orders {
				got = append(got, fmt.Sprintf("%d:%s", o.Line, o.body))
			}
			if s := strings.Join(got, " "); s != tt.want {
				t.Errorf("orders %.200q, want %.200q", s, tt.want)
			}
		})
	}
}
