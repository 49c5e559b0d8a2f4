package engine

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"google.golang.org/grpc"
	grpccodes "google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/rara-run/rara/executors/go/internal/beats"
	"github.com/rara-run/rara/executors/go/internal/codes"
	"github.com/rara-run/rara/executors/go/internal/leaseclock"
	rarav1 "github.com/rara-run/rara/gen/go/rara/v1"
)

// Answers of one stream that may wait; its events are bounded by the window.
const maxQueued = 10_000

// jobStream is one call of Execute: what is queued for the scheduler, and the beat of the one lease. Guarded by the
// supervisor's mutex, but for token and wake.
type jobStream struct {
	token   int64
	beats   *beats.Heartbeats
	frames  []*rarav1.ExecuteResponse
	wake    chan struct{}
	isEnded bool
	status  error // of the call, if it is ended
}

func newJobStream(token int64, terms *rarav1.SessionTerms) *jobStream {
	return &jobStream{token: token, wake: make(chan struct{}, 1),
		beats: beats.New(durationOr(terms.GetHeartbeatInterval(), 5*time.Second),
			durationOr(terms.GetSilenceTimeout(), directSilence), leaseclock.Now())}
}

// send queues a frame. A stream that is not read is given up: the scheduler attaches anew.
func (j *jobStream) send(frame *rarav1.ExecuteResponse) {
	if len(j.frames) >= maxQueued {
		j.frames = nil
		j.end(status.Error(grpccodes.Unavailable, "the stream is not read"))
		return
	}
	j.frames = append(j.frames, frame)
	j.wakeUp()
}

// end the call when what is queued was written. The first end stays.
func (j *jobStream) end(with error) {
	if !j.isEnded {
		j.isEnded, j.status = true, with
		j.wakeUp()
	}
}

func (j *jobStream) wakeUp() {
	select {
	case j.wake <- struct{}{}:
	default:
	}
}

// directService is what schedulers call.
type directService struct {
	rarav1.UnimplementedExecutorServiceServer
	session *directSession
}

