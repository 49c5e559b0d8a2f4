// Package chaos has the operations of the chaos runner's load: short, restartable, each keeping the ledger. They do what
// those of chaos/rara_chaos/operations.py do, so that an attempt in one language goes on from one in the other.
package chaos

import (
	"bytes"
	"context"
	"crypto/sha3"
	"hash/crc32"
	"strconv"
	"time"

	"github.com/rara-run/rara/executors/go/rara"
)

const (
	version       = "1.0.0"
	tickLength    = 100 * time.Millisecond
	ticks         = 4
	slowTicks     = 30
	parts         = 3
	artifactBytes = 50_000    // too large to travel inside a message
	largeBytes    = 1_500_000 // travels in several pieces
	shared        = 40        // contents that many runs have in common
)

// Register offers all of them.
func Register(registry *rara.Registry) {
	rara.Register(registry, "chaos.work", version, kept(work(ticks)))
	rara.Register(registry, "chaos.slow", version, kept(work(slowTicks)))
	rara.Register(registry, "chaos.block", version, kept(work(ticks)), rara.OwnProcess())
	rara.Register(registry, "chaos.flaky", version, kept(flaky))
	rara.Register(registry, "chaos.hopeless", version, kept(hopeless))
	rara.Register(registry, "chaos.make", version, kept(stores))
	rara.Register(registry, "chaos.use", version, kept(reads))
	rara.Register(registry, "chaos.parts", version, kept(inParts))
}

type given struct {
	Ledger   string  `json:"ledger"`
	Number   int64   `json:"number"`
	Parts    []int64 `json:"parts"`
	MadeFrom int64   `json:"made_from"`
}

type made struct {
	Value  int64   `json:"value"`
	Charge charged `json:"charge"`
}

type job = rara.Job[given]

type body func(ctx context.Context, job *job, ledger *ledger) (made, error)

// kept is the handler of a body, with its begin and its end in the ledger.
func kept(body body) rara.Handler[given, made] {
	return func(ctx context.Context, job *job) (made, error) {
		ledger, err := openLedger(job.AnyJob, job.Input.Ledger)
		if err != nil {
			return made{}, err
		}
		defer ledger.file.Close()
		if err := ledger.write(start); err != nil {
			return made{}, err
		}
		result, err := body(ctx, job, ledger)
		if err != nil {
			return made{}, err
		}
		return result, ledger.write(end)
	}
}

// work ticks, from where the checkpoint says on.
func work(ticks int) body {
	return func(ctx context.Context, job *job, ledger *ledger) (made, error) {
		var last struct{ Done int }
		if _, err := job.Checkpoint(&last); err != nil {
			return made{}, err
		}
		for done := last.Done + 1; done <= ticks; done++ {
			if err := pause(ctx); err != nil {
				return made{}, err
			}
			if err := ledger.write(tick); err != nil {
				return made{}, err
			}
			err := job.Progress(rara.Progress{
				Fraction:   new(float64(done) / float64(ticks)),
				Message:    "working",
				Metrics:    map[string]float64{"done": float64(done)},
				Checkpoint: map[string]int{"done": done},
			})
			if err != nil {
				return made{}, err
			}
		}
		return result(ctx, job, ledger)
	}
}

// flaky fails twice after its effect, which is not done again.
func flaky(ctx context.Context, job *job, ledger *ledger) (made, error) {
	done, err := result(ctx, job, ledger)
	if err != nil {
		return made{}, err
	}
	if err := pause(ctx); err != nil {
		return made{}, err
	}
	if job.Failures < 2 {
		return made{}, rara.Retryable("CHAOS_FLAKY", "not yet")
	}
	return done, nil
}

