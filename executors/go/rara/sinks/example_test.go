package sinks_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/rara-run/rara/executors/go/rara"
	"github.com/rara-run/rara/executors/go/rara/sinks"
)

type scores struct {
	Model string  `json:"model"`
	Score float64 `json:"score"`
}

// In a handler, the job has the token.
func ExampleUpsert() {
	var db *sql.DB // opened once for the whole executor
	registry := rara.NewRegistry()
	rara.Register(registry, "model.score", "1.0.0", func(ctx context.Context, job *rara.Job[scores]) (any, error) {
		return nil, sinks.Upsert(ctx, db, job.LeaseToken, sinks.Row{
			Table:  "scores",
			Key:    map[string]any{"model": job.Input.Model},
			Values: map[string]any{"score": job.Input.Score},
		})
	})
}

func ExampleWriteFile() {
	folder, err := os.MkdirTemp("", "sinks-")
	if err != nil {
		panic(err)
	}
	defer os.RemoveAll(folder)
	path := filepath.Join(folder, "report.txt")
	ctx := context.Background()
	fmt.Println(sinks.WriteFile(ctx, 8, path, strings.NewReader("of the second attempt")))
	late := sinks.WriteFile(ctx, 7, path, strings.NewReader("of the first, which was frozen"))
	fmt.Println(errors.Is(late, sinks.ErrSuperseded))
	text, err := os.ReadFile(path)
	fmt.Println(string(text), err)
	// Output:
	// <nil>
	// true
	// of the second attempt <nil>
}
