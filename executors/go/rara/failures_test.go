package rara_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/rara-run/rara/executors/go/internal/scripted"
	"github.com/rara-run/rara/executors/go/rara"
	rarav1 "github.com/rara-run/rara/gen/go/rara/v1"
)

// of a handler that ends with this error.
func failing(err error) rara.Handler[any, any] {
	return func(context.Context, *rara.Job[any]) (any, error) { return nil, err }
}

func TestWhatAHandlersErrorMeans(t *testing.T) {
	t.Parallel()
	var nothing *struct{ value int }
	for name, test := range map[string]struct {
		handler rara.Handler[any, any]
		want    *rarav1.JobError
	}{
		"plain": {failing(errors.New("boom")), &rarav1.JobError{Code: "HANDLER_FAILED", Message: "boom"}},
		"retryable, wrapped": {failing(fmt.Errorf("outer: %w", rara.Retryable("TOOL_FAILED", "no %s", "luck"))),
			&rarav1.JobError{Code: "TOOL_FAILED", Message: "no luck", Retryable: new(true)}},
		"terminal": {failing(rara.Terminal("AUTH_INVALID", "never")),
			&rarav1.JobError{Code: "AUTH_INVALID", Message: "never", Retryable: new(false)}},
		"unset": {failing(&rara.Error{Code: "AUTH_INVALID", Message: "who knows"}),
			&rarav1.JobError{Code: "AUTH_INVALID", Message: "who knows"}},
		"not for handlers": {failing(rara.Terminal("LEASE_EXPIRED", "mine")), &rarav1.JobError{Code: "HANDLER_FAILED",
			Message: "[code \"LEASE_EXPIRED\" is not one a handler can use: capital words joined by _, at least two, " +
				"and none of Rara's own] mine", Retryable: new(false)}},
		"details that are none": {failing(&rara.Error{Code: "TOOL_FAILED", Message: "m", Details: make(chan int)}),
			&rarav1.JobError{Code: "TOOL_FAILED",
				Message: "m [details left out: PAYLOAD_INVALID: details at /: json: unsupported type: chan int]"}},
		"bytes and NUL": {failing(rara.Terminal("TOOL_FAILED", "%s", "tool: \xff\xfe\x80 and \x00.")),
			&rarav1.JobError{Code: "TOOL_FAILED", Message: "tool: \uFFFD\uFFFD\uFFFD and \uFFFD.", Retryable: new(false)}},
		"exit of the goroutine": {func(context.Context, *rara.Job[any]) (any, error) { runtime.Goexit(); return nil, nil },
			&rarav1.JobError{Code: "HANDLER_FAILED", Message: "the handler called runtime.Goexit"}},
		"panic": {func(context.Context, *rara.Job[any]) (any, error) { return nothing.value, nil },
			&rarav1.JobError{Code: "HANDLER_PANIC",
				Message: "panic: runtime error: invalid memory address or nil pointer dereference"}},
		"panic of an own value": {func(context.Context, *rara.Job[any]) (any, error) { panic("at \xff once") },
			&rarav1.JobError{Code: "HANDLER_PANIC", Message: "panic: at \uFFFD once"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := start(t, offer("k", test.handler))
			got := w.job(t, 1, "k", `1`).GetFailed()
			isPanic := got.GetCode() == "HANDLER_PANIC"
			if isPanic && !strings.Contains(got.StackTrace, "failures_test.go") {
				t.Errorf("the stack does not lead here: %s", got.StackTrace)
			}
			got.StackTrace = ""
			if got.String() != test.want.String() {
				t.Errorf("got %v, want %v", got, test.want)
			}
			if isPanic && w.job(t, 2, "k", `1`).GetFailed().GetCode() != "HANDLER_PANIC" {
				t.Error("the executor does not go on")
			}
		})
	}
}

func TestErrorsCarryDetailsPauseAndCause(t *testing.T) {
	t.Parallel()
	w := start(t, offer("k", failing(&rara.Error{
		Code: "RATE_LIMITED", Message: strings.Repeat("é", 20_000), RetryAfter: 1500 * time.Millisecond,
		Details: map[string]any{"n": 1}})))
	got := w.job(t, 1, "k", `1`).GetFailed()
	if got.RetryAfter.AsDuration() != 1500*time.Millisecond || string(got.Details.Data) != `{"n":1}` ||
		got.Retryable != nil || len(got.Message) > 16<<10 || !strings.HasSuffix(got.Message, "[cut: 40000 bytes]") {
		t.Errorf("got %v, %d bytes", got, len(got.Message))
	}
	if err := rara.Retryable("TOOL_FAILED", "read: %w", io.ErrUnexpectedEOF); !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Error("the cause is lost")
	}
}

