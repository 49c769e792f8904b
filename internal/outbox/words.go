package outbox

import (
	"strings"
	"unicode/utf8"
)

// maxReasonBytes is the longest reason we store. The columns hold 64 KiB; a text that is too
// long for them, or not UTF-8, would make the very write fail that is to get rid of its row.
const maxReasonBytes = 4096

// words returns a reason fit for its column and for people.
func words(reason string) string {
	const cut = " …"
	if len(reason) > maxReasonBytes {
		end := maxReasonBytes - len(cut)
		for end > 0 && !utf8.RuneStart(reason[end]) {
			end--
		}
		reason = reason[:end] + cut
	}
	return strings.ToValidUTF8(reason, "\uFFFD")
}
