package rara_test

import (
	"context"
	"errors"
	"io"
	"testing"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/rara-run/rara/executors/go/internal/scripted"
	"github.com/rara-run/rara/executors/go/rara"
	rarav1 "github.com/rara-run/rara/gen/go/rara/v1"
)

// dialled runs an executor that is dialled, and dials it.
func dialled(t *testing.T, registry *rara.Registry, change ...func(*rara.Options)) (*world, rarav1.ExecutorServiceClient) {
	t.Helper()
	address := make(chan string, 1)
	change = append(change, func(o *rara.Options) {
		o.Listen = "127.0.0.1:0"
		o.OnListening = func(at string) { address <- at }
	})
	w := run(t, registry, change...)
	connection, err := grpc.NewClient(receive(t, "address", address),
		grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { connection.Close() })
	return w, rarav1.NewExecutorServiceClient(connection)
}

// executeCall is one call of Execute that acknowledges what it reads.
type executeCall struct {
	stream rarav1.ExecutorService_ExecuteClient
	cancel context.CancelFunc
	events []*rarav1.ProgressEvent
}

func execute(t *testing.T, client rarav1.ExecutorServiceClient, start *rarav1.ExecuteStart) *executeCall {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), scripted.Wait)
	t.Cleanup(cancel)
	stream, err := client.Execute(ctx)
	if err != nil {
		t.Fatal(err)
	}
	start.Terms = &rarav1.SessionTerms{
		HeartbeatInterval: durationpb.New(200 * time.Millisecond), SilenceTimeout: durationpb.New(10 * time.Second)}
	if err := stream.Send(&rarav1.ExecuteRequest{Frame: &rarav1.ExecuteRequest_Start{Start: start}}); err != nil {
		t.Fatal(err)
	}
	return &executeCall{stream: stream, cancel: cancel}
}

// until reads and acknowledges up to an event that is picked, which is not acknowledged.
func (c *executeCall) until(t *testing.T, pick func(*rarav1.ProgressEvent) bool) *rarav1.ProgressEvent {
	t.Helper()
	for {
		frame, err := c.stream.Recv()
		if err != nil {
			t.Fatalf("%v; there came %v", err, c.events)
		}
		if beat := frame.GetHeartbeat(); beat != nil {
			_ = c.stream.Send(&rarav1.ExecuteRequest{Frame: &rarav1.ExecuteRequest_HeartbeatAck{
				HeartbeatAck: &rarav1.HeartbeatAck{Number: beat.Number, Renewed: beat.Number}}})
			continue
		}
		event := frame.GetEvent()
		c.events = append(c.events, event)
		if pick(event) {
			return event
		}
		c.acknowledge(event)
	}
}

func (c *executeCall) acknowledge(event *rarav1.ProgressEvent) {
	_ = c.stream.Send(&rarav1.ExecuteRequest{Frame: &rarav1.ExecuteRequest_Acks{Acks: &rarav1.EventAcks{
		Acks: []*rarav1.EventAck{{LeaseToken: event.Lease.LeaseToken, Sequence: event.Sequence}}}}})
}

// end is the status that the call ends with.
func (c *executeCall) end() error {
	for {
		if _, err := c.stream.Recv(); err != nil {
			if errors.Is(err, io.EOF) {
				return nil
			}
			return err
		}
	}
}

func reasonOf(err error) (codes.Code, string) {
	for _, detail := range status.Convert(err).Details() {
		if info, ok := detail.(*errdetails.ErrorInfo); ok {
			return status.Code(err), info.Reason
		}
	}
	return status.Code(err), ""
}

func TestADialledExecutorRunsAJobOnAStreamOfItsOwn(t *testing.T) {
	t.Parallel()
	w, client := dialled(t, offer("k", func(_ context.Context, job *rara.Job[any]) (any, error) { return job.Input, nil }))
	answer, err := client.GetCapabilities(t.Context(), &rarav1.GetCapabilitiesRequest{ProtocolVersion: 1})
	if err != nil || answer.FreeSlots != 4 || answer.Draining || answer.Hello.ExecutorId != w.executor.ID() {
		t.Fatalf("got %v, %v", answer, err)
	}
	until(t, "readiness", w.executor.IsReady)
	call := execute(t, client, &rarav1.ExecuteStart{Job: scripted.Job(1, "k", `"in"`)})
	last := call.until(t, scripted.IsTerminal)
	if string(last.GetSucceeded().GetOutput().GetData()) != `"in"` || last.Sequence != 3 {
		t.Errorf("got %v", last)
	}
	call.acknowledge(last)
	if err := call.end(); err != nil {
		t.Errorf("the call ends with %v", err)
	}
}

