package main

import (
	"fmt"
	"io"
	"time"

	"github.com/schollz/progressbar/v3"
)

// progress shows how much of something is done: a bar on a terminal, else a line now and then.
type progress struct {
	w     io.Writer
	bar   *progressbar.ProgressBar // nil: lines
	what  string
	total int
	last  time.Time
	shown int
}

// linePause is how long there is no new line.
const linePause = 2 * time.Second

func newProgress(w io.Writer, total int, what string) *progress {
	p := &progress{w: w, what: what, total: total, last: time.Now()}
	if isTerminal(w) {
		p.bar = progressbar.NewOptions(total,
			progressbar.OptionSetWriter(w), progressbar.OptionSetDescription(what),
			progressbar.OptionShowCount(), progressbar.OptionFullWidth(),
			progressbar.OptionThrottle(65*time.Millisecond), progressbar.OptionClearOnFinish())
	}
	return p
}

// set shows that n are done. What goes wrong with showing it does not matter.
func (p *progress) set(n int) {
	if p.bar != nil {
		_ = p.bar.Set(n)
		return
	}
	if n > p.shown && time.Since(p.last) >= linePause {
		p.last, p.shown = time.Now(), n
		fmt.Fprintf(p.w, "%d of %d %s\n", n, p.total, p.what)
	}
}

// done leaves the line to others.
func (p *progress) done() {
	if p.bar != nil {
		_ = p.bar.Finish()
	}
}
