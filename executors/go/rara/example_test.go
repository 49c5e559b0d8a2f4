package rara_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"time"

	"github.com/rara-run/rara/executors/go/rara"
)

type order struct {
	Customer string `json:"customer"`
	Cents    int64  `json:"cents"`
}

type receipt struct {
	Charge string `json:"charge"`
}

// A program that is an executor. RARA_SCHEDULER says where its scheduler listens.
func ExampleMain() {
	registry := rara.NewRegistry()
	rara.Register(registry, "order.charge", "1.0.0", charge, rara.MaxConcurrency(8))
	// rara.Main(registry)
	fmt.Println("registered")
	// Output: registered
}

// An effect is made once, however many attempts the step takes.
func ExampleOnce() {
	_ = charge
	// Output:
}

func charge(ctx context.Context, job *rara.Job[order]) (receipt, error) {
	id, err := rara.Once(ctx, job.AnyJob, "charge", func(ctx context.Context) (string, error) {
		// A crash between the call and its record repeats the call: the key makes the second one harmless.
		return callPayments(ctx, job.IdempotencyKey, job.Secrets["payments"], job.Input)
	})
	return receipt{Charge: id}, err
}

func callPayments(context.Context, string, string, order) (string, error) { return "ch_1", nil }

// Errors say whether another attempt may help.
func ExampleError() {
	read := func(path string) error {
		_, err := os.ReadFile(path)
		if errors.Is(err, fs.ErrNotExist) {
			return rara.Terminal("CORPUS_NOT_FOUND", "%w", err)
		}
		if err != nil {
			return rara.Retryable("CORPUS_UNREADABLE", "%w", err)
		}
		return &rara.Error{Code: "RATE_LIMITED", Message: "later", RetryAfter: time.Minute}
	}
	fmt.Println(read("/nowhere"))
	// Output: CORPUS_NOT_FOUND: open /nowhere: no such file or directory
}

// A long handler reports how far it is, and goes on where an earlier attempt has stopped.
func ExampleAnyJob_Progress() {
	type state struct {
		Done int `json:"done"`
	}
	handler := func(ctx context.Context, job *rara.Job[[]string]) (int, error) {
		var at state
		if _, err := job.Checkpoint(&at); err != nil {
			return 0, err
		}
		for ; at.Done < len(job.Input); at.Done++ {
			if ctx.Err() != nil {
				return 0, context.Cause(ctx)
			}
			fraction := float64(at.Done) / float64(len(job.Input))
			if err := job.Progress(rara.Progress{Fraction: &fraction, Checkpoint: at}); err != nil {
				return 0, err
			}
		}
		return at.Done, nil
	}
	rara.Register(rara.NewRegistry(), "list.walk", "1.0.0", handler)
	// Output:
}

// What is too large for a payload is kept beside the checkpoint, whichever language goes on from it.
func ExampleArtifacts_Keep() {
	handler := func(ctx context.Context, job *rara.Job[[]string]) (int, error) {
		var done int
		weights := []byte("none yet")
		if found, err := job.Checkpoint(&done); err != nil {
			return 0, err
		} else if found {
			last, err := job.Artifacts.OpenCheckpoint(ctx, "weights") // verified
			if err != nil {
				return 0, err
			}
			if weights, err = last.ReadBytes(); err != nil {
				return 0, err
			}
		}
		for ; done < len(job.Input); done++ {
			weights = append(weights, job.Input[done]...)
			kept, err := job.Artifacts.Keep(ctx, "weights", bytes.NewReader(weights))
			if err != nil {
				return 0, err
			}
			report := rara.Progress{Checkpoint: done + 1, Artifacts: []*rara.KeptArtifact{kept}}
			if err := job.Progress(report); err != nil {
				return 0, err
			}
		}
		return len(weights), nil
	}
	rara.Register(rara.NewRegistry(), "model.train", "1.0.0", handler)
	// Output:
}

// Executors can be part of a larger program.
func ExampleExecutor_Run() {
	registry := rara.NewRegistry()
	rara.Register(registry, "order.charge", "1.0.0", charge)
	options := rara.DefaultOptions()
	options.Slots = 0
	_, err := rara.NewExecutor(registry, options)
	fmt.Println(err)
	// Output: option Slots is 0, not 1 to 100000
}
