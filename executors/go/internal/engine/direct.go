package engine

import (
	"context"
	"fmt"
	"net"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	grpccodes "google.golang.org/grpc/codes"
	"google.golang.org/grpc/health"
	"google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/status"

	"github.com/rara-run/rara/executors/go/internal/codes"
	"github.com/rara-run/rara/executors/go/internal/leaseclock"
	rarav1 "github.com/rara-run/rara/gen/go/rara/v1"
)

const (
	startTimeout  = 5 * time.Second // until a call of Execute says what it is about
	directSilence = 15 * time.Second
	abandonCheck  = time.Second
)

// directSession stands where a session stands, over any number of streams that come and go: one for each job. All but
// wake and over is guarded by the supervisor's mutex.
type directSession struct {
	supervisor *Supervisor
	streams    map[int64]*jobStream
	polledAt   time.Duration
	wasPolled  bool
	aloneSince map[int64]time.Duration // tokens without a stream
	wake       chan struct{}
	over       chan struct{} // closed by goodbye
	saidBye    bool
}

// What the supervisor says.

func (d *directSession) wakeUp() {
	select {
	case d.wake <- struct{}{}:
	default:
	}
}

func (d *directSession) setCredit(int64) {} // the scheduler asks for the free slots

func (d *directSession) receipt(int64) {} // the answer to Cancel is the receipt

func (d *directSession) drain(*time.Duration) {} // GetCapabilities says so

func (d *directSession) reject(lease *rarav1.Lease, code, message string) {
	if stream := d.streams[lease.LeaseToken]; stream != nil {
		stream.end(refusal(code, message))
	}
}

func (d *directSession) forget(token int64) {
	delete(d.aloneSince, token)
	if stream := d.streams[token]; stream != nil {
		stream.end(nil)
	}
}

func (d *directSession) goodbye() {
	if !d.saidBye {
		d.saidBye = true
		close(d.over)
	}
}

// isReady tells whether a scheduler has asked lately: jobs can come.
func (d *directSession) isReady(now time.Duration) bool {
	return d.wasPolled && now-d.polledAt <= directSilence
}

// The streams.

// open makes this the stream of its lease; the one before it, if any, ends.
func (d *directSession) open(stream *jobStream) {
	if old := d.streams[stream.token]; old != nil {
		old.end(status.Error(grpccodes.Unavailable, "another call has attached to the job"))
		d.supervisor.outbox.Pause(stream.token) // what it has sent may have reached nobody
	}
	d.streams[stream.token] = stream
	delete(d.aloneSince, stream.token)
	d.supervisor.outbox.Resume(stream.token)
}

func (d *directSession) close(stream *jobStream) {
	if d.streams[stream.token] != stream {
		return
	}
	delete(d.streams, stream.token)
	if d.supervisor.jobs[stream.token] != nil {
		d.aloneSince[stream.token] = leaseclock.Now()
		d.supervisor.outbox.Pause(stream.token)
	} else {
		d.supervisor.outbox.Drop(stream.token)
	}
}

// pump hands events to their streams until goodbye. Called without the mutex.
func (d *directSession) pump(ctx context.Context) {
	for {
		var due time.Duration
		d.supervisor.locked(func() {
			d.forgetAbandoned()
			due = d.distribute()
		})
		select {
		case <-d.wake:
		case <-time.After(due):
		case <-d.over:
			return
		case <-ctx.Done():
			return
		}
	}
}

// distribute what can be sent now; returns in how long to look again.
func (d *directSession) distribute() time.Duration {
	outbox := d.supervisor.outbox
	for {
		now := leaseclock.Now()
		due, waits := outbox.DueIn(now)
		if !waits {
			return abandonCheck
		}
		if due > 0 {
			return min(due, abandonCheck)
		}
		for _, event := range outbox.Take(now) {
			if stream := d.streams[event.Lease.LeaseToken]; stream != nil {
				stream.send(&rarav1.ExecuteResponse{Frame: &rarav1.ExecuteResponse_Event{Event: event}})
			}
		}
	}
}

// forgetAbandoned drops jobs whose stream did not come back for a whole lease: it is over, and the slot is needed.
func (d *directSession) forgetAbandoned() {
	now := leaseclock.Now()
	for token, since := range d.aloneSince {
		job := d.supervisor.jobs[token]
		switch {
		case job == nil:
			delete(d.aloneSince, token)
		case now-since > job.clock.Lease():
			d.supervisor.lose(token)
			d.supervisor.afterChange()
		}
	}
}

// listen serves ExecutorService until goodbye. Called without the mutex.
func (s *Supervisor) listen(ctx context.Context) error {
	listener, err := net.Listen("tcp", s.config.Listen)
	if err != nil {
		return fmt.Errorf("RARA_EXECUTOR_LISTEN %s: %w", s.config.Listen, err)
	}
	direct := &directSession{supervisor: s, streams: map[int64]*jobStream{}, aloneSince: map[int64]time.Duration{},
		wake: make(chan struct{}, 1), over: make(chan struct{})}
	server := grpc.NewServer(append([]grpc.ServerOption{
		grpc.MaxRecvMsgSize(maxMessageBytes), grpc.MaxSendMsgSize(maxMessageBytes),
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: 10 * time.Second, PermitWithoutStream: true}),
	}, s.config.ServerOptions...)...)
	rarav1.RegisterExecutorServiceServer(server, &directService{session: direct})
	alive := health.NewServer()
	grpc_health_v1.RegisterHealthServer(server, alive)
	s.locked(func() {
		s.session = direct
		s.afterChange()
	})
	served := make(chan error, 1)
	go func() { served <- server.Serve(listener) }()
	if s.config.OnListening != nil {
		s.config.OnListening(listener.Addr().String())
	}
	direct.pump(ctx)
	alive.Shutdown()
	s.locked(direct.endAll)
	stopped := time.AfterFunc(time.Second, server.Stop) // for the acknowledgements of what was sent last
	server.GracefulStop()
	stopped.Stop()
	s.locked(func() { s.session = nil })
	return <-served
}

func (d *directSession) endAll() {
	for _, stream := range d.streams {
		stream.end(status.Error(grpccodes.Unavailable, "the executor stops"))
	}
}

// refusal is the status of a call that is not served.
func refusal(code, message string) error { return refusalWith(nil, code, message) }

func refusalWith(metadata map[string]string, code, message string) error {
	statuses := map[string]grpccodes.Code{
		codes.UnsupportedKind:    grpccodes.Unimplemented,
		codes.NoCapacity:         grpccodes.ResourceExhausted,
		codes.ExecutorShutdown:   grpccodes.Unavailable,
		codes.LeaseUnknown:       grpccodes.NotFound,
		codes.FieldInvalid:       grpccodes.InvalidArgument,
		codes.VersionUnsupported: grpccodes.FailedPrecondition,
	}
	answer := status.New(statuses[code], message)
	if detailed, err := answer.WithDetails(&errdetails.ErrorInfo{Reason: code, Domain: "rara.v1", Metadata: metadata}); err == nil {
		answer = detailed
	}
	return answer.Err()
}
