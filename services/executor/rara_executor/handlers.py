"""The operations of one runner, and what must hold before a handler is called."""

from rara_executor import outcomes, payload
from rara_executor.registry import Operation, Registry
from rara_executor.runner_protocol import Failed, OperationInfo, StartJob
from rara_executor.schemas import InputSchemas


class Handlers:
    """Operations with their compiled schemas. Raises ConfigurationError for a schema that is none."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._schemas = InputSchemas()
        for operation in registry.all():
            self._schemas.prepare(operation)

    def catalogue(self) -> list[OperationInfo]:
        return [
            OperationInfo(
                kind=operation.kind,
                version=operation.version,
                is_async=operation.is_async,
                max_concurrency=operation.max_concurrency,
                input_schema_sha256=""
                if operation.input_schema is None
                else payload.canonical_sha256(operation.input_schema),
            )
            for operation in self._registry.all()
        ]

    def find(self, start: StartJob) -> Operation | Failed:
        """The operation that runs the job, or why no handler may be called for it."""
        operation = self._registry.get(start.kind, start.kind_version)
        if operation is None:
            return outcomes.unsupported(start)
        try:
            value = payload.decode(start.input)
        except ValueError as error:
            return outcomes.invalid_input(start, "", f"is not JSON: {error}")
        problem = self._schemas.problem(operation, value)
        return operation if problem is None else outcomes.invalid_input(start, *problem)
