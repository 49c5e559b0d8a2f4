package rara

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime/debug"

	"github.com/google/uuid"
	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/trace"

	"github.com/rara-run/rara/executors/go/internal/engine"
	"github.com/rara-run/rara/executors/go/internal/logs"
	"github.com/rara-run/rara/executors/go/internal/redact"
)

// ErrReplaced ends an executor whose id another process uses.
var ErrReplaced = engine.ErrReplaced

// Executor is one executor, from Run's begin to its end.
type Executor struct {
	id     string
	engine *engine.Executor
}

// NewExecutor offers the registry's operations to a scheduler. The error names everything that has to be changed.
func NewExecutor(registry *Registry, options Options) (*Executor, error) {
	operations, problem := registry.all()
	dial, cannotDial := options.dialOptions()
	serve, cannotServe := options.door().ServerOptions()
	if err := errors.Join(problem, options.check(), cannotDial, cannotServe); err != nil {
		return nil, err
	}
	id, err := uuid.NewV7()
	if err != nil {
		return nil, fmt.Errorf("no randomness for an id: %w", err)
	}
	var redactor redact.Redactor
	redactor.Add(options.Token)
	logger := options.Logger
	if logger == nil {
		logger = DefaultOptions().Logger
	}
	return &Executor{id: id.String(), engine: engine.New(engine.Config{
		Scheduler:        options.Scheduler,
		DialOptions:      dial,
		ExecutorID:       id.String(),
		ExecutorName:     options.Name,
		ExecutorKind:     options.Kind,
		SDK:              "rara-go/" + version(),
		Labels:           options.Labels,
		Operations:       operations,
		Slots:            options.Slots,
		Grace:            options.Grace,
		Stop:             options.Stop,
		Dir:              options.Dir,
		CacheBytes:       options.CacheBytes,
		Transfers:        options.Transfers,
		TransferPatience: options.TransferPatience,
		SecretsDir:       options.SecretsDir,
		ReadyFile:        options.ReadyFile,
		Logger:           logs.Redacted(logger, &redactor),
		Redactor:         &redactor,
		Jitter:           rand.Float64,
		Tracer:           tracerOf(options.TracerProvider),
		Listen:           options.Listen,
		ServerOptions:    serve,
		OnListening:      options.OnListening,
		OnConnected:      options.OnConnected,
	})}, nil
}

// ID is made anew for every executor: leases belong to it.
func (x *Executor) ID() string { return x.id }

// IsReady tells whether jobs can come: heartbeats go to and fro, and handlers that ignore their context leave a slot.
func (x *Executor) IsReady() bool { return x.engine.IsReady() }

// Run holds the executor's whole life, and may be called once. It ends when ctx is done and then what runs has finished
// or was handed back, within Options.Stop; when an operator has drained it; or with ErrReplaced. Handlers that ignore
// their context are left behind.
func (x *Executor) Run(ctx context.Context) error { return x.engine.Run(ctx) }

// tracerOf nil is that of the global provider, which does nothing until somebody sets one.
func tracerOf(provider trace.TracerProvider) trace.Tracer {
	if provider == nil {
		provider = otel.GetTracerProvider()
	}
	return provider.Tracer("rara.executor")
}

func version() string {
	const path = "github.com/rara-run/rara/executors/go"
	if info, ok := debug.ReadBuildInfo(); ok {
		for _, module := range append(info.Deps, &info.Main) {
			if module.Path == path && module.Version != "" && module.Version != "(devel)" {
				return module.Version
			}
		}
	}
	return "0"
}
