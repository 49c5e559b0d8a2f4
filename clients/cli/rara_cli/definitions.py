"""Definitions from files, and on the screen."""

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from rara.v1 import workflow_pb2
from rara_client.definitions import load_definition

from rara_cli import words
from rara_cli.answers import facts, print_document, show_list, show_one, width
from rara_cli.jsonview import Json, dumps, to_json
from rara_cli.runs import pairs
from rara_cli.runview import dependencies
from rara_cli.session import Session
from rara_cli.tables import Column, render


async def register(session: Session, files: Sequence[Path], *, validate_only: bool) -> None:
    """Send definitions to the scheduler, all read before the first is sent."""
    definitions = [load_definition(path) for path in files]
    documents: list[Json] = []
    async with session.connect() as client:
        for definition in definitions:
            answer = await client.register_definition(
                definition, validate_only=validate_only, timeout_s=session.timeout_s
            )
            stored = answer.definition
            said = "unchanged" if answer.already_existed else "created"
            documents.append(
                {
                    "definition": stored.definition,
                    "version": stored.version,
                    "content_sha256": stored.content_sha256,
                    "result": "valid" if validate_only else said,
                }
            )
    _show_results(session, documents)


def show_checked(session: Session, files: Sequence[Path]) -> None:
    """Say that the files could be read."""
    documents: list[Json] = [
        {"definition": load_definition(path).definition, "version": 0, "result": "readable"} for path in files
    ]
    _show_results(session, documents)


def _show_results(session: Session, documents: Sequence[Json]) -> None:
    if session.output == "json":
        print_document(list(documents))
        return
    for document in documents:
        name = words.clean(str(document["definition"]))
        label = f"{name} v{document['version']}" if document["version"] else name
        match session.output:
            case "jsonl":
                print(dumps(document))
            case "name":
                print(name)
            case _:
                print(f"definition {label} {document['result']}")


def show_definitions(session: Session, definitions: Sequence[workflow_pb2.Definition]) -> None:
    now = datetime.now(UTC)
    columns: list[Column[workflow_pb2.Definition]] = [
        Column("NAME", lambda item: item.definition, is_whole=True),
        Column("VERSION", lambda item: str(item.version), is_number=True),
        Column("STEPS", lambda item: str(len(item.steps)), is_number=True),
        Column("CREATED", lambda item: words.instant_text(item.created_at, session.time_style, now)),
        Column("PAUSED", lambda item: "yes" if item.HasField("pause") else ""),
        Column("LABELS", lambda item: pairs(item.labels)),
        Column("CONTENT", lambda item: item.content_sha256, wide_only=True),
    ]
    show_list(
        session,
        definitions,
        columns,
        name=lambda item: item.definition,
        if_empty="no definitions; store one: rara definition apply FILE",
    )


def show_definition(session: Session, definition: workflow_pb2.Definition) -> None:
    show_one(
        session,
        to_json(definition),
        name=definition.definition,
        lines=lambda: _definition_lines(session, definition),
    )


def _definition_lines(session: Session, definition: workflow_pb2.Definition) -> list[str]:
    now = datetime.now(UTC)
    on_failure = workflow_pb2.OnFailure.Name(definition.on_failure).removeprefix("ON_FAILURE_").lower()
    lines = facts(
        [
            ("definition", words.clean(definition.definition)),
            ("version", str(definition.version)),
            ("created", words.instant_text(definition.created_at, session.time_style, now)),
            ("content", definition.content_sha256),
            ("on failure", "fail_fast" if on_failure == "unspecified" else on_failure),
            ("run timeout", _timeout(definition)),
            ("labels", words.clean(pairs(definition.labels))),
        ]
    )
    columns: list[Column[workflow_pb2.StepDefinition]] = [
        Column("STEP", lambda step: step.step_name),
        Column("KIND", lambda step: " ".join(filter(None, (step.kind, step.kind_version)))),
        Column("AFTER", lambda step: ", ".join(dependencies(step))),
        Column("ATTEMPTS", lambda step: str(step.retry.max_attempts or ""), is_number=True),
        Column("NEEDS", lambda step: pairs(step.required_labels)),
    ]
    if definition.steps:
        lines.append("")
        lines.extend(render(definition.steps, columns, width=width(session), in_color=session.in_color))
    return lines


def _timeout(definition: workflow_pb2.Definition) -> str:
    if not definition.HasField("run_timeout"):
        return ""
    return words.duration_text(definition.run_timeout.ToTimedelta().total_seconds())
