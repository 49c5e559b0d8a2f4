package rara_test

import (
	"context"
	"fmt"
	"reflect"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"go.opentelemetry.io/otel/trace"

	"github.com/rara-run/rara/executors/go/internal/scripted"
	"github.com/rara-run/rara/executors/go/rara"
	rarav1 "github.com/rara-run/rara/gen/go/rara/v1"
)

type question struct {
	Text  string `json:"text"`
	Times int    `json:"times"`
}

func TestATypedHandlerRunsAJob(t *testing.T) {
	t.Parallel()
	registry := rara.NewRegistry()
	rara.Register(registry, "text.repeat", "1.0.0",
		func(ctx context.Context, job *rara.Job[question]) ([]string, error) {
			var answer []string
			for i := range job.Input.Times {
				answer = append(answer, job.Input.Text)
				if err := job.Progress(rara.Progress{
					Fraction: new(float64(i+1) / float64(job.Input.Times)), Message: "said",
					Metrics: map[string]float64{"times": float64(i + 1)}, Checkpoint: map[string]int{"done": i + 1},
				}); err != nil {
					return nil, err
				}
			}
			return answer, nil
		}, rara.MaxConcurrency(3))
	w := start(t, registry, func(o *rara.Options) { o.Labels = map[string]string{"gpu": "none"} })

	hello := w.session.Hello
	if hello.ProtocolVersion != 1 || hello.ExecutorKind != "go" || hello.ExecutorName != "test" ||
		hello.ExecutorId != w.executor.ID() || hello.Labels["gpu"] != "none" || len(hello.HeldJobs) != 0 {
		t.Errorf("got %v", hello)
	}
	if c := hello.Capabilities; len(c) != 1 || c[0].Kind != "text.repeat" || c[0].MaxConcurrency != 3 ||
		!reflect.DeepEqual(c[0].Versions, []string{"1.0.0"}) {
		t.Errorf("got %v", c)
	}
	w.session.Credit(t, 4)
	w.session.Jobs(scripted.Job(7, "text.repeat", `{"text":"ja","times":2}`))
	if result := w.session.Succeeded(t, 7); string(result.GetOutput().GetData()) != `["ja","ja"]` {
		t.Errorf("got %v", result)
	}
	w.session.Credit(t, 5)
	events := scripted.Events(w.session.Frames(), 7)
	if events[0].GetAccepted().GetExecutorId() != w.executor.ID() || events[1].GetRunning() == nil {
		t.Errorf("got %v", events)
	}
	last := events[len(events)-2].GetProgress()
	if last.GetFraction() != 1 || last.Message != "said" || last.Metrics["times"] != 2 ||
		string(last.Checkpoint.Data) != `{"done":2}` {
		t.Errorf("got %v", last)
	}
	for i, event := range events {
		if event.Sequence != int64(i+1) || event.Lease.Attempt != 1 || event.Lease.StepRunId != "step" {
			t.Errorf("event %d is %v", i, event)
		}
	}
}

func TestUserCodeWaitsForTheAcknowledgement(t *testing.T) {
	t.Parallel()
	began := make(chan struct{})
	w := start(t, offer("k", func(context.Context, *rara.Job[any]) (any, error) {
		close(began)
		return nil, nil
	}))
	w.session.Deaf()
	w.session.Jobs(scripted.Job(1, "k", `1`))
	w.session.Event(t, 1, "accepted", func(e *rarav1.ProgressEvent) bool { return e.GetAccepted() != nil })
	w.session.Until(t, "two heartbeats", beatsSince(len(w.session.Frames()), 2))
	select {
	case <-began:
		t.Fatal("the handler began before `accepted` was acknowledged")
	default:
	}
	for _, frame := range w.session.Frames() {
		if tokens := frame.GetHeartbeat().GetLeaseTokens(); len(tokens) > 0 {
			t.Errorf("what is not accepted is renewed: %v", tokens)
		}
	}
	w.session.Acks(&rarav1.EventAcks{Acks: []*rarav1.EventAck{{LeaseToken: 1, Sequence: 1}}})
	receive(t, "handler", began)
}

func beatsSince(from, count int) func([]*rarav1.ConnectRequest) bool {
	return func(frames []*rarav1.ConnectRequest) bool {
		seen := 0
		for _, frame := range frames[from:] {
			if frame.GetHeartbeat() != nil {
				seen++
			}
		}
		return seen >= count
	}
}

