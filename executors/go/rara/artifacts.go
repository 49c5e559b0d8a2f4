package rara

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"os"
	"strings"

	"github.com/rara-run/rara/executors/go/internal/codes"
	"github.com/rara-run/rara/executors/go/internal/engine"
	"github.com/rara-run/rara/executors/go/internal/payload"
	rarav1 "github.com/rara-run/rara/gen/go/rara/v1"
)

// Artifacts of one job: named inputs, and the outputs so far.
type Artifacts struct{ held *engine.Work }

// InputArtifact is verified bytes that the step was given.
type InputArtifact struct {
	Name      string
	Path      string // a file that must not be changed
	SHA256    string
	SizeBytes int64
	MediaType string
	Type      string
	Metadata  []byte // JSON; nil: none
}

// ReadBytes reads the whole.
func (a *InputArtifact) ReadBytes() ([]byte, error) { return os.ReadFile(a.Path) }

// OutputArtifact is stored bytes.
type OutputArtifact struct {
	Name      string
	SHA256    string
	SizeBytes int64
}

// Output says what an output is.
type Output struct {
	// Type is what it is to people: dataset, model, index, metrics, report, checkpoint or blob. Empty: blob.
	Type string
	// MediaType of the bytes. Empty: application/octet-stream.
	MediaType string
	// Metadata is what the handler says about it: anything that becomes a JSON object. nil: nothing.
	Metadata any
	// DerivedFrom names the inputs that it was made from. Empty: all of them.
	DerivedFrom []string
}

// Names of the input artifacts, as the step's bindings give them.
func (a *Artifacts) Names() []string {
	var names []string
	for _, artifact := range a.held.Request.InputArtifacts {
		names = append(names, artifact.Name)
	}
	return names
}

// Open fetches an input artifact, verified by digest and size.
func (a *Artifacts) Open(ctx context.Context, name string) (*InputArtifact, error) {
	artifact, err := a.input(name)
	if err != nil {
		return nil, err
	}
	path, err := a.held.OpenInput(ctx, name)
	if err != nil {
		return nil, fmt.Errorf("input artifact %q: %w", name, err)
	}
	return opened(artifact, path), nil
}

func opened(artifact *rarav1.Artifact, path string) *InputArtifact {
	return &InputArtifact{
		Name: artifact.Name, Path: path,
		SHA256: artifact.Digest.GetSha256(), SizeBytes: artifact.Digest.GetSizeBytes(),
		MediaType: artifact.MediaType, Type: artifact.Type, Metadata: artifact.Metadata.GetData(),
	}
}

func (a *Artifacts) input(name string) (*rarav1.Artifact, error) {
	return named(a.held.Request.InputArtifacts, name, "input")
}

func named(artifacts []*rarav1.Artifact, name, what string) (*rarav1.Artifact, error) {
	var names []string
	for _, artifact := range artifacts {
		if artifact.Name == name {
			return artifact, nil
		}
		names = append(names, artifact.Name)
	}
	return nil, &codes.Failure{Code: codes.ArtifactMissing, Message: fmt.Sprintf(
		"no %s artifact %q; there are: %s", what, name, strings.Join(names, ", "))}
}

// KeptArtifact is stored bytes that a checkpoint can name; it is no output of the step.
type KeptArtifact struct {
	Name      string
	SHA256    string
	SizeBytes int64
}

// Keep stores what content gives for checkpoints: name it in Progress.Artifacts. Keep again what two checkpoints in a
// row did not name: nothing has held its bytes meanwhile.
func (a *Artifacts) Keep(ctx context.Context, name string, content io.Reader) (*KeptArtifact, error) {
	if err := engine.CheckName(name); err != nil {
		return nil, err
	}
	digest, err := a.held.Keep(ctx, content)
	if err != nil {
		return nil, fmt.Errorf("checkpoint artifact %q: %w", name, err)
	}
	return &KeptArtifact{Name: name, SHA256: digest.Sha256, SizeBytes: digest.SizeBytes}, nil
}

// OfCheckpoint are the artifacts that came with the checkpoint. A new checkpoint may name them again.
func (a *Artifacts) OfCheckpoint() []*KeptArtifact {
	var kept []*KeptArtifact
	for _, artifact := range a.held.Request.CheckpointArtifacts {
		kept = append(kept, &KeptArtifact{
			Name: artifact.Name, SHA256: artifact.Digest.GetSha256(), SizeBytes: artifact.Digest.GetSizeBytes()})
	}
	return kept
}

// OpenCheckpoint fetches an artifact that an earlier attempt kept with the checkpoint, verified by digest and size.
func (a *Artifacts) OpenCheckpoint(ctx context.Context, name string) (*InputArtifact, error) {
	artifact, err := named(a.held.Request.CheckpointArtifacts, name, "checkpoint")
	if err != nil {
		return nil, err
	}
	path, err := a.held.OpenCheckpoint(ctx, name)
	if err != nil {
		return nil, fmt.Errorf("checkpoint artifact %q: %w", name, err)
	}
	return opened(artifact, path), nil
}

// PutFile stores a copy of the file as an output.
func (a *Artifacts) PutFile(ctx context.Context, name, path string, output Output) (*OutputArtifact, error) {
	file, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer file.Close()
	return a.Put(ctx, name, file, output)
}

// PutBytes stores bytes as an output.
func (a *Artifacts) PutBytes(ctx context.Context, name string, data []byte, output Output) (*OutputArtifact, error) {
	return a.Put(ctx, name, bytes.NewReader(data), output)
}

// Put stores what content gives as an output, as a stream: it may be larger than memory.
func (a *Artifacts) Put(
	ctx context.Context, name string, content io.Reader, output Output,
) (*OutputArtifact, error) {
	out := engine.Output{Name: name, Type: output.Type, MediaType: output.MediaType}
	if out.Type == "" {
		out.Type = "blob"
	}
	if out.MediaType == "" {
		out.MediaType = "application/octet-stream"
	}
	if output.Metadata != nil {
		metadata, err := payload.Encode(output.Metadata, "metadata of artifact "+name, payload.MaxEffectBytes)
		if err != nil {
			return nil, err
		}
		out.Metadata = metadata
	}
	for _, source := range output.DerivedFrom {
		artifact, err := a.input(source)
		if err != nil {
			return nil, err
		}
		out.DerivedFrom = append(out.DerivedFrom, artifact.Digest)
	}
	digest, err := a.held.PutOutput(ctx, out, content)
	if err != nil {
		return nil, fmt.Errorf("output artifact %q: %w", name, err)
	}
	return &OutputArtifact{Name: name, SHA256: digest.Sha256, SizeBytes: digest.SizeBytes}, nil
}
