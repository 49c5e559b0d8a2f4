package engine

import (
	"context"
	"errors"
	"fmt"
	"io"
	"runtime"
	"slices"
	"sync"
	"time"

	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/rara-run/rara/executors/go/internal/beats"
	"github.com/rara-run/rara/executors/go/internal/leaseclock"
	rarav1 "github.com/rara-run/rara/gen/go/rara/v1"
)

const (
	welcomeTimeout = 10 * time.Second
	lastWords      = 5 * time.Second // after GoAway, for the acks of what the scheduler still commits
)

// link is what the supervisor says to a scheduler beside its events. Each call only notes it.
type link interface {
	wakeUp()
	// setCredit allows so many jobs since the session began. A smaller limit than before is ignored.
	setCredit(limit int64)
	reject(lease *rarav1.Lease, code, message string)
	// receipt says that the cancel request for the token has arrived.
	receipt(token int64)
	forget(token int64)
	drain(finishWithin *time.Duration)
	// goodbye ends it when everything was said and acknowledged.
	goodbye()
	isReady(now time.Duration) bool
}

// sessionEnd tells why a call has ended.
type sessionEnd struct {
	reason      string
	welcomed    bool
	wentAway    *rarav1.GoAway // the scheduler's
	saidGoodbye bool           // ours
	refused     *Versions      // what a scheduler speaks that refused ours
	wasHeard    bool           // it was: the scheduler has then ended the call in order
}

// session is one Connect call: one goroutine writes, one reads, one keeps the beat. All fields but stream and wake are
// guarded by the supervisor's mutex.
type session struct {
	supervisor *Supervisor
	stream     rarav1.DispatchService_ConnectClient
	wake       chan struct{}

	beats       *beats.Heartbeats // from Welcome on
	beatDue     bool
	credit      int64
	creditSent  int64
	receipts    []int64
	receipted   map[int64]bool
	rejections  []*rarav1.JobRejection
	drainDue    *rarav1.Drain
	goodbyeDue  bool
	saidGoodbye bool
	wentAway    *rarav1.GoAway
}

func newSession(supervisor *Supervisor, stream rarav1.DispatchService_ConnectClient) *session {
	return &session{supervisor: supervisor, stream: stream, wake: make(chan struct{}, 1), creditSent: -1,
		receipted: map[int64]bool{}}
}

// What the supervisor says; each only notes it and wakes the writer.

func (c *session) wakeUp() {
	select {
	case c.wake <- struct{}{}:
	default:
	}
}

func (c *session) setCredit(limit int64) {
	c.credit = max(c.credit, limit)
	c.wakeUp()
}

func (c *session) reject(lease *rarav1.Lease, code, message string) {
	c.rejections = append(c.rejections, &rarav1.JobRejection{Lease: lease, Code: code, Message: message})
	c.wakeUp()
}

// receipt is said once a session.
func (c *session) receipt(token int64) {
	if !c.receipted[token] {
		c.receipted[token] = true
		c.receipts = append(c.receipts, token)
		c.wakeUp()
	}
}

func (c *session) forget(token int64) { delete(c.receipted, token) }

func (c *session) drain(finishWithin *time.Duration) {
	c.drainDue = &rarav1.Drain{}
	if finishWithin != nil {
		c.drainDue.FinishWithin = durationpb.New(*finishWithin)
	}
	c.wakeUp()
}

func (c *session) goodbye() {
	c.goodbyeDue = true
	c.wakeUp()
}

func (c *session) isReady(now time.Duration) bool { return c.beats != nil && c.beats.IsReady(now) }

