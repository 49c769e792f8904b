package testenv

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"time"
)

// Manage calls the broker's management API at the path made of the segments, and reads the answer
// into out unless that is nil. That something to delete is not there is as good.
func (s *Servers) Manage(ctx context.Context, method string, in, out any, segments ...string) error {
	return callManagement(ctx, s.management, method, in, out, segments...)
}

// callManagement does that with the API at this root.
func callManagement(ctx context.Context, root *url.URL, method string, in, out any, segments ...string) error {
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	path := "api"
	for _, s := range segments {
		path += "/" + url.PathEscape(s)
	}
	var body io.Reader = http.NoBody
	if in != nil {
		text, err := json.Marshal(in)
		if err != nil {
			return err
		}
		body = bytes.NewReader(text)
	}
	u := root.JoinPath(path)
	req, err := http.NewRequestWithContext(ctx, method, u.String(), body)
	if err != nil {
		return err
	}
	req.Header.Set("Content-Type", "application/json")
	req.Close = true // an idle connection would look like a leaked goroutine
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return err
	}
	defer func() { _ = resp.Body.Close() }() // it was only read
	answer, err := io.ReadAll(resp.Body)
	switch {
	case err != nil:
		return err
	case method == http.MethodDelete && resp.StatusCode == http.StatusNotFound:
		return nil
	case resp.StatusCode >= http.StatusMultipleChoices:
		return fmt.Errorf("management API: %s %s: %s: %.1000s", method, u.Redacted(), resp.Status, answer)
	case out == nil:
		return nil
	}
	if err := json.Unmarshal(answer, out); err != nil {
		return fmt.Errorf("management API: %s %s: %w", method, u.Redacted(), err)
	}
	return nil
}
