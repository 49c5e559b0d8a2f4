package payload_test

import (
	"encoding/json"
	"errors"
	"math"
	"strings"
	"testing"

	"github.com/rara-run/rara/executors/go/internal/codes"
	"github.com/rara-run/rara/executors/go/internal/payload"
)

func TestEncodeRefusesByNameAndPath(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		value any
		code  string
		path  string
	}{
		"NUL in a value":       {map[string]any{"a": []any{"x", map[string]any{"b/c": "\x00"}}}, codes.PayloadInvalid, "at /a/1/b~1c: U+0000"},
		"NUL in a key":         {map[string]any{"o": map[string]any{"a\x00": 1}}, codes.PayloadInvalid, "at /o: U+0000"},
		"NUL alone":            {"\x00", codes.PayloadInvalid, "at /: U+0000"},
		"bytes of no encoding": {[]string{"ok", "\xff\xfe\x80"}, codes.PayloadInvalid, "at /1: text that is not UTF-8"},
		"surrogate in a value": {"\xed\xa0\x80", codes.PayloadInvalid, "at /: text that is not UTF-8"},
		"escaped surrogate":    {json.RawMessage(`{"a":["\ud800"]}`), codes.PayloadInvalid, "at /a/0: a lone surrogate"},
		"escaped low one":      {json.RawMessage(`"\uDC00\uD800"`), codes.PayloadInvalid, "a lone surrogate"},
		"cut pair":             {json.RawMessage(`"\ud800\u0041"`), codes.PayloadInvalid, "a lone surrogate"},
		"not a number":         {map[string]any{"loss": math.NaN()}, codes.PayloadInvalid, "NaN"},
		"a channel":            {make(chan int), codes.PayloadInvalid, "chan"},
		"one byte too many":    {strings.Repeat("x", payload.MaxBytes-1), codes.PayloadTooLarge, "use an artifact"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			_, err := payload.Encode(test.value, "output", payload.MaxBytes)
			var problem *codes.Failure
			if !errors.As(err, &problem) || problem.Code != test.code || !strings.Contains(problem.Message, test.path) {
				t.Fatalf("got %v, want %s with %q", err, test.code, test.path)
			}
			if !strings.HasPrefix(problem.Message, "output") {
				t.Errorf("the message does not name the value: %q", problem.Message)
			}
		})
	}
}

func TestEncodeKeepsWhatIsLegal(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		value any
		want  string
	}{
		"nothing":              {nil, `null`},
		"html":                 {"a<b&c>d", `"a<b&c>d"`},
		"replacement":          {"kept \uFFFD", `"kept ` + "\uFFFD" + `"`},
		"pair":                 {json.RawMessage(`"\ud83d\ude00 \\ud800 \\u0000"`), `"\ud83d\ude00 \\ud800 \\u0000"`},
		"big number":           {json.RawMessage(`[9007199254740993]`), `[9007199254740993]`},
		"exactly the limit":    {strings.Repeat("x", payload.MaxBytes-2), `"` + strings.Repeat("x", payload.MaxBytes-2) + `"`},
		"escaped quotes, path": {map[string]string{`"`: `\"`}, `{"\"":"\\\""}`},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			got, err := payload.Encode(test.value, "output", payload.MaxBytes)
			if err != nil || string(got) != test.want {
				t.Fatalf("got %.80s, %v", got, err)
			}
		})
	}
}

func TestRewriteChangesStringsAndNumbersOnly(t *testing.T) {
	t.Parallel()
	change := func(text string) string { return strings.ReplaceAll(text, "12345678", "***") }
	given := `{"b": 12345678, "12345678": ["a\n12345678", true, null, 1e5], "a": -1.50}`
	want := `{"b": "***", "***": ["a\n***", true, null, 1e5], "a": -1.50}`
	if got := string(payload.Rewrite([]byte(given), change)); got != want {
		t.Errorf("got %s", got)
	}
}
