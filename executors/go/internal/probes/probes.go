// Package probes has the operations that an executor offers to be verified; docs/how-to/executor-in-another-language.md
// says what each does.
package probes

import (
	"context"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"net/url"
	"os"
	"strings"
	"time"

	"go.opentelemetry.io/otel"

	"github.com/rara-run/rara/executors/go/rara"
)

const version = "1.0.0"

// Register offers all probes.
func Register(registry *rara.Registry) {
	rara.Register(registry, "probe.echo", version, echo)
	rara.Register(registry, "probe.sleep", version, sleep)
	rara.Register(registry, "probe.traced", version, traced)
	rara.Register(registry, "probe.traced_apart", version, traced, rara.OwnProcess())
	rara.Register(registry, "probe.fail", version, fail)
	rara.Register(registry, "probe.panic", version, panics)
	rara.Register(registry, "probe.panic_goroutine", version, panicGoroutine)
	rara.Register(registry, "probe.progress", version, progress)
	rara.Register(registry, "probe.artifact", version, artifact)
	rara.Register(registry, "probe.ignore_cancel", version, ignoreCancel, rara.OwnProcess())
	rara.Register(registry, "probe.leak", version, ignoreCancel) // where nothing can end it
	rara.Register(registry, "probe.await", version, await)
	rara.Register(registry, "probe.spin", version, spin)
	rara.Register(registry, "probe.once", version, once)
	rara.Register(registry, "probe.output", version, output)
}

// echo returns its input.
func echo(_ context.Context, job *rara.Job[json.RawMessage]) (json.RawMessage, error) {
	if job.Input == nil {
		return json.RawMessage("null"), nil
	}
	return job.Input, nil
}

type slept struct {
	Slept      float64 `json:"slept"`
	Checkpoint any     `json:"checkpoint"`
}

type sleeping struct {
	Seconds    float64         `json:"seconds"`
	Checkpoint json.RawMessage `json:"checkpoint"`
}

// sleep sleeps for `seconds`, with a checkpoint first if there is a `checkpoint`; ends early when cancelled.
func sleep(ctx context.Context, job *rara.Job[sleeping]) (slept, error) {
	if job.Input.Checkpoint != nil {
		report := rara.Progress{Fraction: new(0.0), Message: "sleeping", Checkpoint: job.Input.Checkpoint}
		if err := job.Progress(report); err != nil {
			return slept{}, err
		}
	}
	select {
	case <-time.After(duration(job.Input.Seconds)):
	case <-ctx.Done():
		return slept{}, ctx.Err()
	}
	result := slept{Slept: job.Input.Seconds}
	_, err := job.Checkpoint(&result.Checkpoint)
	return result, err
}

type failing struct {
	Code      string  `json:"code"`
	Message   *string `json:"message"`
	Retryable *bool   `json:"retryable"`
	Bytes     string  `json:"bytes"`
	Length    int     `json:"length"`
	Secret    bool    `json:"secret"`
}

// fail fails with `code`, `message` and `retryable`, which may be absent.
//
// bytes: the message as hexadecimal bytes. length: of a message of letters x. secret: the message and a progress text
// hold the secret `probe`, URL-encoded as well.
func fail(_ context.Context, job *rara.Job[failing]) (any, error) {
	given := job.Input
	message := "as asked"
	if given.Message != nil {
		message = *given.Message
	}
	message += strings.Repeat("x", given.Length)
	if given.Bytes != "" {
		raw, err := hex.DecodeString(given.Bytes)
		if err != nil {
			return nil, err
		}
		message = string(raw)
	}
	if given.Secret {
		value := job.Secrets["probe"]
		message = fmt.Sprintf("cannot reach https://user:%s@host/?key=%s", value, url.QueryEscape(value))
		job.Log.Info("probe", "secret", value)
		err := job.Progress(rara.Progress{
			Fraction: new(0.5), Message: "with " + value, Checkpoint: map[string]string{"at": "page 2"}})
		if err != nil {
			return nil, err
		}
	}
	if given.Code == "" && given.Retryable == nil {
		return nil, errors.New(message)
	}
	if given.Code == "" {
		given.Code = "PROBE_FAILED"
	}
	return nil, &rara.Error{Code: given.Code, Message: message, Retryable: given.Retryable}
}

// panics dies of a bug.
func panics(context.Context, *rara.Job[any]) (int, error) { return dereference(nil), nil }

type panicking struct {
	Seconds  float64 `json:"seconds"`
	Attempts int     `json:"attempts"`
}

