package message

import (
	"bytes"
	"encoding/json"
)

// MaxBody is how large a body every worker takes, in bytes. One may be set up to take larger ones.
const MaxBody = 256 << 10

// EncodeJSON is json.Marshal, but "<", ">" and "&" stay as they are: nothing of ours is put into a
// page, and each would have six bytes.
func EncodeJSON(v any) ([]byte, error) {
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	if err := e.Encode(v); err != nil {
		return nil, err
	}
	return bytes.TrimSuffix(b.Bytes(), []byte("\n")), nil
}
