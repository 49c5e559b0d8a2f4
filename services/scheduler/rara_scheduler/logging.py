"""Structured logs on stderr: JSON lines for services, columns for people."""

import logging
import sys

import structlog

from rara_scheduler.domain.secrets import redact_text


def redact_values(
    _logger: structlog.typing.WrappedLogger, _method: str, event: structlog.typing.EventDict
) -> structlog.typing.EventDict:
    """The last line of defence: no raw secret in a line, a database's own words about a row included."""
    for key, value in event.items():
        if isinstance(value, str):
            event[key] = redact_text(value)
    return event


def configure(*, log_format: str, level: str) -> None:
    """Set structlog up for this process. log_format: `json`, `console`, or `auto` for what suits stderr."""
    renderer: structlog.typing.Processor
    if log_format == "json" or (log_format == "auto" and not sys.stderr.isatty()):
        renderer = structlog.processors.JSONRenderer()
    else:
        renderer = structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            redact_values,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, level.upper())),
        logger_factory=structlog.WriteLoggerFactory(file=sys.stderr),
        cache_logger_on_first_use=True,
    )
