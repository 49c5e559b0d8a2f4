package outbox_test

import (
	"fmt"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/rara-run/rara/executors/go/internal/outbox"
	rarav1 "github.com/rara-run/rara/gen/go/rara/v1"
)

const ms = time.Millisecond

func accepted(token int64) *rarav1.ProgressEvent {
	return &rarav1.ProgressEvent{
		Lease: &rarav1.Lease{LeaseToken: token},
		Event: &rarav1.ProgressEvent_Accepted{Accepted: &rarav1.JobAccepted{}},
	}
}

func running(token int64) *rarav1.ProgressEvent {
	return &rarav1.ProgressEvent{
		Lease: &rarav1.Lease{LeaseToken: token},
		Event: &rarav1.ProgressEvent_Running{Running: &rarav1.JobRunning{}},
	}
}

func progress(token int64, message, checkpoint string) *rarav1.ProgressEvent {
	report := &rarav1.JobProgress{Message: message}
	if checkpoint != "" {
		report.Checkpoint = &rarav1.Payload{Data: []byte(checkpoint)}
	}
	return &rarav1.ProgressEvent{
		Lease: &rarav1.Lease{LeaseToken: token},
		Event: &rarav1.ProgressEvent_Progress{Progress: report},
	}
}

func failed(token int64) *rarav1.ProgressEvent {
	return &rarav1.ProgressEvent{
		Lease: &rarav1.Lease{LeaseToken: token},
		Event: &rarav1.ProgressEvent_Failed{Failed: &rarav1.JobError{}},
	}
}

// numbers of what Take gives, as "token.sequence".
func numbers(events []*rarav1.ProgressEvent) []string {
	var got []string
	for _, event := range events {
		got = append(got, fmt.Sprintf("%d.%d", event.Lease.LeaseToken, event.Sequence))
	}
	return got
}

func want(t *testing.T, got []string, wanted ...string) {
	t.Helper()
	if !reflect.DeepEqual(got, wanted) {
		t.Errorf("got %v, want %v", got, wanted)
	}
}

func TestRunningAndProgressWaitForCompanyAndAllElseDoesNot(t *testing.T) {
	t.Parallel()
	o := outbox.New()
	o.Add(running(1), 0, true)
	o.Add(progress(1, "a", ""), 2*ms, true)
	if due, ok := o.DueIn(4 * ms); !ok || due != 6*ms {
		t.Errorf("due in %v, %v", due, ok)
	}
	o.Add(accepted(2), 4*ms, true)
	if due, ok := o.DueIn(4 * ms); !ok || due != 0 {
		t.Errorf("due in %v, %v", due, ok)
	}
	want(t, numbers(o.Take(4*ms)), "1.1", "1.2", "2.1")
	if _, ok := o.DueIn(4 * ms); ok {
		t.Error("nothing is left")
	}
}

func TestFramesAreBoundedInEventsAndBytes(t *testing.T) {
	t.Parallel()
	o := outbox.New()
	for token := range int64(outbox.MaxBatchEvents + 1) {
		o.Add(progress(token, "p", ""), 0, true)
	}
	if due, _ := o.DueIn(0); due != 0 {
		t.Errorf("a full frame leaves at once, not in %v", due)
	}
	if got := len(o.Take(0)); got != outbox.MaxBatchEvents {
		t.Errorf("%d events", got)
	}
	o.Take(0)
	large := strings.Repeat("x", outbox.MaxBatchBytes-100)
	o.Add(progress(1000, large, ""), 0, true)
	o.Add(progress(1001, large, ""), 0, true)
	want(t, numbers(o.Take(0)), "1000.1")
	want(t, numbers(o.Take(0)), "1001.1")
}

func TestUnderPressureProgressIsMergedAndKeepsTheCheckpoint(t *testing.T) {
	t.Parallel()
	o := outbox.New()
	o.Add(progress(1, "a", `"kept"`), 0, false)
	if got := o.Add(progress(1, "b", ""), 0, false); got != 1 {
		t.Errorf("sequence %d", got)
	}
	o.Add(failed(1), 0, false)
	o.Add(progress(1, "late", ""), 0, false) // not over a terminal event
	events := o.Take(0)
	want(t, numbers(events), "1.1", "1.2", "1.3")
	if merged := events[0].GetProgress(); merged.Message != "b" || string(merged.Checkpoint.Data) != `"kept"` {
		t.Errorf("got %v", merged)
	}
}