func TestInputsThatDoNotFitReachNoHandler(t *testing.T) {
	t.Parallel()
	registry := rara.NewRegistry()
	rara.Register(registry, "k", "1.0.0", func(context.Context, *rara.Job[struct{ In question }]) (string, error) {
		return "reached", nil
	})
	w := start(t, registry)
	for i, test := range []struct{ input, path string }{
		{`{"In":{"times":"two"}}`, "at /In/times"}, {`{"In":`, "at /"}, {`{} {}`, "more than one"}, {`[]`, "at /"},
	} {
		got := w.job(t, int64(i+1), "k", test.input).GetFailed()
		if got.GetCode() != "INPUT_INVALID" || got.Retryable != nil || !strings.Contains(got.Message, test.path) {
			t.Errorf("%s: %v", test.input, got)
		}
	}
}

func TestOutputsThatCannotBeStoredAreRefusedByPath(t *testing.T) {
	t.Parallel()
	outputs := map[string]any{
		"nul":       map[string]any{"a": []any{"x", map[string]any{"b/c": "\x00"}}},
		"key":       map[string]any{"a\x00": 1},
		"surrogate": json.RawMessage(`["\ud800"]`),
		"bytes":     []string{"\xff"},
		"nan":       math.NaN(),
		"over":      strings.Repeat("x", 1<<20-1),
		"exact":     strings.Repeat("x", 1<<20-2),
	}
	w := start(t, offer("k", func(_ context.Context, job *rara.Job[any]) (any, error) {
		return outputs[job.Input.(string)], nil
	}))
	token := int64(0)
	for name, want := range map[string]string{
		"nul": "output at /a/1/b~1c: U+0000", "key": "output at /: U+0000", "surrogate": "output at /0: a lone surrogate",
		"bytes": "output at /0: text that is not UTF-8", "nan": "output at /", "over": "use an artifact", "exact": "",
	} {
		token++
		event := w.job(t, token, "k", `"`+name+`"`)
		code := "PAYLOAD_INVALID"
		if name == "over" {
			code = "PAYLOAD_TOO_LARGE"
		}
		failed := event.GetFailed()
		if name == "exact" && event.GetSucceeded() == nil {
			t.Errorf("exactly the limit passes: %v", failed)
		}
		if name != "exact" && (failed.GetCode() != code || !strings.Contains(failed.Message, want)) {
			t.Errorf("%s: got %v", name, failed)
		}
	}
}

func TestProgressIsMadeSendable(t *testing.T) {
	t.Parallel()
	w := start(t, offer("k", func(_ context.Context, job *rara.Job[any]) (any, error) {
		err := job.Progress(rara.Progress{Fraction: new(7.0), Message: "a\x00" + strings.Repeat("m", 1<<20),
			Metrics: map[string]float64{"loss": math.NaN(), "ok\xff": 1}})
		if err != nil {
			return nil, err
		}
		err = job.Progress(rara.Progress{Checkpoint: strings.Repeat("x", 1<<20)})
		return nil, err
	}))
	failed := w.job(t, 1, "k", `1`).GetFailed()
	if failed.GetCode() != "PAYLOAD_TOO_LARGE" || !strings.Contains(failed.Message, "checkpoint") {
		t.Errorf("got %v", failed)
	}
	got := scripted.Events(w.session.Frames(), 1)[2].GetProgress()
	if got.GetFraction() != 1 || len(got.Message) > 4<<10 || !strings.HasPrefix(got.Message, "a\uFFFDmm") ||
		len(got.Metrics) != 1 || got.Metrics["ok\uFFFD"] != 1 {
		t.Errorf("got %v", got)
	}
}

