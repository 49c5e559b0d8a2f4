package engine

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/rara-run/rara/executors/go/internal/codes"
	"github.com/rara-run/rara/executors/go/internal/leaseclock"
	"github.com/rara-run/rara/executors/go/internal/outbox"
	"github.com/rara-run/rara/executors/go/internal/payload"
	"github.com/rara-run/rara/executors/go/internal/secrets"
	"github.com/rara-run/rara/executors/go/internal/slots"
	"github.com/rara-run/rara/executors/go/internal/text"
	rarav1 "github.com/rara-run/rara/gen/go/rara/v1"
)

const (
	defaultLease = 30 * time.Second
	maxHeldBytes = 64 << 20 // of unacknowledged events, beyond which no new job is asked for
	maxRefusals  = 3        // of one job, after which it is given up
)

// Supervisor holds every job of this executor, by lease token, and decides what happens with it next. Methods that do
// not say otherwise are called with mu held.
type Supervisor struct {
	config  Config
	events  *events
	store   *artifactStore
	drain   *drain
	scratch string
	base    context.Context // of all that outlives a handler; ends with Run
	work    sync.WaitGroup  // goroutines that Run waits for; handlers are counted by inHandler

	mu              sync.Mutex
	jobs            map[int64]*Job
	operations      map[[2]string]*Operation
	slots           *slots.Slots
	outbox          *outbox.Outbox
	session         link          // nil: there is none
	spoken          uint32        // the version that the next Hello says
	tally           *tally        // of a drain that is under way; nil: there is none
	changed         chan struct{} // closed at the next change; nil: nobody waits for one
	leaked          int           // handlers that ignore their context
	maxPayloadBytes int
	maxInlineBytes  int
	maxFrameBytes   int
}

func newSupervisor(ctx context.Context, config Config, store *artifactStore, scratch string) *Supervisor {
	s := &Supervisor{
		config:          config,
		events:          &events{redactor: config.Redactor, id: config.ExecutorID, name: config.ExecutorName},
		store:           store,
		scratch:         scratch,
		spoken:          config.Versions.Newest,
		base:            ctx,
		jobs:            map[int64]*Job{},
		operations:      map[[2]string]*Operation{},
		outbox:          outbox.New(),
		maxPayloadBytes: payload.MaxBytes,
		maxInlineBytes:  16 << 10,
		maxFrameBytes:   4 << 20,
	}
	var offers []slots.Offer
	for i := range config.Operations {
		operation := &config.Operations[i]
		s.operations[[2]string{operation.Kind, operation.Version}] = operation
		offers = append(offers, slots.Offer{
			Kind: operation.Kind, Version: operation.Version, MaxConcurrency: operation.MaxConcurrency})
	}
	s.slots = slots.New(config.Slots, config.ExecutorKind, offers)
	s.drain = newDrain(s)
	return s
}

// locked runs do with the mutex, which must not be held.
func (s *Supervisor) locked(do func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	do()
}

// running counts the jobs whose terminal event was not made.
func (s *Supervisor) running() int {
	count := 0
	for _, job := range s.jobs {
		if job.phase != ended {
			count++
		}
	}
	return count
}

// A job's way.

func (s *Supervisor) take(request *rarav1.JobRequest) {
	if request.Lease == nil || s.jobs[request.Lease.LeaseToken] != nil {
		return // a repeat changes nothing
	}
	if refused := s.slots.Take(request.ExecutorKind, request.Kind, request.KindVersion); refused != nil {
		s.reject(request, refused.Code, refused.Message)
		return
	}
	scratch := filepath.Join(s.scratch, strconv.FormatInt(request.Lease.LeaseToken, 10))
	job := &Job{
		Request:    request,
		supervisor: s,
		scratch:    scratch,
		operation:  s.operations[[2]string{request.Kind, request.KindVersion}],
		artifacts:  newJobArtifacts(s.store, request, scratch, s.maxInlineBytes),
		receivedAt: time.Now(),
		clock:      leaseclock.New(durationOr(request.LeaseDuration, defaultLease)),
		stored:     map[int64]chan struct{}{},
	}
	s.jobs[job.token()] = job
	s.armDeadline(job)
	s.emit(s.events.accepted(job.lease()))
}