// panicGoroutine dies of a bug in a goroutine that it has started, which nobody can recover from, after `seconds`. Only
// in the first `attempts`, if they are given.
func panicGoroutine(ctx context.Context, job *rara.Job[panicking]) (any, error) {
	if job.Input.Attempts > 0 && job.Attempt > job.Input.Attempts {
		return nil, nil
	}
	go func() {
		time.Sleep(duration(job.Input.Seconds))
		dereference(nil)
	}()
	<-ctx.Done()
	return nil, ctx.Err()
}

func dereference(nothing *struct{ value int }) int { return nothing.value }

type counting struct {
	Count int `json:"count"`
}

// progress reports `count` times, with checkpoints {"done": n}.
func progress(_ context.Context, job *rara.Job[counting]) (map[string]int, error) {
	count := job.Input.Count
	for number := 1; number <= count; number++ {
		err := job.Progress(rara.Progress{
			Fraction:   new(float64(number) / float64(count)),
			Message:    fmt.Sprintf("%d of %d", number, count),
			Checkpoint: map[string]int{"done": number},
		})
		if err != nil {
			return nil, err
		}
	}
	return map[string]int{"reported": count}, nil
}

type sized struct {
	Size int    `json:"size"`
	Bad  string `json:"bad"`
}

// artifact puts `size` bytes, byte n being n modulo 251, as artifact `out`; it opens an input artifact `source` first.
func artifact(ctx context.Context, job *rara.Job[sized]) (map[string]string, error) {
	source := ""
	for _, name := range job.Artifacts.Names() {
		if name == "source" {
			input, err := job.Artifacts.Open(ctx, name)
			if err != nil {
				return nil, err
			}
			source = input.SHA256
		}
	}
	data := make([]byte, job.Input.Size)
	for number := range data {
		data[number] = byte(number % 251)
	}
	put, err := job.Artifacts.PutBytes(ctx, "out", data, rara.Output{})
	if err != nil {
		return nil, err
	}
	return map[string]string{"out": put.SHA256, "source": source}, nil
}

// ignoreCancel runs on for `seconds`, whatever it is asked.
func ignoreCancel(_ context.Context, job *rara.Job[sleeping]) (any, error) {
	time.Sleep(duration(job.Input.Seconds))
	return nil, nil
}

type awaiting struct {
	File string `json:"file"`
	Code string `json:"code"`
}

// await waits until `file` is there, and then fails with `code`, if there is one.
func await(ctx context.Context, job *rara.Job[awaiting]) (any, error) {
	for {
		if _, err := os.Stat(job.Input.File); err == nil {
			break
		}
		select {
		case <-time.After(20 * time.Millisecond):
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
	if job.Input.Code != "" {
		return nil, &rara.Error{Code: job.Input.Code, Message: "as asked"}
	}
	return nil, nil
}

// spin computes for `seconds` without a pause.
func spin(_ context.Context, job *rara.Job[sleeping]) (map[string]bool, error) {
	rounds := 0
	for until := time.Now().Add(duration(job.Input.Seconds)); time.Now().Before(until); {
		rounds++
	}
	return map[string]bool{"rounds": rounds > 0}, nil
}

// once records the effect `probe` with the result {"token": its lease token}, and returns what is recorded.
func once(ctx context.Context, job *rara.Job[any]) (map[string]int64, error) {
	return rara.Once(ctx, job.AnyJob, "probe", func(context.Context) (map[string]int64, error) {
		return map[string]int64{"token": job.LeaseToken}, nil
	})
}

// output returns {"text": ...}: `size` letters x, or what is `bad`: "nul" has U+0000, "surrogate" a lone \ud800.
func output(_ context.Context, job *rara.Job[sized]) (any, error) {
	switch job.Input.Bad {
	case "nul":
		return deep("a\x00b"), nil
	case "surrogate":
		return deep(json.RawMessage(`"a\ud800b"`)), nil
	}
	return map[string]string{"text": strings.Repeat("x", job.Input.Size)}, nil
}

func deep(text any) any { return map[string]any{"deep": []any{map[string]any{"text": text}}} }

func duration(seconds float64) time.Duration { return time.Duration(seconds * float64(time.Second)) }

// traced makes a span of the handler's own.
func traced(ctx context.Context, _ *rara.Job[any]) (any, error) {
	_, span := otel.Tracer("handlers").Start(ctx, "inside go")
	defer span.End()
	return span.SpanContext().TraceID().String(), nil
}
