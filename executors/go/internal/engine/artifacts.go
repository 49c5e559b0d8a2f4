package engine

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"sync"

	"google.golang.org/protobuf/proto"

	"github.com/rara-run/rara/executors/go/internal/blobs"
	"github.com/rara-run/rara/executors/go/internal/codes"
	"github.com/rara-run/rara/executors/go/internal/text"
	rarav1 "github.com/rara-run/rara/gen/go/rara/v1"
)

// All inline bytes of one manifest: the rest of a message may have 1 MiB.
const maxInlineTotalBytes = 512 << 10

// artifactStore is what all jobs share: the service, the cache, and a bound on transfers at once.
type artifactStore struct {
	client    *blobs.Client
	cache     *blobs.Cache
	transfers chan struct{}
}

func (a *artifactStore) transfer(ctx context.Context, do func() error) error {
	select {
	case a.transfers <- struct{}{}:
		defer func() { <-a.transfers }()
		return do()
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// jobArtifacts are kept until the job's last event is acknowledged, so that a missing blob can be stored again. Its
// methods may be called by any goroutine of the handler.
type jobArtifacts struct {
	store     *artifactStore
	request   *rarav1.JobRequest
	scratch   string
	maxInline int

	mu          sync.Mutex
	manifest    []*rarav1.Artifact
	consumed    []*rarav1.Digest
	inputs      map[string]*opening
	carried     map[string]*opening // of the checkpoint
	names       map[string]bool
	files       map[string]stored // by digest
	kept        map[string]*kept  // by digest: what checkpoints may name
	named       []naming          // what checkpoints name of it, oldest first
	fileCount   int
	inlineTotal int
	// manifestBytes of what was put, but for inline bytes.
	manifestBytes int
}

// opening is one input that is fetched once, however many ask for it.
type opening struct {
	number int
	mu     sync.Mutex
	path   string
}

type stored struct {
	digest          *rarav1.Digest
	mediaType, path string
}

// kept is stored bytes of a checkpoint. path: empty where they have not been opened, or their file was removed.
type kept struct {
	stored
	isNamed bool // by a checkpoint since it was kept
}

// naming is what the checkpoint of one event names, by digest.
type naming struct {
	sequence int64
	digests  map[string]bool
	isStored bool // nobody asks for its bytes again
}

func newJobArtifacts(store *artifactStore, request *rarav1.JobRequest, scratch string, maxInline int) *jobArtifacts {
	a := &jobArtifacts{store: store, request: request, scratch: scratch, maxInline: maxInline,
		inputs: map[string]*opening{}, carried: map[string]*opening{}, names: map[string]bool{},
		files: map[string]stored{}, kept: map[string]*kept{}}
	for _, artifact := range request.CheckpointArtifacts {
		a.kept[artifact.Digest.GetSha256()] = &kept{stored: stored{artifact.Digest, artifact.MediaType, ""}}
	}
	return a
}

// made returns what goes into the terminal event.
func (a *jobArtifacts) made() ([]*rarav1.Artifact, []*rarav1.Digest) {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.manifest, a.consumed
}

// OpenInput is Port's.
func (j *Job) OpenInput(ctx context.Context, name string) (string, error) {
	for _, artifact := range j.Request.InputArtifacts {
		if artifact.Name == name {
			return j.artifacts.open(ctx, artifact, j.artifacts.inputs, "in", func(string) {
				j.artifacts.consumed = append(j.artifacts.consumed, artifact.Digest)
			})
		}
	}
	return "", &codes.Failure{Code: codes.ArtifactMissing, Message: fmt.Sprintf("no input artifact %q", name)}
}

// OpenCheckpoint is Port's.
func (j *Job) OpenCheckpoint(ctx context.Context, name string) (string, error) {
	for _, artifact := range j.Request.CheckpointArtifacts {
		if artifact.Name == name {
			return j.artifacts.open(ctx, artifact, j.artifacts.carried, "checkpoint", func(path string) {
				if known := j.artifacts.kept[artifact.Digest.GetSha256()]; known != nil && known.path == "" {
					known.path = path
				}
			})
		}
	}
	return "", &codes.Failure{Code: codes.ArtifactMissing, Message: fmt.Sprintf("no checkpoint artifact %q", name)}
}

// open fetches an artifact once; `all` are those of its sort. opened: called with the mutex held.
func (a *jobArtifacts) open(
	ctx context.Context, artifact *rarav1.Artifact, all map[string]*opening, sort string, opened func(path string),
) (string, error) {
	a.mu.Lock()
	input := all[artifact.Name]
	if input == nil {
		input = &opening{number: len(all) + 1}
		all[artifact.Name] = input
	}
	a.mu.Unlock()

	input.mu.Lock()
	defer input.mu.Unlock()
	if input.path != "" {
		return input.path, nil
	}
	path := filepath.Join(a.scratch, fmt.Sprintf("%s-%d", sort, input.number))
	os.Remove(path) // of an open that was cut short
	if err := a.fetch(ctx, artifact, path); err != nil {
		return "", err
	}
	input.path = path
	a.mu.Lock()
	opened(path)
	a.mu.Unlock()
	return path, nil
}

func (a *jobArtifacts) fetch(ctx context.Context, artifact *rarav1.Artifact, path string) error {
	if len(artifact.Inline) == 0 && artifact.Digest.GetSizeBytes() > 0 {
		return a.store.transfer(ctx, func() error { return a.store.cache.Place(ctx, artifact.Digest, path) })
	}
	hash := sha256.Sum256(artifact.Inline)
	got := &rarav1.Digest{Sha256: hex.EncodeToString(hash[:]), SizeBytes: int64(len(artifact.Inline))}
	if !proto.Equal(got, artifact.Digest) {
		return &codes.Failure{Code: codes.ArtifactMismatch, Message: fmt.Sprintf(
			"artifact %q does not have the digest that it names", artifact.Name)}
	}
	return errors.Join(os.MkdirAll(a.scratch, 0o700), os.WriteFile(path, artifact.Inline, 0o400))
}

// Output is an artifact that a handler leaves. Metadata: JSON, or nil.
type Output struct {
	Name, Type, MediaType string
	Metadata              []byte
	DerivedFrom           []*rarav1.Digest
}

// PutOutput is Port's.
func (j *Job) PutOutput(ctx context.Context, output Output, content io.Reader) (*rarav1.Digest, error) {
	if err := context.Cause(j.ctx); err != nil {
		return nil, err
	}
	digest, err := j.artifacts.put(ctx, output, content)
	j.loseIfLost(err)
	return digest, err
}

// Keep is Port's.
func (j *Job) Keep(ctx context.Context, content io.Reader) (*rarav1.Digest, error) {
	if err := context.Cause(j.ctx); err != nil {
		return nil, err
	}
	digest, err := j.artifacts.keepForCheckpoint(ctx, content)
	j.loseIfLost(err)
	return digest, err
}

func (j *Job) loseIfLost(err error) {
	var failure *codes.Failure
	if errors.As(err, &failure) && failure.Code == codes.LeaseLost {
		j.supervisor.locked(func() { j.supervisor.lose(j.token()) })
	}
}

func (a *jobArtifacts) keepForCheckpoint(ctx context.Context, content io.Reader) (*rarav1.Digest, error) {
	path, err := a.newFile()
	if err != nil {
		return nil, err
	}
	digest, err := blobs.Keep(content, path)
	if err != nil {
		return nil, err
	}
	file := stored{digest, "application/octet-stream", path}
	if digest.SizeBytes > 0 { // the empty blob is known by its digest
		if err := a.send(ctx, file); err != nil {
			return nil, err
		}
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if old := a.kept[digest.Sha256]; old != nil && old.path != "" { // which may be on its way to the store again
		os.Remove(path)
		old.isNamed = false
		return digest, nil
	}
	a.kept[digest.Sha256] = &kept{stored: file}
	return digest, nil
}

// ofCheckpoint is what a checkpoint names.
func (a *jobArtifacts) ofCheckpoint(named []Kept) ([]*rarav1.Artifact, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	var artifacts []*rarav1.Artifact
	for _, one := range named {
		known := a.kept[one.SHA256]
		if known == nil {
			return nil, &codes.Failure{Code: codes.ArtifactMissing, Message: fmt.Sprintf(
				"the checkpoint's artifact %q was not kept by this attempt", one.Name)}
		}
		known.isNamed = true
		artifacts = append(artifacts, &rarav1.Artifact{
			Name: text.Valid(one.Name), Digest: known.digest, MediaType: known.mediaType, Type: "checkpoint"})
	}
	return artifacts, nil
}

// checkpointQueued takes in that the event of this number names these; what it named before, unsent, was merged into it.
func (a *jobArtifacts) checkpointQueued(sequence int64, named []Kept) {
	a.mu.Lock()
	defer a.mu.Unlock()
	now := naming{sequence: sequence, digests: map[string]bool{}}
	for _, one := range named {
		now.digests[one.SHA256] = true
	}
	if last := len(a.named) - 1; last >= 0 && a.named[last].sequence == sequence {
		replaced := a.named[last]
		a.named[last] = now
		a.removeUnneeded(replaced)
		return
	}
	a.named = append(a.named, now)
	a.removeUnneeded()
}

// checkpointStored takes in that the event of this number will not be refused any more.
func (a *jobArtifacts) checkpointStored(sequence int64) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for i := range a.named {
		if a.named[i].sequence == sequence {
			a.named[i].isStored = true
		}
	}
	a.removeUnneeded()
}

// removeUnneeded removes the files that neither the newest two checkpoints name nor any that is not known to be stored.
func (a *jobArtifacts) removeUnneeded(gone ...naming) {
	older := max(0, len(a.named)-2)
	var needed []naming
	for i, one := range a.named {
		if i < older && one.isStored {
			gone = append(gone, one)
		} else {
			needed = append(needed, one)
		}
	}
	a.named = needed
	for _, one := range gone {
		for sha256 := range one.digests {
			isNeeded := slices.ContainsFunc(needed, func(other naming) bool { return other.digests[sha256] })
			if old := a.kept[sha256]; old != nil && old.isNamed && !isNeeded {
				os.Remove(old.path)
				old.path = ""
			}
		}
	}
}

func (a *jobArtifacts) put(ctx context.Context, output Output, content io.Reader) (*rarav1.Digest, error) {
	if err := checkOutput(output); err != nil {
		return nil, err
	}
	path, err := a.target(output.Name)
	if err != nil {
		return nil, err
	}
	digest, err := a.keep(ctx, output, content, path)
	if err != nil {
		os.Remove(path)
		a.mu.Lock()
		maps.DeleteFunc(a.files, func(_ string, file stored) bool { return file.path == path })
		delete(a.names, output.Name) // it was not stored: the name is free again
		a.mu.Unlock()
		return nil, err
	}
	return digest, nil
}

// target takes the name, also while another put is under way.
func (a *jobArtifacts) target(name string) (string, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.names[name] {
		no := false
		return "", &codes.Failure{Code: artifactInvalid, Retryable: &no,
			Message: fmt.Sprintf("artifact name %s was used before", name)}
	}
	if len(a.names) >= maxArtifacts {
		return "", &codes.Failure{Code: codes.ArtifactTooLarge,
			Message: fmt.Sprintf("a manifest has at most %d artifacts", maxArtifacts)}
	}
	a.names[name] = true
	return a.newFileLocked()
}

func (a *jobArtifacts) newFile() (string, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.newFileLocked()
}

func (a *jobArtifacts) newFileLocked() (string, error) {
	a.fileCount++
	return filepath.Join(a.scratch, fmt.Sprintf("out-%d", a.fileCount)), os.MkdirAll(a.scratch, 0o700)
}

func (a *jobArtifacts) keep(
	ctx context.Context, output Output, content io.Reader, path string,
) (*rarav1.Digest, error) {
	digest, err := blobs.Keep(content, path)
	if err != nil {
		return nil, err
	}
	artifact := &rarav1.Artifact{
		Name: output.Name, Digest: digest, MediaType: output.MediaType, Type: output.Type,
		DerivedFrom: output.DerivedFrom,
	}
	if output.Metadata != nil {
		artifact.Metadata = &rarav1.Payload{Data: output.Metadata}
	}
	a.mu.Lock()
	a.manifestBytes += proto.Size(artifact)
	if total := a.manifestBytes; total > maxManifestBytes {
		a.mu.Unlock()
		return nil, &codes.Failure{Code: codes.ArtifactTooLarge, Message: fmt.Sprintf(
			"the manifest has %d bytes, and %d are its limit: use fewer artifacts, or less metadata",
			total, maxManifestBytes)}
	}
	if known, isHere := a.files[digest.Sha256]; isHere { // the same bytes again: one copy of them is enough
		os.Remove(path)
		path = known.path
	} else {
		a.files[digest.Sha256] = stored{digest, artifact.MediaType, path}
	}
	size := int(digest.SizeBytes)
	isInline := size <= a.maxInline && a.inlineTotal+size <= maxInlineTotalBytes
	if isInline {
		a.inlineTotal += size
	}
	a.mu.Unlock()
	if isInline {
		artifact.Inline, err = os.ReadFile(path)
	} else {
		err = a.upload(ctx, digest.Sha256)
	}
	if err != nil {
		return nil, err
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	a.manifest = append(a.manifest, artifact)
	return digest, nil
}

// uploadAgain stores blobs that the scheduler misses.
func (a *jobArtifacts) uploadAgain(ctx context.Context, digests []*rarav1.Digest) error {
	for _, digest := range digests {
		a.mu.Lock()
		file, isOurs := a.files[digest.Sha256]
		if known := a.kept[digest.Sha256]; !isOurs && known != nil && known.path != "" {
			file, isOurs = known.stored, true
		}
		a.mu.Unlock()
		if !isOurs {
			return &codes.Failure{Code: codes.ArtifactMismatch, Message: fmt.Sprintf(
				"blob %s is missing, and this job does not have its bytes", digest.Sha256)}
		}
		if err := a.send(ctx, file); err != nil {
			return err
		}
	}
	return nil
}

func (a *jobArtifacts) upload(ctx context.Context, sha256 string) error {
	a.mu.Lock()
	file := a.files[sha256]
	a.mu.Unlock()
	return a.send(ctx, file)
}

func (a *jobArtifacts) send(ctx context.Context, file stored) error {
	return a.store.transfer(ctx, func() error {
		return a.store.client.Upload(ctx, a.request.Lease, file.digest, file.mediaType, file.path)
	})
}
