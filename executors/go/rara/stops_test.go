package rara_test

import (
	"context"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/rara-run/rara/executors/go/internal/scripted"
	"github.com/rara-run/rara/executors/go/rara"
	rarav1 "github.com/rara-run/rara/gen/go/rara/v1"
)

// obeying handlers leave a checkpoint and wait to be stopped.
func obeying(ctx context.Context, job *rara.Job[any]) (any, error) {
	_ = job.Progress(rara.Progress{Checkpoint: "half"})
	<-ctx.Done()
	if job.Input == "finish" {
		return rara.CancelReason(ctx), nil
	}
	return nil, ctx.Err()
}

func TestACancelIsConfirmedWhenTheHandlerHasEnded(t *testing.T) {
	t.Parallel()
	w := start(t, offer("k", obeying))
	w.session.Jobs(scripted.Job(1, "k", `1`), scripted.Job(2, "k", `"finish"`))
	w.session.Running(t, 1)
	w.session.Running(t, 2)
	w.session.Cancel(1, "CANCELLED", time.Minute)
	w.session.Cancel(1, "DEADLINE_EXCEEDED", time.Minute) // the first reason stays
	w.session.Cancel(2, "SIBLING_FAILED", time.Minute)
	cancelled := w.session.Ended(t, 1).GetCancelled()
	if cancelled.GetReason() != "CANCELLED" || string(cancelled.Checkpoint.GetData()) != `"half"` || cancelled.RunnerExit != nil {
		t.Errorf("got %v", cancelled)
	}
	if result := w.session.Succeeded(t, 2); string(result.GetOutput().GetData()) != `"SIBLING_FAILED"` {
		t.Errorf("what is done is done: %v", result)
	}
	receipts := map[int64]int{}
	for _, frame := range w.session.Frames() {
		for _, token := range frame.GetCancelReceipts().GetLeaseTokens() {
			receipts[token]++
		}
	}
	if receipts[1] != 1 || receipts[2] != 1 {
		t.Errorf("receipts %v", receipts)
	}
}

func TestACancelBeforeTheHandlerRunsNothing(t *testing.T) {
	t.Parallel()
	w := start(t, offer("k", func(context.Context, *rara.Job[any]) (any, error) { panic("reached") }))
	w.session.Deaf()
	w.session.Jobs(scripted.Job(1, "k", `1`))
	w.session.Event(t, 1, "accepted", func(e *rarav1.ProgressEvent) bool { return e.GetAccepted() != nil })
	w.session.Cancel(1, "CANCELLED", time.Minute)
	if got := w.session.Ended(t, 1).GetCancelled(); got.GetReason() != "CANCELLED" {
		t.Errorf("got %v", got)
	}
}

func TestAHandlerThatIgnoresItsContextIsReportedAndFenced(t *testing.T) {
	t.Parallel()
	release, late := make(chan struct{}), make(chan error, 2)
	w := start(t, offer("k", func(ctx context.Context, job *rara.Job[any]) (any, error) {
		<-release
		late <- job.Progress(rara.Progress{Message: "late"})
		_, err := rara.Once(ctx, job.AnyJob, "late", func(context.Context) (int, error) { return 1, nil })
		late <- err
		return "late", nil
	}), func(o *rara.Options) { o.Slots = 1 })
	w.session.Credit(t, 1)
	w.session.Jobs(scripted.Job(1, "k", `1`))
	w.session.Running(t, 1)
	w.session.Cancel(1, "CANCELLED", 50*time.Millisecond)
	if got := w.session.Ended(t, 1).GetCancelled(); got.GetReason() != "CANCELLED" {
		t.Errorf("got %v", got)
	}
	until(t, "readiness that tells of the leak", func() bool { return !w.executor.IsReady() })
	if !strings.Contains(w.logs.String(), "handler.leaked") {
		t.Error("nothing is logged of it")
	}
	w.session.Until(t, "two heartbeats", beatsSince(len(w.session.Frames()), 2))
	for _, frame := range w.session.Frames() {
		if frame.GetCredit().GetLimit() > 1 {
			t.Error("its slot is not free")
		}
	}
	count := len(scripted.Events(w.session.Frames(), 1))
	close(release)
	for range 2 {
		if err := receive(t, "late report", late); err == nil {
			t.Error("a late report is refused")
		}
	}
	w.session.Credit(t, 2)
	until(t, "readiness", w.executor.IsReady)
	if events := scripted.Events(w.session.Frames(), 1); len(events) != count {
		t.Errorf("what is late is dropped: %v", events[count:])
	}
}

