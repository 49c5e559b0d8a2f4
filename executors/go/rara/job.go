package rara

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"os"
	"regexp"
	"sync"
	"time"

	"github.com/rara-run/rara/executors/go/internal/codes"
	"github.com/rara-run/rara/executors/go/internal/engine"
	"github.com/rara-run/rara/executors/go/internal/payload"
	"github.com/rara-run/rara/executors/go/internal/text"
)

const (
	maxMetrics             = 256
	maxCheckpointArtifacts = 64
)

var effectName = regexp.MustCompile(`^[^\x00-\x1f\x7f]{1,255}$`) // the scheduler refuses others

// Job is one attempt of a step, as its handler sees it.
type Job[In any] struct {
	// Input is the step's input, with all references resolved.
	Input In
	*AnyJob
}

// AnyJob is a job without the type of its input: what helpers of several handlers take. Its methods may be called by
// any goroutine of the handler, and return the context's cause once the job has ended.
type AnyJob struct {
	StepRunID     string
	WorkflowRunID string
	StepName      string
	Definition    string
	Kind          string
	KindVersion   string
	// Attempt counts the leases that were granted for this step so far, from 1.
	Attempt int
	// LeaseToken is larger for every later attempt: a sink outside that compares it refuses late writers.
	LeaseToken int64
	// IdempotencyKey names the step's effects outside: equal on every attempt, and in a retried run.
	IdempotencyKey string
	// Failures of MaxAttempts are spent so far.
	Failures    int
	MaxAttempts int
	// Secrets are the resolved ones, by the names that the step gives them.
	Secrets map[string]string
	// Log has the step's ids; secrets are replaced in what it writes.
	Log *slog.Logger
	// Artifacts are the inputs, and the outputs so far.
	Artifacts *Artifacts

	held    *engine.Work
	mu      sync.Mutex
	effects map[string]*effect
}

func newAnyJob(held *engine.Work) *AnyJob {
	request := held.Request
	job := &AnyJob{
		StepRunID:      request.Lease.StepRunId,
		WorkflowRunID:  request.WorkflowRunId,
		StepName:       request.StepName,
		Definition:     request.Definition,
		Kind:           request.Kind,
		KindVersion:    request.KindVersion,
		Attempt:        int(request.Lease.Attempt),
		LeaseToken:     request.Lease.LeaseToken,
		IdempotencyKey: request.IdempotencyKey,
		Failures:       int(request.Failures),
		MaxAttempts:    int(request.MaxAttempts),
		Secrets:        held.Secrets,
		Log:            held.Logger,
		Artifacts:      &Artifacts{held: held},
		held:           held,
		effects:        map[string]*effect{},
	}
	for _, known := range request.Effects {
		job.effects[known.Name] = &effect{isStored: true, result: known.Result.GetData()}
	}
	return job
}

// Scratch is a folder for this attempt alone, removed when the attempt has ended.
func (j *AnyJob) Scratch() (string, error) {
	return j.held.Scratch, os.MkdirAll(j.held.Scratch, 0o700)
}

// EndsAt is the deadline or the attempt's timeout, whichever is first; false: there is neither.
func (j *AnyJob) EndsAt() (time.Time, bool) { return j.held.EndsAt, !j.held.EndsAt.IsZero() }

// Checkpoint decodes the newest checkpoint that an earlier attempt has stored. False: there is none.
func (j *AnyJob) Checkpoint(into any) (bool, error) {
	if j.held.Request.Checkpoint == nil {
		return false, nil
	}
	return true, decode(j.held.Request.Checkpoint.Data, into)
}

// Progress is how far a handler is.
type Progress struct {
	// Fraction from 0 to 1; nil: unknown.
	Fraction *float64
	// Message is for people; over 4 KiB it is cut.
	Message string
	// Metrics are named figures. One that is not a finite number is left out: a loss that became NaN is no reason to
	// lose the step.
	Metrics map[string]float64
	// Checkpoint is what a later attempt starts from, anything that becomes JSON; nil: the last one stays.
	Checkpoint any
	// Artifacts are bytes that the checkpoint needs, from Artifacts.Keep, at most 64. A later attempt finds them with
	// Artifacts.OpenCheckpoint. They replace those of the checkpoint before.
	Artifacts []*KeptArtifact
}

