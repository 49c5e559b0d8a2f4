package rara_test

import (
	"bytes"
	"context"
	"flag"
	"log/slog"
	"os"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/rara-run/rara/executors/go/internal/logs"
	"github.com/rara-run/rara/executors/go/internal/scripted"
	"github.com/rara-run/rara/executors/go/rara"
	rarav1 "github.com/rara-run/rara/gen/go/rara/v1"
)

func TestMain(m *testing.M) {
	if os.Getenv("RARA_TEST_MAIN") != "" {
		rara.Main(ownProcess())
	}
	rara.ServeChild(ownProcess())
	flag.Parse()
	_ = flag.Set("test.parallel", "8") // most of a test is waiting
	goleak.VerifyTestMain(m)
}

// world is an executor against a scripted scheduler.
type world struct {
	scheduler *scripted.Scheduler
	session   *scripted.Session // the first one, welcomed
	executor  *rara.Executor
	logs      *buffer
	stop      context.CancelFunc
	ended     chan error
}

// start runs an executor until the test ends. change: options over the test's.
func start(t *testing.T, registry *rara.Registry, change ...func(*rara.Options)) *world {
	t.Helper()
	w := run(t, registry, change...)
	w.session = w.scheduler.Session(t)
	w.session.Welcome(scripted.Terms{})
	return w
}

// run does the same without a word of the scheduler.
func run(t *testing.T, registry *rara.Registry, change ...func(*rara.Options)) *world {
	t.Helper()
	w := &world{scheduler: scripted.Start(t), logs: &buffer{}, ended: make(chan error, 1)}
	options := rara.DefaultOptions()
	options.Scheduler = w.scheduler.Address
	options.Name = "test"
	options.Dir = t.TempDir()
	options.Grace, options.Stop = 200*time.Millisecond, 2*time.Second
	options.Logger = slog.New(logs.New(w.logs, "json", "debug").Handler())
	for _, do := range change {
		do(&options)
	}
	executor, err := rara.NewExecutor(registry, options)
	if err != nil {
		t.Fatal(err)
	}
	w.executor = executor
	ctx, stop := context.WithCancel(context.Background())
	w.stop = stop
	go func() { w.ended <- executor.Run(ctx) }()
	t.Cleanup(func() {
		w.stop()
		select {
		case err := <-w.ended:
			w.ended <- err
		case <-time.After(scripted.Wait):
			t.Error("the executor does not end")
		}
	})
	return w
}

// job sends one job of the kind and returns its result.
func (w *world) job(t *testing.T, token int64, kind, input string) *rarav1.ProgressEvent {
	t.Helper()
	w.session.Jobs(scripted.Job(token, kind, input))
	return w.session.Ended(t, token)
}

// buffer is a writer for several goroutines.
type buffer struct {
	mu   sync.Mutex
	data bytes.Buffer
}

func (b *buffer) Write(data []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.data.Write(data)
}

func (b *buffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.data.String()
}

// offer registers a handler of any input under version 1.0.0 alone.
func offer(kind string, handler rara.Handler[any, any], options ...rara.Option) *rara.Registry {
	registry := rara.NewRegistry()
	rara.Register(registry, kind, "1.0.0", handler, options...)
	return registry
}

// until waits for something outside of the frames.
func until(t *testing.T, what string, condition func() bool) {
	t.Helper()
	for deadline := time.Now().Add(scripted.Wait); !condition(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("no %s in time", what)
		}
	}
}

// receive waits for a value of a channel.
func receive[T any](t *testing.T, what string, from <-chan T) T {
	t.Helper()
	select {
	case value := <-from:
		return value
	case <-time.After(scripted.Wait):
		t.Fatalf("no %s in time", what)
		panic("unreachable")
	}
}
