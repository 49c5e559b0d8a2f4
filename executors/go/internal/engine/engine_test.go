package engine_test

import (
	"context"
	"io"
	"log/slog"
	"math/rand/v2"
	"os"
	"runtime"
	"testing"
	"time"

	"go.uber.org/goleak"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/rara-run/rara/executors/go/internal/engine"
	"github.com/rara-run/rara/executors/go/internal/redact"
	"github.com/rara-run/rara/executors/go/internal/scripted"
	rarav1 "github.com/rara-run/rara/gen/go/rara/v1"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func config(t *testing.T, scheduler *scripted.Scheduler) engine.Config {
	return engine.Config{
		Scheduler:    scheduler.Address,
		DialOptions:  []grpc.DialOption{grpc.WithTransportCredentials(insecure.NewCredentials())},
		ExecutorID:   "id",
		ExecutorName: "test",
		ExecutorKind: "go",
		Operations: []engine.Operation{{Kind: "k", Version: "1.0.0",
			Handler: func(context.Context, *engine.Work) ([]byte, *engine.Failed) { return []byte("1"), nil }}},
		Slots:     4,
		Grace:     time.Second,
		Stop:      time.Second,
		Dir:       t.TempDir(),
		Transfers: 1,
		Logger:    slog.New(slog.NewTextHandler(io.Discard, nil)),
		Redactor:  &redact.Redactor{},
		Jitter:    func() float64 { return 0 },
	}
}

// PROC-3: sessions that are cut at any moment, a third of them during a write.
func TestCutSessionsLeaveNothingBehind(t *testing.T) {
	const warmUp, cuts = 20, 200
	scheduler := scripted.Start(t)
	ctx, stop := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- engine.New(config(t, scheduler)).Run(ctx) }()
	var goroutines, files int
	for number := range warmUp + cuts {
		if number == warmUp {
			goroutines, files = runtime.NumGoroutine(), openFiles(t)
		}
		session := scheduler.Session(t)
		if rand.IntN(3) > 0 {
			session.Welcome(scripted.Terms{})
			token := int64(number + 1)
			session.Jobs(scripted.Job(token, "k", `1`)) // it writes while it is cut
			time.Sleep(time.Duration(rand.IntN(3)) * time.Millisecond)
		}
		session.Cut(nil)
		<-session.Done
	}
	last := scheduler.Session(t)
	last.WelcomeWith(welcomeOfNothing())
	last.Credit(t, 4) // nothing is held any more: all slots are free
	settled := func() bool { return runtime.NumGoroutine() <= goroutines+5 && openFiles(t) <= files+5 }
	for deadline := time.Now().Add(5 * time.Second); !settled(); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("%d goroutines and %d files after, %d and %d before",
				runtime.NumGoroutine(), openFiles(t), goroutines, files)
		}
	}
	stop()
	if err := <-ended; err != nil {
		t.Error(err)
	}
}

func openFiles(t *testing.T) int {
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(entries)
}

// welcomeOfNothing names no held job: all are lost.
func welcomeOfNothing() *rarav1.Welcome { return &rarav1.Welcome{ProtocolVersion: 1} }