// hopeless fails for good in the run that it first met, and succeeds in a run that retries that one.
func hopeless(ctx context.Context, job *job, ledger *ledger) (made, error) {
	met := struct {
		Run string `json:"run"`
	}{job.WorkflowRunID}
	if _, err := job.Checkpoint(&met); err != nil {
		return made{}, err
	}
	if met.Run != job.WorkflowRunID {
		return result(ctx, job, ledger)
	}
	if err := job.Progress(rara.Progress{Checkpoint: met}); err != nil {
		return made{}, err
	}
	return made{}, rara.Terminal("CHAOS_HOPELESS", "never in this run")
}

// stores keeps an artifact.
func stores(ctx context.Context, job *job, ledger *ledger) (made, error) {
	number := number(job.Input)
	output := rara.Output{Metadata: map[string]int64{"number": number}}
	if _, err := job.Artifacts.PutBytes(ctx, "content", content(number), output); err != nil {
		return made{}, err
	}
	return result(ctx, job, ledger)
}

// reads takes the artifact of the step before it.
func reads(ctx context.Context, job *job, ledger *ledger) (made, error) {
	input, err := job.Artifacts.Open(ctx, "content")
	if err != nil {
		return made{}, err
	}
	data, err := input.ReadBytes()
	if err != nil {
		return made{}, err
	}
	if !bytes.Equal(data, content(job.Input.MadeFrom)) {
		return made{}, rara.Terminal("CHAOS_CONTENT", "the artifact is not what was stored")
	}
	return result(ctx, job, ledger)
}

// inParts goes on from a checkpoint whose bytes are in the blob store, and stores its artifact at the end.
func inParts(ctx context.Context, job *job, ledger *ledger) (made, error) {
	number := number(job.Input)
	var last struct{ Done int }
	if _, err := job.Checkpoint(&last); err != nil {
		return made{}, err
	}
	if last.Done > 0 {
		part, err := job.Artifacts.OpenCheckpoint(ctx, "part")
		if err != nil {
			return made{}, err
		}
		data, err := part.ReadBytes()
		if err != nil {
			return made{}, err
		}
		if !bytes.Equal(data, content(number+int64(last.Done))) {
			return made{}, rara.Terminal("CHAOS_CONTENT", "the checkpoint's bytes are not what was stored")
		}
	}
	for done := last.Done + 1; done <= parts; done++ {
		if err := pause(ctx); err != nil {
			return made{}, err
		}
		if err := ledger.write(tick); err != nil {
			return made{}, err
		}
		part, err := job.Artifacts.Keep(ctx, "part", bytes.NewReader(content(number+int64(done))))
		if err != nil {
			return made{}, err
		}
		err = job.Progress(rara.Progress{
			Fraction:   new(float64(done) / float64(parts)),
			Message:    "kept",
			Checkpoint: map[string]int{"done": done},
			Artifacts:  []*rara.KeptArtifact{part},
		})
		if err != nil {
			return made{}, err
		}
	}
	if _, err := job.Artifacts.PutBytes(ctx, "content", content(number), rara.Output{}); err != nil {
		return made{}, err
	}
	return result(ctx, job, ledger)
}

func result(ctx context.Context, job *job, ledger *ledger) (made, error) {
	charge, err := ledger.charge(ctx)
	return made{value(job.StepName, number(job.Input)), charge}, err
}

func pause(ctx context.Context) error {
	select {
	case <-time.After(tickLength):
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// number of a step: the run's, or the sum of what the steps before it made.
func number(input given) int64 {
	if input.Parts == nil {
		return input.Number
	}
	sum := int64(0)
	for _, part := range input.Parts {
		sum += part
	}
	return sum
}

// value is what a step makes of its number.
func value(stepName string, number int64) int64 {
	return (number*31 + int64(crc32.ChecksumIEEE([]byte(stepName)))) % 1_000_003
}

// content is the artifact of a number. Every other number shares its with others, and every fourth content is large.
func content(number int64) []byte {
	seed, size := number, artifactBytes
	if number%2 != 0 {
		seed = number % shared
	}
	if seed%4 == 0 {
		size = largeBytes
	}
	return sha3.SumSHAKE256([]byte(strconv.FormatInt(seed, 10)), size)
}