func TestWhatMayBeStoredIsNeverMerged(t *testing.T) {
	t.Parallel()
	o := outbox.New()
	o.Add(progress(1, "a", ""), 0, true)
	o.Take(0)
	o.Rewind()
	o.Add(progress(1, "b", ""), 0, false)
	want(t, numbers(o.Take(0)), "1.1", "1.2")
}

func TestTheWindowHoldsBackUntilAcknowledged(t *testing.T) {
	t.Parallel()
	o := outbox.New()
	o.EventWindow = 2
	for token := int64(1); token <= 3; token++ {
		o.Add(accepted(token), 0, true)
	}
	want(t, numbers(o.Take(0)), "1.1", "2.1")
	if _, ok := o.DueIn(0); ok {
		t.Error("the window is full")
	}
	o.Acknowledge(1, 1, nil)
	want(t, numbers(o.Take(0)), "3.1")
}

func TestAcknowledgementsAreCumulativeAndAskForGaps(t *testing.T) {
	t.Parallel()
	o := outbox.New()
	for range 4 {
		o.Add(accepted(1), 0, true)
	}
	o.Take(7 * ms)
	done := o.Acknowledge(1, 3, []int64{2})
	if len(done) != 2 || done[0].Sequence() != 1 || done[1].Sequence() != 3 || done[0].FirstSentAt != 7*ms {
		t.Errorf("got %v", done)
	}
	want(t, numbers(o.Take(0)), "1.2")
	if last, acked := o.Sequences(1); last != 4 || acked != 3 {
		t.Errorf("sequences %d, %d", last, acked)
	}
	o.Acknowledge(1, 9, nil)
	if o.Holds(1) || !o.IsEmpty() || o.HeldBytes != 0 || o.InFlight != 0 {
		t.Errorf("something is left: %d bytes, %d in flight", o.HeldBytes, o.InFlight)
	}
}

func TestASessionsEndSendsAgainInOrderAndUnchanged(t *testing.T) {
	t.Parallel()
	o := outbox.New()
	for token := int64(1); token <= 3; token++ {
		o.Add(accepted(token), 0, true)
	}
	o.Take(0)
	o.Add(failed(2), 0, true)
	o.Acknowledge(1, 1, nil)
	o.Rewind()
	want(t, numbers(o.Take(0)), "2.1", "3.1", "2.2")
}

func TestARefusedEventIsHeldResentOrReplaced(t *testing.T) {
	t.Parallel()
	o := outbox.New()
	for range 3 {
		o.Add(accepted(1), 0, true)
	}
	o.Take(0)
	if o.Hold(1, 9) || !o.Hold(1, 2) {
		t.Error("only what is here can be held")
	}
	o.Rewind()
	want(t, numbers(o.Take(0)), "1.1", "1.3")
	o.Resend(1, 2)
	want(t, numbers(o.Take(0)), "1.2")
	o.Hold(1, 2)
	o.Replace(failed(1), 2)
	events := o.Take(0)
	want(t, numbers(events), "1.2")
	if events[0].GetFailed() == nil {
		t.Errorf("got %v", events[0])
	}
	if last, _ := o.Sequences(1); last != 2 {
		t.Errorf("what came after it is dropped, the last is %d", last)
	}
}

func TestADroppedLeaseSaysNothingMore(t *testing.T) {
	t.Parallel()
	o := outbox.New()
	o.Add(accepted(1), 0, true)
	o.Add(accepted(2), 0, true)
	o.Drop(1)
	want(t, numbers(o.Take(0)), "2.1")
	if o.InFlight != 1 {
		t.Errorf("%d in flight", o.InFlight)
	}
}

func TestALeaseWithoutAStreamWaitsOutsideOfTheWindow(t *testing.T) {
	t.Parallel()
	o := outbox.New()
	o.EventWindow = 3
	o.Add(accepted(1), 0, true)
	o.Add(accepted(2), 0, true)
	o.Take(0)
	o.Add(progress(1, "a", ""), 0, true)
	o.Pause(1)
	o.Add(progress(1, "b", ""), 0, true) // merged into what waits
	o.Add(failed(1), 0, true)
	if o.InFlight != 1 {
		t.Errorf("%d in flight", o.InFlight)
	}
	if _, ok := o.DueIn(0); ok {
		t.Error("nothing of it can be sent")
	}
	o.Resume(1)
	events := o.Take(0)
	want(t, numbers(events), "1.1", "1.2")
	if events[1].GetProgress().Message != "b" {
		t.Errorf("got %v", events[1])
	}
	o.Acknowledge(1, 2, nil)
	want(t, numbers(o.Take(0)), "1.3")
}
