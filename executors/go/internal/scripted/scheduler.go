// Package scripted is a scheduler for tests that does what it is told, over real gRPC: frames in, frames out, and an
// artifact service in memory.
package scripted

import (
	"net"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/types/known/durationpb"

	rarav1 "github.com/rara-run/rara/gen/go/rara/v1"
)

// Wait is how long a test waits for what has to happen.
const Wait = 30 * time.Second

// Scheduler accepts sessions, one after the other.
type Scheduler struct {
	rarav1.UnimplementedDispatchServiceServer
	Address  string
	Blobs    *Blobs
	sessions chan *Session
	server   *grpc.Server
}

// Start serves until the test ends.
func Start(t *testing.T) *Scheduler {
	t.Helper()
	return StartAt(t, "127.0.0.1:0")
}

// StartAt serves at an address until the test ends, or Stop.
func StartAt(t *testing.T, address string) *Scheduler {
	t.Helper()
	listener, err := net.Listen("tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	s := &Scheduler{
		Address: listener.Addr().String(), Blobs: newBlobs(), sessions: make(chan *Session, 100),
		server: grpc.NewServer(),
	}
	rarav1.RegisterDispatchServiceServer(s.server, s)
	rarav1.RegisterArtifactServiceServer(s.server, s.Blobs)
	served := make(chan struct{})
	go func() {
		defer close(served)
		_ = s.server.Serve(listener)
	}()
	t.Cleanup(func() {
		s.Stop()
		<-served
	})
	return s
}

// Stop cuts all that is open.
func (s *Scheduler) Stop() { s.server.Stop() }

// Connect is the service's method.
func (s *Scheduler) Connect(stream rarav1.DispatchService_ConnectServer) error {
	session := &Session{stream: stream, changed: make(chan struct{}), over: make(chan error, 1), Done: make(chan struct{})}
	frame, err := stream.Recv()
	if err != nil {
		return err
	}
	session.Hello = frame.GetHello()
	defer close(session.Done)
	s.sessions <- session
	go session.read()
	return <-session.over
}

// Session waits for the next one, with its Hello.
func (s *Scheduler) Session(t *testing.T) *Session {
	t.Helper()
	select {
	case session := <-s.sessions:
		return session
	case <-time.After(Wait):
		t.Fatal("no session in time")
		return nil
	}
}

// Terms are the defaults of tests: short enough to wait for.
type Terms struct {
	Heartbeat, Silence time.Duration
	Limits             *rarav1.Limits
}

// Session is one call, after its Hello.
type Session struct {
	Hello *rarav1.Hello
	Done  chan struct{} // closed when the call has ended

	stream rarav1.DispatchService_ConnectServer
	over   chan error
	sends  sync.Mutex

	mu      sync.Mutex
	frames  []*rarav1.ConnectRequest
	changed chan struct{}
	isDeaf  bool // acknowledges no events
	isStale bool // answers heartbeats and renews nothing
	isMute  bool // answers no heartbeats
}

// Welcome answers Hello: every held job goes on from what is acknowledged.
func (s *Session) Welcome(terms Terms) {
	if terms.Heartbeat == 0 {
		terms.Heartbeat, terms.Silence = 200*time.Millisecond, 15*time.Second
	}
	welcome := &rarav1.Welcome{ProtocolVersion: 1, SessionId: "session", Acks: &rarav1.EventAcks{},
		Terms: &rarav1.SessionTerms{
			HeartbeatInterval: durationpb.New(terms.Heartbeat), SilenceTimeout: durationpb.New(terms.Silence),
			Limits: terms.Limits,
		}}
	for _, held := range s.Hello.HeldJobs {
		welcome.Acks.Acks = append(welcome.Acks.Acks,
			&rarav1.EventAck{LeaseToken: held.Lease.LeaseToken, Sequence: held.AckedSequence})
	}
	s.WelcomeWith(welcome)
}

// WelcomeWith answers Hello.
func (s *Session) WelcomeWith(welcome *rarav1.Welcome) {
	s.Send(&rarav1.ConnectResponse{Frame: &rarav1.ConnectResponse_Welcome{Welcome: welcome}})
}

// Send a frame.
func (s *Session) Send(frame *rarav1.ConnectResponse) {
	s.sends.Lock()
	defer s.sends.Unlock()
	_ = s.stream.Send(frame) // the call may have ended
}

// Jobs starts them.
func (s *Session) Jobs(jobs ...*rarav1.JobRequest) {
	s.Send(&rarav1.ConnectResponse{Frame: &rarav1.ConnectResponse_Jobs{Jobs: &rarav1.JobBatch{Jobs: jobs}}})
}

// Acks answers events.
func (s *Session) Acks(acks *rarav1.EventAcks) {
	s.Send(&rarav1.ConnectResponse{Frame: &rarav1.ConnectResponse_Acks{Acks: acks}})
}

// Cancel asks for a job's end.
func (s *Session) Cancel(token int64, reason string, grace time.Duration) {
	s.Send(&rarav1.ConnectResponse{Frame: &rarav1.ConnectResponse_Cancels{Cancels: &rarav1.CancelJobs{
		Jobs: []*rarav1.CancelJob{{LeaseToken: token, Reason: reason, Grace: durationpb.New(grace)}}}}})
}

// GoAway says the last word.
func (s *Session) GoAway(reason string) {
	s.Send(&rarav1.ConnectResponse{Frame: &rarav1.ConnectResponse_GoAway{GoAway: &rarav1.GoAway{Reason: reason}}})
}

