package engine

import (
	"context"
	"errors"
	"time"

	"google.golang.org/grpc"

	rarav1 "github.com/rara-run/rara/gen/go/rara/v1"
)

const (
	firstBackoff = 200 * time.Millisecond
	maxBackoff   = 5 * time.Second
	// The call opens before Welcome tells the limit.
	maxMessageBytes = 64 << 20
)

// ErrReplaced ends an executor whose id another process uses: this one must not come back.
var ErrReplaced = errors.New("another session of this executor_id has replaced ours")

// connect holds one session after the other, whatever ended the last, until our Goodbye. wasHeard: the scheduler has
// ended the call in order. Called without the mutex.
func (s *Supervisor) connect(ctx context.Context) (wasHeard bool, err error) {
	failures, longest := 0, maxBackoff
	for ctx.Err() == nil {
		end, interval := s.oneSession(ctx)
		s.config.Logger.Info("session.ended", "reason", end.reason, "welcomed", end.welcomed)
		if end.saidGoodbye {
			return end.wasHeard, nil
		}
		if end.refused != nil && s.fallBack(*end.refused) {
			continue
		}
		if end.welcomed {
			failures = 0
			// Short heartbeats mean short leases: those held must be renewed before they run out.
			longest = min(maxBackoff, interval)
		} else {
			failures++
		}
		pause := backoff(failures, s.config.Jitter(), longest)
		if away := end.wentAway; away != nil {
			if away.Reason == "REPLACED" {
				return false, ErrReplaced
			}
			if away.ReconnectAfter != nil {
				pause = away.ReconnectAfter.AsDuration()
			}
		}
		select {
		case <-time.After(pause):
		case <-ctx.Done():
		}
	}
	return false, nil
}

// fallBack tells whether another try, at once, may meet a scheduler that speaks these versions alone.
func (s *Supervisor) fallBack(theirs Versions) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	version, isNew := s.config.Versions.fallBack(s.spoken, theirs)
	if isNew {
		s.spoken = version
	}
	return isNew
}

// oneSession dials anew, so that nothing of the last connection, such as its own backoff, is in the way.
func (s *Supervisor) oneSession(ctx context.Context) (sessionEnd, time.Duration) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	connection, err := grpc.NewClient(s.config.Scheduler, s.config.DialOptions...)
	if err != nil {
		return sessionEnd{reason: err.Error()}, 0
	}
	defer connection.Close()
	// Keepalive stays off: heartbeats show both directions, and a server counts pings against us.
	stream, err := rarav1.NewDispatchServiceClient(connection).Connect(
		ctx, grpc.MaxCallRecvMsgSize(maxMessageBytes), grpc.MaxCallSendMsgSize(maxMessageBytes))
	if err != nil {
		return sessionEnd{reason: err.Error()}, 0
	}
	session := newSession(s, stream)
	end := session.run(ctx, cancel)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.session = nil
	s.outbox.Rewind()
	if end.welcomed {
		s.spoken = s.config.Versions.Newest // the next session may be with a newer scheduler
	}
	if session.beats == nil {
		return end, 0
	}
	return end, session.beats.Interval
}

// backoff is the pause after so many failures in a row. jitter: a draw from [0, 1).
func backoff(failures int, jitter float64, longest time.Duration) time.Duration {
	return time.Duration(jitter * float64(min(longest, firstBackoff<<min(failures, 16))))
}
