package blobs

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"io"
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"regexp"
	"sort"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"

	"github.com/rara-run/rara/executors/go/internal/codes"
	rarav1 "github.com/rara-run/rara/gen/go/rara/v1"
)

var sha256Shape = regexp.MustCompile(`^[0-9a-f]{64}$`)

// Fetch brings a blob, verified, into a file.
type Fetch func(ctx context.Context, digest *rarav1.Digest, target string) error

// Cache is a folder that several executors of one machine may share, in Python or Go; a blob in use survives its
// removal. The least used goes first.
type Cache struct {
	folder string
	parts  string // a folder of this executor alone: no other one takes what is being fetched for something to remove
	limit  int64
	fetch  Fetch

	mu       sync.Mutex
	busy     map[string]chan struct{}
	verified map[string]stamp // files whose bytes this process has seen to be right
}

type stamp struct {
	modified time.Time
	size     int64
}

// NewCache keeps the folder to a limit in bytes; what running jobs use is not counted. parts: a folder of this executor
// alone, on the same disk.
func NewCache(folder, parts string, limit int64, fetch Fetch) *Cache {
	return &Cache{folder: folder, parts: parts, limit: limit, fetch: fetch, busy: map[string]chan struct{}{}, verified: map[string]stamp{}}
}

// Place makes the blob appear at target, a new path on the same disk.
func (c *Cache) Place(ctx context.Context, digest *rarav1.Digest, target string) error {
	if !sha256Shape.MatchString(digest.GetSha256()) {
		return &codes.Failure{Code: codes.ArtifactMissing, Message: "the input artifact names no SHA-256 digest"}
	}
	if err := c.enter(ctx, digest.Sha256); err != nil {
		return err
	}
	defer c.leave(digest.Sha256)
	path := filepath.Join(c.folder, digest.Sha256[:2], digest.Sha256)
	if !c.isRight(path, digest) {
		if err := c.download(ctx, digest, path); err != nil {
			return err
		}
	}
	return link(path, target)
}

// enter lets one goroutine at a time work on a blob.
func (c *Cache) enter(ctx context.Context, name string) error {
	for {
		c.mu.Lock()
		other, taken := c.busy[name]
		if !taken {
			c.busy[name] = make(chan struct{})
			c.mu.Unlock()
			return nil
		}
		c.mu.Unlock()
		select {
		case <-other:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

func (c *Cache) leave(name string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	close(c.busy[name])
	delete(c.busy, name)
}

func (c *Cache) download(ctx context.Context, digest *rarav1.Digest, path string) error {
	c.makeRoom(digest.SizeBytes)
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return err
	}
	part, err := os.CreateTemp(c.parts, "part-")
	if err != nil {
		return err
	}
	part.Close()
	defer os.Remove(part.Name())
	if err := c.fetch(ctx, digest, part.Name()); err != nil {
		return err
	}
	if err := errors.Join(os.Chmod(part.Name(), 0o444), os.Rename(part.Name(), path)); err != nil {
		return err
	}
	c.remember(path, digest.Sha256)
	return nil
}

func (c *Cache) remember(path, name string) {
	if info, err := os.Stat(path); err == nil {
		c.mu.Lock()
		c.verified[name] = stamp{info.ModTime(), info.Size()}
		c.mu.Unlock()
	}
}

// isRight tells whether the blob is there, and what it says. Another process, or a crash, may have left it.
func (c *Cache) isRight(path string, digest *rarav1.Digest) bool {
	info, err := os.Stat(path)
	if err != nil {
		return false
	}
	c.mu.Lock()
	known, ok := c.verified[digest.Sha256]
	c.mu.Unlock()
	if ok && known.size == info.Size() && known.modified.Equal(info.ModTime()) {
		return info.Size() == digest.SizeBytes
	}
	if got, err := DigestOf(path); err == nil && proto.Equal(got, digest) {
		c.remember(path, digest.Sha256)
		return true
	}
	os.Remove(path)
	return false
}

func (c *Cache) makeRoom(wanted int64) {
	size := wanted
	type file struct {
		path string
		size int64
		used time.Time
	}
	var files []file
	_ = filepath.WalkDir(c.folder, func(path string, entry fs.DirEntry, err error) error {
		if err != nil || !entry.Type().IsRegular() {
			return nil
		}
		if info, err := entry.Info(); err == nil {
			files = append(files, file{path, info.Size(), lastUsed(info)})
			size += info.Size()
		}
		return nil
	})
	sort.Slice(files, func(i, j int) bool { return files[i].used.Before(files[j].used) })
	for _, file := range files {
		if size <= c.limit && freeBytes(c.folder) >= wanted {
			return
		}
		os.Remove(file.path)
		size -= file.size
	}
}

// freeBytes of the disk; where nobody can say, as many as there can be.
func freeBytes(folder string) int64 {
	var facts syscall.Statfs_t
	if syscall.Statfs(folder, &facts) != nil {
		return math.MaxInt64
	}
	return int64(facts.Bavail) * int64(facts.Bsize)
}

func lastUsed(info fs.FileInfo) time.Time {
	if system, ok := info.Sys().(*syscall.Stat_t); ok {
		return time.Unix(system.Atim.Unix())
	}
	return info.ModTime()
}

func link(path, target string) error {
	if err := os.MkdirAll(filepath.Dir(target), 0o700); err != nil {
		return err
	}
	if os.Link(path, target) != nil { // another disk, or a file system without links
		if err := copyFile(path, target); err != nil {
			return err
		}
	}
	if info, err := os.Stat(path); err == nil {
		_ = os.Chtimes(path, time.Now(), info.ModTime()) // the access time orders removal
	}
	return nil
}

func copyFile(source, target string) error {
	reader, err := os.Open(source)
	if err != nil {
		return err
	}
	defer reader.Close()
	writer, err := os.Create(target)
	if err != nil {
		return err
	}
	_, err = io.Copy(writer, reader)
	return errors.Join(err, writer.Close())
}

// DigestOf reads a file's digest.
func DigestOf(path string) (*rarav1.Digest, error) {
	file, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer file.Close()
	hash := sha256.New()
	size, err := io.Copy(hash, file)
	return &rarav1.Digest{Sha256: hex.EncodeToString(hash.Sum(nil)), SizeBytes: size}, err
}

func isAtStart(file *os.File) bool {
	offset, err := file.Seek(0, io.SeekCurrent)
	return err == nil && offset == 0
}

// Keep copies what reader gives into target, hashing the bytes that were copied.
func Keep(reader io.Reader, target string) (*rarav1.Digest, error) {
	writer, err := os.Create(target)
	if err != nil {
		return nil, err
	}
	hash := sha256.New()
	if file, ok := reader.(*os.File); ok && isAtStart(file) &&
		unix.IoctlFileClone(int(writer.Fd()), int(file.Fd())) == nil {
		// The disk's own copy, which takes no room; what is hashed is what is kept.
		size, err := io.Copy(hash, writer)
		return &rarav1.Digest{Sha256: hex.EncodeToString(hash.Sum(nil)), SizeBytes: size}, errors.Join(err, writer.Close())
	}
	size, err := io.Copy(io.MultiWriter(writer, hash), reader)
	if isFull(err) {
		err = faultOf(err).failure
	}
	return &rarav1.Digest{Sha256: hex.EncodeToString(hash.Sum(nil)), SizeBytes: size}, errors.Join(err, writer.Close())
}