func TestARefusedEventIsMendedInPlace(t *testing.T) {
	t.Parallel()
	release := make(chan struct{})
	w := start(t, offer("k", func(ctx context.Context, job *rara.Job[any]) (any, error) {
		<-release
		if job.Input.(string) == "progress" {
			_ = job.Progress(rara.Progress{Message: "refused"})
			<-ctx.Done()
			return "too late", nil
		}
		return "refused", nil
	}))
	refuse := func(token int64, refused *rarav1.ProgressEvent) *rarav1.JobError {
		w.session.Acks(&rarav1.EventAcks{Refusals: []*rarav1.EventRefusal{{
			LeaseToken: token, Sequence: refused.Sequence, Code: "PAYLOAD_INVALID", Message: "at /a"}}})
		failed := w.session.Event(t, token, "failed", func(e *rarav1.ProgressEvent) bool { return e.GetFailed() != nil })
		if failed.Sequence != refused.Sequence {
			t.Errorf("sequence %d instead of %d", failed.Sequence, refused.Sequence)
		}
		return failed.GetFailed()
	}
	w.session.Jobs(scripted.Job(1, "k", `"progress"`), scripted.Job(2, "k", `"result"`))
	w.session.Running(t, 1)
	w.session.Running(t, 2)
	w.session.Deaf()
	close(release)
	progress := w.session.Event(t, 1, "progress", func(e *rarav1.ProgressEvent) bool { return e.GetProgress() != nil })
	result := w.session.Ended(t, 2)
	for token, refused := range map[int64]*rarav1.ProgressEvent{1: progress, 2: result} {
		if got := refuse(token, refused); got.Code != "PAYLOAD_INVALID" || got.Message != "at /a" {
			t.Errorf("got %v", got)
		}
	}
}

func TestAResultThatFitsIntoNoFrameFailsItsStepAlone(t *testing.T) {
	t.Parallel()
	w := run(t, offer("k", func(ctx context.Context, job *rara.Job[any]) (any, error) {
		count := 60
		if job.Input == "more" {
			count = 100
		}
		for i := range count {
			_, err := job.Artifacts.PutBytes(ctx, fmt.Sprint(i), nil, rara.Output{Metadata: strings.Repeat("m", 16_000)})
			if err != nil {
				return nil, err
			}
		}
		return strings.Repeat("x", 100_000), nil
	}))
	w.session = w.scheduler.Session(t)
	w.session.Welcome(scripted.Terms{Limits: &rarav1.Limits{MaxFrameBytes: 1 << 20}})
	if got := w.job(t, 1, "k", `1`).GetFailed(); got.GetCode() != "PAYLOAD_TOO_LARGE" {
		t.Errorf("got %v", got)
	}
	if got := w.job(t, 2, "k", `"more"`).GetFailed(); got.GetCode() != "ARTIFACT_TOO_LARGE" {
		t.Errorf("got %v", got)
	}
}

func TestOnceRecordsBeforeItReturns(t *testing.T) {
	t.Parallel()
	calls := 0
	w := start(t, offer("k", func(ctx context.Context, job *rara.Job[any]) (any, error) {
		charge := func(context.Context) (map[string]int, error) { calls++; return map[string]int{"charged": 5}, nil }
		first, err := rara.Once(ctx, job.AnyJob, "charge", charge)
		if err != nil {
			return nil, err
		}
		second, err := rara.Once(ctx, job.AnyJob, "charge", charge)
		if err != nil {
			return nil, err
		}
		known, err := rara.Once(ctx, job.AnyJob, "known", func(context.Context) (string, error) { panic("not again") })
		return []any{first, second, known, job.IdempotencyKey}, err
	}))
	job := scripted.Job(1, "k", `1`)
	job.Effects = []*rarav1.Effect{{Name: "known", Result: &rarav1.Payload{Data: []byte(`"before"`)}}}
	w.session.Jobs(job)
	output := w.session.Succeeded(t, 1).GetOutput().GetData()
	if string(output) != `[{"charged":5},{"charged":5},"before","run/step"]` || calls != 1 {
		t.Errorf("got %s after %d calls", output, calls)
	}
	effects := 0
	for _, event := range scripted.Events(w.session.Frames(), 1) {
		if effect := event.GetEffect(); effect != nil {
			effects++
			if effect.Name != "charge" || string(effect.Result.Data) != `{"charged":5}` {
				t.Errorf("got %v", effect)
			}
		}
	}
	if effects != 1 {
		t.Errorf("%d effects", effects)
	}
}

func TestOnceRefusesWhatIsTooLarge(t *testing.T) {
	t.Parallel()
	w := start(t, offer("k", func(ctx context.Context, job *rara.Job[any]) (any, error) {
		return rara.Once(ctx, job.AnyJob, "big", func(context.Context) (string, error) {
			return strings.Repeat("x", 16<<10), nil
		})
	}))
	if got := w.job(t, 1, "k", `1`).GetFailed(); got.GetCode() != "PAYLOAD_TOO_LARGE" || !strings.Contains(got.Message, "effect big") {
		t.Errorf("got %v", got)
	}
}