func TestJobsThatCannotRunAreRejected(t *testing.T) {
	t.Parallel()
	release := make(chan struct{})
	w := start(t, offer("k", func(context.Context, *rara.Job[any]) (any, error) { <-release; return nil, nil }),
		func(o *rara.Options) { o.Slots = 1 })
	other := scripted.Job(3, "k", `1`)
	other.KindVersion = "2.0.0"
	w.session.Jobs(scripted.Job(1, "k", `1`), scripted.Job(1, "k", `1`), scripted.Job(2, "k", `1`), other,
		scripted.Job(4, "unknown", `1`))
	got := map[int64]string{}
	w.session.Until(t, "rejections", func(frames []*rarav1.ConnectRequest) bool {
		for _, frame := range frames {
			for _, rejection := range frame.GetRejections().GetRejections() {
				got[rejection.Lease.LeaseToken] = rejection.Code
			}
		}
		return len(got) == 3
	})
	if want := map[int64]string{2: "NO_CAPACITY", 3: "UNSUPPORTED_KIND", 4: "UNSUPPORTED_KIND"}; !reflect.DeepEqual(got, want) {
		t.Errorf("got %v", got)
	}
	close(release)
	w.session.Succeeded(t, 1)
}

func TestALostStreamStopsNoJobAndEventsComeAgain(t *testing.T) {
	t.Parallel()
	for name, end := range map[string]error{
		"half-close":  nil,
		"unavailable": status.Error(codes.Unavailable, "away"),
		"cancelled":   status.Error(codes.Canceled, "reset"),
		"internal":    status.Error(codes.Internal, "bug"),
		"denied":      status.Error(codes.PermissionDenied, "not yet"),
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			release := make(chan struct{})
			w := start(t, offer("k", func(ctx context.Context, job *rara.Job[any]) (any, error) {
				_ = job.Progress(rara.Progress{Message: "before"})
				select {
				case <-release:
				case <-ctx.Done():
					return nil, ctx.Err()
				}
				return "done", nil
			}))
			w.session.Jobs(scripted.Job(1, "k", `1`))
			w.session.Running(t, 1)
			w.session.Deaf()
			close(release)
			sent := w.session.Ended(t, 1)
			w.session.Cut(end)

			second := w.scheduler.Session(t)
			held := second.Hello.HeldJobs
			if len(held) != 1 || held[0].Lease.LeaseToken != 1 || !held[0].Finished || held[0].LastSequence != sent.Sequence {
				t.Errorf("got %v", held)
			}
			second.Welcome(scripted.Terms{})
			again := second.Ended(t, 1)
			if again.String() != sent.String() {
				t.Errorf("resent as %v instead of %v", again, sent)
			}
		})
	}
}

func TestTheAnswerToTheInventoryDecides(t *testing.T) {
	t.Parallel()
	causes := make(chan string, 3)
	w := start(t, offer("k", func(ctx context.Context, job *rara.Job[any]) (any, error) {
		<-ctx.Done()
		causes <- fmt.Sprint(job.LeaseToken, " ", rara.CancelReason(ctx))
		return nil, ctx.Err()
	}))
	for token := int64(1); token <= 4; token++ {
		w.session.Jobs(scripted.Job(token, "k", `1`))
		w.session.Running(t, token)
	}
	w.session.Cut(nil)
	second := w.scheduler.Session(t)
	if len(second.Hello.HeldJobs) != 4 {
		t.Fatalf("got %v", second.Hello.HeldJobs)
	}
	// 1 goes on, 2 is lost, 3 is to be cancelled, and 4 is not named at all.
	second.WelcomeWith(&rarav1.Welcome{
		Acks:            &rarav1.EventAcks{Acks: []*rarav1.EventAck{{LeaseToken: 1, Sequence: 2}}},
		LostLeaseTokens: []int64{2},
		Cancels:         []*rarav1.CancelJob{{LeaseToken: 3, Reason: "SIBLING_FAILED"}},
	})
	got := map[string]bool{}
	for range 3 {
		got[receive(t, "cause", causes)] = true
	}
	if want := map[string]bool{"2 LEASE_LOST": true, "3 SIBLING_FAILED": true, "4 LEASE_LOST": true}; !reflect.DeepEqual(got, want) {
		t.Errorf("got %v", got)
	}
	if cancelled := second.Ended(t, 3).GetCancelled(); cancelled.GetReason() != "SIBLING_FAILED" {
		t.Errorf("got %v", cancelled)
	}
	second.Until(t, "receipt of 3", func(frames []*rarav1.ConnectRequest) bool {
		for _, frame := range frames {
			if reflect.DeepEqual(frame.GetCancelReceipts().GetLeaseTokens(), []int64{3}) {
				return true
			}
		}
		return false
	})
	for _, token := range []int64{2, 4} {
		if events := scripted.Events(second.Frames(), token); len(events) > 0 {
			t.Errorf("a lost job says %v", events)
		}
	}
	second.Cancel(1, "CANCELLED", time.Second)
	second.Ended(t, 1)
}

