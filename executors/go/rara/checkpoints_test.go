package rara_test

import (
	"bytes"
	"context"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/rara-run/rara/executors/go/internal/scripted"
	"github.com/rara-run/rara/executors/go/rara"
	rarav1 "github.com/rara-run/rara/gen/go/rara/v1"
)

// saving keeps two artifacts with its checkpoint, carries those of the checkpoint before, and waits to be stopped.
func saving(ctx context.Context, job *rara.Job[any]) (any, error) {
	kept := job.Artifacts.OfCheckpoint()
	for _, name := range []string{"weights", "log"} {
		one, err := job.Artifacts.Keep(ctx, name, strings.NewReader(strings.Repeat(name, 5000)))
		if err != nil {
			return nil, err
		}
		kept = append(kept, one)
	}
	if err := job.Progress(rara.Progress{Checkpoint: "half", Artifacts: kept}); err != nil {
		return nil, err
	}
	<-ctx.Done()
	return nil, context.Cause(ctx)
}

func withArtifacts(event *rarav1.ProgressEvent) bool {
	return len(event.GetProgress().GetCheckpointArtifacts()) > 0
}

func names(artifacts []*rarav1.Artifact) string {
	var names []string
	for _, artifact := range artifacts {
		names = append(names, artifact.Name)
	}
	return strings.Join(names, " ")
}

func TestACheckpointsBytesAreStoredAndLeaveWithACancelledJob(t *testing.T) {
	t.Parallel()
	w := start(t, ownProcess()) // over the pipe of a child, too
	before := w.scheduler.Blobs.Put([]byte("before"))
	request := scripted.Job(1, "save", `1`)
	request.Checkpoint = &rarav1.Payload{Data: []byte(`"old"`)}
	request.CheckpointArtifacts = []*rarav1.Artifact{{Name: "old", Digest: before}}
	w.session.Jobs(request)
	progress := w.session.Event(t, 1, "checkpoint", withArtifacts).GetProgress()
	if got := names(progress.CheckpointArtifacts); got != "old weights log" {
		t.Fatalf("got %s", got)
	}
	stored := w.scheduler.Blobs.Get(progress.CheckpointArtifacts[1].Digest)
	if !bytes.Equal(stored, bytes.Repeat([]byte("weights"), 5000)) || progress.CheckpointArtifacts[1].Type != "checkpoint" {
		t.Errorf("got %d bytes of %v", len(stored), progress.CheckpointArtifacts[1])
	}
	w.session.Cancel(1, "CANCELLED", time.Minute)
	cancelled := w.session.Ended(t, 1).GetCancelled()
	if string(cancelled.GetCheckpoint().GetData()) != `"half"` || names(cancelled.CheckpointArtifacts) != "old weights log" {
		t.Errorf("got %v", cancelled)
	}
}

func TestACheckpointsMissingBlobIsStoredAgain(t *testing.T) {
	t.Parallel()
	w := start(t, offer("k", saving))
	w.session.Deaf()
	w.session.Jobs(scripted.Job(1, "k", `1`))
	w.session.Event(t, 1, "accepted", func(e *rarav1.ProgressEvent) bool { return e.GetAccepted() != nil })
	w.session.Acks(&rarav1.EventAcks{Acks: []*rarav1.EventAck{{LeaseToken: 1, Sequence: 1}}})
	event := w.session.Event(t, 1, "checkpoint", withArtifacts)
	digest := event.GetProgress().CheckpointArtifacts[0].Digest
	w.scheduler.Blobs.Lose(digest)
	w.session.Acks(&rarav1.EventAcks{Refusals: []*rarav1.EventRefusal{{
		LeaseToken: 1, Sequence: event.Sequence, Code: "BLOBS_MISSING", Digests: []*rarav1.Digest{digest}}}})
	w.session.Until(t, "the same event again", func(frames []*rarav1.ConnectRequest) bool {
		seen := 0
		for _, again := range scripted.Events(frames, 1) {
			if again.String() == event.String() {
				seen++
			}
		}
		return seen == 2
	})
	if w.scheduler.Blobs.Get(digest) == nil {
		t.Error("it was not stored again")
	}
	w.session.Cancel(1, "CANCELLED", time.Minute)
	w.session.Ended(t, 1)
}

