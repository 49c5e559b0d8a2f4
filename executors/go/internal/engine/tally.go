package engine

import (
	"log/slog"
	"math"
	"time"

	"github.com/rara-run/rara/executors/go/internal/codes"
	rarav1 "github.com/rara-run/rara/gen/go/rara/v1"
)

// tally is what became of the jobs of a drain. Nothing counts as told before the scheduler has said that it knows: an
// event by its acknowledgement, a rejection by the end of the session that our Goodbye asked for. finished: ended by
// themselves, failures included. spent: of finished and lost, what cost its step a failure.
type tally struct {
	finished, handedBack, lost, spent int
	rejected                          map[int64]bool
}

// stored takes in that the last event of a job is acknowledged.
func (t *tally) stored(event *rarav1.ProgressEvent) {
	switch event := event.Event.(type) {
	case *rarav1.ProgressEvent_Cancelled:
		switch event.Cancelled.Reason {
		case codes.ExecutorShutdown:
			t.handedBack++
			return
		case codes.AttemptTimeout, codes.ProgressTimeout: // cancels of the attempt alone, judged as failures
			t.spent++
		}
	case *rarav1.ProgressEvent_Failed:
		switch event.Failed.Code {
		case "DISPATCH_LOST", codes.ExecutorShutdown, codes.UnsupportedKind, codes.NoCapacity: // free of cost
		default:
			t.spent++
		}
	}
	t.finished++
}

// passedOn takes in that a lease is somebody else's, or nobody's, while its job was here.
func (t *tally) passedOn() {
	t.lost++
	t.spent++
}

// close is the end. left: jobs that are still held. wasHeard: our last word. givesBack: it was about them, too.
func (t *tally) close(left int, wasHeard, givesBack bool) {
	rejected := len(t.rejected)
	t.rejected = nil
	known := 0
	if wasHeard {
		known = rejected
		if givesBack {
			known += left
		}
	}
	t.handedBack += known
	t.lost += rejected + left - known
	t.spent += rejected + left - known
}

// say writes the line that a drain ends with.
func (t *tally) say(logger *slog.Logger, duration time.Duration) {
	logger.Info("drain.ended", "finished", t.finished, "handed_back", t.handedBack, "lost", t.lost, "spent", t.spent,
		"duration_s", math.Round(duration.Seconds()*1000)/1000)
}
