package rara_test

import (
	"bytes"
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/rara-run/rara/executors/go/internal/scripted"
	"github.com/rara-run/rara/executors/go/rara"
	rarav1 "github.com/rara-run/rara/gen/go/rara/v1"
)

// reversing puts its input backwards, as an upload and, if small, inline.
func reversing(ctx context.Context, job *rara.Job[any]) (any, error) {
	source, err := job.Artifacts.Open(ctx, "corpus")
	if err != nil {
		return nil, err
	}
	data, err := source.ReadBytes()
	if err != nil {
		return nil, err
	}
	again, err := job.Artifacts.Open(ctx, "corpus")
	if err != nil || again.Path != source.Path {
		return nil, rara.Terminal("OPENED_TWICE", "%v", err)
	}
	folder, err := job.Scratch()
	if err != nil {
		return nil, err
	}
	path := filepath.Join(folder, "reversed")
	for i, j := 0, len(data)-1; i < j; i, j = i+1, j-1 {
		data[i], data[j] = data[j], data[i]
	}
	if err := os.WriteFile(path, data, 0o600); err != nil {
		return nil, err
	}
	_, err = job.Artifacts.PutFile(ctx, "reversed", path,
		rara.Output{Type: "dataset", Metadata: map[string]int{"bytes": len(data)}, DerivedFrom: []string{"corpus"}})
	return folder, err
}

func withCorpus(token int64, digest *rarav1.Digest, inline []byte) *rarav1.JobRequest {
	job := scripted.Job(token, "k", `1`)
	job.InputArtifacts = []*rarav1.Artifact{{Name: "corpus", Digest: digest, Inline: inline, Type: "dataset"}}
	return job
}

func reversed(data []byte) []byte {
	out := bytes.Clone(data)
	for i, j := 0, len(out)-1; i < j; i, j = i+1, j-1 {
		out[i], out[j] = out[j], out[i]
	}
	return out
}

func TestArtifactsAreFetchedVerifiedAndStored(t *testing.T) {
	t.Parallel()
	w := start(t, offer("k", reversing))
	data := bytes.Repeat([]byte("0123456789abcdef"), 100_000)
	w.scheduler.Blobs.CutAfter(700_000) // the upload goes on where it was cut
	w.session.Jobs(withCorpus(1, w.scheduler.Blobs.Put(data), nil))
	result := w.session.Succeeded(t, 1)
	if result == nil {
		t.Fatalf("got %v", w.session.Ended(t, 1))
	}
	artifact := result.Manifest.Artifacts[0]
	if artifact.Name != "reversed" || artifact.Type != "dataset" || artifact.MediaType != "application/octet-stream" ||
		string(artifact.Metadata.Data) != `{"bytes":1600000}` || len(artifact.Inline) != 0 ||
		artifact.DerivedFrom[0].Sha256 != scripted.DigestOf(data).Sha256 ||
		result.Consumed[0].Sha256 != scripted.DigestOf(data).Sha256 {
		t.Errorf("got %v", result)
	}
	if !bytes.Equal(w.scheduler.Blobs.Get(artifact.Digest), reversed(data)) {
		t.Error("other bytes are stored")
	}
	w.session.Jobs(withCorpus(2, scripted.DigestOf(data), nil))
	w.session.Succeeded(t, 2)
	if writes, reads := w.scheduler.Blobs.Counts(); writes != 1 || reads != 1 {
		t.Errorf("%d writes and %d reads: the second job needs none", writes, reads)
	}
	folder := strings.Trim(string(result.GetOutput().GetData()), `"`)
	until(t, "removal of the scratch folder", func() bool { _, err := os.Stat(folder); return os.IsNotExist(err) })
}

func TestSmallArtifactsTravelInline(t *testing.T) {
	t.Parallel()
	w := start(t, offer("k", reversing))
	w.session.Jobs(withCorpus(1, scripted.DigestOf([]byte("abc")), []byte("abc")))
	artifact := w.session.Succeeded(t, 1).GetManifest().GetArtifacts()[0]
	if string(artifact.Inline) != "cba" || artifact.Digest.Sha256 != scripted.DigestOf([]byte("cba")).Sha256 {
		t.Errorf("got %v", artifact)
	}
}

func TestWrongAndMissingInputsFailWithTheirCode(t *testing.T) {
	t.Parallel()
	w := start(t, offer("k", reversing))
	large := bytes.Repeat([]byte("x"), 50_000)
	flipped := bytes.Clone(large)
	flipped[7] = 'y'
	wrong := scripted.DigestOf(large)
	w.scheduler.Blobs.PutAs(wrong, flipped)
	for i, test := range []struct {
		job  *rarav1.JobRequest
		code string
	}{
		{withCorpus(1, wrong, nil), "ARTIFACT_MISMATCH"},
		{withCorpus(2, scripted.DigestOf([]byte("elsewhere")), nil), "ARTIFACT_MISSING"},
		{withCorpus(3, scripted.DigestOf([]byte("abc")), []byte("abd")), "ARTIFACT_MISMATCH"},
		{scripted.Job(4, "k", `1`), "ARTIFACT_MISSING"},
	} {
		w.session.Jobs(test.job)
		if got := w.session.Failed(t, int64(i+1)); got.GetCode() != test.code || got.Retryable != nil {
			t.Errorf("%d: got %v, want %s", i+1, got, test.code)
		}
	}
}

func TestBlobsThatTheSchedulerMissesAreStoredAgain(t *testing.T) {
	t.Parallel()
	w := start(t, offer("k", reversing))
	data := bytes.Repeat([]byte("0123456789abcdef"), 2_000)
	w.session.Deaf()
	w.session.Jobs(withCorpus(1, w.scheduler.Blobs.Put(data), nil))
	w.session.Event(t, 1, "accepted", func(e *rarav1.ProgressEvent) bool { return e.GetAccepted() != nil })
	w.session.Acks(&rarav1.EventAcks{Acks: []*rarav1.EventAck{{LeaseToken: 1, Sequence: 1}}})
	event := w.session.Ended(t, 1)
	digest := event.GetSucceeded().GetManifest().GetArtifacts()[0].Digest
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
	w.session.Acks(&rarav1.EventAcks{Refusals: []*rarav1.EventRefusal{{
		LeaseToken: 1, Sequence: event.Sequence, Code: "BLOBS_MISSING",
		Digests: []*rarav1.Digest{scripted.DigestOf([]byte("not ours"))}}}})
	failed := w.session.Event(t, 1, "failed", func(e *rarav1.ProgressEvent) bool { return e.GetFailed() != nil })
	if failed.GetFailed().Code != "ARTIFACT_MISMATCH" || failed.Sequence != event.Sequence {
		t.Errorf("got %v", failed)
	}
}

func TestAnArtifactNameIsUsedOnce(t *testing.T) {
	t.Parallel()
	w := start(t, offer("k", func(ctx context.Context, job *rara.Job[any]) (any, error) {
		if _, err := job.Artifacts.PutBytes(ctx, "a", []byte("1"), rara.Output{}); err != nil {
			return nil, err
		}
		if _, err := job.Artifacts.PutBytes(ctx, "a", []byte("2"), rara.Output{}); err == nil {
			return nil, rara.Terminal("NAME_TAKEN", "twice")
		}
		return job.Artifacts.Names(), nil
	}))
	if result := w.job(t, 1, "k", `1`).GetSucceeded(); len(result.GetManifest().GetArtifacts()) != 1 {
		t.Errorf("got %v", result)
	}
}
