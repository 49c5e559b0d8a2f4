// Package text makes text that can always be sent: valid UTF-8, without U+0000, cut to a limit with a mark.
package text

import (
	"fmt"
	"strings"
	"unicode/utf8"
)

// Longest texts of the contract, in bytes.
const (
	MaxMessageBytes  = 16 << 10
	MaxStackBytes    = 64 << 10
	MaxProgressBytes = 4 << 10
)

// Valid returns the text with U+0000, and each byte that is not UTF-8, replaced by U+FFFD.
func Valid(text string) string {
	return strings.Map(func(r rune) rune {
		if r == 0 {
			return utf8.RuneError
		}
		return r // a byte of no encoding comes as RuneError
	}, text)
}

// Cut returns the text's beginning, at most limit bytes, with a mark if anything was left out.
func Cut(text string, limit int) string {
	if len(text) <= limit {
		return text
	}
	mark := fmt.Sprintf(" [cut: %d bytes]", len(text))
	return whole(text[:limit-len(mark)]) + mark
}

// CutMiddle returns beginning and end of the text: of a stack trace both matter.
func CutMiddle(text string, limit int) string {
	if len(text) <= limit {
		return text
	}
	mark := fmt.Sprintf("\n[cut: %d bytes]\n", len(text))
	room := limit - len(mark)
	tail := text[len(text)-(room-room/4):]
	for len(tail) > 0 && !utf8.RuneStart(tail[0]) {
		tail = tail[1:]
	}
	return whole(text[:room/4]) + mark + tail
}

// whole drops a rune that was cut in two at the end.
func whole(text string) string {
	for end := len(text); end > 0 && end > len(text)-utf8.UTFMax; end-- {
		if utf8.RuneStart(text[end-1]) {
			if !utf8.FullRuneInString(text[end-1:]) {
				return text[:end-1]
			}
			break
		}
	}
	return text
}
