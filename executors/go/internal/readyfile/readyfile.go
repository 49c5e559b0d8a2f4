// Package readyfile keeps a file that says whether the executor is ready: touched while it is, gone when it is not, old
// when it hangs. The Python executor keeps the same one.
package readyfile

import (
	"errors"
	"io/fs"
	"log/slog"
	"os"
	"time"
)

// stale is the age at which a file counts as left behind. It is touched every second; a busy machine may be late.
const stale = 10 * time.Second

// File follows the executor's readiness. Without a path it does nothing. It is used by one goroutine.
type File struct {
	path     string
	logger   *slog.Logger
	isFaulty bool
}

// New is a file that is not there yet.
func New(path string, logger *slog.Logger) *File { return &File{path: path, logger: logger} }

// Show is called every second. A file that cannot be written fails the health check, and must not cost the jobs.
func (f *File) Show(isReady bool) {
	if f.path == "" {
		return
	}
	change := remove
	if isReady {
		change = touch
	}
	err := change(f.path)
	if err != nil && !f.isFaulty {
		f.logger.Warn("executor.ready_file_failed", "error", err)
	}
	f.isFaulty = err != nil
}

func touch(path string) error {
	file, err := os.OpenFile(path, os.O_CREATE|os.O_WRONLY, 0o644)
	if err != nil {
		return err
	}
	if err := file.Close(); err != nil {
		return err
	}
	now := time.Now()
	return os.Chtimes(path, now, now)
}

func remove(path string) error {
	if err := os.Remove(path); !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// IsNew tells whether an executor has touched the file just now.
func IsNew(path string) bool {
	found, err := os.Stat(path)
	return err == nil && time.Since(found.ModTime()) < stale
}
