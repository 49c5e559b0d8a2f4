// Package passages cuts documents into clean passages, each text once: what the knowledge pipeline's Python step does,
// to the byte.
package passages

import (
	"crypto/sha256"
	"encoding/hex"
	"regexp"
	"strings"
	"unicode"
	"unicode/utf8"

	"golang.org/x/text/unicode/norm"
)

// maxChars of a passage or so.
const maxChars = 1000

var (
	atxHeading   = regexp.MustCompile(`^#{1,6}[ \t]+(.*?)[ \t]*#*$`)
	markdownLink = regexp.MustCompile(`!?\[([^\[\]\n]{0,400})\]\([^()\s]*\)`)
)

const maxLinkTarget = 2000

// Passage is consecutive text below one heading, empty before the first.
type Passage struct{ Heading, Text string }

// SHA256 is what makes two passages the same: the clean text. The heading is where it stands.
func (p Passage) SHA256() string {
	sum := sha256.Sum256([]byte(p.Text))
	return hex.EncodeToString(sum[:])
}

// Normalise gives NFC, \n for every line end, no control characters, single blanks, no blanks at the ends of lines.
func Normalise(text string) string {
	text = norm.NFC.String(strings.ReplaceAll(strings.ReplaceAll(text, "\r\n", "\n"), "\r", "\n"))
	lines := strings.Split(strings.Map(withoutControl, text), "\n")
	for i, line := range lines {
		lines[i] = strings.Join(strings.FieldsFunc(line, unicode.IsSpace), " ")
	}
	return strings.Join(lines, "\n")
}

func withoutControl(r rune) rune {
	switch {
	case r <= 0x08, r >= 0x0b && r <= 0x1f, r >= 0x7f && r <= 0x9f, r == 0x200b, r == 0xfeff:
		return -1
	}
	return r
}

// Split cuts a text at headings and empty lines into passages of at most limit characters.
//
// Short neighbours under the same heading share a passage; a longer paragraph is cut at the end of a sentence or word.
// Headings are no part of the text.
func Split(text string, isMarkdown bool, limit int) []Passage {
	var passages []Passage
	heading, gathered, length := "", "", 0
	take := func() {
		if gathered != "" {
			passages = append(passages, Passage{heading, gathered})
		}
		gathered, length = "", 0
	}
	for _, block := range blocks(Normalise(text), isMarkdown) {
		if block.isHeading {
			take()
			heading = block.text
			continue
		}
		for _, piece := range pieces(block.text, limit) {
			chars := runeCount(piece)
			switch {
			case gathered == "":
				gathered, length = piece, chars
			case length+1+chars > limit:
				take()
				gathered, length = piece, chars
			default:
				gathered, length = gathered+" "+piece, length+1+chars
			}
		}
	}
	take()
	return passages
}

type block struct {
	text      string
	isHeading bool
}

// blocks are headings and paragraphs in their order, without markup, each on one line.
func blocks(text string, isMarkdown bool) []block {
	var found []block
	var paragraph []string
	take := func() {
		if body := plain(strings.Join(paragraph, " "), isMarkdown); body != "" {
			found = append(found, block{body, false})
		}
		paragraph = nil
	}
	for line := range strings.SplitSeq(text, "\n") {
		heading := ""
		if isMarkdown {
			if match := atxHeading.FindStringSubmatch(line); match != nil {
				heading = match[1]
			}
		}
		switch {
		case heading != "":
			take()
			found = append(found, block{plain(heading, true), true})
		case isUnderline(line):
			above := 0
			if len(paragraph) == 1 {
				above = runeCount(paragraph[0])
			}
			if above > 0 && above <= runeCount(line)+3 {
				found = append(found, block{plain(paragraph[0], isMarkdown), true})
				paragraph = nil
			} else {
				take() // a rule across the page
			}
		case line != "":
			paragraph = append(paragraph, line)
		default:
			take()
		}
	}
	take()
	return found
}

// isUnderline tells of a line of one punctuation mark, as reStructuredText and pydoc write headings.
func isUnderline(line string) bool {
	return len(line) >= 3 && strings.IndexByte("=-~^*#\"'`+.", line[0]) >= 0 &&
		strings.Count(line, line[:1]) == len(line)
}

