// Package engine runs an executor: sessions one after the other, the jobs that it holds, and what becomes of them.
//
// One mutex, the supervisor's, guards all state: jobs, slots, outbox, and what a session has to say. Whoever holds it
// only notes things and wakes a goroutine; nobody waits with it. Frames are composed at the moment of their writing, so
// that what waits is state and not a queue.
package engine

import (
	"context"
	"errors"
	"log/slog"
	"strings"
	"time"

	"go.opentelemetry.io/otel/trace"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/rara-run/rara/executors/go/internal/codes"
	"github.com/rara-run/rara/executors/go/internal/logs"
	"github.com/rara-run/rara/executors/go/internal/redact"
	rarav1 "github.com/rara-run/rara/gen/go/rara/v1"
)

// Config is what an executor goes by. It was checked by whoever made it.
type Config struct {
	Versions    Versions // none: OurVersions
	Scheduler   string
	DialOptions []grpc.DialOption // credentials included

	ExecutorID, ExecutorName, ExecutorKind, SDK string

	Labels     map[string]string
	Operations []Operation

	Slots      int
	Grace      time.Duration
	Stop       time.Duration
	Dir        string
	CacheBytes int64
	Transfers  int
	// TransferPatience is how long a transfer may move nothing.
	TransferPatience time.Duration
	SecretsDir       string
	ReadyFile        string // is there, and new, while jobs can come; empty: there is none

	Logger   *slog.Logger // redacted with Redactor
	Redactor *redact.Redactor
	Jitter   func() float64 // draws from [0, 1)
	Tracer   trace.Tracer   // of handlers' spans; nil: there are none

	// Listen is where schedulers dial this executor; empty: it dials.
	Listen        string
	ServerOptions []grpc.ServerOption // of that port: credentials and who is let in
	OnListening   func(address string)
	OnConnected   func()
}

// Operation is one handler under a kind and version. MaxConcurrency: 0 is as many as there are slots.
type Operation struct {
	Kind, Version  string
	MaxConcurrency int
	Handler        Handler
}

// Handler runs one job, and returns its output as JSON, or why there is none.
type Handler func(ctx context.Context, work *Work) (output []byte, failed *Failed)

// Failed is a failure as the contract has it. Retryable nil: by the code's default.
type Failed struct {
	Code       string
	Message    string
	Retryable  *bool
	RetryAfter time.Duration
	Details    []byte
	Stack      string
	Exit       *rarav1.RunnerExit // of the child process that ran the handler, if one did
}

// Stopped is the cause of a handler's cancelled context.
type Stopped struct{ Reason string }

func (s *Stopped) Error() string { return "the job is to stop: " + s.Reason }

// ReasonOf a cancelled context; empty: it is not to stop, or for a reason that is not ours.
func ReasonOf(ctx context.Context) string {
	var stopped *Stopped
	if errors.As(context.Cause(ctx), &stopped) {
		return stopped.Reason
	}
	return ""
}

// JobLogger says whose line it is.
func JobLogger(logger *slog.Logger, request *rarav1.JobRequest) *slog.Logger {
	lease := request.Lease
	logger = logger.With("step_run_id", lease.StepRunId, "workflow_run_id", request.WorkflowRunId,
		"attempt", lease.Attempt, "lease_token", lease.LeaseToken, "kind", request.Kind)
	if parts := strings.Split(request.Trace.GetTraceparent(), "-"); len(parts) >= 4 {
		logger = logger.With("trace_id", parts[1])
	}
	return logger
}

// FailureOf is an error of the SDK itself, with the code that it has or another one.
func FailureOf(err error, code string) *codes.Failure {
	var failure *codes.Failure
	if errors.As(err, &failure) {
		return failure
	}
	return &codes.Failure{Code: code, Message: err.Error()}
}

// HandlerLogger is the job's own: in a group, so that its keys cannot pass for ours. It is made with its first line,
// for most handlers write none.
func HandlerLogger(logger *slog.Logger, request *rarav1.JobRequest) *slog.Logger {
	return logs.Lazy(logger, func() *slog.Logger { return JobLogger(logger, request).WithGroup("handler") })
}

// duration of the wire, or the default where it is absent or nothing.
func durationOr(given *durationpb.Duration, otherwise time.Duration) time.Duration {
	if d := given.AsDuration(); given != nil && d > 0 {
		return d
	}
	return otherwise
}
