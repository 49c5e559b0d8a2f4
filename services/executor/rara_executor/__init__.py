"""The executor of Rara, and what its users import to write operations."""

from rara_executor.artifact_files import InputArtifact, OutputArtifact
from rara_executor.errors import (
    ConfigurationError,
    ExecutorError,
    JobCancelledError,
    JobFailure,
    PayloadInvalid,
    PayloadTooLarge,
    Retryable,
    Terminal,
)
from rara_executor.job import BlockingJob, Job
from rara_executor.registry import operation

__all__ = [
    "BlockingJob",
    "ConfigurationError",
    "ExecutorError",
    "InputArtifact",
    "Job",
    "JobCancelledError",
    "JobFailure",
    "OutputArtifact",
    "PayloadInvalid",
    "PayloadTooLarge",
    "Retryable",
    "Terminal",
    "operation",
]
