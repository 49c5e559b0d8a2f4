// Package scratch is the executor's folder: scratch for its jobs, a cache, and what dead executors have left there.
package scratch

import (
	"fmt"
	"os"
	"path/filepath"
	"syscall"

	"golang.org/x/sys/unix"
)

// Folder is `jobs/<executor_id>` below a folder that executors of one machine share, Python's and Go's.
//
// The lock on a file in it tells that its process lives; without it the folder is anybody's to remove.
type Folder struct {
	Jobs  string
	Cache string
	lock  *os.File
}

// Open makes the folder, and removes those of dead executors.
func Open(root, executorID string) (*Folder, error) {
	f := &Folder{Jobs: filepath.Join(root, "jobs", executorID), Cache: filepath.Join(root, "cache")}
	if err := f.open(root); err != nil {
		return nil, fmt.Errorf("RARA_EXECUTOR_DIR %s: %w", root, err)
	}
	return f, nil
}

func (f *Folder) open(root string) error {
	if err := os.MkdirAll(root, 0o700); err != nil {
		return err
	}
	info, err := os.Stat(root)
	if err != nil {
		return err
	}
	if owner, ok := info.Sys().(*syscall.Stat_t); ok && owner.Uid != uint32(os.Getuid()) {
		return fmt.Errorf("it belongs to another user") // a shared /tmp: somebody else may have been first
	}
	for _, path := range []string{f.Jobs, f.Cache} {
		if err := os.MkdirAll(path, 0o700); err != nil {
			return err
		}
	}
	f.lock, err = os.OpenFile(filepath.Join(f.Jobs, "lock"), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return err
	}
	if err := unix.Flock(int(f.lock.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		return err
	}
	others, err := os.ReadDir(filepath.Dir(f.Jobs))
	for _, other := range others {
		if path := filepath.Join(filepath.Dir(f.Jobs), other.Name()); path != f.Jobs && isAbandoned(path) {
			os.RemoveAll(path)
		}
	}
	return err
}

// Close removes the folder. A repeat changes nothing.
func (f *Folder) Close() {
	if f.lock != nil {
		os.RemoveAll(f.Jobs)
		f.lock.Close()
		f.lock = nil
	}
}

func isAbandoned(folder string) bool {
	lock, err := os.OpenFile(filepath.Join(folder, "lock"), os.O_RDWR, 0)
	if err != nil {
		return false // just being made, or just being removed
	}
	defer lock.Close()
	return unix.Flock(int(lock.Fd()), unix.LOCK_EX|unix.LOCK_NB) == nil
}
