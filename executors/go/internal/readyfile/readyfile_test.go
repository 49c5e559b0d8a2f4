package readyfile_test

import (
	"bytes"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/rara-run/rara/executors/go/internal/readyfile"
)

func TestItIsThereAndNewWhileReadyAndGoneWhenNot(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "ready")
	var log bytes.Buffer
	file := readyfile.New(path, slog.New(slog.NewTextHandler(&log, nil)))
	expect := func(isNew bool, when string) {
		t.Helper()
		if readyfile.IsNew(path) != isNew {
			t.Errorf("%s: new is %v", when, !isNew)
		}
	}
	expect(false, "before")
	file.Show(true)
	expect(true, "ready")
	past := time.Now().Add(-time.Minute)
	if err := os.Chtimes(path, past, past); err != nil {
		t.Fatal(err)
	}
	expect(false, "untouched")
	file.Show(true)
	expect(true, "touched again")
	file.Show(false)
	file.Show(false)
	if _, err := os.Stat(path); !os.IsNotExist(err) {
		t.Errorf("not gone: %v", err)
	}
	if log.Len() > 0 {
		t.Errorf("logged %s", &log)
	}
}

func TestAFolderThatIsNotThereIsSaidOnceAndCostsTheHealthCheckAlone(t *testing.T) {
	t.Parallel()
	var log bytes.Buffer
	path := filepath.Join(t.TempDir(), "nowhere", "ready")
	file := readyfile.New(path, slog.New(slog.NewTextHandler(&log, nil)))
	file.Show(true)
	file.Show(true)
	if said := strings.Count(log.String(), "executor.ready_file_failed"); said != 1 {
		t.Errorf("said %d times: %s", said, &log)
	}
	readyfile.New("", nil).Show(true)
}
