// Package payload makes JSON that every store and language keeps as it is, and refuses the rest by name and path.
package payload

import (
	"bytes"
	"encoding/json"
	"fmt"
	"strconv"
	"strings"
	"unicode/utf8"

	"github.com/rara-run/rara/executors/go/internal/codes"
)

// Limits of the contract.
const (
	MaxBytes       = 1 << 20 // where the scheduler has not named its own
	MaxEffectBytes = 16 << 10
	MaxEffects     = 64
)

// Encode returns the value as JSON, or a *codes.Failure. what: how that calls the value.
func Encode(value any, what string, limitBytes int) ([]byte, error) {
	var buffer bytes.Buffer
	encoder := json.NewEncoder(&buffer)
	encoder.SetEscapeHTML(false)
	if err := encoder.Encode(value); err != nil {
		return nil, invalid(what, "", err.Error())
	}
	data := bytes.TrimSuffix(buffer.Bytes(), []byte("\n"))
	if len(data) > limitBytes {
		return nil, &codes.Failure{Code: codes.PayloadTooLarge, Message: fmt.Sprintf(
			"%s has %d bytes, the limit is %d: use an artifact", what, len(data), limitBytes)}
	}
	if looksClean(data) {
		return data, nil
	}
	var problem error
	walk(data, func(path func() string, text []byte) []byte {
		if problem == nil {
			if why := textProblem(text); why != "" {
				problem = invalid(what, path(), why)
			}
		}
		return text
	})
	if problem != nil {
		return nil, problem
	}
	return data, nil
}

// Rewrite returns the JSON with every string replaced by what change makes of it, and every number too, as a string,
// if change makes another text of it. All else stays as it was written.
func Rewrite(data []byte, change func(string) string) []byte {
	return walk(data, func(_ func() string, token []byte) []byte {
		if token[0] != '"' {
			if changed := change(string(token)); changed != string(token) {
				return quote(changed)
			}
			return token
		}
		var text string
		if json.Unmarshal(token, &text) != nil {
			return token
		}
		if changed := change(text); changed != text {
			return quote(changed)
		}
		return token
	})
}

// looksClean is the short way: most payloads hold none of the escapes that could be at fault.
func looksClean(data []byte) bool {
	return utf8.Valid(data) && !bytes.Contains(data, []byte(`\u0000`)) && !bytes.Contains(data, []byte(`\ufffd`)) &&
		!bytes.Contains(data, []byte(`\ud`)) && !bytes.Contains(data, []byte(`\uD`))
}

// textProblem looks into one string as it is written, quotes included. Numbers have no problem.
func textProblem(token []byte) string {
	if token[0] != '"' {
		return ""
	}
	if !utf8.Valid(token) {
		return "text that is not UTF-8 cannot be stored"
	}
	for i := 0; i < len(token); i++ {
		if token[i] != '\\' {
			continue
		}
		i++
		if token[i] != 'u' {
			continue
		}
		switch unit := unitAt(token, i+1); {
		case unit == 0:
			return "U+0000 cannot be stored"
		case unit == utf8.RuneError:
			// What encoding/json writes for a byte that is not UTF-8; a real U+FFFD it writes as it is.
			return "text that is not UTF-8 cannot be stored"
		case unit >= 0xDC00 && unit < 0xE000:
			return "a lone surrogate cannot be stored"
		case unit >= 0xD800 && unit < 0xDC00:
			low := rune(0)
			if i+6 < len(token) && token[i+5] == '\\' && token[i+6] == 'u' {
				low = unitAt(token, i+7)
			}
			if low < 0xDC00 || low >= 0xE000 {
				return "a lone surrogate cannot be stored"
			}
			i += 6
		}
		i += 4
	}
	return ""
}

func unitAt(token []byte, at int) rune {
	if at+4 > len(token) {
		return 0
	}
	unit, _ := strconv.ParseUint(string(token[at:at+4]), 16, 32)
	return rune(unit)
}

func invalid(what, path, problem string) *codes.Failure {
	if path == "" {
		path = "/"
	}
	return &codes.Failure{Code: codes.PayloadInvalid, Message: fmt.Sprintf("%s at %s: %s", what, path, problem)}
}

func quote(text string) []byte {
	var buffer bytes.Buffer
	encoder := json.NewEncoder(&buffer)
	encoder.SetEscapeHTML(false)
	if err := encoder.Encode(text); err != nil {
		return []byte(`""`)
	}
	return bytes.TrimSuffix(buffer.Bytes(), []byte("\n"))
}

// frame is one array or object that the walk is in.
type frame struct {
	isObject bool
	key      string
	index    int
}

// walk calls visit for each string (keys too) and number of valid JSON, and returns the JSON with what visit returned
// in its place. path is the JSON pointer (RFC 6901) of the token; of a key: of its object.
func walk(data []byte, visit func(path func() string, token []byte) []byte) []byte {
	out := make([]byte, 0, len(data))
	var stack []frame
	isKey := false
	path := func() string {
		var pointer strings.Builder
		for depth, at := range stack {
			switch {
			case !at.isObject:
				fmt.Fprintf(&pointer, "/%d", at.index)
			case depth < len(stack)-1 || !isKey:
				pointer.WriteString("/" + strings.NewReplacer("~", "~0", "/", "~1").Replace(at.key))
			}
		}
		return pointer.String()
	}
	for i := 0; i < len(data); {
		switch c := data[i]; c {
		case '"', '-', '0', '1', '2', '3', '4', '5', '6', '7', '8', '9':
			end := tokenEnd(data, i)
			token := data[i:end]
			out = append(out, visit(path, token)...)
			if isKey && c == '"' {
				_ = json.Unmarshal(token, &stack[len(stack)-1].key)
			}
			i = end
			continue
		case '{', '[':
			stack = append(stack, frame{isObject: c == '{'})
			isKey = c == '{'
		case '}', ']':
			stack = stack[:len(stack)-1]
			isKey = false
		case ':':
			isKey = false
		case ',':
			top := &stack[len(stack)-1]
			top.index++
			isKey = top.isObject
		}
		out = append(out, data[i])
		i++
	}
	return out
}

func tokenEnd(data []byte, start int) int {
	if data[start] != '"' {
		end := start
		for end < len(data) && strings.IndexByte("+-.0123456789eE", data[end]) >= 0 {
			end++
		}
		return end
	}
	for end := start + 1; end < len(data); end++ {
		switch data[end] {
		case '\\':
			end++
		case '"':
			return end + 1
		}
	}
	return len(data)
}
