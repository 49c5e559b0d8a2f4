package engine

import (
	"context"
	"io"
	"log/slog"
	"time"

	"go.opentelemetry.io/otel/trace"

	"github.com/rara-run/rara/executors/go/internal/leaseclock"
	rarav1 "github.com/rara-run/rara/gen/go/rara/v1"
)

type phase int

const (
	accepting phase = iota // a slot is reserved; `accepted` is not acknowledged, no user code may run
	ready                  // acknowledged, but the lease is not certain: a renewal is waited for
	starting               // its secrets are being resolved
	running                // in its handler
	ended                  // its terminal event is in the outbox
)

type stopKind int

const (
	stopCancel stopKind = iota // ends as `cancelled` with the reason
	stopFail                   // ends as `failed` with the reason as its code
	stopLost                   // ends without a word
)

// stop tells why a job is being stopped. reason: a code of the contract.
type stop struct {
	kind            stopKind
	reason, message string
}

// Report is how far a handler is. Checkpoint: JSON; nil: the last one stays, with its artifacts.
type Report struct {
	Fraction   *float64
	Message    string
	Metrics    map[string]float64
	Checkpoint []byte
	Artifacts  []Kept
}

// Kept names stored bytes in a checkpoint.
type Kept struct{ Name, SHA256 string }

// Work is one job as its handler sees it, in whichever process the handler runs. It does not change.
type Work struct {
	Request         *rarav1.JobRequest
	Secrets         map[string]string
	Scratch         string // a folder for this attempt alone; it may still have to be made
	MaxPayloadBytes int
	EndsAt          time.Time // the deadline or the attempt's timeout, whichever is first; zero: there is neither
	Logger          *slog.Logger
	Port
}

// Port leads from a handler to whoever holds its job. The error is the context's cause when nobody listens any more.
type Port interface {
	Progress(report Report) error
	// RecordEffect returns when the result is stored.
	RecordEffect(ctx context.Context, name string, result []byte) error
	// OpenInput returns a path with the verified bytes of an input artifact.
	OpenInput(ctx context.Context, name string) (string, error)
	// PutOutput stores what content gives, and lists it in the manifest.
	PutOutput(ctx context.Context, output Output, content io.Reader) (*rarav1.Digest, error)
	// OpenCheckpoint does so for an artifact of the checkpoint that the job was given.
	OpenCheckpoint(ctx context.Context, name string) (string, error)
	// Keep stores what content gives, for checkpoints to name.
	Keep(ctx context.Context, content io.Reader) (*rarav1.Digest, error)
	// LeaseOver is when the job's lease is over, as it is known now, on the lease clock.
	LeaseOver() time.Duration
	// OnKill says how to end the process that runs the handler, for a job that is to be stopped and does not stop.
	// False: it is not to run any more.
	OnKill(kill func()) bool
}

// Job is one attempt, from its request to the acknowledgement of its last event.
type Job struct {
	Request *rarav1.JobRequest

	supervisor *Supervisor
	operation  *Operation
	artifacts  *jobArtifacts
	scratch    string
	receivedAt time.Time
	ctx        context.Context // of the handler, from running on
	interrupt  context.CancelCauseFunc
	span       trace.Span // likewise; nil: no handler has begun

	// What follows is guarded by the supervisor's mutex.
	phase           phase
	inHandler       bool // its handler has not returned: the slot is taken, whatever was said of the job
	clock           leaseclock.Clock
	stop            *stop
	checkpoint      *rarav1.JobProgress   // the newest report that had one
	secrets         map[string]string     // nil: not resolved
	lastEvent       *rarav1.ProgressEvent // terminal, from its making on
	refusedSequence int64                 // of the event that a terminal one has to replace
	refusals        int
	stored          map[int64]chan struct{} // effects by sequence: closed when acknowledged
	timers          jobTimers
	kill            func() // ends the child process that runs the handler; nil: there is none
}

func (j *Job) endSpan(event *rarav1.ProgressEvent) {
	if j.span != nil {
		endSpan(j.span, event)
	}
}

func (j *Job) token() int64 { return j.Request.Lease.LeaseToken }

func (j *Job) lease() *rarav1.Lease { return j.Request.Lease }

func (j *Job) isLost() bool { return j.stop != nil && j.stop.kind == stopLost }

// Progress is Port's, as are the next.
func (j *Job) Progress(report Report) error {
	s := j.supervisor
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.open(j); err != nil {
		return err
	}
	j.timers.progressedAt = time.Now()
	if err := s.refuseSecret(j, "checkpoint", report.Checkpoint); err != nil {
		return err
	}
	artifacts, err := j.artifacts.ofCheckpoint(report.Artifacts)
	if err != nil {
		return err
	}
	event := s.events.progress(j.lease(), report, artifacts)
	if event.GetProgress().Checkpoint != nil {
		j.checkpoint = event.GetProgress()
	}
	sequence := s.emit(event)
	if len(report.Artifacts) > 0 {
		j.artifacts.checkpointQueued(sequence, report.Artifacts)
	}
	return nil
}

// RecordEffect is Port's.
func (j *Job) RecordEffect(ctx context.Context, name string, result []byte) error {
	s := j.supervisor
	s.mu.Lock()
	if err := s.open(j); err != nil {
		s.mu.Unlock()
		return err
	}
	j.timers.progressedAt = time.Now()
	if err := s.refuseSecret(j, "effect "+name, result); err != nil {
		s.mu.Unlock()
		return err
	}
	stored := make(chan struct{})
	j.stored[s.emit(s.events.effect(j.lease(), name, result))] = stored
	s.mu.Unlock()
	select {
	case <-stored:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-j.ctx.Done():
		return context.Cause(j.ctx)
	}
}

// LeaseOver is Port's.
func (j *Job) LeaseOver() time.Duration {
	j.supervisor.mu.Lock()
	defer j.supervisor.mu.Unlock()
	return j.clock.OverAt()
}

// OnKill is Port's.
func (j *Job) OnKill(kill func()) bool {
	j.supervisor.mu.Lock()
	defer j.supervisor.mu.Unlock()
	j.kill = kill
	return j.phase == running && j.supervisor.open(j) == nil
}
