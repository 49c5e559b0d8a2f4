package secrets_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/rara-run/rara/executors/go/internal/secrets"
	rarav1 "github.com/rara-run/rara/gen/go/rara/v1"
)

func TestResolve(t *testing.T) { // not parallel: it sets the environment
	t.Setenv("TOKEN_OF_TEST", "from the environment")
	t.Setenv("RARA_SOMETHING", "ours")
	folder := t.TempDir()
	outside := filepath.Join(t.TempDir(), "outside")
	for path, data := range map[string]string{
		filepath.Join(folder, "key"):    "from a file\r\n",
		filepath.Join(folder, "bytes"):  "\xff\xfe",
		filepath.Join(folder, "large"):  strings.Repeat("x", secrets.MaxBytes+1),
		filepath.Join(folder, "..data"): "dotted",
		outside:                         "not yours",
	} {
		if err := os.WriteFile(path, []byte(data), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Symlink(outside, filepath.Join(folder, "link")); err != nil {
		t.Fatal(err)
	}
	for _, test := range []struct{ provider, name, version, value, problem string }{
		{"env", "TOKEN_OF_TEST", "", "from the environment", ""},
		{"env", "NOT_SET_ANYWHERE", "", "", "not set"},
		{"env", "RARA_SOMETHING", "", "", "own settings"},
		{"env", "TOKEN_OF_TEST", "2", "", "no versions"},
		{"file", "key", "", "from a file", ""},
		{"file", "..data", "", "dotted", ""},
		{"file", "missing", "", "", "no such file"},
		{"file", "../outside", "", "", "escapes"},
		{"file", "link", "", "", "escapes"},
		{"file", "bytes", "", "", "not UTF-8"},
		{"file", "large", "", "", "over 65536 bytes"},
		{"vault", "key", "", "", "no such provider"},
	} {
		reference := &rarav1.SecretRef{Provider: test.provider, Name: test.name, Version: test.version}
		values, err := secrets.Resolve(map[string]*rarav1.SecretRef{"it": reference}, folder)
		switch {
		case test.problem == "" && (err != nil || values["it"] != test.value):
			t.Errorf("%v: %v, %v", reference, values, err)
		case test.problem != "" && (err == nil || !strings.Contains(err.Error(), test.problem)):
			t.Errorf("%v: %v, want %q", reference, err, test.problem)
		}
	}
}
