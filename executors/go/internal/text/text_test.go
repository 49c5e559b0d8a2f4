package text_test

import (
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/rara-run/rara/executors/go/internal/text"
)

func TestValidReplacesWhatCannotBeSent(t *testing.T) {
	t.Parallel()
	for given, want := range map[string]string{
		"plain":                 "plain",
		"grüße":                 "grüße",
		"a\x00b":                "a\uFFFDb",
		"tool: \xff\xfe\x80":    "tool: \uFFFD\uFFFD\uFFFD",
		"\xed\xa0\x80 surrogat": "\uFFFD\uFFFD\uFFFD surrogat",
	} {
		if got := text.Valid(given); got != want {
			t.Errorf("Valid(%q) = %q, want %q", given, got, want)
		}
	}
}

func TestCutsKeepTheLimitAndWholeRunes(t *testing.T) {
	t.Parallel()
	long := strings.Repeat("é", 5000)
	for name, cut := range map[string]func(string, int) string{"head": text.Cut, "middle": text.CutMiddle} {
		for limit := 100; limit < 104; limit++ {
			got := cut(long, limit)
			if len(got) > limit || !utf8.ValidString(got) || !strings.Contains(got, "[cut: 10000 bytes]") {
				t.Errorf("%s at %d: %d bytes, %q", name, limit, len(got), got)
			}
		}
		if got := cut("short", 5); got != "short" {
			t.Errorf("%s changed a text that fits: %q", name, got)
		}
	}
}