// run holds the session until it ends, however it ends. cancel ends the call. Called without the mutex.
func (c *session) run(ctx context.Context, cancel context.CancelCauseFunc) sessionEnd {
	if err := c.open(cancel); err != nil {
		end := c.end(c.reasonOf(ctx, err), false)
		if versions, ok := versionsOf(err); ok {
			end.refused = &versions
		}
		return end
	}
	var group sync.WaitGroup
	read, written := make(chan error, 1), make(chan error, 1)
	group.Go(func() { read <- c.read() })
	group.Go(func() { written <- c.write(ctx) })
	group.Go(func() { c.keepBeat(ctx, cancel) })
	var err error
	select {
	case err = <-read:
	case err = <-written:
		// Nothing more can be said, but what has arrived must be taken in before the next Hello, and a scheduler that
		// goes away still acknowledges what it still commits.
		timer := time.AfterFunc(lastWords, func() { cancel(errors.New("no end after the last words")) })
		if readErr := <-read; err == nil || errors.Is(err, io.EOF) {
			err = readErr
		}
		timer.Stop()
	}
	reason := c.reasonOf(ctx, err)
	inOrder := errors.Is(err, io.EOF) && context.Cause(ctx) == nil
	cancel(nil)
	group.Wait()
	return c.end(reason, inOrder)
}

// open says Hello and takes Welcome in.
func (c *session) open(cancel context.CancelCauseFunc) error {
	timer := time.AfterFunc(welcomeTimeout, func() { cancel(errors.New("no Welcome in time")) })
	defer timer.Stop()
	s := c.supervisor
	var hello *rarav1.Hello
	s.locked(func() { hello = s.hello(s.spoken) })
	// A failed Send tells less than the Recv that follows.
	_ = c.stream.Send(&rarav1.ConnectRequest{Frame: &rarav1.ConnectRequest_Hello{Hello: hello}})
	frame, err := c.stream.Recv()
	if err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	switch frame := frame.Frame.(type) {
	case *rarav1.ConnectResponse_Welcome:
		c.welcome(frame.Welcome)
		return nil
	case *rarav1.ConnectResponse_GoAway:
		c.wentAway = frame.GoAway
		return errors.New("the scheduler sent us away")
	default:
		return fmt.Errorf("the first frame was %T, not a Welcome", frame)
	}
}

func (c *session) welcome(welcome *rarav1.Welcome) {
	terms := welcome.Terms
	c.beats = beats.New(durationOr(terms.GetHeartbeatInterval(), 5*time.Second),
		durationOr(terms.GetSilenceTimeout(), 15*time.Second), leaseclock.Now())
	c.beatDue = true // what was held through the gap is renewed at once
	c.supervisor.welcomed(c, welcome)
}

func (c *session) read() error {
	for {
		frame, err := c.stream.Recv()
		if err != nil {
			return err
		}
		c.supervisor.locked(func() { c.heard(frame) })
	}
}

// heard takes one frame in, whole.
func (c *session) heard(frame *rarav1.ConnectResponse) {
	s := c.supervisor
	c.beats.Heard(leaseclock.Now())
	switch frame := frame.Frame.(type) {
	case *rarav1.ConnectResponse_Jobs:
		for _, request := range frame.Jobs.Jobs {
			s.take(request)
		}
	case *rarav1.ConnectResponse_Acks:
		s.acks(frame.Acks)
	case *rarav1.ConnectResponse_HeartbeatAck:
		renewal, _ := c.beats.Answer(frame.HeartbeatAck)
		s.heartbeatAck(frame.HeartbeatAck, renewal)
	case *rarav1.ConnectResponse_Cancels:
		for _, cancel := range frame.Cancels.Jobs {
			s.cancel(cancel)
		}
	case *rarav1.ConnectResponse_Drain:
		s.askedToDrain(frame.Drain)
	case *rarav1.ConnectResponse_GoAway:
		c.wentAway = frame.GoAway
	default:
		s.config.Logger.Debug("session.frame_ignored", "frame", fmt.Sprintf("%T", frame))
	}
	s.afterChange() // an ack makes room in the window, too
}

