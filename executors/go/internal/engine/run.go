package engine

import (
	"context"
	"fmt"
	"runtime/debug"
	"time"

	"go.opentelemetry.io/otel/propagation"

	"github.com/rara-run/rara/executors/go/internal/codes"
)

// run calls the handler. A panic fails the step and not the process; one in a goroutine that the handler has started
// cannot be caught by anybody, and ends the process.
func (s *Supervisor) run(job *Job) {
	out := outcome{failed: &Failed{Code: codes.HandlerFailed, Message: "the handler called runtime.Goexit"}}
	defer func() {
		if value := recover(); value != nil {
			out = outcome{failed: &Failed{
				Code: codes.HandlerPanic, Message: fmt.Sprintf("panic: %v", value), Stack: string(debug.Stack())}}
		}
		s.locked(func() { s.returned(job, out) })
	}()
	output, failed := job.operation.Handler(job.ctx, job)
	out = outcome{output: output, failed: failed}
}

// handlerContext is cancelled when the job is to stop, with a *Stopped as its cause, and carries the run's trace.
func (s *Supervisor) handlerContext(job *Job) (context.Context, context.CancelCauseFunc) {
	ctx := context.WithoutCancel(s.base)
	if trace := job.Request.Trace; trace.GetTraceparent() != "" {
		ctx = propagation.TraceContext{}.Extract(ctx, propagation.MapCarrier{
			"traceparent": trace.Traceparent, "tracestate": trace.Tracestate})
	}
	var ends time.Time
	if limit := job.Request.TimeRemaining; limit != nil {
		ends = job.receivedAt.Add(limit.AsDuration())
	}
	if limit := job.Request.AttemptTimeout; limit != nil {
		if at := time.Now().Add(limit.AsDuration()); ends.IsZero() || at.Before(ends) {
			ends = at
		}
	}
	ctx, interrupt := context.WithCancelCause(ctx)
	return deadlined{ctx, ends}, interrupt
}

// deadlined tells handlers, and what they call, when the job ends. Our own timer ends it, with the reason as the cause.
type deadlined struct {
	context.Context
	at time.Time
}

func (d deadlined) Deadline() (time.Time, bool) { return d.at, !d.at.IsZero() }
