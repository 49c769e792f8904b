package amqp

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"regexp"
	"strings"
	"time"

	"backstep/deploy/rabbitmq"
)

// policy is an entry of the policies array of a definitions file.
type policy struct {
	Name       string         `json:"name"`
	Pattern    string         `json:"pattern"`
	ApplyTo    string         `json:"apply-to"`
	Priority   int            `json:"priority"`
	Definition map[string]any `json:"definition"`
}

// ApplyPolicies puts the policies of deploy/rabbitmq on a virtual host through the management
// API at managementURL, which carries user and password, and returns the names of those it
// put. From RabbitMQ 4.3.1 on they include what older brokers refuse. They are for the queues
// named in the files, or for these queues if any are given.
func ApplyPolicies(ctx context.Context, managementURL, vhost string, queues ...string) ([]string, error) {
	m, err := newManagement(managementURL)
	if err != nil {
		return nil, fmt.Errorf("management URL: %w", err)
	}
	var overview struct {
		Version string `json:"rabbitmq_version"`
	}
	if err := m.call(ctx, http.MethodGet, nil, &overview, "overview"); err != nil {
		return nil, fmt.Errorf("ask for the broker's version: %w", err)
	}
	policies, err := policiesFor(overview.Version, queues)
	if err != nil {
		return nil, err
	}
	var names []string
	for _, p := range policies {
		if err := m.call(ctx, http.MethodPut, p, nil, "policies", vhost, p.Name); err != nil {
			return names, fmt.Errorf("put policy %q on virtual host %q: %w", p.Name, vhost, err)
		}
		names = append(names, p.Name)
	}
	return names, nil
}

// policiesFor returns the policies for a broker of this version.
func policiesFor(version string, queues []string) ([]policy, error) {
	file := rabbitmq.Policies
	if atLeast(version, 4, 3, 1) {
		file = rabbitmq.Policies431
	}
	var definitions struct {
		Policies []policy `json:"policies"`
	}
	if err := json.Unmarshal(file, &definitions); err != nil {
		return nil, fmt.Errorf("read the policies: %w", err)
	}
	if len(queues) == 0 {
		return definitions.Policies, nil
	}
	names := make([]string, len(queues))
	for i, q := range queues {
		names[i] = regexp.QuoteMeta(q)
	}
	for i := range definitions.Policies {
		p := &definitions.Policies[i]
		p.Pattern = queueNames.ReplaceAllLiteralString(p.Pattern, "("+strings.Join(names, "|")+")")
	}
	return definitions.Policies, nil
}

// queueNames matches the alternatives in a pattern of the files.
var queueNames = regexp.MustCompile(`\([^)]*\)`)

// atLeast reports whether a version such as "4.3.7" or "4.4.0-rc.1" is at least this one.
func atLeast(version string, want ...int) bool {
	var got [3]int
	// A version that is cut short, or not one at all, counts as old: the base policies fit every broker.
	_, _ = fmt.Sscanf(version, "%d.%d.%d", &got[0], &got[1], &got[2])
	for i, w := range want {
		if got[i] != w {
			return got[i] > w
		}
	}
	return true
}

// management calls the HTTP API of a broker.
type management struct {
	root   *url.URL // without credentials
	user   *url.Userinfo
	client http.Client
}

// CheckManagementURL returns why ApplyPolicies would refuse the URL of a management API.
func CheckManagementURL(raw string) error {
	_, err := newManagement(raw)
	return err
}

// newManagement checks the URL. Its errors quote nothing of it, as for an AMQP URL.
func newManagement(raw string) (*management, error) {
	u, err := url.Parse(raw)
	if err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Host == "" {
		return nil, errors.New("it must read http(s)://user:password@host:port, user and password percent-encoded")
	}
	user := u.User
	u.User = nil
	return &management{root: u, user: user, client: http.Client{Timeout: 30 * time.Second}}, nil
}

// call sends in, if it is not nil, to the resource made of the segments and reads the answer
// into out, if it is not nil.
func (m *management) call(ctx context.Context, method string, in, out any, segments ...string) error {
	path := "api"
	for _, s := range segments {
		path += "/" + url.PathEscape(s)
	}
	var body bytes.Buffer
	if in != nil {
		if err := json.NewEncoder(&body).Encode(in); err != nil {
			return err
		}
	}
	req, err := http.NewRequestWithContext(ctx, method, m.root.JoinPath(path).String(), &body)
	if err != nil {
		return err
	}
	req.Close = true // a few calls, then nothing
	req.Header.Set("Content-Type", "application/json")
	if m.user != nil {
		password, _ := m.user.Password()
		req.SetBasicAuth(m.user.Username(), password)
	}
	resp, err := m.client.Do(req)
	if err != nil {
		return err
	}
	defer func() { _ = resp.Body.Close() }() // it was only read
	if resp.StatusCode >= http.StatusBadRequest {
		return answerError(m.root.Host, resp)
	}
	if out == nil {
		return nil
	}
	return json.NewDecoder(resp.Body).Decode(out)
}

// answerError says what the management API objected to and what to do about it.
func answerError(host string, resp *http.Response) error {
	text, _ := io.ReadAll(io.LimitReader(resp.Body, 1000)) // half an explanation is better than none
	hint := ""
	switch resp.StatusCode {
	case http.StatusUnauthorized, http.StatusForbidden:
		hint = "; the user needs the policymaker tag and rights on the virtual host"
	case http.StatusNotFound:
		hint = "; does the virtual host exist, and is this the management port (15672)?"
	}
	return fmt.Errorf("management API at %s answered %s: %s%s", host, resp.Status, bytes.TrimSpace(text), hint)
}
