package engine

import (
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/rara-run/rara/executors/go/internal/codes"
)

// jobTimers are the executor's own timers of a job: a second line behind the scheduler's, and the end of a grace.
type jobTimers struct {
	armed        []*time.Timer
	progress     *time.Timer // looks again and again
	grace        *time.Timer
	graceEndsAt  time.Time
	progressedAt time.Time
}

func (t *jobTimers) cancel() {
	for _, timer := range append(t.armed, t.progress, t.grace) {
		if timer != nil {
			timer.Stop()
		}
	}
	t.armed, t.progress, t.grace = nil, nil, nil
}

// armDeadline arms the deadline: the time to it runs from the request's receipt.
func (s *Supervisor) armDeadline(job *Job) {
	s.arm(job, job.Request.TimeRemaining, codes.DeadlineExceeded)
}

func (s *Supervisor) armAttempt(job *Job) {
	s.arm(job, job.Request.AttemptTimeout, codes.AttemptTimeout)
	job.timers.progressedAt = time.Now()
	if limit := job.Request.ProgressTimeout; limit != nil {
		s.watchProgress(job, limit.AsDuration(), limit.AsDuration())
	}
}

func (s *Supervisor) arm(job *Job, after *durationpb.Duration, reason string) {
	if after != nil {
		timer := s.after(job, after.AsDuration(), func() { s.timedOut(job, reason) })
		job.timers.armed = append(job.timers.armed, timer)
	}
}

// watchProgress is one timer that looks again, instead of a new one with every report.
func (s *Supervisor) watchProgress(job *Job, limit, delay time.Duration) {
	job.timers.progress = s.after(job, delay, func() {
		if left := limit - time.Since(job.timers.progressedAt); left > 0 {
			s.watchProgress(job, limit, left)
		} else {
			s.timedOut(job, codes.ProgressTimeout)
		}
	})
}

func (s *Supervisor) timedOut(job *Job, reason string) {
	s.log(job).Info("job.timed_out", "reason", reason)
	s.halt(job, stop{kind: stopCancel, reason: reason}, s.config.Grace)
	s.afterChange()
}

// giveUpWithin ends the wait for a handler after the grace. An earlier end stays.
func (s *Supervisor) giveUpWithin(job *Job, grace time.Duration) {
	at := time.Now().Add(grace)
	if job.timers.grace != nil {
		if !job.timers.graceEndsAt.After(at) {
			return
		}
		job.timers.grace.Stop()
	}
	job.timers.graceEndsAt = at
	job.timers.grace = s.lockedAfter(grace, func() { s.graceOver(job) })
}

// after runs do with the mutex held, unless the job has ended.
func (s *Supervisor) after(job *Job, delay time.Duration, do func()) *time.Timer {
	return s.lockedAfter(delay, func() {
		if job.phase != ended {
			do()
		}
	})
}

// lockedAfter runs do with the mutex held.
func (s *Supervisor) lockedAfter(delay time.Duration, do func()) *time.Timer {
	return time.AfterFunc(delay, func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		do()
	})
}