func TestWithoutARenewalTheHandlerIsFencedAtFiveSixths(t *testing.T) {
	t.Parallel()
	const lease = 6 * time.Second
	stopped := make(chan time.Time, 1)
	w := run(t, offer("k", func(ctx context.Context, _ *rara.Job[any]) (any, error) {
		<-ctx.Done()
		stopped <- time.Now()
		return nil, ctx.Err()
	}))
	w.session = w.scheduler.Session(t)
	w.session.Stale() // the scheduler lives, and its database does not
	w.session.Welcome(scripted.Terms{Heartbeat: 100 * time.Millisecond, Silence: 20 * time.Second})
	job := scripted.Job(1, "k", `1`)
	job.LeaseDuration = durationpb.New(lease)
	sent := time.Now()
	w.session.Jobs(job)
	failed := w.session.Failed(t, 1)
	after := receive(t, "stop", stopped).Sub(sent)
	if failed.GetCode() != "LEASE_EXPIRED" || !strings.HasPrefix(failed.Message, "no heartbeat was renewed for 5.") {
		t.Errorf("got %v", failed)
	}
	if after < lease*5/6 || after > lease {
		t.Errorf("stopped after %v of a lease of %v", after, lease)
	}
}

func TestRenewalsKeepTheHandlerRunning(t *testing.T) {
	t.Parallel()
	w := run(t, offer("k", obeying))
	w.session = w.scheduler.Session(t)
	w.session.Welcome(scripted.Terms{Heartbeat: 200 * time.Millisecond, Silence: 20 * time.Second})
	job := scripted.Job(1, "k", `1`)
	job.LeaseDuration = durationpb.New(3 * time.Second)
	w.session.Jobs(job)
	w.session.Running(t, 1)
	w.session.Until(t, "more than a lease's worth of heartbeats", beatsSince(len(w.session.Frames()), 20))
	w.session.Cancel(1, "CANCELLED", time.Minute)
	if got := w.session.Ended(t, 1).GetCancelled(); got == nil {
		t.Error("it was fenced although it was renewed")
	}
}

func TestALeaseThatPassedOnIsLeftWithoutAWord(t *testing.T) {
	t.Parallel()
	ended := make(chan string, 1)
	w := start(t, offer("k", func(ctx context.Context, _ *rara.Job[any]) (any, error) {
		<-ctx.Done()
		ended <- rara.CancelReason(ctx)
		return "mine", nil
	}))
	w.session.Jobs(scripted.Job(1, "k", `1`))
	w.session.Running(t, 1)
	count := len(scripted.Events(w.session.Frames(), 1))
	w.session.Send(&rarav1.ConnectResponse{Frame: &rarav1.ConnectResponse_HeartbeatAck{
		HeartbeatAck: &rarav1.HeartbeatAck{Number: 1, LostLeaseTokens: []int64{1}}}})
	if got := receive(t, "stop", ended); got != "LEASE_LOST" {
		t.Errorf("got %q", got)
	}
	w.session.Credit(t, 5)
	if events := scripted.Events(w.session.Frames(), 1); len(events) != count {
		t.Errorf("it says %v", events[count:])
	}
}

func TestALostJobSaysNothingWhileItStops(t *testing.T) {
	t.Parallel()
	reported := make(chan error, 2)
	w := start(t, offer("k", func(ctx context.Context, job *rara.Job[any]) (any, error) {
		<-ctx.Done()
		reported <- job.Progress(rara.Progress{Message: "late"})
		_, err := rara.Once(context.Background(), job.AnyJob, "late", func(context.Context) (int, error) { return 1, nil })
		reported <- err
		return nil, ctx.Err()
	}))
	w.session.Jobs(scripted.Job(1, "k", `1`))
	w.session.Running(t, 1)
	count := len(scripted.Events(w.session.Frames(), 1))
	w.session.Acks(&rarav1.EventAcks{Refusals: []*rarav1.EventRefusal{{LeaseToken: 1, Sequence: 2, Code: "LEASE_LOST"}}})
	for range 2 {
		if err := receive(t, "report", reported); err == nil {
			t.Error("a lost job is heard")
		}
	}
	w.session.Credit(t, 5)
	if events := scripted.Events(w.session.Frames(), 1); len(events) != count {
		t.Errorf("it says %v", events[count:])
	}
}

