// Package fenced has operations that end in the middle, for tests of what the next attempt finds. Those of the Python
// tests, support/fenced_handlers.py, do the same in every detail.
package fenced

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/rara-run/rara/executors/go/rara"
)

const (
	version = "1.0.0"
	epochs  = 6
	look    = 20 * time.Millisecond
)

// Register offers all of them.
func Register(registry *rara.Registry) {
	rara.Register(registry, "fenced.train", version, train)
	rara.Register(registry, "fenced.publish", version, publish)
	rara.Register(registry, "fenced.describe", version, describe)
	rara.Register(registry, "fenced.charge", version, charge)
}

type given struct {
	Folder string `json:"folder"`
	Size   int    `json:"size"`
}

type job = rara.Job[given]

// mark leaves a file that says how far this attempt is.
func mark(job *job, name string) error {
	return os.WriteFile(filepath.Join(job.Input.Folder, fmt.Sprintf("%s-%d", name, job.Attempt)), nil, 0o644)
}

// until waits for a file of the test.
func until(ctx context.Context, job *job, name string) error {
	for ; ; time.Sleep(look) {
		if _, err := os.Stat(filepath.Join(job.Input.Folder, name)); err == nil {
			return nil
		}
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
	}
}

// state of a training: Big has digits that no float64 holds.
type state struct {
	Epoch int    `json:"epoch"`
	Big   int64  `json:"big"`
	By    string `json:"by"`
}

type trained struct {
	Epoch     int    `json:"epoch"`
	ResumedAt int    `json:"resumed_at"`
	ResumedOf string `json:"resumed_of"`
	By        string `json:"by"`
	Big       int64  `json:"big"`
	Log       string `json:"log"`
}

// weights after an epoch: Size bytes, each of which every epoch changes.
func weights(size, epoch int) []byte {
	data := make([]byte, size)
	for i := range data {
		data[i] = byte(i*31 + epoch*7)
	}
	return data
}

// train goes on from the checkpoint's weights and log. The first attempt stops for ever in its middle.
func train(ctx context.Context, job *job) (trained, error) {
	at := state{Big: 1<<53 + 1, By: "go"}
	out := trained{By: "go"}
	var log []byte
	found, err := job.Checkpoint(&at)
	if err != nil {
		return out, err
	}
	if found {
		out.ResumedAt, out.ResumedOf = at.Epoch, at.By
		if log, err = resume(ctx, job, at.Epoch); err != nil {
			return out, err
		}
	}
	for at.Epoch < epochs {
		at.Epoch, at.By = at.Epoch+1, "go"
		log = fmt.Appendf(log, "go %d\n", at.Epoch)
		if err := save(ctx, job, at, log); err != nil {
			return out, err
		}
		if !found && at.Epoch == epochs/2 {
			if err := mark(job, "half"); err != nil {
				return out, err
			}
			<-ctx.Done()
			return out, context.Cause(ctx)
		}
	}
	out.Epoch, out.Big, out.Log = at.Epoch, at.Big, string(log)
	_, err = job.Artifacts.PutBytes(ctx, "model", weights(job.Input.Size, at.Epoch), rara.Output{Type: "model"})
	return out, err
}

// resume checks the weights of the epoch, and returns the log.
func resume(ctx context.Context, job *job, epoch int) ([]byte, error) {
	found, err := job.Artifacts.OpenCheckpoint(ctx, "weights")
	if err != nil {
		return nil, err
	}
	data, err := found.ReadBytes()
	if err != nil {
		return nil, err
	}
	if !bytes.Equal(data, weights(job.Input.Size, epoch)) || found.Type != "checkpoint" {
		return nil, rara.Terminal("WEIGHTS_WRONG", "of epoch %d", epoch)
	}
	log, err := job.Artifacts.OpenCheckpoint(ctx, "log")
	if err != nil {
		return nil, err
	}
	return log.ReadBytes()
}

func save(ctx context.Context, job *job, at state, log []byte) error {
	kept, err := job.Artifacts.Keep(ctx, "weights", bytes.NewReader(weights(job.Input.Size, at.Epoch)))
	if err != nil {
		return err
	}
	said, err := job.Artifacts.Keep(ctx, "log", bytes.NewReader(log))
	if err != nil {
		return err
	}
	return job.Progress(rara.Progress{Checkpoint: at, Artifacts: []*rara.KeptArtifact{kept, said}})
}

type described struct {
	Code    string `json:"code"`
	Message string `json:"message"`
	Of      string `json:"of"`
}

// describe reads one of its two inputs; leaves an output of every type, and says why it cannot leave another one.
func describe(ctx context.Context, job *job) (described, error) {
	read, err := job.Artifacts.Open(ctx, "read")
	if err != nil {
		return described{}, err
	}
	for _, sort := range []string{"dataset", "model", "index", "metrics", "report", "checkpoint", "blob"} {
		_, err := job.Artifacts.PutBytes(ctx, "of/"+sort, []byte(sort), rara.Output{
			Type: sort, MediaType: "text/" + sort, DerivedFrom: []string{"read"},
			Metadata: map[string]any{"type": sort, "big": 1<<53 + 1, "read": json.RawMessage(read.Metadata)},
		})
		if err != nil {
			return described{}, err
		}
	}
	if _, err := job.Artifacts.PutBytes(ctx, "plain", []byte("plain"), rara.Output{}); err != nil {
		return described{}, err
	}
	_, refused := job.Artifacts.PutBytes(ctx, "other", []byte("other"), rara.Output{Type: "embedding"})
	code, message, _ := strings.Cut(fmt.Sprint(refused), ": artifact ")
	code = code[strings.LastIndex(code, " ")+1:]
	return described{code, "artifact " + message, read.Type}, nil
}

// charge has its one effect when the test lets this attempt, and gives what is recorded of it.
func charge(ctx context.Context, job *job) (string, error) {
	if err := mark(job, "stored"); err != nil {
		return "", err
	}
	if err := until(ctx, job, fmt.Sprintf("publish-%d", job.Attempt)); err != nil {
		return "", err
	}
	charged, err := rara.Once(ctx, job.AnyJob, "charge", func(context.Context) (string, error) {
		return fmt.Sprintf("go %d", job.Attempt), mark(job, "charged")
	})
	if err != nil {
		return "", err
	}
	return charged, mark(job, "returned")
}

type published struct {
	Attempt int    `json:"attempt"`
	By      string `json:"by"`
}

// publish stores what names its attempt, and ends when the test lets this attempt.
func publish(ctx context.Context, job *job) (published, error) {
	data := bytes.Repeat(fmt.Appendf(nil, "go %d\n", job.Attempt), job.Input.Size)
	if _, err := job.Artifacts.PutBytes(ctx, "model", data, rara.Output{Type: "model"}); err != nil {
		return published{}, err
	}
	if err := mark(job, "stored"); err != nil {
		return published{}, err
	}
	if err := until(ctx, job, fmt.Sprintf("publish-%d", job.Attempt)); err != nil {
		return published{}, err
	}
	return published{job.Attempt, "go"}, mark(job, "returned")
}
