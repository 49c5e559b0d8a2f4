package redact_test

import (
	"encoding/base64"
	"encoding/json"
	"net/url"
	"strings"
	"testing"

	"github.com/rara-run/rara/executors/go/internal/redact"
)

func TestEveryFormOfASecretIsReplaced(t *testing.T) {
	t.Parallel()
	const secret = `p/ss+w&rd="ü"`
	var redactor redact.Redactor
	redactor.Add("short")
	redactor.Add(secret)
	redactor.Add(secret + "longer")
	quoted, _ := json.Marshal(secret)
	for name, text := range map[string]string{
		"raw":            "x " + secret + " y",
		"query":          "?key=" + url.QueryEscape(secret),
		"path":           "/" + url.PathEscape(secret),
		"json":           string(quoted),
		"base64":         base64.StdEncoding.EncodeToString([]byte(secret)),
		"base64url":      base64.RawURLEncoding.EncodeToString([]byte(secret)),
		"basic auth":     base64.StdEncoding.EncodeToString([]byte("user:" + secret)),
		"basic auth 2":   base64.StdEncoding.EncodeToString([]byte("users:" + secret + "@host")),
		"of the longer:": secret + "longer",
	} {
		got := redactor.Text(text)
		if !strings.Contains(got, redact.Mark) || strings.Contains(got, "longer") || strings.Contains(got, secret) {
			t.Errorf("%s: %q stays in %q", name, text, got)
		}
	}
	if got := redactor.Text("a short word"); got != "a short word" {
		t.Errorf("a short secret blanks out words: %q", got)
	}
}

func TestJSONStaysJSON(t *testing.T) {
	t.Parallel()
	var redactor redact.Redactor
	given := []byte(`{"id":1234567890,"text":"line\n1234567890","n":1e3}`)
	if got := redactor.JSON(given); string(got) != string(given) {
		t.Errorf("nothing is known yet: %s", got)
	}
	redactor.Add("1234567890")
	redactor.Add("n1234567890") // must not take the n of an escaped line end
	if got := string(redactor.JSON(given)); got != `{"id":"***","text":"line\n***","n":1e3}` {
		t.Errorf("got %s", got)
	}
}
