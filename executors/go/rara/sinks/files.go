package sinks

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"time"

	"golang.org/x/sys/unix"

	"github.com/rara-run/rara/executors/go/rara"
)

const (
	lockWait = 30 * time.Second
	lockLook = 20 * time.Millisecond
	digits   = 20 // one width for all, so that a token is overwritten in place
)

var isToken = regexp.MustCompile(`^[0-9]{20}$`)

// WriteFile makes the file at path hold what content gives, wholly or not at all; ErrSuperseded if a newer attempt has
// written it.
//
// The largest token that has written stands in `.NAME.fence` beside it, which is also what writers lock while they
// replace the file. A process that is killed leaves path as it was, or as it was to become.
func WriteFile(ctx context.Context, token int64, path string, content io.Reader) error {
	if err := CheckToken(token); err != nil {
		return err
	}
	var unique [16]byte
	_, _ = rand.Read(unique[:]) // never fails
	folder, name := filepath.Split(path)
	part := filepath.Join(folder, fmt.Sprintf(".%s.%0*d.%s.part", name, digits, token, hex.EncodeToString(unique[:])))
	defer os.Remove(part)
	if err := writeNew(part, content); err != nil {
		return err
	}
	return replace(ctx, path, part, token)
}

func writeNew(path string, content io.Reader) error {
	file, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o666)
	if err != nil {
		return err
	}
	_, err = io.Copy(file, content)
	return errors.Join(err, file.Sync(), file.Close())
}

func replace(ctx context.Context, path, part string, token int64) error {
	folder, name := filepath.Split(path)
	fence, err := os.OpenFile(filepath.Join(folder, "."+name+".fence"), os.O_RDWR|os.O_CREATE, 0o666)
	if err != nil {
		return err
	}
	defer fence.Close() // gives the lock up
	if err := lock(ctx, fence, path); err != nil {
		return err
	}
	newest := newestToken(fence)
	if newest > token {
		return Superseded("file "+path, token)
	}
	if newest < token {
		// Before the file itself: whatever ends this process in between, no older attempt can follow.
		_, err := fence.WriteAt(fmt.Appendf(nil, "%0*d\n", digits, token), 0)
		if err := errors.Join(err, fence.Sync()); err != nil {
			return err
		}
	}
	if err := os.Rename(part, path); err != nil {
		return err
	}
	removeOlder(folder, name, token)
	return syncFolder(folder)
}

// lock with a bound: whoever holds it may have been stopped in the middle.
func lock(ctx context.Context, fence *os.File, path string) error {
	ctx, cancel := context.WithTimeout(ctx, lockWait)
	defer cancel()
	for {
		switch err := unix.Flock(int(fence.Fd()), unix.LOCK_EX|unix.LOCK_NB); {
		case err == nil:
			return nil
		case !errors.Is(err, unix.EWOULDBLOCK) && !errors.Is(err, unix.EINTR):
			return fmt.Errorf("lock of %s: %w", path, err)
		}
		select {
		case <-ctx.Done():
			return rara.Retryable("WRITE_BLOCKED", "file %s: locked by others: %w", path, ctx.Err())
		case <-time.After(lockLook):
		}
	}
}

// newestToken is 0 where nobody has written.
func newestToken(fence *os.File) int64 {
	var text [digits]byte
	if n, _ := fence.ReadAt(text[:], 0); n < digits || !isToken.Match(text[:]) {
		return 0
	}
	token, _ := strconv.ParseInt(string(text[:]), 10, 64)
	return token
}

// removeOlder removes what killed writers have left, and what older ones still write, which they could not put into
// place any more.
func removeOlder(folder, name string, token int64) {
	part := regexp.MustCompile(`^\.` + regexp.QuoteMeta(name) + `\.([0-9]{20})\.[0-9a-f]{32}\.part$`)
	entries, _ := os.ReadDir(filepath.Clean(folder + "."))
	for _, entry := range entries {
		found := part.FindStringSubmatch(entry.Name())
		if found == nil {
			continue
		}
		if of, err := strconv.ParseInt(found[1], 10, 64); err == nil && of < token {
			os.Remove(filepath.Join(folder, entry.Name()))
		}
	}
}

func syncFolder(folder string) error {
	opened, err := os.Open(filepath.Clean(folder + "."))
	if err != nil {
		return err
	}
	return errors.Join(opened.Sync(), opened.Close())
}
