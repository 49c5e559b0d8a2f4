package engine

import (
	"context"
	"log/slog"
	"time"

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

// Report is how far a handler is. Checkpoint: JSON; nil: the last one stays.
type Report struct {
	Fraction   *float64
	Message    string
	Metrics    map[string]float64
	Checkpoint []byte
}

// Job is one attempt, from its request to the acknowledgement of its last event. Exported fields do not change while
// the handler runs.
type Job struct {
	Request         *rarav1.JobRequest
	Secrets         map[string]string
	Scratch         string // a folder for this attempt alone; it may still have to be made
	MaxPayloadBytes int
	Logger          *slog.Logger

	supervisor *Supervisor
	operation  *Operation
	artifacts  *jobArtifacts
	receivedAt time.Time
	ctx        context.Context // of the handler, from running on
	interrupt  context.CancelCauseFunc

	// What follows is guarded by the supervisor's mutex.
	phase           phase
	inHandler       bool // its handler has not returned: the slot is taken, whatever was said of the job
	clock           leaseclock.Clock
	stop            *stop
	checkpoint      *rarav1.Payload // the newest reported
	secretsResolved bool
	refusedSequence int64 // of the event that a terminal one has to replace
	refusals        int
	stored          map[int64]chan struct{} // effects by sequence: closed when acknowledged
	timers          jobTimers
	kill            func() // ends the child process that runs the handler; nil: there is none
}

func (j *Job) token() int64 { return j.Request.Lease.LeaseToken }

func (j *Job) lease() *rarav1.Lease { return j.Request.Lease }

func (j *Job) isLost() bool { return j.stop != nil && j.stop.kind == stopLost }

// EndsAt is the deadline or the attempt's timeout, whichever is first; false: there is neither.
func (j *Job) EndsAt() (time.Time, bool) { return j.ctx.Deadline() }

// Progress reports how far the handler is. The error is the context's cause, when nobody listens any more.
func (j *Job) Progress(report Report) error {
	s := j.supervisor
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.open(j); err != nil {
		return err
	}
	j.timers.progressedAt = time.Now()
	event := s.events.progress(j.lease(), report)
	if checkpoint := event.GetProgress().Checkpoint; checkpoint != nil {
		j.checkpoint = checkpoint
	}
	s.emit(event)
	return nil
}

// RecordEffect returns when the result is stored.
func (j *Job) RecordEffect(ctx context.Context, name string, result []byte) error {
	s := j.supervisor
	s.mu.Lock()
	if err := s.open(j); err != nil {
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

// OnKill says how to end the process that runs the handler, for a job that is to be stopped and does not stop. It
// returns false if that is so already.
func (j *Job) OnKill(kill func()) bool {
	j.supervisor.mu.Lock()
	defer j.supervisor.mu.Unlock()
	j.kill = kill
	return j.phase == running && j.supervisor.open(j) == nil
}
