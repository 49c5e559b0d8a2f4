package beats_test

import (
	"reflect"
	"testing"
	"time"

	"github.com/rara-run/rara/executors/go/internal/beats"
	rarav1 "github.com/rara-run/rara/gen/go/rara/v1"
)

const s = time.Second

func TestOnlyACommittedRenewalRenews(t *testing.T) {
	t.Parallel()
	h := beats.New(5*s, 15*s, 100*s)
	h.Compose([]int64{2, 1}, 101*s)
	h.Compose([]int64{1}, 106*s)
	if _, ok := h.Answer(&rarav1.HeartbeatAck{Number: 1}); ok {
		t.Error("an answer alone shows that the scheduler lives, not that the database does")
	}
	got, ok := h.Answer(&rarav1.HeartbeatAck{Number: 2, Renewed: 1})
	if want := (beats.Renewal{SentAt: 101 * s, Tokens: []int64{1, 2}}); !ok || !reflect.DeepEqual(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
	if _, ok := h.Answer(&rarav1.HeartbeatAck{Number: 2, Renewed: 1}); ok {
		t.Error("the same renewal counts once")
	}
	if next := h.Compose(nil, 111*s); next.Number != 3 || next.Answered != 2 {
		t.Errorf("got %v", next)
	}
	if _, ok := h.Answer(&rarav1.HeartbeatAck{Number: 9, Renewed: 9}); ok {
		t.Error("a heartbeat that was never sent renews nothing")
	}
}

func TestSilenceAndReadiness(t *testing.T) {
	t.Parallel()
	h := beats.New(5*s, 15*s, 100*s)
	if !h.IsReady(110*s) || h.IsReady(111*s) {
		t.Error("Welcome holds for two intervals")
	}
	h.Compose(nil, 105*s)
	h.Answer(&rarav1.HeartbeatAck{Number: 1})
	if !h.IsReady(115*s) || h.IsReady(116*s) {
		t.Error("an answer counts from the sending of its heartbeat")
	}
	h.Heard(120 * s)
	if h.IsSilent(135*s) || !h.IsSilent(135*s+1) {
		t.Error("silence counts from the last frame")
	}
}
