package engine

import (
	"context"
	"fmt"
	"runtime/debug"
	"time"

	"go.opentelemetry.io/otel/propagation"

	"github.com/rara-run/rara/executors/go/internal/codes"
	rarav1 "github.com/rara-run/rara/gen/go/rara/v1"
)

// Call runs a handler, and says how it ended, once, whatever it does. A panic fails the step and not the process; one
// in a goroutine that the handler has started cannot be caught by anybody, and ends the process.
func Call(ctx context.Context, handler Handler, work *Work, done func(output []byte, failed *Failed)) {
	var output []byte
	failed := &Failed{Code: codes.HandlerFailed, Message: "the handler called runtime.Goexit"}
	defer func() {
		if value := recover(); value != nil {
			output, failed = nil, &Failed{
				Code: codes.HandlerPanic, Message: fmt.Sprintf("panic: %v", value), Stack: string(debug.Stack())}
		}
		done(output, failed)
	}()
	output, failed = handler(ctx, work)
}

// HandlerContext is cancelled when the job is to stop, with a *Stopped as its cause, and carries the run's trace.
func HandlerContext(
	base context.Context, request *rarav1.JobRequest, endsAt time.Time,
) (context.Context, context.CancelCauseFunc) {
	ctx := context.WithoutCancel(base)
	if trace := request.Trace; trace.GetTraceparent() != "" {
		ctx = propagation.TraceContext{}.Extract(ctx, propagation.MapCarrier{
			"traceparent": trace.Traceparent, "tracestate": trace.Tracestate})
	}
	ctx, interrupt := context.WithCancelCause(ctx)
	return deadlined{ctx, endsAt}, interrupt
}

// endsAt is the deadline or the end of the attempt that starts now, whichever is first; zero: there is neither.
func endsAt(request *rarav1.JobRequest, receivedAt time.Time) time.Time {
	var ends time.Time
	if limit := request.TimeRemaining; limit != nil {
		ends = receivedAt.Add(limit.AsDuration())
	}
	if limit := request.AttemptTimeout; limit != nil {
		ends = earlier(ends, time.Now().Add(limit.AsDuration()))
	}
	return ends
}

// deadlined tells handlers, and what they call, when the job ends. Our own timer ends it, with the reason as the cause.
type deadlined struct {
	context.Context
	at time.Time
}

func (d deadlined) Deadline() (time.Time, bool) { return d.at, !d.at.IsZero() }