// acknowledged takes in that events are stored: go on from there, or be done.
func (s *Supervisor) acknowledged(ack *rarav1.EventAck) {
	job := s.jobs[ack.LeaseToken]
	for _, entry := range s.outbox.Acknowledge(ack.LeaseToken, ack.Sequence, ack.Missing) {
		if job == nil {
			continue
		}
		if entry.Event.GetAccepted() != nil && job.phase == accepting {
			job.phase = ready
			if entry.WasSent {
				job.clock.Renew(entry.FirstSentAt)
			} else {
				job.clock.Renew(leaseclock.Now())
			}
			s.beginIfCertain(job)
		}
		if entry.Event.GetProgress() != nil {
			job.artifacts.checkpointStored(entry.Sequence())
		}
		if stored := job.stored[entry.Sequence()]; stored != nil {
			delete(job.stored, entry.Sequence())
			close(stored)
		}
	}
	if job != nil && job.phase == ended && !s.outbox.Holds(ack.LeaseToken) {
		if s.tally != nil && job.lastEvent != nil {
			s.tally.stored(job.lastEvent)
		}
		s.forget(job)
	}
}

// renewed takes in that a heartbeat sent then has renewed the lease.
func (s *Supervisor) renewed(token int64, sentAt time.Duration) {
	if job := s.jobs[token]; job != nil {
		job.clock.Renew(sentAt)
		s.beginIfCertain(job)
	}
}

// beginIfCertain starts the handler, or what must come before it; without a certain lease a renewal is waited for.
func (s *Supervisor) beginIfCertain(job *Job) {
	if job.phase != ready || leaseclock.Now() >= job.clock.FenceAt() {
		return
	}
	if len(job.Request.Secrets) > 0 && job.secrets == nil {
		job.phase = starting
		s.spawn(func() { s.resolveSecrets(job) })
		return
	}
	s.start(job)
}