func (c *session) write(ctx context.Context) error {
	for {
		var frames []*rarav1.ConnectRequest
		var pause <-chan time.Time
		var isOver bool
		c.supervisor.locked(func() {
			c.drained()
			var due time.Duration
			var waits bool
			frames, due, waits, isOver = c.next(leaseclock.Now())
			if waits {
				pause = time.After(due)
			}
		})
		for _, frame := range frames {
			if err := c.stream.Send(frame); err != nil {
				return err
			}
		}
		if isOver {
			return c.stream.CloseSend()
		}
		if len(frames) > 0 {
			continue
		}
		select {
		case <-c.wake:
			runtime.Gosched() // what others are about to say goes into the same frame
		case <-pause:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// drained empties the wake-up call: what it was about is looked at now.
func (c *session) drained() {
	select {
	case <-c.wake:
	default:
	}
}

// next returns what is to be written now; nothing: in how long to look again, if gathered progress waits; or that the
// session is over.
func (c *session) next(now time.Duration) (frames []*rarav1.ConnectRequest, due time.Duration, waits, isOver bool) {
	if c.wentAway != nil {
		return nil, 0, false, true
	}
	frames = c.controlFrames(now)
	outbox := c.supervisor.outbox
	due, waits = outbox.DueIn(now)
	if waits && due == 0 {
		if events := outbox.Take(now); len(events) > 0 {
			frames = append(frames, &rarav1.ConnectRequest{
				Frame: &rarav1.ConnectRequest_Events{Events: &rarav1.EventBatch{Events: events}}})
			return frames, 0, false, false
		}
	}
	if c.goodbyeDue && outbox.IsEmpty() {
		c.saidGoodbye = true
		frames = append(frames, &rarav1.ConnectRequest{
			Frame: &rarav1.ConnectRequest_Goodbye{Goodbye: &rarav1.Goodbye{}}})
		return frames, 0, false, true
	}
	return frames, due, waits, false
}

func (c *session) controlFrames(now time.Duration) []*rarav1.ConnectRequest {
	var frames []*rarav1.ConnectRequest
	if c.beatDue {
		c.beatDue = false
		heartbeat := c.beats.Compose(c.supervisor.heartbeatTokens(), now)
		frames = append(frames, &rarav1.ConnectRequest{
			Frame: &rarav1.ConnectRequest_Heartbeat{Heartbeat: heartbeat}})
	}
	if len(c.receipts) > 0 {
		frames = append(frames, &rarav1.ConnectRequest{Frame: &rarav1.ConnectRequest_CancelReceipts{
			CancelReceipts: &rarav1.CancelReceipts{LeaseTokens: slices.Clone(c.receipts)}}})
		c.receipts = nil
	}
	if len(c.rejections) > 0 {
		frames = append(frames, &rarav1.ConnectRequest{Frame: &rarav1.ConnectRequest_Rejections{
			Rejections: &rarav1.JobRejections{Rejections: c.rejections}}})
		c.rejections = nil
	}
	if c.drainDue != nil {
		frames = append(frames, &rarav1.ConnectRequest{Frame: &rarav1.ConnectRequest_Drain{Drain: c.drainDue}})
		c.drainDue = nil
	}
	if c.credit > c.creditSent {
		c.creditSent = c.credit
		frames = append(frames, &rarav1.ConnectRequest{Frame: &rarav1.ConnectRequest_Credit{
			Credit: &rarav1.Credit{Limit: c.credit}}})
	}
	return frames
}

func (c *session) keepBeat(ctx context.Context, cancel context.CancelCauseFunc) {
	ticker := time.NewTicker(c.beats.Interval)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
		c.supervisor.locked(func() {
			if c.beats.IsSilent(leaseclock.Now()) {
				cancel(errors.New("the scheduler is silent"))
				return
			}
			c.beatDue = true
			c.wakeUp()
		})
	}
}

// reasonOf an end is our own, if we ended the call.
func (c *session) reasonOf(ctx context.Context, err error) string {
	if cause := context.Cause(ctx); cause != nil {
		return cause.Error()
	}
	if err == nil || errors.Is(err, io.EOF) {
		return "the call has ended"
	}
	if answer, ok := status.FromError(err); ok {
		return fmt.Sprintf("%v: %s", answer.Code(), answer.Message())
	}
	return err.Error()
}

func (c *session) end(reason string, inOrder bool) sessionEnd {
	c.supervisor.mu.Lock()
	defer c.supervisor.mu.Unlock()
	return sessionEnd{reason: reason, welcomed: c.beats != nil, wentAway: c.wentAway, saidGoodbye: c.saidGoodbye,
		wasHeard: c.saidGoodbye && inOrder}
}
