package engine

import (
	"fmt"

	"google.golang.org/protobuf/proto"

	"github.com/rara-run/rara/executors/go/internal/codes"
	rarav1 "github.com/rara-run/rara/gen/go/rara/v1"
)

// outcome is what a handler said. abandoned: it has said nothing, and is not waited for any longer.
type outcome struct {
	output    []byte
	failed    *Failed
	abandoned bool
}

// lastEvent of a job, by what its handler said and why it was stopped.
func (s *Supervisor) lastEvent(job *Job, out outcome) *rarav1.ProgressEvent {
	lease, why := job.lease(), job.stop
	var exit *rarav1.RunnerExit
	if out.failed != nil {
		exit = out.failed.Exit
	}
	switch {
	// Refused by the scheduler, or by ourselves: what it went on to do rests on what is not stored.
	case why != nil && (job.refusedSequence > 0 || why.reason == codes.SecretInPayload):
		return s.events.failed(lease, &Failed{Code: why.reason, Message: why.message, Exit: exit})
	case out.failed == nil && !out.abandoned: // what is done is done, also if it was asked to stop
		return s.fitting(job, s.events.succeeded(lease, out.output, job.artifacts))
	case why != nil && why.kind == stopFail:
		return s.events.failed(lease, &Failed{Code: why.reason, Message: why.message, Exit: exit})
	case why != nil:
		return s.events.cancelled(lease, why.reason, job.checkpoint, exit)
	default:
		return s.fitting(job, s.events.failed(lease, out.failed))
	}
}

// fitting replaces an event that would not fit into a frame: sent, it would end the session with all its jobs.
func (s *Supervisor) fitting(job *Job, event *rarav1.ProgressEvent) *rarav1.ProgressEvent {
	const envelope = 1 << 10
	size := proto.Size(event)
	if size+envelope <= s.maxFrameBytes {
		return event
	}
	return s.events.failed(job.lease(), &Failed{Code: codes.PayloadTooLarge, Message: fmt.Sprintf(
		"result and manifest have %d bytes, a frame holds %d: use fewer or smaller artifacts and metadata",
		size, s.maxFrameBytes)})
}
