package passages

import (
	"fmt"
)

// line is a clean document as Python's json module writes it: equal data sets have equal digests, whichever language
// made them. encoding/json would spell U+2028 and some control characters in another way.
func line(given document, hashes, order []string, fresh map[string]Passage) []byte {
	out := append([]byte(`{"name":`), quoted(given.Name)...)
	out = append(append(out, `,"title":`...), quoted(given.Title)...)
	out = append(out, `,"passages":[`...)
	for i, hash := range hashes {
		out = append(append(out, comma(i)...), quoted(hash)...)
	}
	out = append(out, `],"new_passages":[`...)
	for i, hash := range order {
		out = append(append(append(out, comma(i)...), `{"sha256":`...), quoted(hash)...)
		out = append(append(out, `,"heading":`...), quoted(fresh[hash].Heading)...)
		out = append(append(append(out, `,"text":`...), quoted(fresh[hash].Text)...), '}')
	}
	return append(out, "]}\n"...)
}

func comma(index int) string {
	if index == 0 {
		return ""
	}
	return ","
}

func quoted(text string) []byte {
	short := map[byte]string{'"': `\"`, '\\': `\\`, '\n': `\n`, '\r': `\r`, '\t': `\t`, '\b': `\b`, '\f': `\f`}
	out := append(make([]byte, 0, len(text)+2), '"')
	for i := range len(text) {
		c := text[i]
		switch escape, ok := short[c]; {
		case ok:
			out = append(out, escape...)
		case c < 0x20:
			out = fmt.Appendf(out, `\u%04x`, c)
		default:
			out = append(out, c)
		}
	}
	return append(out, '"')
}