func TestASecondCallGoesOnFromWhatIsStored(t *testing.T) {
	t.Parallel()
	release := make(chan struct{})
	_, client := dialled(t, offer("k", func(context.Context, *rara.Job[any]) (any, error) { <-release; return "done", nil }))
	first := execute(t, client, &rarav1.ExecuteStart{Job: scripted.Job(1, "k", `1`)})
	first.until(t, func(e *rarav1.ProgressEvent) bool { return e.GetRunning() != nil })
	close(release) // the first call is still open when the second one comes
	start := &rarav1.ExecuteStart{Job: &rarav1.JobRequest{Lease: scripted.Job(1, "", "").Lease}, ResumeAfterSequence: 1}
	second := execute(t, client, start)
	last := second.until(t, scripted.IsTerminal)
	if last.GetSucceeded() == nil || second.events[0].GetRunning() == nil || len(second.events) != 2 {
		t.Errorf("got %v", second.events)
	}
	second.acknowledge(last)
	// OK would say that the job has nothing more to tell.
	if err := first.end(); status.Code(err) != codes.Unavailable {
		t.Errorf("the displaced call ends with %v", err)
	}
	if err := second.end(); err != nil {
		t.Errorf("the call ends with %v", err)
	}
}

func TestWhatIsNotServedIsAStatusWithItsCode(t *testing.T) {
	t.Parallel()
	_, client := dialled(t, offer("k", obeying), func(o *rara.Options) { o.Slots = 1 })
	running := execute(t, client, &rarav1.ExecuteStart{Job: scripted.Job(1, "k", `1`)})
	running.until(t, func(e *rarav1.ProgressEvent) bool { return e.GetRunning() != nil })
	other := scripted.Job(1, "k", `1`)
	other.Lease.StepRunId = "another"
	for name, test := range map[string]struct {
		start  *rarav1.ExecuteStart
		code   codes.Code
		reason string
	}{
		"slots":   {&rarav1.ExecuteStart{Job: scripted.Job(2, "k", `1`)}, codes.ResourceExhausted, "NO_CAPACITY"},
		"kind":    {&rarav1.ExecuteStart{Job: scripted.Job(3, "other", `1`)}, codes.Unimplemented, "UNSUPPORTED_KIND"},
		"unknown": {&rarav1.ExecuteStart{Job: scripted.Job(4, "k", `1`), ResumeAfterSequence: 2}, codes.NotFound, "LEASE_UNKNOWN"},
		"step":    {&rarav1.ExecuteStart{Job: other}, codes.InvalidArgument, "FIELD_INVALID"},
		"no job":  {&rarav1.ExecuteStart{}, codes.InvalidArgument, "FIELD_INVALID"},
	} {
		if code, reason := reasonOf(execute(t, client, test.start).end()); code != test.code || reason != test.reason {
			t.Errorf("%s: got %v %s", name, code, reason)
		}
	}
	_, err := client.GetCapabilities(t.Context(), &rarav1.GetCapabilitiesRequest{ProtocolVersion: 9})
	if code, reason := reasonOf(err); code != codes.FailedPrecondition || reason != "PROTOCOL_VERSION_UNSUPPORTED" {
		t.Errorf("got %v", err)
	}
	answer, err := client.Cancel(t.Context(), &rarav1.CancelRequest{
		Cancel: &rarav1.CancelJob{LeaseToken: 1, Reason: "CANCELLED", Grace: durationpb.New(time.Minute)}})
	if err != nil || !answer.Known {
		t.Errorf("got %v, %v", answer, err)
	}
	last := running.until(t, scripted.IsTerminal)
	if last.GetCancelled().GetReason() != "CANCELLED" {
		t.Errorf("got %v", last)
	}
	running.acknowledge(last)
}

func TestADialledExecutorDrains(t *testing.T) {
	t.Parallel()
	release := make(chan struct{})
	w, client := dialled(t, offer("k", func(context.Context, *rara.Job[any]) (any, error) { <-release; return "done", nil }),
		func(o *rara.Options) { o.Stop = 10 * time.Second })
	call := execute(t, client, &rarav1.ExecuteStart{Job: scripted.Job(1, "k", `1`)})
	call.until(t, func(e *rarav1.ProgressEvent) bool { return e.GetRunning() != nil })
	w.stop()
	until(t, "draining", func() bool {
		answer, err := client.GetCapabilities(t.Context(), &rarav1.GetCapabilitiesRequest{ProtocolVersion: 1})
		return err == nil && answer.Draining && answer.FreeSlots == 0
	})
	if code, reason := reasonOf(execute(t, client, &rarav1.ExecuteStart{Job: scripted.Job(2, "k", `1`)}).end()); code != codes.Unavailable || reason != "EXECUTOR_SHUTDOWN" {
		t.Errorf("got %v %s", code, reason)
	}
	close(release)
	call.acknowledge(call.until(t, scripted.IsTerminal))
	if err := receive(t, "end", w.ended); err != nil {
		t.Error(err)
	}
	w.ended <- nil
}

func TestWhoeverReachesTheListenerMayRunAnything(t *testing.T) {
	t.Parallel()
	for listen, isRefused := range map[string]bool{
		"127.0.0.1:7400": false, "[::1]:7400": false, "localhost:0": false, "0.0.0.0:7400": true, "7400": true, ":7400": true,
	} {
		options := rara.DefaultOptions()
		options.Listen = listen
		if _, err := rara.NewExecutor(ownProcess(), options); (err != nil) != isRefused {
			t.Errorf("%s: %v", listen, err)
		}
	}
}
