"""Operations of a user who traces with OpenTelemetry, and has set it up in the module as its documentation says."""

from typing import Any

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from rara_executor import BlockingJob, Job, Retryable, operation

_provider = TracerProvider(resource=Resource({"service.name": "handlers"}))
_provider.add_span_processor(SimpleSpanProcessor(OTLPSpanExporter()))
trace.set_tracer_provider(_provider)
_tracer = trace.get_tracer("handlers")


@operation("traced.async", version="1.0.0")
async def traced(job: Job) -> Any:
    with _tracer.start_as_current_span("inside async"):
        return job.trace_headers


@operation("traced.blocking", version="1.0.0")
def traced_blocking(job: BlockingJob) -> Any:
    with _tracer.start_as_current_span("inside blocking"):
        return job.trace_headers


@operation("traced.flaky", version="1.0.0")
async def flaky(job: Job) -> Any:
    if job.failures == 0:
        raise Retryable("HANDLER_FAILED", "the first time it fails")
    return None


@operation("traced.hopeless", version="1.0.0")
async def hopeless(job: Job) -> Any:
    raise Retryable("HANDLER_FAILED", "it always fails")
