// Package where has operations that say where they run, in several versions.
package where

import (
	"context"
	"time"

	"github.com/rara-run/rara/executors/go/rara"
)

// Register offers all of them; tests/support/where_handlers.py has the same kinds in other versions.
func Register(registry *rara.Registry) {
	for _, version := range []string{"1.4.2", "1.10.0"} {
		rara.Register(registry, "where.a", version, here)
	}
	rara.Register(registry, "where.b", "10.0.0", here)
	rara.Register(registry, "where.narrow", "1.0.0", slowly, rara.MaxConcurrency(2))
}

type place struct {
	Language string    `json:"language"`
	Version  string    `json:"version"`
	Stay     []float64 `json:"stay"` // from, to: wall time in seconds
}

func here(_ context.Context, job *rara.Job[any]) (place, error) {
	return place{Language: "go", Version: job.KindVersion}, nil
}

// slowly takes a while, and tells when.
func slowly(_ context.Context, job *rara.Job[any]) (place, error) {
	from := now()
	time.Sleep(100 * time.Millisecond)
	return place{"go", job.KindVersion, []float64{from, now()}}, nil
}

func now() float64 { return float64(time.Now().UnixNano()) / 1e9 }