func TestTheExecutorsOwnTimersAreASecondLine(t *testing.T) {
	t.Parallel()
	short := durationpb.New(time.Second)
	for reason, set := range map[string]func(*rarav1.JobRequest){
		"DEADLINE_EXCEEDED": func(job *rarav1.JobRequest) { job.TimeRemaining = short },
		"ATTEMPT_TIMEOUT":   func(job *rarav1.JobRequest) { job.AttemptTimeout = short },
		"PROGRESS_TIMEOUT":  func(job *rarav1.JobRequest) { job.ProgressTimeout = short },
	} {
		t.Run(reason, func(t *testing.T) {
			t.Parallel()
			deadlines := make(chan bool, 1)
			w := start(t, offer("k", func(ctx context.Context, job *rara.Job[any]) (any, error) {
				_, has := ctx.Deadline()
				deadlines <- has
				for range 20 { // reports keep the progress timeout away
					_ = job.Progress(rara.Progress{Message: "still here"})
					time.Sleep(75 * time.Millisecond)
				}
				<-ctx.Done()
				return nil, ctx.Err()
			}))
			job := scripted.Job(1, "k", `1`)
			set(job)
			w.session.Jobs(job)
			if got := w.session.Ended(t, 1).GetCancelled(); got.GetReason() != reason {
				t.Errorf("got %v", got)
			}
			if has := receive(t, "deadline", deadlines); has != (reason != "PROGRESS_TIMEOUT") {
				t.Errorf("the context has a deadline: %v", has)
			}
		})
	}
}

func TestAnEffectIsAnEventLikeAnyOther(t *testing.T) {
	t.Parallel()
	w := start(t, offer("k", func(ctx context.Context, job *rara.Job[any]) (any, error) {
		for _, name := range []string{"a", "b", "c", "d", "e"} {
			if _, err := rara.Once(ctx, job.AnyJob, name, func(context.Context) (int, error) { return 1, nil }); err != nil {
				return nil, err
			}
			time.Sleep(300 * time.Millisecond)
		}
		return "moved", nil
	}))
	job := scripted.Job(1, "k", `1`)
	job.ProgressTimeout = durationpb.New(time.Second)
	w.session.Jobs(job)
	if result := w.session.Succeeded(t, 1); result == nil {
		t.Errorf("got %v", w.session.Ended(t, 1))
	}
}

func TestAStopLetsJobsFinishAndSaysGoodbye(t *testing.T) {
	t.Parallel()
	release := make(chan struct{})
	w := start(t, offer("k", func(context.Context, *rara.Job[any]) (any, error) { <-release; return "done", nil }),
		func(o *rara.Options) { o.Stop = 10 * time.Second })
	w.session.Jobs(scripted.Job(1, "k", `1`))
	w.session.Running(t, 1)
	w.stop()
	w.session.Until(t, "Drain", func(frames []*rarav1.ConnectRequest) bool {
		for _, frame := range frames {
			if within := frame.GetDrain().GetFinishWithin(); within != nil {
				return within.AsDuration() > 0 && within.AsDuration() < 10*time.Second
			}
		}
		return false
	})
	w.session.Jobs(scripted.Job(2, "k", `1`))
	w.session.Until(t, "rejection", func(frames []*rarav1.ConnectRequest) bool {
		for _, frame := range frames {
			for _, rejection := range frame.GetRejections().GetRejections() {
				return rejection.Code == "EXECUTOR_SHUTDOWN"
			}
		}
		return false
	})
	close(release)
	w.session.Succeeded(t, 1)
	receive(t, "end of the call", w.session.Done)
	if err := receive(t, "end", w.ended); err != nil {
		t.Error(err)
	}
	w.ended <- nil
	frames := w.session.Frames()
	if frames[len(frames)-1].GetGoodbye() == nil {
		t.Errorf("the last word is %v", frames[len(frames)-1])
	}
}

func TestAtTheEndOfADrainWhatRunsIsHandedBack(t *testing.T) {
	t.Parallel()
	w := start(t, offer("k", obeying))
	w.session.Jobs(scripted.Job(1, "k", `1`))
	w.session.Running(t, 1)
	w.session.Send(&rarav1.ConnectResponse{Frame: &rarav1.ConnectResponse_Drain{
		Drain: &rarav1.Drain{FinishWithin: durationpb.New(100 * time.Millisecond)}}})
	cancelled := w.session.Ended(t, 1).GetCancelled()
	if cancelled.GetReason() != "EXECUTOR_SHUTDOWN" || string(cancelled.Checkpoint.GetData()) != `"half"` {
		t.Errorf("got %v", cancelled)
	}
	if err := receive(t, "end", w.ended); err != nil {
		t.Error(err)
	}
	w.ended <- nil
}

func TestTheStopBoundHoldsWithoutAScheduler(t *testing.T) {
	t.Parallel()
	w := run(t, offer("k", obeying), func(o *rara.Options) { o.Scheduler = "127.0.0.1:1"; o.Stop = 500 * time.Millisecond })
	began := time.Now()
	w.stop()
	if err := receive(t, "end", w.ended); err != nil {
		t.Error(err)
	}
	w.ended <- nil
	if took := time.Since(began); took > 3*time.Second {
		t.Errorf("took %v", took)
	}
	if said := `"event":"drain.ended","finished":0,"handed_back":0,"lost":0,"spent":0,`; strings.Count(w.logs.String(), said) != 1 {
		t.Errorf("said %s", w.logs.String())
	}
}
