"""The events of one attempt of a step, stored and live."""

import asyncio
from contextlib import aclosing

from rara.v1 import job_pb2
from rara_client import Client

from rara_cli.answers import print_document
from rara_cli.exits import CommandError, Exit
from rara_cli.jsonview import to_json
from rara_cli.session import Session
from rara_cli.steps import show_event


async def print_events(
    session: Session, client: Client, step_run_id: str, attempt: int, after: int, *, is_endless: bool
) -> None:
    """Print what is stored; `is_endless`: and what comes, until the attempt has ended.

    With -o json one array at the end.
    """
    kept: list[job_pb2.ProgressEvent] = []

    def take(event: job_pb2.ProgressEvent) -> None:
        if session.output == "json":
            kept.append(event)
        else:
            show_event(session, event)

    response = await client.get_step_run(step_run_id)
    chosen = attempt or response.step_run.attempt
    known = {item.lease.attempt: item for item in response.attempts}
    if chosen and chosen not in known and chosen != response.step_run.attempt:
        name = response.step_run.step_name
        raise CommandError(
            Exit.NOT_FOUND,
            "ATTEMPT_NOT_FOUND",
            f"step {name} has no attempt {chosen}",
            f"rara step get {step_run_id}",
        )
    newest = known[chosen].last_sequence if chosen in known else response.step_run.last_sequence
    if is_endless or newest > after:
        try:
            async with (
                asyncio.timeout(session.timeout_s),
                aclosing(client.watch_step_run(step_run_id, attempt=chosen, after_sequence=after)) as updates,
            ):
                async for update in updates:
                    if update.WhichOneof("update") != "event":
                        continue
                    take(update.event)
                    if not is_endless and update.event.sequence >= newest:
                        break
        except TimeoutError:
            raise CommandError(
                Exit.STILL_GOING, "STILL_GOING", f"there may be more events after {session.timeout_s:g} s"
            ) from None
    if session.output == "json":
        print_document([to_json(event) for event in kept])
    elif not newest and not is_endless:
        session.note(f"no events yet; why not: rara why {step_run_id}")
