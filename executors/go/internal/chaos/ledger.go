package chaos

import (
	"context"
	"encoding/json"
	"os"

	"golang.org/x/sys/unix"

	"github.com/rara-run/rara/executors/go/rara"
)

// What a line of the ledger says; chaos/rara_chaos/ledger.py has the same words.
const (
	start  = "start"
	tick   = "tick"
	effect = "effect"
	end    = "end"
)

type entry struct {
	What      string  `json:"what"`
	Key       string  `json:"key"`
	StepRunID string  `json:"step_run_id"`
	Token     int64   `json:"token"`
	Attempt   int     `json:"attempt"`
	Pid       int     `json:"pid"`
	At        float64 `json:"at_s"` // of the machine's monotonic clock, which all processes share
}

// ledger is where one attempt writes down what it does.
type ledger struct {
	job  *rara.AnyJob
	file *os.File
}

func openLedger(job *rara.AnyJob, path string) (*ledger, error) {
	file, err := os.OpenFile(path, os.O_WRONLY|os.O_APPEND|os.O_CREATE, 0o644)
	return &ledger{job, file}, err
}

// write one line by one write, so that a kill leaves whole lines.
//
// A report comes first. It is refused as soon as the lease is over, even where the whole process has stood still and the
// context does not know yet: who must not report must not work either.
func (l *ledger) write(what string) error {
	if err := l.job.Progress(rara.Progress{Message: what}); err != nil {
		return err
	}
	var now unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &now); err != nil {
		return err
	}
	line, err := json.Marshal(entry{what, l.job.IdempotencyKey, l.job.StepRunID, l.job.LeaseToken, l.job.Attempt,
		os.Getpid(), float64(now.Nano()) / 1e9})
	if err != nil {
		return err
	}
	_, err = l.file.Write(append(line, '\n'))
	return err
}

type charged struct {
	Token int64 `json:"token"`
}

// charge does the effect once; what is recorded of it names the attempt that did it.
func (l *ledger) charge(ctx context.Context) (charged, error) {
	return rara.Once(ctx, l.job, "charge", func(context.Context) (charged, error) {
		return charged{l.job.LeaseToken}, l.write(effect)
	})
}
