package rara_test

import (
	"context"
	"encoding/base64"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"google.golang.org/protobuf/encoding/prototext"

	"github.com/rara-run/rara/executors/go/internal/scripted"
	"github.com/rara-run/rara/executors/go/rara"
	rarav1 "github.com/rara-run/rara/gen/go/rara/v1"
)

const secret = "p/ss=word +1"

func secretJob(token int64, provider, input string) *rarav1.JobRequest {
	job := scripted.Job(token, "k", input)
	job.Secrets = map[string]*rarav1.SecretRef{"key": {Provider: provider, Name: "api-key"}}
	return job
}

func TestASecretLeavesTheExecutorInNoForm(t *testing.T) {
	t.Parallel()
	folder := t.TempDir()
	if err := os.WriteFile(filepath.Join(folder, "api-key"), []byte(secret+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	w := start(t, offer("k", func(ctx context.Context, job *rara.Job[any]) (any, error) {
		if job.Secrets["key"] != secret {
			return nil, rara.Terminal("WRONG_SECRET", "that is not it")
		}
		encoded := base64.StdEncoding.EncodeToString([]byte("user:" + secret))
		job.Log.Info("said "+secret, "header", encoded)
		_ = job.Progress(rara.Progress{Message: "with " + secret, Checkpoint: map[string]string{"at": "page 2"}})
		_, err := job.Artifacts.PutBytes(ctx, "a", []byte("bytes are the handler's own"), rara.Output{Metadata: []string{secret}})
		if err != nil {
			return nil, err
		}
		switch job.Input {
		case "checkpoint": // whatever the handler makes of the error
			_ = job.Progress(rara.Progress{Checkpoint: map[string]string{"at": url.QueryEscape(secret)}})
		case "effect":
			_, _ = rara.Once(ctx, job.AnyJob, "call", func(context.Context) (string, error) { return secret, nil })
		case "fail":
			return nil, &rara.Error{Code: "TOOL_FAILED", Message: "with " + encoded, Details: []string{secret}}
		case "panic":
			panic(secret)
		}
		return map[string]any{"in": "a " + secret + " b", secret: 1}, nil
	}), func(o *rara.Options) { o.SecretsDir = folder })
	for token, input := range []string{`"succeed"`, `"fail"`, `"panic"`, `"checkpoint"`, `"effect"`} {
		w.session.Jobs(secretJob(int64(token+1), "file", input))
		w.session.Ended(t, int64(token+1))
	}
	if got := string(w.session.Succeeded(t, 1).GetOutput().GetData()); got != `{"in":"a *** b","***":1}` {
		t.Errorf("got %s", got)
	}
	if got := w.session.Failed(t, 3).GetMessage(); got != "panic: ***" {
		t.Errorf("got %q", got)
	}
	for token, what := range map[int64]string{4: "checkpoint", 5: "effect call"} {
		got := w.session.Failed(t, token)
		if got.GetCode() != "SECRET_IN_PAYLOAD" || !strings.HasPrefix(got.GetMessage(), what+" holds a secret") {
			t.Errorf("got %v", got)
		}
	}
	var all strings.Builder
	for _, frame := range w.session.Frames() {
		all.WriteString(prototext.Format(frame))
	}
	all.WriteString(w.logs.String())
	middle := base64.StdEncoding.EncodeToString([]byte("user:" + secret))[8:20]
	for _, form := range []string{secret, url.QueryEscape(secret), url.PathEscape(secret), middle} {
		if strings.Contains(all.String(), form) {
			t.Errorf("%q was sent or logged", form)
		}
	}
	if !strings.Contains(w.logs.String(), "said ***") {
		t.Errorf("the handler's line is missing: %s", w.logs)
	}
}

func TestAnUnresolvedSecretRunsNothing(t *testing.T) {
	t.Parallel()
	w := start(t, offer("k", func(context.Context, *rara.Job[any]) (any, error) { panic("reached") }))
	w.session.Jobs(secretJob(1, "vault", `1`))
	failed := w.session.Failed(t, 1)
	if failed.GetCode() != "SECRET_UNRESOLVED" || failed.Retryable != nil || !strings.Contains(failed.Message, `"api-key"`) {
		t.Errorf("got %v", failed)
	}
	for _, event := range scripted.Events(w.session.Frames(), 1) {
		if event.GetRunning() != nil {
			t.Error("the handler was called")
		}
	}
}
