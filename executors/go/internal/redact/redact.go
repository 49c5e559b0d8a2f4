// Package redact replaces resolved secrets in everything that leaves the executor, in the forms they usually take.
package redact

import (
	"bytes"
	"encoding/base64"
	"encoding/json"
	"net/url"
	"regexp"
	"sort"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/rara-run/rara/executors/go/internal/payload"
)

// Mark stands where a secret stood.
const Mark = "***"

// MinChars is the shortest secret that is replaced: shorter ones would blank out ordinary words.
const MinChars = 8

// Redactor knows every secret that was resolved since the process began. Its zero value is ready, for any goroutine.
type Redactor struct {
	mu       sync.Mutex
	secrets  map[string]bool
	replacer atomic.Pointer[strings.Replacer]
}

// Add makes a secret known.
func (r *Redactor) Add(secret string) {
	if len(secret) < MinChars {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.secrets[secret] {
		return
	}
	if r.secrets == nil {
		r.secrets = map[string]bool{}
	}
	r.secrets[secret] = true
	all := map[string]bool{}
	for known := range r.secrets {
		for _, form := range forms(known) {
			if len(form) >= MinChars {
				all[form] = true
			}
		}
	}
	ordered := make([]string, 0, len(all))
	for form := range all {
		ordered = append(ordered, form)
	}
	// At one place the replacer takes the first form that fits: the longest must lead.
	sort.Slice(ordered, func(i, j int) bool {
		if len(ordered[i]) != len(ordered[j]) {
			return len(ordered[i]) > len(ordered[j])
		}
		return ordered[i] < ordered[j]
	})
	pairs := make([]string, 0, 2*len(ordered))
	for _, form := range ordered {
		pairs = append(pairs, form, Mark)
	}
	r.replacer.Store(strings.NewReplacer(pairs...))
}

// Text returns the text without secrets.
func (r *Redactor) Text(text string) string {
	if replacer := r.replacer.Load(); replacer != nil {
		return replacer.Replace(text)
	}
	return text
}

// JSON returns valid JSON without secrets in its strings and numbers.
func (r *Redactor) JSON(data []byte) []byte {
	if r.replacer.Load() == nil || len(data) == 0 {
		return data
	}
	return payload.Rewrite(data, r.Text)
}

// In tells whether valid JSON holds a secret in its strings or numbers.
func (r *Redactor) In(data []byte) bool {
	return r.replacer.Load() != nil && len(data) > 0 && !bytes.Equal(payload.Rewrite(data, r.Text), data)
}

var percent = regexp.MustCompile(`%[0-9A-F]{2}`)

func forms(secret string) []string {
	found := []string{secret, url.QueryEscape(secret), url.PathEscape(secret)}
	found = append(found, strings.ReplaceAll(found[1], "+", "%20"))
	for _, form := range found[1:] {
		found = append(found, percent.ReplaceAllStringFunc(form, strings.ToLower))
	}
	if quoted, err := json.Marshal(secret); err == nil {
		found = append(found, string(quoted[1:len(quoted)-1]))
	}
	quoted := strconv.Quote(secret)
	found = append(found, quoted[1:len(quoted)-1])
	for _, encoding := range []*base64.Encoding{base64.StdEncoding, base64.URLEncoding} {
		found = append(found, encoding.EncodeToString([]byte(secret)))
		raw := encoding.WithPadding(base64.NoPadding)
		for shift := range 3 {
			// In the middle of a longer text (user:password) the secret begins at any of three offsets, and the
			// characters at its ends depend on its neighbours: keep those that do not.
			encoded := raw.EncodeToString(append(make([]byte, shift), secret...))
			found = append(found, encoded[(shift*8+5)/6:(shift+len(secret))*8/6])
		}
	}
	return found
}
