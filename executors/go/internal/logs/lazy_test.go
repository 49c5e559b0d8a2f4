package logs_test

import (
	"bytes"
	"log/slog"
	"strings"
	"testing"

	"github.com/rara-run/rara/executors/go/internal/logs"
)

func TestALazyLoggerIsMadeForItsFirstLine(t *testing.T) {
	t.Parallel()
	var written bytes.Buffer
	plain := logs.New(&written, "json", "info")
	made := 0
	lazy := logs.Lazy(plain, func() *slog.Logger {
		made++
		return plain.With("step_run_id", "s1").WithGroup("handler")
	})
	lazy.Debug("not wanted")
	if made != 0 {
		t.Error("made for a line that is not written")
	}
	lazy.Info("first", "count", 1)
	lazy.With("more", true).Info("second")
	if made != 1 {
		t.Errorf("made %d times", made)
	}
	for _, part := range []string{`"step_run_id":"s1","handler":{"count":1}`, `"step_run_id":"s1","handler":{"more":true}`} {
		if !strings.Contains(written.String(), part) {
			t.Errorf("%s is not in %s", part, written.String())
		}
	}
}
