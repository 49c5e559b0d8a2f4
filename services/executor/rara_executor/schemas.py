"""Input schemas, compiled once per process; nothing is ever fetched for them."""

from collections.abc import Mapping
from typing import NoReturn

from rara_executor.errors import ConfigurationError
from rara_executor.payload import pointer
from rara_executor.registry import Operation


class InputSchemas:
    """Validators of the operations that have a schema."""

    def __init__(self) -> None:
        self._validators: dict[tuple[str, str], _Validator] = {}

    def prepare(self, operation: Operation) -> None:
        """Compile the operation's schema. Raises ConfigurationError."""
        if operation.input_schema is not None:
            self._validators[operation.kind, operation.version] = _Validator(
                operation.kind, operation.input_schema
            )

    def problem(self, operation: Operation, value: object) -> tuple[str, str] | None:
        """JSON pointer and text of the first thing that does not fit; None: it fits."""
        validator = self._validators.get((operation.kind, operation.version))
        return None if validator is None else validator.problem(value)


class _Validator:
    def __init__(self, kind: str, schema: Mapping[str, object]) -> None:
        import jsonschema_rs

        try:
            self._validator = jsonschema_rs.validator_for(
                dict(schema),
                retriever=_refuse,
                mask="(value)",  # the message names the rule; the value may be a secret
                # A pattern that would search for minutes gives up instead: an input comes from anybody.
                pattern_options=jsonschema_rs.FancyRegexOptions(backtrack_limit=200_000),
            )
        except (ValueError, TypeError) as error:
            raise ConfigurationError(f"input_schema of {kind}: {error}") from error

    def problem(self, value: object) -> tuple[str, str] | None:
        for error in self._validator.iter_errors(value):
            path = ""
            for part in error.instance_path:
                path = pointer(path, part)
            return path, error.message
        return None


def _refuse(uri: str, /) -> NoReturn:
    raise ValueError(f"a schema may not refer to {uri}: nothing is fetched")