// resolveSecrets is called without the mutex: a file system may be slow.
func (s *Supervisor) resolveSecrets(job *Job) {
	values, err := secrets.Resolve(job.Request.Secrets, s.config.SecretsDir)
	for _, value := range values {
		s.config.Redactor.Add(value)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if job.phase != starting {
		return // it was stopped meanwhile
	}
	if err != nil {
		s.conclude(job, outcome{failed: failedBy(err, codes.SecretUnresolved)})
	} else {
		job.secrets, job.phase = values, ready
		s.beginIfCertain(job)
	}
	s.afterChange()
}

func (s *Supervisor) start(job *Job) {
	job.phase, job.inHandler = running, true
	s.emit(s.events.running(job.lease(), "goroutine-"+strconv.FormatInt(job.token(), 10)))
	s.armAttempt(job)
	s.debug(job, "job.started")
	work := &Work{
		Request: job.Request, Secrets: job.secrets, Scratch: job.scratch, MaxPayloadBytes: s.maxPayloadBytes,
		EndsAt: endsAt(job.Request, job.receivedAt), Port: job,
		Logger: HandlerLogger(s.config.Logger, job.Request),
	}
	job.ctx, job.interrupt = HandlerContext(s.base, job.Request, work.EndsAt)
	job.ctx, job.span = s.process(job.ctx, job.Request)
	go Call(job.ctx, job.operation.Handler, work, func(output []byte, failed *Failed) {
		s.locked(func() { s.returned(job, outcome{output: output, failed: failed}) })
	})
}

// returned takes in what the handler of a job has said, however late.
func (s *Supervisor) returned(job *Job, out outcome) {
	job.inHandler = false
	if job.phase == ended { // given up before: nobody listens to what it says
		s.leaked--
		s.slots.Leave(job.Request.Kind)
		s.log(job).Warn("handler.returned_late", "leaked", s.leaked)
		s.removeScratch(job)
	} else {
		s.conclude(job, out)
	}
	s.afterChange()
}

// halt asks the handler to stop, and gives it up after the grace. The first reason stays.
func (s *Supervisor) halt(job *Job, why stop, grace time.Duration) {
	if job.phase == ended {
		return
	}
	switch {
	case job.stop == nil:
		job.stop = &why
		if job.phase != running {
			s.conclude(job, outcome{abandoned: true})
			return
		}
		job.interrupt(&Stopped{why.reason})
	case why.kind == stopLost:
		job.stop = &why
	}
	s.giveUpWithin(job, grace)
}

// graceOver ends the process that runs the handler. A handler of this process cannot be ended: it is reported and
// fenced, so that nothing it says counts, and keeps its slot until it returns.
func (s *Supervisor) graceOver(job *Job) {
	if job.phase != running {
		return
	}
	if job.kill != nil {
		s.log(job).Warn("runner.killed")
		job.kill()
		return
	}
	s.leaked++
	s.log(job).Error("handler.leaked", "reason", job.stop.reason, "leaked", s.leaked)
	s.conclude(job, outcome{abandoned: true})
	s.afterChange()
}

// conclude says how the job ended: its handler runs no more, or is given up.
func (s *Supervisor) conclude(job *Job, out outcome) {
	job.timers.cancel()
	if !job.inHandler {
		s.slots.Leave(job.Request.Kind)
	}
	job.phase = ended
	if job.interrupt != nil {
		job.interrupt(errEnded) // for goroutines that the handler has left behind
	}
	if job.isLost() {
		job.endSpan(nil)
		s.passOn(job)
		return
	}
	event := s.lastEvent(job, out)
	job.lastEvent = event
	job.endSpan(event)
	s.logEnd(job, event)
	if job.refusedSequence > 0 {
		s.outbox.Replace(event, job.refusedSequence)
		s.wake()
	} else {
		s.emit(event)
	}
}

var errEnded = errors.New("the job has ended")

// open tells whether the job may still say something: its handler runs, and its lease is neither lost nor over.
func (s *Supervisor) open(job *Job) error {
	if job.phase != running || job.isLost() {
		return context.Cause(job.ctx)
	}
	if now := leaseclock.Now(); now >= job.clock.OverAt() { // the process stood still past its lease
		s.fence(job, now)
		return context.Cause(job.ctx)
	}
	return nil
}

// refuseSecret fails a job that would keep a secret for its next attempt. Redacted it would be another value, and the next
// attempt would go on with that.
func (s *Supervisor) refuseSecret(job *Job, what string, data []byte) error {
	if !s.config.Redactor.In(data) {
		return nil
	}
	message := text.Cut(s.config.Redactor.Text(what), text.MaxProgressBytes) +
		" holds a secret that was resolved here; leave it out"
	s.halt(job, stop{stopFail, codes.SecretInPayload, message}, s.config.Grace)
	s.afterChange()
	return &codes.Failure{Code: codes.SecretInPayload, Message: message}
}

// fence stops what runs under a lease that is no longer certain.
func (s *Supervisor) fence(job *Job, now time.Duration) {
	if job.phase != running {
		return
	}
	if job.stop == nil {
		s.log(job).Warn("job.fenced")
	}
	message := fmt.Sprintf("no heartbeat was renewed for %.1f s", (now - job.clock.Since()).Seconds())
	grace := min(job.clock.Lease()/12, max(0, job.clock.OverAt()-now)/2)
	s.halt(job, stop{stopFail, codes.LeaseExpired, message}, grace)
	s.afterChange()
}

// What the scheduler refuses or asks for.

func (s *Supervisor) refused(refusal *rarav1.EventRefusal) {
	job := s.jobs[refusal.LeaseToken]
	if job == nil {
		return
	}
	s.log(job).Warn("event.refused", "code", refusal.Code, "sequence", refusal.Sequence)
	if refusal.Code == codes.LeaseLost {
		s.lose(refusal.LeaseToken)
		return
	}
	if !s.outbox.Hold(refusal.LeaseToken, refusal.Sequence) {
		return
	}
	job.refusals++
	switch {
	case job.refusals > maxRefusals:
		s.log(job).Error("job.given_up", "code", refusal.Code, "message", refusal.Message)
		s.lose(refusal.LeaseToken)
	case refusal.Code == codes.BlobsMissing:
		s.spawn(func() { s.uploadAgain(job, refusal) })
	default:
		s.failInPlace(job, refusal.Sequence, &Failed{Code: refusal.Code, Message: refusal.Message})
	}
}

// uploadAgain is called without the mutex.
func (s *Supervisor) uploadAgain(job *Job, refusal *rarav1.EventRefusal) {
	err := job.artifacts.uploadAgain(s.base, refusal.Digests)
	s.mu.Lock()
	defer s.mu.Unlock()
	if err != nil {
		s.failInPlace(job, refusal.Sequence, failedBy(err, codes.DependencyUnavailable))
	} else {
		s.outbox.Resend(job.token(), refusal.Sequence)
	}
	s.afterChange()
}

// failInPlace says `failed` under the number of an event that cannot be stored.
func (s *Supervisor) failInPlace(job *Job, sequence int64, failed *Failed) {
	if job.phase == ended {
		job.lastEvent = s.events.failed(job.lease(), failed)
		s.outbox.Replace(job.lastEvent, sequence)
		s.wake()
		return
	}
	job.refusedSequence = sequence
	s.halt(job, stop{stopFail, failed.Code, failed.Message}, s.config.Grace)
}

func (s *Supervisor) cancel(cancel *rarav1.CancelJob) {
	job := s.jobs[cancel.LeaseToken]
	if job == nil {
		return
	}
	if s.session != nil {
		s.session.receipt(cancel.LeaseToken)
	}
	if job.phase == ended {
		return
	}
	reason, grace := cancel.Reason, s.config.Grace
	if reason == "" {
		reason = codes.Cancelled
	}
	if cancel.Grace != nil {
		grace = cancel.Grace.AsDuration()
	}
	if job.stop == nil {
		s.log(job).Info("job.cancel_requested", "reason", reason)
	}
	// Also where it stops already, by our own timer: the request may leave it less time.
	s.halt(job, stop{kind: stopCancel, reason: reason}, grace)
}

// lose stops a job whose lease has passed on, and reports nothing more of it.
func (s *Supervisor) lose(token int64) {
	job := s.jobs[token]
	if job == nil || job.isLost() {
		return
	}
	s.log(job).Warn("job.lost")
	s.outbox.Drop(token)
	if job.phase == ended {
		s.passOn(job)
	} else {
		s.halt(job, stop{kind: stopLost, reason: codes.LeaseLost}, job.clock.Lease()/12)
	}
}

// handBack ends what still runs free of cost: the executor stops.
func (s *Supervisor) handBack(grace time.Duration) {
	for _, job := range s.jobs {
		switch {
		case job.phase == ended:
		// Without a session an event is kept until there is one; of a rejection nobody would hear.
		case job.phase != running && job.stop == nil && s.session != nil:
			s.reject(job.Request, codes.ExecutorShutdown, "the executor stops")
			job.timers.cancel()
			s.slots.Leave(job.Request.Kind)
			job.phase = ended
			s.forget(job)
		default:
			s.halt(job, stop{kind: stopCancel, reason: codes.ExecutorShutdown}, grace)
		}
	}
	s.afterChange()
}

// passOn drops a job whose lease is not ours any more.
func (s *Supervisor) passOn(job *Job) {
	if s.tally != nil {
		s.tally.passedOn()
	}
	s.forget(job)
}

// forget drops a job of which nothing more is to be said.
func (s *Supervisor) forget(job *Job) {
	delete(s.jobs, job.token())
	s.outbox.Drop(job.token())
	if s.session != nil {
		s.session.forget(job.token())
	}
	if !job.inHandler {
		s.removeScratch(job)
	}
}

// Small things.

func (s *Supervisor) removeScratch(job *Job) {
	if s.jobs[job.token()] == job {
		return // a missing blob may still be asked for
	}
	if unix.Access(job.scratch, unix.F_OK) == nil { // most jobs make none
		s.spawn(func() { os.RemoveAll(job.scratch) })
	}
}

func (s *Supervisor) emit(event *rarav1.ProgressEvent) int64 {
	sequence := s.outbox.Add(event, leaseclock.Now(), s.session != nil)
	s.wake()
	return sequence
}

func (s *Supervisor) wake() {
	if s.session != nil {
		s.session.wakeUp()
	}
}

// reject gives a lease back. Without a session the next Hello says it: what is not listed is not held.
func (s *Supervisor) reject(request *rarav1.JobRequest, code, message string) {
	JobLogger(s.config.Logger, request).Info("job.rejected", "code", code)
	if s.tally != nil {
		s.tally.rejected[request.Lease.LeaseToken] = true
	}
	if s.session != nil {
		s.session.reject(request.Lease, code, message)
	}
}

// nextChange is closed when the table has changed.
func (s *Supervisor) nextChange() <-chan struct{} {
	if s.changed == nil {
		s.changed = make(chan struct{})
	}
	return s.changed
}

// afterChange tells all who wait for the table to become something, and asks for as many jobs as there are slots.
func (s *Supervisor) afterChange() {
	if s.changed != nil {
		close(s.changed)
		s.changed = nil
	}
	if s.session == nil {
		return
	}
	if s.outbox.HeldBytes < maxHeldBytes {
		s.session.setCredit(s.slots.Credit())
	}
	s.wake()
}

func (s *Supervisor) log(job *Job) *slog.Logger { return JobLogger(s.config.Logger, job.Request) }

// debug makes no logger for a line that nobody wants: of short steps there are thousands a second.
func (s *Supervisor) debug(job *Job, message string) {
	if s.config.Logger.Enabled(s.base, slog.LevelDebug) {
		s.log(job).Debug(message)
	}
}

// logEnd logs successes at debug level: of short steps there are thousands a second.
func (s *Supervisor) logEnd(job *Job, event *rarav1.ProgressEvent) {
	switch {
	case event.GetSucceeded() != nil:
		s.debug(job, "job.succeeded")
	case event.GetFailed() != nil:
		s.log(job).Warn("job.failed", "code", event.GetFailed().Code, "message", event.GetFailed().Message)
	default:
		s.log(job).Info("job.cancelled", "reason", event.GetCancelled().GetReason())
	}
}

// spawn starts what Run waits for. After the end nothing begins.
func (s *Supervisor) spawn(work func()) {
	if s.base.Err() == nil {
		s.work.Go(work)
	}
}

func failedBy(err error, code string) *Failed {
	failure := FailureOf(err, code)
	return &Failed{Code: failure.Code, Message: failure.Message}
}