// TestACheckpointsBytesStayUntilItIsStored: a report does not wait, so the handler may be far ahead of a refusal.
func TestACheckpointsBytesStayUntilItIsStored(t *testing.T) {
	t.Parallel()
	w := start(t, offer("k", func(ctx context.Context, job *rara.Job[any]) (any, error) {
		for epoch := range 3 {
			one, err := job.Artifacts.Keep(ctx, "weights", strings.NewReader(strings.Repeat(strconv.Itoa(epoch), 30_000)))
			if err != nil {
				return nil, err
			}
			if err := job.Progress(rara.Progress{Checkpoint: epoch, Artifacts: []*rara.KeptArtifact{one}}); err != nil {
				return nil, err
			}
		}
		<-ctx.Done()
		return nil, context.Cause(ctx)
	}))
	w.session.Deaf()
	w.session.Jobs(scripted.Job(1, "k", `1`))
	w.session.Event(t, 1, "accepted", func(e *rarav1.ProgressEvent) bool { return e.GetAccepted() != nil })
	w.session.Acks(&rarav1.EventAcks{Acks: []*rarav1.EventAck{{LeaseToken: 1, Sequence: 1}}})
	last := w.session.Event(t, 1, "third checkpoint", func(e *rarav1.ProgressEvent) bool {
		return withArtifacts(e) && string(e.GetProgress().Checkpoint.GetData()) == "2"
	})
	first := w.session.Event(t, 1, "first checkpoint", withArtifacts)
	digest := first.GetProgress().CheckpointArtifacts[0].Digest
	w.scheduler.Blobs.Lose(digest)
	w.session.Acks(&rarav1.EventAcks{Refusals: []*rarav1.EventRefusal{{
		LeaseToken: 1, Sequence: first.Sequence, Code: "BLOBS_MISSING", Digests: []*rarav1.Digest{digest}}}})
	w.session.Until(t, "the first checkpoint again", func(frames []*rarav1.ConnectRequest) bool {
		seen := 0
		for _, again := range scripted.Events(frames, 1) {
			if again.String() == first.String() {
				seen++
			}
		}
		return seen == 2
	})
	if w.scheduler.Blobs.Get(digest) == nil {
		t.Error("it was not stored again")
	}
	w.session.Acks(&rarav1.EventAcks{Acks: []*rarav1.EventAck{{LeaseToken: 1, Sequence: last.Sequence}}})
	w.session.Cancel(1, "CANCELLED", time.Minute)
	w.session.Ended(t, 1)
}

func TestWrongUsesOfACheckpointsArtifactsAreNamed(t *testing.T) {
	t.Parallel()
	w := start(t, offer("k", func(ctx context.Context, job *rara.Job[any]) (any, error) {
		_, missing := job.Artifacts.OpenCheckpoint(ctx, "none")
		_, named := job.Artifacts.Keep(ctx, "../a", strings.NewReader("x"))
		one := &rara.KeptArtifact{Name: "a", SHA256: strings.Repeat("0", 64)}
		alone := job.Progress(rara.Progress{Artifacts: []*rara.KeptArtifact{one}})
		foreign := job.Progress(rara.Progress{Checkpoint: 1, Artifacts: []*rara.KeptArtifact{one}})
		many := job.Progress(rara.Progress{Checkpoint: 1, Artifacts: make([]*rara.KeptArtifact, 65)})
		var said []string
		for _, err := range []error{missing, named, alone, foreign, many} {
			said = append(said, err.Error())
		}
		return said, nil
	}))
	said := string(w.job(t, 1, "k", `1`).GetSucceeded().GetOutput().GetData())
	for _, want := range []string{"ARTIFACT_MISSING", "ARTIFACT_INVALID", "artifacts belong to a checkpoint",
		"was not kept by this attempt", "65 artifacts of a checkpoint, the limit is 64"} {
		if !strings.Contains(said, want) {
			t.Errorf("no %q in %s", want, said)
		}
	}
}