// Progress reports how far it is. It never waits: of reports that come too fast the newest is sent.
func (j *AnyJob) Progress(report Progress) error {
	out := engine.Report{Message: report.Message, Metrics: map[string]float64{}}
	if f := report.Fraction; f != nil && !math.IsNaN(*f) && !math.IsInf(*f, 0) {
		out.Fraction = new(min(1, max(0, *f)))
	}
	if len(report.Metrics) > maxMetrics {
		return &codes.Failure{Code: codes.PayloadTooLarge, Message: fmt.Sprintf(
			"%d metrics at once, the limit is %d", len(report.Metrics), maxMetrics)}
	}
	for name, value := range report.Metrics {
		if !math.IsNaN(value) && !math.IsInf(value, 0) {
			out.Metrics[text.Cut(text.Valid(name), 200)] = value
		}
	}
	if report.Checkpoint != nil {
		checkpoint, err := payload.Encode(report.Checkpoint, "checkpoint", j.held.MaxPayloadBytes)
		if err != nil {
			return err
		}
		out.Checkpoint = checkpoint
	}
	kept, err := keptArtifacts(report)
	if err != nil {
		return err
	}
	out.Artifacts = kept
	return j.held.Progress(out)
}

func keptArtifacts(report Progress) ([]engine.Kept, error) {
	if len(report.Artifacts) > 0 && report.Checkpoint == nil {
		return nil, errors.New("artifacts belong to a checkpoint: give one, if only an empty object")
	}
	if len(report.Artifacts) > maxCheckpointArtifacts {
		return nil, &codes.Failure{Code: codes.PayloadTooLarge, Message: fmt.Sprintf(
			"%d artifacts of a checkpoint, the limit is %d", len(report.Artifacts), maxCheckpointArtifacts)}
	}
	var kept []engine.Kept
	for _, artifact := range report.Artifacts {
		if err := engine.CheckName(artifact.Name); err != nil {
			return nil, err
		}
		kept = append(kept, engine.Kept{Name: artifact.Name, SHA256: artifact.SHA256})
	}
	return kept, nil
}

// effect is one name of Once. Its mutex is held while its function runs.
type effect struct {
	mu       sync.Mutex
	isStored bool
	result   []byte
}

// Once returns the result of do, from whichever attempt recorded it first. A crash between do and the record repeats
// do, so hand job.IdempotencyKey to what it calls.
func Once[R any](
	ctx context.Context, job *AnyJob, name string, do func(ctx context.Context) (R, error),
) (R, error) {
	var result R
	known, err := job.effect(name)
	if err != nil {
		return result, err
	}
	known.mu.Lock()
	defer known.mu.Unlock()
	if !known.isStored {
		made, err := do(ctx)
		if err != nil {
			return result, err
		}
		encoded, err := payload.Encode(made, "effect "+name, payload.MaxEffectBytes)
		if err != nil {
			return result, err
		}
		if err := job.held.RecordEffect(ctx, name, encoded); err != nil {
			return result, err
		}
		known.isStored, known.result = true, encoded
	}
	// What later attempts will get, this one gets too.
	return result, decode(known.result, &result)
}

func (j *AnyJob) effect(name string) (*effect, error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	if !effectName.MatchString(name) || text.Valid(name) != name {
		return nil, &codes.Failure{
			Code: codes.PayloadInvalid, Message: "effect name must have 1 to 255 printable characters"}
	}
	known := j.effects[name]
	if known == nil {
		if len(j.effects) >= payload.MaxEffects {
			return nil, &codes.Failure{Code: codes.PayloadTooLarge, Message: fmt.Sprintf(
				"a step records at most %d effects", payload.MaxEffects)}
		}
		known = &effect{}
		j.effects[name] = known
	}
	return known, nil
}