// GetCapabilities is the service's method, as are the next.
func (d *directService) GetCapabilities(
	_ context.Context, request *rarav1.GetCapabilitiesRequest,
) (*rarav1.GetCapabilitiesResponse, error) {
	s := d.session.supervisor
	if versions := s.config.Versions; !versions.has(request.ProtocolVersion) {
		return nil, refusalWith(versions.metadata(), codes.VersionUnsupported, fmt.Sprintf(
			"protocol_version %d is not spoken here; %d to %d are", request.ProtocolVersion, versions.Oldest, versions.Newest))
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	d.session.polledAt, d.session.wasPolled = leaseclock.Now(), true
	s.connected()
	return &rarav1.GetCapabilitiesResponse{
		Hello: s.hello(request.ProtocolVersion), FreeSlots: int32(s.slots.Free()), Draining: s.slots.Draining}, nil
}

func (d *directService) Cancel(_ context.Context, request *rarav1.CancelRequest) (*rarav1.CancelResponse, error) {
	s := d.session.supervisor
	s.mu.Lock()
	defer s.mu.Unlock()
	cancel := request.Cancel
	_, known := s.jobs[cancel.GetLeaseToken()]
	switch {
	case !known:
	case cancel.Reason == codes.LeaseLost:
		s.lose(cancel.LeaseToken)
	default:
		s.cancel(cancel)
	}
	s.afterChange()
	return &rarav1.CancelResponse{Known: known}, nil
}

func (d *directService) Drain(_ context.Context, request *rarav1.DrainRequest) (*rarav1.DrainResponse, error) {
	s := d.session.supervisor
	s.mu.Lock()
	defer s.mu.Unlock()
	drain := request.Drain
	if drain == nil {
		drain = &rarav1.Drain{}
	}
	s.askedToDrain(drain)
	return &rarav1.DrainResponse{}, nil
}

type executeCall = grpc.BidiStreamingServer[rarav1.ExecuteRequest, rarav1.ExecuteResponse]

// Execute ends its goroutines by returning: then neither Recv nor Send waits any longer.
func (d *directService) Execute(call executeCall) error {
	s := d.session.supervisor
	first := make(chan *rarav1.ExecuteRequest, 1)
	read, written := make(chan error, 1), make(chan error, 1)
	var stream *jobStream
	begun := make(chan struct{})
	go func() {
		frame, err := call.Recv()
		if err != nil {
			read <- err
			return
		}
		first <- frame
		select {
		case <-begun:
			read <- d.read(call, stream)
		case <-call.Context().Done():
		}
	}()
	var start *rarav1.ExecuteStart
	select {
	case frame := <-first:
		start = frame.GetStart()
	case <-read:
	case <-time.After(startTimeout):
	}
	stream, err := d.begin(start)
	if err != nil {
		return err
	}
	close(begun)
	defer s.locked(func() { d.session.close(stream) })
	go func() { written <- d.write(call, stream) }()
	ticker := time.NewTicker(stream.beats.Interval)
	defer ticker.Stop()
	for {
		select {
		case err := <-read:
			if errors.Is(err, io.EOF) {
				err = nil
			}
			return err
		case err := <-written:
			return err
		case <-ticker.C:
			if d.beat(stream) {
				// Not OK, which would say that the job has nothing more to tell.
				return status.Error(grpccodes.Unavailable, "the scheduler is silent")
			}
		}
	}
}

// begin attaches to the job of this lease, or starts it.
func (d *directService) begin(start *rarav1.ExecuteStart) (*jobStream, error) {
	lease := start.GetJob().GetLease()
	if start == nil {
		return nil, refusal(codes.FieldInvalid, "start: must be the first frame")
	}
	if lease.GetLeaseToken() < 1 || lease.GetStepRunId() == "" || start.ResumeAfterSequence < 0 {
		return nil, refusal(codes.FieldInvalid, "start.job.lease: must name a step and a token")
	}
	s := d.session.supervisor
	s.mu.Lock()
	defer s.mu.Unlock()
	job := s.jobs[lease.LeaseToken]
	if job == nil && start.ResumeAfterSequence > 0 {
		return nil, refusal(codes.LeaseUnknown, "no job is held here under this lease")
	}
	if job != nil && job.lease().StepRunId != lease.StepRunId {
		return nil, refusal(codes.FieldInvalid, "start.job.lease: the token is another step's")
	}
	s.takeLimits(start.Terms.GetLimits())
	stream := newJobStream(lease.LeaseToken, start.Terms)
	d.session.open(stream)
	if job == nil {
		s.take(start.Job)
	} else {
		s.acknowledged(&rarav1.EventAck{LeaseToken: stream.token, Sequence: start.ResumeAfterSequence})
		d.compose(stream) // what was held through the gap is renewed at once
	}
	s.afterChange()
	return stream, nil
}

// beat queues a heartbeat, or tells that the scheduler is silent.
func (d *directService) beat(stream *jobStream) (isSilent bool) {
	d.session.supervisor.locked(func() {
		if isSilent = stream.beats.IsSilent(leaseclock.Now()); !isSilent {
			d.compose(stream)
		}
	})
	return isSilent
}

func (d *directService) compose(stream *jobStream) {
	var tokens []int64
	for _, token := range d.session.supervisor.heartbeatTokens() {
		if token == stream.token {
			tokens = append(tokens, token)
		}
	}
	stream.send(&rarav1.ExecuteResponse{Frame: &rarav1.ExecuteResponse_Heartbeat{
		Heartbeat: stream.beats.Compose(tokens, leaseclock.Now())}})
}

func (d *directService) read(call executeCall, stream *jobStream) error {
	for {
		frame, err := call.Recv()
		if err != nil {
			return err
		}
		d.session.supervisor.locked(func() { d.heard(stream, frame) })
	}
}

func (d *directService) heard(stream *jobStream, frame *rarav1.ExecuteRequest) {
	s := d.session.supervisor
	stream.beats.Heard(leaseclock.Now())
	switch frame := frame.Frame.(type) {
	case *rarav1.ExecuteRequest_Acks:
		s.acks(ofStream(stream.token, frame.Acks))
	case *rarav1.ExecuteRequest_HeartbeatAck:
		renewal, _ := stream.beats.Answer(frame.HeartbeatAck)
		s.heartbeatAck(ownOf(stream.token, frame.HeartbeatAck), renewal)
	default:
		s.config.Logger.Debug("job_stream.frame_ignored", "frame", fmt.Sprintf("%T", frame))
	}
	s.afterChange()
}

func (d *directService) write(call executeCall, stream *jobStream) error {
	for {
		var frames []*rarav1.ExecuteResponse
		var isEnded bool
		d.session.supervisor.locked(func() {
			frames, stream.frames = stream.frames, nil
			isEnded = stream.isEnded
		})
		for _, frame := range frames {
			if err := call.Send(frame); err != nil {
				return err
			}
		}
		if isEnded {
			return stream.status
		}
		select {
		case <-stream.wake:
		case <-call.Context().Done():
			return call.Context().Err()
		}
	}
}

// ofStream keeps what is about the stream's own lease: it speaks for no other.
func ofStream(token int64, acks *rarav1.EventAcks) *rarav1.EventAcks {
	own := &rarav1.EventAcks{}
	for _, ack := range acks.Acks {
		if ack.LeaseToken == token {
			own.Acks = append(own.Acks, ack)
		}
	}
	for _, refusal := range acks.Refusals {
		if refusal.LeaseToken == token {
			own.Refusals = append(own.Refusals, refusal)
		}
	}
	return own
}

func ownOf(token int64, ack *rarav1.HeartbeatAck) *rarav1.HeartbeatAck {
	own := &rarav1.HeartbeatAck{Number: ack.Number, Renewed: ack.Renewed}
	for _, lost := range ack.LostLeaseTokens {
		if lost == token {
			own.LostLeaseTokens = append(own.LostLeaseTokens, lost)
		}
	}
	for _, cancel := range ack.Cancels {
		if cancel.LeaseToken == token {
			own.Cancels = append(own.Cancels, cancel)
		}
	}
	return own
}
