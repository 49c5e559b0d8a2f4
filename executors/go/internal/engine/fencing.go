package engine

import (
	"context"
	"time"

	"github.com/rara-run/rara/executors/go/internal/leaseclock"
)

const fenceCheck = 500 * time.Millisecond

// keepFences stops handlers whose lease can no longer be certain. Called without the mutex.
func (s *Supervisor) keepFences(ctx context.Context) {
	for ctx.Err() == nil {
		var next time.Duration
		s.locked(func() { next = s.checkFences(leaseclock.Now()) })
		select {
		case <-time.After(next):
		case <-ctx.Done():
		}
	}
}

// checkFences looks at all leases once, and tells when the next look is due.
func (s *Supervisor) checkFences(now time.Duration) time.Duration {
	next := now + fenceCheck
	for _, job := range s.jobs {
		if job.phase != running {
			continue
		}
		if job.clock.FenceAt() <= now {
			s.fence(job, now)
		} else {
			next = min(next, job.clock.FenceAt())
		}
	}
	return max(5*time.Millisecond, next-now)
}
