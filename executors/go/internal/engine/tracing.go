package engine

import (
	"context"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/trace"
	"google.golang.org/protobuf/proto"

	rarav1 "github.com/rara-run/rara/gen/go/rara/v1"
)

// process begins the span of a handler, in whose context it is then current. A run that nobody traces gets none.
func (s *Supervisor) process(ctx context.Context, request *rarav1.JobRequest) (context.Context, trace.Span) {
	if request.Trace.GetTraceparent() == "" || s.config.Tracer == nil {
		return ctx, trace.SpanFromContext(context.Background()) // which takes everything and keeps nothing
	}
	return s.config.Tracer.Start(ctx, "process "+request.Kind, trace.WithSpanKind(trace.SpanKindConsumer),
		trace.WithAttributes(
			attribute.String("rara.workflow_run_id", request.WorkflowRunId),
			attribute.String("rara.step_run_id", request.Lease.StepRunId),
			attribute.Int64("rara.attempt", int64(request.Lease.Attempt)),
			attribute.Int64("rara.lease_token", request.Lease.LeaseToken),
			attribute.String("rara.step_name", request.StepName),
			attribute.String("rara.kind", request.Kind),
			attribute.String("rara.kind_version", request.KindVersion),
			attribute.String("rara.executor_name", s.config.ExecutorName)))
}

// endSpan with what is said of the handler; nil: nothing, the lease was lost.
func endSpan(span trace.Span, event *rarav1.ProgressEvent) {
	outcome, code := "lost", ""
	switch {
	case event == nil:
	case event.GetSucceeded() != nil:
		outcome = "succeeded"
	case event.GetFailed() != nil:
		// The code alone: a message may hold what only those may read who may read the run.
		outcome, code = "failed", event.GetFailed().Code
		span.SetStatus(codes.Error, code)
	default:
		outcome, code = "cancelled", event.GetCancelled().GetReason()
	}
	span.SetAttributes(attribute.String("rara.outcome", outcome))
	if code != "" {
		span.SetAttributes(attribute.String("error.type", code))
	}
	span.End()
}

// TracedRequest is the request as it goes to another process, where spans are to be children of the current one.
func TracedRequest(ctx context.Context, request *rarav1.JobRequest) *rarav1.JobRequest {
	carrier := propagation.MapCarrier{}
	propagation.TraceContext{}.Inject(ctx, carrier)
	if carrier["traceparent"] == "" {
		return request
	}
	traced := proto.CloneOf(request)
	traced.Trace = &rarav1.TraceContext{Traceparent: carrier["traceparent"], Tracestate: carrier["tracestate"]}
	return traced
}
