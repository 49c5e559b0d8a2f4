package rara_test

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/rara-run/rara/executors/go/internal/scripted"
	"github.com/rara-run/rara/executors/go/rara"
	rarav1 "github.com/rara-run/rara/gen/go/rara/v1"
)

// ownProcess is what the children of this test program can run.
func ownProcess() *rara.Registry {
	registry := rara.NewRegistry()
	for kind, handler := range map[string]rara.Handler[any, any]{
		"all":       allOfIt,
		"obey":      obeying,
		"save":      saving,
		"ignore":    ignoring,
		"panic":     func(context.Context, *rara.Job[any]) (any, error) { panic("caught") },
		"die":       func(context.Context, *rara.Job[any]) (any, error) { os.Exit(7); return nil, nil },
		"goroutine": func(context.Context, *rara.Job[any]) (any, error) { go panic("nobody catches it"); select {} },
		"fail":      failing(rara.Terminal("TOOL_FAILED", "with %s", secret)),
	} {
		rara.Register(registry, kind, "1.0.0", handler, rara.OwnProcess())
	}
	return registry
}

// allOfIt uses everything that a job has.
func allOfIt(ctx context.Context, job *rara.Job[any]) (any, error) {
	source, err := job.Artifacts.Open(ctx, "corpus")
	if err != nil {
		return nil, err
	}
	data, err := source.ReadBytes()
	if err != nil {
		return nil, err
	}
	job.Log.Info("in a child", "secret", job.Secrets["key"])
	if err := job.Progress(rara.Progress{Fraction: new(0.0), Message: "began", Checkpoint: map[string]int{"n": 1}}); err != nil {
		return nil, err
	}
	if _, err := job.Artifacts.PutBytes(ctx, "copy", data, rara.Output{DerivedFrom: []string{"corpus"}}); err != nil {
		return nil, err
	}
	once, err := rara.Once(ctx, job.AnyJob, "effect", func(context.Context) (int, error) { return 5, nil })
	if err != nil {
		return nil, err
	}
	_, taken := job.Artifacts.Open(ctx, "nothing")
	_, hasEnd := job.EndsAt()
	return []any{once, job.Secrets["key"] == secret, os.Getpid() != os.Getppid(), taken != nil, hasEnd}, nil
}

// ignoring starts a program, says its number, and waits.
func ignoring(_ context.Context, job *rara.Job[any]) (any, error) {
	sleeper := exec.Command("sleep", "600")
	if err := sleeper.Start(); err != nil {
		return nil, err
	}
	numbers := strconv.Itoa(os.Getpid()) + " " + strconv.Itoa(sleeper.Process.Pid)
	if err := job.Progress(rara.Progress{Message: numbers}); err != nil {
		return nil, err
	}
	time.Sleep(10 * time.Minute)
	return nil, nil
}

func TestAHandlerInAProcessHasAllThatOthersHave(t *testing.T) {
	t.Parallel()
	folder := t.TempDir()
	if err := os.WriteFile(filepath.Join(folder, "api-key"), []byte(secret), 0o600); err != nil {
		t.Fatal(err)
	}
	w := start(t, ownProcess(), func(o *rara.Options) { o.SecretsDir = folder })
	data := []byte(strings.Repeat("x", 50_000))
	job := withCorpus(1, w.scheduler.Blobs.Put(data), nil)
	job.Kind = "all"
	job.Secrets = map[string]*rarav1.SecretRef{"key": {Provider: "file", Name: "api-key"}}
	w.session.Jobs(job)
	result := w.session.Succeeded(t, 1)
	if got := string(result.GetOutput().GetData()); got != `[5,true,true,true,false]` {
		t.Fatalf("got %s of %v", got, w.session.Ended(t, 1))
	}
	artifact := result.Manifest.Artifacts[0]
	if artifact.Digest.Sha256 != scripted.DigestOf(data).Sha256 || len(artifact.DerivedFrom) != 1 {
		t.Errorf("got %v", artifact)
	}
	progress := scripted.Events(w.session.Frames(), 1)[2].GetProgress()
	if progress.Fraction == nil || *progress.Fraction != 0 || progress.Message != "began" ||
		string(progress.Checkpoint.GetData()) != `{"n":1}` {
		t.Errorf("got %v", progress)
	}
}

func TestHowAProcessEndsIsReported(t *testing.T) {
	t.Parallel()
	w := start(t, ownProcess())
	for i, test := range []struct {
		kind, code string
		exit       int32
	}{{"panic", "HANDLER_PANIC", 0}, {"die", "RUNNER_CRASHED", 7}, {"goroutine", "RUNNER_CRASHED", 2}, {"fail", "TOOL_FAILED", 0}} {
		failed := w.job(t, int64(i+1), test.kind, `1`).GetFailed()
		if failed.GetCode() != test.code || failed.GetRunnerExit().GetExitCode() != test.exit {
			t.Errorf("%s: got %v", test.kind, failed)
		}
		if test.exit != 0 && failed.RunnerExit.GetPeakMemoryBytes() == 0 {
			t.Errorf("%s: got %v", test.kind, failed.RunnerExit)
		}
	}
}

func TestAProcessIsAskedAndThenKilledWithAllThatItHasStarted(t *testing.T) {
	t.Parallel()
	w := start(t, ownProcess(), func(o *rara.Options) { o.Slots = 2 })
	w.session.Credit(t, 2)
	w.session.Jobs(scripted.Job(1, "obey", `1`), scripted.Job(2, "ignore", `1`))
	isProgress := func(e *rarav1.ProgressEvent) bool { return e.GetProgress() != nil }
	w.session.Event(t, 1, "progress", isProgress)
	numbers := w.session.Event(t, 2, "progress", isProgress).GetProgress().Message
	w.session.Cancel(1, "CANCELLED", time.Minute)
	w.session.Cancel(2, "CANCELLED", 50*time.Millisecond)
	if got := w.session.Ended(t, 1).GetCancelled(); string(got.GetCheckpoint().GetData()) != `"half"` || got.RunnerExit != nil {
		t.Errorf("got %v", got)
	}
	if got := w.session.Ended(t, 2).GetCancelled(); got.GetReason() != "CANCELLED" || got.RunnerExit.GetSignal() != 9 {
		t.Errorf("got %v", got)
	}
	w.session.Credit(t, 4) // its slot is free
	for number := range strings.SplitSeq(numbers, " ") {
		pid, err := strconv.Atoi(number)
		if err != nil {
			t.Fatal(err)
		}
		until(t, "end of process "+number, func() bool { return isGone(pid) })
	}
}

// isGone also counts a process whose new parent has not looked yet.
func isGone(pid int) bool {
	stat, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	return err != nil || strings.Contains(string(stat), ") Z ") || syscall.Kill(pid, 0) != nil
}