func TestSilenceEndsTheSessionAndNotTheJob(t *testing.T) {
	t.Parallel()
	w := run(t, offer("k", func(ctx context.Context, _ *rara.Job[any]) (any, error) { <-ctx.Done(); return nil, ctx.Err() }))
	first := w.scheduler.Session(t)
	first.Welcome(scripted.Terms{Heartbeat: 200 * time.Millisecond, Silence: 2 * time.Second})
	first.Jobs(scripted.Job(1, "k", `1`))
	first.Running(t, 1)
	first.Mute()
	second := w.scheduler.Session(t)
	receive(t, "end of the first call", first.Done)
	if len(second.Hello.HeldJobs) != 1 || second.Hello.HeldJobs[0].Finished {
		t.Errorf("got %v", second.Hello.HeldJobs)
	}
	second.Welcome(scripted.Terms{})
	second.Cancel(1, "CANCELLED", time.Second)
	second.Ended(t, 1)
}

func TestHeartbeatsRenewWhatRunsAndSayWhatWasAnswered(t *testing.T) {
	t.Parallel()
	w := start(t, offer("k", func(ctx context.Context, _ *rara.Job[any]) (any, error) {
		for ctx.Err() == nil { // a handler that keeps a processor busy delays nothing
		}
		return nil, ctx.Err()
	}))
	w.session.Jobs(scripted.Job(5, "k", `1`))
	w.session.Running(t, 5)
	w.session.Until(t, "renewals", func(frames []*rarav1.ConnectRequest) bool {
		count, number := 0, int64(0)
		for _, frame := range frames {
			beat := frame.GetHeartbeat()
			if beat == nil {
				continue
			}
			if number++; beat.Number != number || beat.Answered > beat.Number-1 {
				t.Errorf("heartbeat %d is %v", number, beat)
			}
			if reflect.DeepEqual(beat.LeaseTokens, []int64{5}) && beat.Answered > 0 {
				count++
			}
		}
		return count >= 3
	})
	until(t, "readiness", w.executor.IsReady) // heartbeats are answered
	w.session.Cancel(5, "CANCELLED", time.Second)
	w.session.Ended(t, 5)
}

func TestUnknownFramesAreIgnored(t *testing.T) {
	t.Parallel()
	w := start(t, offer("k", func(context.Context, *rara.Job[any]) (any, error) { return 1, nil }))
	w.session.Send(&rarav1.ConnectResponse{})
	w.session.Acks(&rarav1.EventAcks{Acks: []*rarav1.EventAck{{LeaseToken: 99, Sequence: 5}}})
	w.session.Cancel(99, "CANCELLED", 0)
	if w.job(t, 1, "k", `1`).GetSucceeded() == nil {
		t.Error("the session goes on")
	}
}

func TestAReplacedExecutorEndsForGood(t *testing.T) {
	t.Parallel()
	w := start(t, offer("k", func(context.Context, *rara.Job[any]) (any, error) { return 1, nil }))
	w.session.GoAway("REPLACED")
	w.session.Cut(nil)
	err := receive(t, "end", w.ended)
	if err != rara.ErrReplaced {
		t.Errorf("got %v", err)
	}
	w.ended <- err
}

func TestTheTraceOfTheRunIsInTheContext(t *testing.T) {
	t.Parallel()
	w := start(t, offer("k", func(ctx context.Context, _ *rara.Job[any]) (any, error) {
		return trace.SpanContextFromContext(ctx).TraceID().String(), nil
	}))
	job := scripted.Job(1, "k", `1`)
	job.Trace = &rarav1.TraceContext{Traceparent: "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"}
	w.session.Jobs(job)
	if got := string(w.session.Succeeded(t, 1).GetOutput().GetData()); got != `"4bf92f3577b34da6a3ce929d0e0e4736"` {
		t.Errorf("got %s", got)
	}
}
