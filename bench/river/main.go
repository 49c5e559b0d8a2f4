// Command river is the benchmark's peer in Go: the commands of rara_bench.peers.process over River.
//
//	river install|enqueue|work NAME DSN COUNT
package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"strconv"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"
	"github.com/riverqueue/river/rivermigrate"
)

// As many workers and as quick fetches as its documentation allows: 100 ms between fetches is the default.
const (
	maxWorkers    = 2000
	fetchCooldown = 2 * time.Millisecond
	fetchPoll     = 20 * time.Millisecond
	insertBatch   = 1000
)

type noopArgs struct {
	Number int `json:"number"`
}

func (noopArgs) Kind() string { return "noop" }

type noopWorker struct {
	river.WorkerDefaults[noopArgs]
	count int64
	begun atomic.Int64
}

func (w *noopWorker) Work(context.Context, *river.Job[noopArgs]) error {
	switch w.begun.Add(1) {
	case 1:
		fmt.Println("first")
	case w.count:
		fmt.Println("all")
	}
	return nil
}

func main() {
	if err := run(context.Background(), os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "river:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, arguments []string) error {
	if len(arguments) != 4 {
		return errors.New("usage: river install|enqueue|work NAME DSN COUNT")
	}
	count, err := strconv.Atoi(arguments[3])
	if err != nil {
		return fmt.Errorf("count: %w", err)
	}
	pool, err := pgxpool.New(ctx, arguments[2])
	if err != nil {
		return fmt.Errorf("connect: %w", err)
	}
	defer pool.Close()
	switch arguments[0] {
	case "install":
		return install(ctx, pool)
	case "enqueue":
		return enqueue(ctx, pool, count)
	case "work":
		return work(ctx, pool, count)
	}
	return fmt.Errorf("no command %q", arguments[0])
}

func install(ctx context.Context, pool *pgxpool.Pool) error {
	migrator, err := rivermigrate.New(riverpgxv5.New(pool), nil)
	if err != nil {
		return err
	}
	_, err = migrator.Migrate(ctx, rivermigrate.DirectionUp, nil)
	return err
}

func enqueue(ctx context.Context, pool *pgxpool.Pool, count int) error {
	client, err := newClient(pool, &river.Config{})
	if err != nil {
		return err
	}
	for first := 0; first < count; first += insertBatch {
		var batch []river.InsertManyParams
		for number := first; number < min(first+insertBatch, count); number++ {
			batch = append(batch, river.InsertManyParams{Args: noopArgs{Number: number}})
		}
		if _, err := client.InsertManyFast(ctx, batch); err != nil {
			return fmt.Errorf("insert: %w", err)
		}
	}
	return nil
}

// work runs until it is killed.
func work(ctx context.Context, pool *pgxpool.Pool, count int) error {
	workers := river.NewWorkers()
	river.AddWorker(workers, &noopWorker{count: int64(count)})
	client, err := newClient(pool, &river.Config{
		Queues:            map[string]river.QueueConfig{river.QueueDefault: {MaxWorkers: maxWorkers}},
		Workers:           workers,
		FetchCooldown:     fetchCooldown,
		FetchPollInterval: fetchPoll,
	})
	if err != nil {
		return err
	}
	fmt.Println("ready")
	if _, err := bufio.NewReader(os.Stdin).ReadString('\n'); err != nil {
		return fmt.Errorf("wait for the go: %w", err)
	}
	if err := client.Start(ctx); err != nil {
		return fmt.Errorf("start: %w", err)
	}
	<-client.Stopped()
	return nil
}

func newClient(pool *pgxpool.Pool, config *river.Config) (*river.Client[pgx.Tx], error) {
	config.Logger = slog.New(slog.NewTextHandler(io.Discard, nil))
	return river.NewClient(riverpgxv5.New(pool), config)
}
