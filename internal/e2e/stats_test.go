package e2e

import (
	"bufio"
	"encoding/json"
	"errors"
	"net/http"
	"strings"

	"backstep/internal/inbox"
)

// stats asks a worker what it has done. The admin port is in its log.
func (p *proc) stats() (s inbox.Snapshot) {
	p.t.Helper()
	addr, err := p.admin()
	if err != nil {
		p.t.Fatal(err)
	}
	req, err := http.NewRequestWithContext(p.t.Context(), http.MethodGet, "http://"+addr+"/stats", http.NoBody)
	if err != nil {
		p.t.Fatal(err)
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		p.t.Fatal(err)
	}
	defer func() { _ = resp.Body.Close() }()
	if err := json.NewDecoder(resp.Body).Decode(&s); err != nil {
		p.t.Fatal(err)
	}
	return s
}

func (p *proc) admin() (addr string, err error) {
	lines := bufio.NewScanner(strings.NewReader(p.text()))
	for lines.Scan() {
		var entry struct{ Msg, Addr string }
		if json.Unmarshal(lines.Bytes(), &entry) == nil && entry.Msg == "admin listening" {
			return entry.Addr, nil
		}
	}
	return "", errors.New("the log names no admin port")
}