func plain(text string, isMarkdown bool) string {
	if isMarkdown {
		text = withoutLinks(text)
	}
	return strings.TrimFunc(withoutEmphasis(text), unicode.IsSpace)
}

func withoutLinks(text string) string {
	var out strings.Builder
	for {
		at := markdownLink.FindStringSubmatchIndex(text)
		if at == nil {
			return out.String() + text
		}
		if target := text[at[3]+2 : at[1]-1]; runeCount(target) > maxLinkTarget {
			out.WriteString(text[:at[0]+1]) // not a link: look on behind its first character
			text = text[at[0]+1:]
			continue
		}
		out.WriteString(text[:at[0]] + text[at[2]:at[3]])
		text = text[at[1]:]
	}
}

const maxEmphasised = 400

// withoutEmphasis drops stars and backticks around words. Underscores are left alone: `__init__` is a name far more often than
// it is emphasis.
func withoutEmphasis(text string) string {
	if !strings.ContainsAny(text, "*`") {
		return text
	}
	runes := []rune(text)
	var out []rune
	for i := 0; i < len(runes); {
		if i == 0 || !binds(runes[i-1]) {
			if inner, next := emphasised(runes, i); next > 0 {
				out = append(out, inner...)
				i = next
				continue
			}
		}
		out = append(out, runes[i])
		i++
	}
	return string(out)
}

// emphasised text that begins with a mark at i, and where to go on; 0: none does.
func emphasised(runes []rune, i int) ([]rune, int) {
	mark := runes[i]
	if mark != '*' && mark != '`' {
		return nil, 0
	}
	width := 1
	if i+1 < len(runes) && runes[i+1] == mark {
		width = 2
	}
	start, end := i+width, i+width
	for end < len(runes) && runes[end] != '*' && runes[end] != '`' && runes[end] != '\n' {
		end++
	}
	next := end + width
	if end == start || end-start > maxEmphasised || next > len(runes) ||
		unicode.IsSpace(runes[start]) || unicode.IsSpace(runes[end-1]) {
		return nil, 0
	}
	for _, r := range runes[end:next] {
		if r != mark {
			return nil, 0
		}
	}
	if next < len(runes) && binds(runes[next]) {
		return nil, 0
	}
	return runes[start:end], next
}

// binds tells of a character beside which a mark is not the edge of emphasis.
func binds(r rune) bool {
	return r == '*' || r == '`' || r == '_' || unicode.IsLetter(r) || unicode.IsNumber(r)
}

func pieces(text string, limit int) []string {
	var found []string
	runes := []rune(text)
	for len(runes) > limit {
		cut := sentenceEnd(runes, limit)
		if cut == 0 {
			cut = lastBlank(runes, limit) + 1
		}
		if cut == 0 {
			cut = limit // one word longer than a passage
		}
		found = append(found, string(trim(runes[:cut])))
		runes = trim(runes[cut:])
	}
	if len(runes) > 0 {
		found = append(found, string(runes))
	}
	return found
}

// sentenceEnd is behind the blanks of the last sentence that ends in the second half of the limit; 0: none does.
func sentenceEnd(runes []rune, limit int) int {
	cut := 0
	for i := limit / 2; i < limit; i++ {
		if strings.ContainsRune(".!?:;", runes[i]) {
			end := i + 1
			for end < limit && unicode.IsSpace(runes[end]) {
				end++
			}
			if end > i+1 {
				cut = end
			}
		}
	}
	return cut
}

func lastBlank(runes []rune, limit int) int {
	for i := limit - 1; i >= 1; i-- {
		if runes[i] == ' ' {
			return i
		}
	}
	return -1
}

func trim(runes []rune) []rune {
	for len(runes) > 0 && unicode.IsSpace(runes[0]) {
		runes = runes[1:]
	}
	for len(runes) > 0 && unicode.IsSpace(runes[len(runes)-1]) {
		runes = runes[:len(runes)-1]
	}
	return runes
}

func runeCount(text string) int { return utf8.RuneCountInString(text) }
