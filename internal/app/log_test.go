package app

import (
	"errors"
	"log/slog"
	"strings"
	"testing"
	"time"
)

func TestLogIsLegible(t *testing.T) {
	var out strings.Builder
	log := slog.New(slog.NewJSONHandler(&out, &slog.HandlerOptions{ReplaceAttr: legible}))
	log.Info("database back", "after", 9171*time.Millisecond, "error", errors.Join(errors.New("one"), errors.New("two")), "n", 3)
	for _, want := range []string{`"after":"9.171s"`, `"error":"one; two"`, `"n":3`, `"level":"INFO"`} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("%s is not in %s", want, out.String())
		}
	}
}
