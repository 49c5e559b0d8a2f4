// Package manifest hashes the files of a folder into artifacts.
package manifest

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"sort"
	"strings"
	"sync"

	"golang.org/x/sync/errgroup"

	"github.com/rara-run/rara/executors/go/rara"
)

// maxFiles keeps a manifest well within one message: what is larger belongs into an archive.
const maxFiles = 999 // and the artifact `manifest`

const maxNameBytes = 255 // a longer name gives way to the digest of the path

// Options of the step.
type Options struct {
	// Folder that the executor can read.
	Folder string `json:"folder"`
	// Concurrency: files that are hashed at once; 0: 4.
	Concurrency int `json:"concurrency"`
}

// Summary of what was found. Skipped: links, sockets and the like, which are not followed.
type Summary struct {
	Files     int   `json:"files"`
	SizeBytes int64 `json:"size_bytes"`
	Skipped   int   `json:"skipped"`
}

type entry struct {
	Path      string `json:"path"`
	SHA256    string `json:"sha256"`
	SizeBytes int64  `json:"size_bytes"`
}

// Hash stores every regular file below a folder as an artifact named for its relative path, and all paths with their
// digests, in the order of the paths, as the artifact `manifest`.
func Hash(ctx context.Context, job *rara.Job[Options]) (Summary, error) {
	paths, skipped, err := walk(job.Input.Folder)
	if err != nil {
		return Summary{}, err
	}
	entries := make([]entry, len(paths))
	var mu sync.Mutex
	done := 0
	group, groupCtx := errgroup.WithContext(ctx)
	group.SetLimit(max(1, min(64, job.Input.Concurrency)))
	if job.Input.Concurrency == 0 {
		group.SetLimit(4)
	}
	for i, path := range paths {
		group.Go(func() error {
			stored, err := job.Artifacts.PutFile(groupCtx, artifactName(path), filepath.Join(job.Input.Folder, path),
				rara.Output{})
			if err != nil {
				return err
			}
			entries[i] = entry{path, stored.SHA256, stored.SizeBytes}
			mu.Lock()
			defer mu.Unlock()
			done++
			return job.Progress(rara.Progress{Fraction: new(float64(done) / float64(len(paths))), Message: path})
		})
	}
	if err := group.Wait(); err != nil {
		return Summary{}, err
	}
	summary := Summary{Files: len(entries), Skipped: skipped}
	var lines bytes.Buffer
	encoder := json.NewEncoder(&lines)
	encoder.SetEscapeHTML(false)
	for _, entry := range entries {
		summary.SizeBytes += entry.SizeBytes
		if err := encoder.Encode(entry); err != nil {
			return Summary{}, err
		}
	}
	_, err = job.Artifacts.PutBytes(ctx, "manifest", lines.Bytes(),
		rara.Output{Type: "report", MediaType: "application/jsonl", Metadata: summary})
	return summary, err
}

// artifactName of a file: its path below `files/`, with what a name cannot hold encoded as in a URL.
func artifactName(path string) string {
	var name strings.Builder
	name.WriteString("files/")
	for i := range len(path) {
		c := path[i]
		startsOrEnds := i == 0 || path[i-1] == '/' || i == len(path)-1 || path[i+1] == '/'
		switch {
		case 'a' <= c && c <= 'z', 'A' <= c && c <= 'Z', '0' <= c && c <= '9', c == '_', c == '/':
			name.WriteByte(c)
		case strings.IndexByte(".-=+@,", c) >= 0 && !startsOrEnds:
			name.WriteByte(c)
		default:
			fmt.Fprintf(&name, "%%%02X", c)
		}
	}
	if name.Len() > maxNameBytes {
		hash := sha256.Sum256([]byte(path))
		return "files/" + hex.EncodeToString(hash[:])
	}
	return name.String()
}

// walk finds regular files, by relative path with slashes, in order.
func walk(folder string) (paths []string, skipped int, err error) {
	if info, err := os.Stat(folder); err != nil || !info.IsDir() {
		return nil, 0, rara.Terminal("FOLDER_NOT_FOUND", "%q is not a folder", folder)
	}
	err = filepath.WalkDir(folder, func(path string, found fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return rara.Retryable("FOLDER_UNREADABLE", "%w", err)
		case found.IsDir():
		case !found.Type().IsRegular():
			skipped++
		case len(paths) == maxFiles:
			return rara.Terminal("FOLDER_TOO_LARGE", "%s holds more than %d files", folder, maxFiles)
		default:
			relative, err := filepath.Rel(folder, path)
			if err != nil {
				return err
			}
			paths = append(paths, filepath.ToSlash(relative))
		}
		return nil
	})
	sort.Strings(paths)
	return paths, skipped, err
}
