"""The database knows the same states as the code."""

import re

import asyncpg
from rara_scheduler.domain import run, step

_CHECKED = """
select pg_get_constraintdef(c.oid)
  from pg_constraint c
 where c.conrelid = $1::regclass and c.contype = 'c'
"""


async def states_of(database_url: str, table: str) -> set[str]:
    """The values that the check on nothing but the column `state` allows."""
    connection = await asyncpg.connect(database_url)
    try:
        found = [row[0] for row in await connection.fetch(_CHECKED, table)]
    finally:
        await connection.close()
    whole = [text for text in found if re.fullmatch(r"CHECK \(\(state = ANY \(ARRAY\[[^\]]*\]\)\)\)", text)]
    assert len(whole) == 1, found
    return set(re.findall(r"'(\w+)'::text", whole[0]))


async def test_a_run_can_be_in_every_state_and_no_other(database_url: str) -> None:
    assert await states_of(database_url, "rara.workflow_run") == set(run.RunState)


async def test_a_result_can_be_in_every_terminal_state_and_no_other(database_url: str) -> None:
    assert await states_of(database_url, "rara.result") == set(step.TERMINAL)


async def test_the_view_of_a_step_s_state_names_every_open_state(database_url: str) -> None:
    connection = await asyncpg.connect(database_url)
    try:
        text = await connection.fetchval("select pg_get_viewdef('rara.step_state'::regclass)")
    finally:
        await connection.close()
    case = text.split(" END AS state")[0]
    assert set(re.findall(r"'(\w+)'::text", case)) == set(step.StepState) - step.TERMINAL
