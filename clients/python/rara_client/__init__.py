"""Typed asyncio client of Rara's API: the generated messages, without the boilerplate around them."""

from rara_client.client import Client
from rara_client.errors import (
    AlreadyExists,
    ArtifactMismatch,
    CallTimeout,
    DefinitionInvalid,
    FieldViolation,
    IdempotencyConflict,
    InvalidArgument,
    NotAllowed,
    NotFound,
    PayloadInvalid,
    RaraError,
    Refused,
    RevisionCompacted,
    SecretInPayload,
    Unauthenticated,
    Unavailable,
)
from rara_client.pacing import Pacing
from rara_client.run_ends import RunEnd
from rara_client.security import Security

__all__ = [
    "AlreadyExists",
    "ArtifactMismatch",
    "CallTimeout",
    "Client",
    "DefinitionInvalid",
    "FieldViolation",
    "IdempotencyConflict",
    "InvalidArgument",
    "NotAllowed",
    "NotFound",
    "Pacing",
    "PayloadInvalid",
    "RaraError",
    "Refused",
    "RevisionCompacted",
    "RunEnd",
    "SecretInPayload",
    "Security",
    "Unauthenticated",
    "Unavailable",
]
