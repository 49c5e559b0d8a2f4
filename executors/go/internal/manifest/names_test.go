package manifest

import (
	"regexp"
	"strings"
	"testing"
)

// What the SDK and the scheduler take.
var taken = regexp.MustCompile(`^[A-Za-z0-9_%](?:[A-Za-z0-9_%.=+@,-]*[A-Za-z0-9_%=+@,-])?` +
	`(?:/[A-Za-z0-9_%](?:[A-Za-z0-9_%.=+@,-]*[A-Za-z0-9_%=+@,-])?)*$`)

func TestEveryPathHasANameOfItsOwnThatCanBeTaken(t *testing.T) {
	t.Parallel()
	names := map[string]string{}
	for path, want := range map[string]string{
		"a/b.txt":                "files/a/b.txt",
		"date=2024-01-01/part-0": "files/date=2024-01-01/part-0",
		".hidden":                "files/%2Ehidden",
		"%2Ehidden":              "files/%252Ehidden",
		"a.":                     "files/a%2E",
		"..":                     "files/%2E%2E",
		"déjà vu":                "files/d%C3%A9j%C3%A0%20vu",
		"a\\b:c":                 "files/a%5Cb%3Ac",
		"-":                      "files/%2D",
		strings.Repeat("é", 60):  "", // too long: its digest
		strings.Repeat("è", 60):  "",
	} {
		name := artifactName(path)
		if want != "" && name != want {
			t.Errorf("%q is %q, not %q", path, name, want)
		}
		if len(name) > maxNameBytes || !taken.MatchString(name) {
			t.Errorf("%q: nobody takes %q", path, name)
		}
		if other, isThere := names[name]; isThere {
			t.Errorf("%q and %q are both %q", path, other, name)
		}
		names[name] = path
	}
}
