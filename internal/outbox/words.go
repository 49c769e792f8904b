package outbox

import (
	"strings"
	"unicode/utf8"
)

// maxReasonBytes is the longest reason we store. The columns hold 64 KiB; a text that is too
// long for them, or not UTF-8, would make the very write fail that is to get rid of its row.
const maxReasonBytes = 4096

// words returns a reason fit for its column and for people.
func words(reason string) string { return clip(reason, maxReasonBytes) }

// clip returns text as valid UTF-8 of about limit bytes at most.
func clip(text string, limit int) string {
	const cut = " …"
	if len(text) > limit {
		end := limit - len(cut)
		for end > 0 && !utf8.RuneStart(text[end]) {
			end--
		}
		text = text[:end] + cut
	}
	return strings.ToValidUTF8(text, "\uFFFD")
}
