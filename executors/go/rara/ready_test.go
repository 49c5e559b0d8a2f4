package rara_test

import (
	"errors"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/rara-run/rara/executors/go/rara"
)

func TestTheReadyFileFollowsTheSession(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "ready")
	w := start(t, offer("k", obeying), func(o *rara.Options) { o.ReadyFile = path })
	until(t, "a file that says ready", func() bool { return checked(t, path) == 0 })
	w.stop()
	w.ended <- <-w.ended
	if log := w.logs.String(); !strings.Contains(log, `"executor.stopping","stop_s":2`) ||
		!strings.Contains(log, `"executor.stopped"`) {
		t.Errorf("the stop is not logged: %s", log)
	}
	if _, err := os.Stat(path); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the file outlives the executor: %v", err)
	}
}

func TestTheHealthCheckTellsAMissingFileFromAMissingSetting(t *testing.T) {
	t.Parallel()
	if code := checked(t, filepath.Join(t.TempDir(), "ready")); code != 1 {
		t.Errorf("no file: exit %d", code)
	}
	if code := checked(t, ""); code != 2 {
		t.Errorf("no setting: exit %d", code)
	}
}

// checked is the exit code of this program's health check.
func checked(t *testing.T, path string) int {
	t.Helper()
	check := exec.Command(os.Args[0], "ready")
	check.Env = append(os.Environ(), "RARA_TEST_MAIN=1", "RARA_EXECUTOR_READY_FILE="+path)
	var failed *exec.ExitError
	if err := check.Run(); errors.As(err, &failed) {
		return failed.ExitCode()
	} else if err != nil {
		t.Fatal(err)
	}
	return 0
}