// Cut ends the call with an error, as a broken connection does.
func (s *Session) Cut(err error) {
	select {
	case s.over <- err:
	default:
	}
}

// Deaf stops acknowledging events; Stale stops renewing; Mute stops answering heartbeats.
func (s *Session) Deaf() { s.mu.Lock(); s.isDeaf = true; s.mu.Unlock() }

// Stale answers heartbeats from now on without a renewal, as if the database were away.
func (s *Session) Stale() { s.mu.Lock(); s.isStale = true; s.mu.Unlock() }

// Mute answers no heartbeat from now on.
func (s *Session) Mute() { s.mu.Lock(); s.isMute = true; s.mu.Unlock() }

func (s *Session) read() {
	for {
		frame, err := s.stream.Recv()
		if err != nil {
			s.Cut(nil)
			return
		}
		s.mu.Lock()
		s.frames = append(s.frames, frame)
		close(s.changed)
		s.changed = make(chan struct{})
		deaf, stale, mute := s.isDeaf, s.isStale, s.isMute
		s.mu.Unlock()
		if events := frame.GetEvents(); events != nil && !deaf {
			acks := &rarav1.EventAcks{}
			for _, event := range events.Events {
				acks.Acks = append(acks.Acks,
					&rarav1.EventAck{LeaseToken: event.Lease.LeaseToken, Sequence: event.Sequence})
			}
			s.Acks(acks)
		}
		if beat := frame.GetHeartbeat(); beat != nil && !mute {
			ack := &rarav1.HeartbeatAck{Number: beat.Number}
			if !stale {
				ack.Renewed = beat.Number
			}
			s.Send(&rarav1.ConnectResponse{Frame: &rarav1.ConnectResponse_HeartbeatAck{HeartbeatAck: ack}})
		}
		if frame.GetGoodbye() != nil {
			s.Cut(nil)
		}
	}
}

// Frames received so far, Hello apart.
func (s *Session) Frames() []*rarav1.ConnectRequest {
	s.mu.Lock()
	defer s.mu.Unlock()
	return append([]*rarav1.ConnectRequest(nil), s.frames...)
}

// Until waits until the frames so far satisfy the condition.
func (s *Session) Until(t *testing.T, what string, condition func([]*rarav1.ConnectRequest) bool) {
	t.Helper()
	late := time.After(Wait)
	for {
		s.mu.Lock()
		frames, changed := s.frames, s.changed
		s.mu.Unlock()
		if condition(frames) {
			return
		}
		select {
		case <-changed:
		case <-late:
			t.Fatalf("no %s in time; there came: %v", what, frames)
		}
	}
}

// Events of a lease so far, in the order of their coming.
func Events(frames []*rarav1.ConnectRequest, token int64) []*rarav1.ProgressEvent {
	var events []*rarav1.ProgressEvent
	for _, frame := range frames {
		for _, event := range frame.GetEvents().GetEvents() {
			if event.Lease.LeaseToken == token {
				events = append(events, event)
			}
		}
	}
	return events
}

// Event waits for the first event of a lease that is picked.
func (s *Session) Event(
	t *testing.T, token int64, what string, pick func(*rarav1.ProgressEvent) bool,
) *rarav1.ProgressEvent {
	t.Helper()
	var found *rarav1.ProgressEvent
	s.Until(t, what, func(frames []*rarav1.ConnectRequest) bool {
		for _, event := range Events(frames, token) {
			if pick(event) {
				found = event
				return true
			}
		}
		return false
	})
	return found
}

// Running waits until the handler of a lease was called.
func (s *Session) Running(t *testing.T, token int64) {
	t.Helper()
	s.Event(t, token, "running", func(e *rarav1.ProgressEvent) bool { return e.GetRunning() != nil })
}

// Succeeded waits for the result of a lease.
func (s *Session) Succeeded(t *testing.T, token int64) *rarav1.JobResult {
	t.Helper()
	return s.Ended(t, token).GetSucceeded()
}

// Failed waits for the failure of a lease.
func (s *Session) Failed(t *testing.T, token int64) *rarav1.JobError {
	t.Helper()
	return s.Ended(t, token).GetFailed()
}

// Ended waits for the terminal event of a lease.
func (s *Session) Ended(t *testing.T, token int64) *rarav1.ProgressEvent {
	t.Helper()
	return s.Event(t, token, "terminal event", IsTerminal)
}

// IsTerminal tells whether nothing may follow the event.
func IsTerminal(event *rarav1.ProgressEvent) bool {
	return event.GetSucceeded() != nil || event.GetFailed() != nil || event.GetCancelled() != nil
}

// Credit waits until so many jobs are allowed.
func (s *Session) Credit(t *testing.T, limit int64) {
	t.Helper()
	s.Until(t, "credit", func(frames []*rarav1.ConnectRequest) bool {
		for _, frame := range frames {
			if frame.GetCredit().GetLimit() >= limit {
				return true
			}
		}
		return false
	})
}

// Job is a request with a lease of 30 s.
func Job(token int64, kind, input string) *rarav1.JobRequest {
	return &rarav1.JobRequest{
		Lease:          &rarav1.Lease{StepRunId: "step", LeaseToken: token, Attempt: 1},
		WorkflowRunId:  "run",
		IdempotencyKey: "run/step",
		Kind:           kind,
		KindVersion:    "1.0.0",
		LeaseDuration:  durationpb.New(30 * time.Second),
		Input:          &rarav1.Payload{Data: []byte(input)},
		StepName:       "step",
		Definition:     "definition",
		MaxAttempts:    3,
	}
}
