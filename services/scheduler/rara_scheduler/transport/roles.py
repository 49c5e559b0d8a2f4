"""Who may call what: every method that a scheduler serves, and the roles that may call it.

A method that stands neither here nor in OPEN is refused to everybody, so that a new one is closed until somebody has
decided. A test calls each with each kind of caller.
"""

from collections.abc import Mapping
from typing import Final

from rara_scheduler.domain.tokens import Role

# What probes ask, and load balancers: it tells whether we serve, and nothing else.
OPEN: Final = frozenset({"/grpc.health.v1.Health/Check"})

_PEOPLE: Final = frozenset({Role.CLIENT, Role.OPERATOR})
_OPERATORS: Final = frozenset({Role.OPERATOR})
_EXECUTORS: Final = frozenset({Role.EXECUTOR})
_ALL: Final = frozenset(Role)

_BY_SERVICE: Final[Mapping[str, Mapping[str, frozenset[Role]]]] = {
    "rara.v1.WorkflowService": {
        "RegisterDefinition": _PEOPLE,
        "GetDefinition": _PEOPLE,
        "ListDefinitions": _PEOPLE,
        "StartRun": _PEOPLE,
        "BatchStartRuns": _PEOPLE,
        "GetRun": _PEOPLE,
        "ListRuns": _PEOPLE,
        "CancelRun": _PEOPLE,
        "RetryRun": _PEOPLE,
        "WatchRun": _PEOPLE,
        "WatchRuns": _PEOPLE,
        "GetStepRun": _PEOPLE,
        "ListStepRuns": _PEOPLE,
        "WatchStepRun": _PEOPLE,
        "ExplainStep": _PEOPLE,
        "QueryLineage": _PEOPLE,
        "ListExecutors": _PEOPLE,
        "DrainExecutor": _OPERATORS,
        "Pause": _OPERATORS,
        "Resume": _OPERATORS,
        "ListPauses": _PEOPLE,
        "RetryRuns": _OPERATORS,
        "CancelRuns": _OPERATORS,
        "RequeueSteps": _OPERATORS,
    },
    # CreateUpload asks an executor for a lease of its own as well.
    "rara.v1.ArtifactService": {
        "FindMissingBlobs": _ALL,
        "CreateUpload": _ALL,
        "WriteBlob": _ALL,
        "QueryWriteStatus": _ALL,
        "CompleteUpload": _ALL,
        "GetDownload": _ALL,
        "ReadBlob": _ALL,
    },
    # What Hello claims has to lie within the token's kinds as well.
    "rara.v1.DispatchService": {"Connect": _EXECUTORS},
    "grpc.health.v1.Health": {"Watch": _ALL, "List": _ALL},
    "grpc.reflection.v1alpha.ServerReflection": {"ServerReflectionInfo": _ALL},
    "grpc.reflection.v1.ServerReflection": {"ServerReflectionInfo": _ALL},
}

ALLOWED: Final[Mapping[str, frozenset[Role]]] = {
    f"/{service}/{method}": roles
    for service, methods in _BY_SERVICE.items()
    for method, roles in methods.items()
}


def may_call(role: Role, method: str) -> bool:
    """method: as gRPC has it, `/package.Service/Method`."""
    return role in ALLOWED.get(method, frozenset())
