package outbox

import (
	"log/slog"
	"time"

	"backstep/internal/sqltx"
)

// trouble keeps the log calm: what fails again and again, several times a second, is told
// when it begins, when it changes, every so often, and when it is over.
type trouble struct {
	class sqltx.Class
	told  time.Time
}

const tellEvery = 10 * time.Second

func (t *trouble) report(log *slog.Logger, what string, err error) {
	class := sqltx.Classify(err)
	switch {
	case err != nil && (class != t.class || time.Since(t.told) > tellEvery):
		log.Warn(what, "error", err)
		t.told = time.Now()
	case err == nil && t.class != sqltx.None:
		log.Info("over", "was", what)
	}
	t.class = class
}
