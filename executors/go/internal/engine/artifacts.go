package engine

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
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
	names       map[string]bool
	files       map[string]stored // by digest
	fileCount   int
	inlineTotal int
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

func newJobArtifacts(store *artifactStore, request *rarav1.JobRequest, scratch string, maxInline int) *jobArtifacts {
	return &jobArtifacts{store: store, request: request, scratch: scratch, maxInline: maxInline,
		inputs: map[string]*opening{}, names: map[string]bool{}, files: map[string]stored{}}
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
			return j.artifacts.open(ctx, artifact)
		}
	}
	return "", &codes.Failure{Code: codes.ArtifactMissing, Message: fmt.Sprintf("no input artifact %q", name)}
}

func (a *jobArtifacts) open(ctx context.Context, artifact *rarav1.Artifact) (string, error) {
	a.mu.Lock()
	input := a.inputs[artifact.Name]
	if input == nil {
		input = &opening{number: len(a.inputs) + 1}
		a.inputs[artifact.Name] = input
	}
	a.mu.Unlock()

	input.mu.Lock()
	defer input.mu.Unlock()
	if input.path != "" {
		return input.path, nil
	}
	path := filepath.Join(a.scratch, fmt.Sprintf("in-%d", input.number))
	os.Remove(path) // of an open that was cut short
	if err := a.fetch(ctx, artifact, path); err != nil {
		return "", err
	}
	input.path = path
	a.mu.Lock()
	a.consumed = append(a.consumed, artifact.Digest)
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
			"input artifact %q does not have the digest that it names", artifact.Name)}
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
	var failure *codes.Failure
	if errors.As(err, &failure) && failure.Code == codes.LeaseLost {
		j.supervisor.locked(func() { j.supervisor.lose(j.token()) })
	}
	return digest, err
}

func (a *jobArtifacts) put(ctx context.Context, output Output, content io.Reader) (*rarav1.Digest, error) {
	output.Name = text.Valid(output.Name)
	path, err := a.target(output.Name)
	if err != nil {
		return nil, err
	}
	digest, err := a.keep(ctx, output, content, path)
	if err != nil {
		a.mu.Lock()
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
	if name == "" || a.names[name] {
		return "", fmt.Errorf("artifact name %q is empty or was used before", name)
	}
	a.names[name] = true
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
		Name: output.Name, Digest: digest, MediaType: text.Valid(output.MediaType), Type: text.Valid(output.Type),
		DerivedFrom: output.DerivedFrom,
	}
	if output.Metadata != nil {
		artifact.Metadata = &rarav1.Payload{Data: output.Metadata}
	}
	a.mu.Lock()
	a.files[digest.Sha256] = stored{digest, artifact.MediaType, path}
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
		_, isOurs := a.files[digest.Sha256]
		a.mu.Unlock()
		if !isOurs {
			return &codes.Failure{Code: codes.ArtifactMismatch, Message: fmt.Sprintf(
				"blob %s is missing and is none of this job's outputs", digest.Sha256)}
		}
		if err := a.upload(ctx, digest.Sha256); err != nil {
			return err
		}
	}
	return nil
}

func (a *jobArtifacts) upload(ctx context.Context, sha256 string) error {
	a.mu.Lock()
	file := a.files[sha256]
	a.mu.Unlock()
	return a.store.transfer(ctx, func() error {
		return a.store.client.Upload(ctx, a.request.Lease, file.digest, file.mediaType, file.path)
	})
}
