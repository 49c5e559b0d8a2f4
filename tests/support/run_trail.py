"""Every change of a run's state, written down by the database itself in a test's own table."""

from collections.abc import Sequence

import asyncpg

# What may follow what within one transaction: a run whose only step succeeds is `running` within it.
FOLLOWS = {
    "pending": {"running", "cancelling", "succeeded", "failed", "cancelled"},
    "running": {"cancelling", "succeeded", "failed", "cancelled"},
    "cancelling": {"succeeded", "failed", "cancelled"},
}
CLOSED = {"succeeded", "failed", "cancelled"}

_TRAIL = """
create table run_trail (
    n serial primary key, workflow_run_id uuid, was text, became text, open_steps int, noted_at timestamptz
);
create function note_run() returns trigger language plpgsql as $$
begin
    insert into run_trail (workflow_run_id, was, became, open_steps, noted_at)
    select new.workflow_run_id, old.state, new.state, count(*), clock_timestamp()
      from rara.step_run s
     where s.workflow_run_id = new.workflow_run_id
       and not exists (select from rara.result x where x.step_run_id = s.step_run_id);
    return null;
end $$;
create constraint trigger note_run after update of state on rara.workflow_run deferrable initially deferred
    for each row when (old.state <> new.state) execute function note_run();
"""


async def keep_trail(connection: "asyncpg.Connection[asyncpg.Record]") -> None:
    """From now on, and at the commit of each change, when all else of its transaction is done."""
    await connection.execute(_TRAIL)


async def assert_closed_once(
    connection: "asyncpg.Connection[asyncpg.Record]", run_ids: Sequence[str]
) -> None:
    """The runs changed as their table allows, and each closed once, for good, with no step open."""
    rows = await connection.fetch(
        "select workflow_run_id::text, was, became, open_steps from run_trail"
        " where workflow_run_id = any($1::uuid[]) order by n",
        run_ids,
    )
    trails: dict[str, list[asyncpg.Record]] = {}
    for row in rows:
        trails.setdefault(row["workflow_run_id"], []).append(row)
    assert trails.keys() == set(run_ids)
    for trail in trails.values():
        assert trail[0]["was"] == "pending"
        assert all(row["became"] in FOLLOWS[row["was"]] for row in trail), trail
        closings = [row for row in trail if row["became"] in CLOSED]
        assert closings == trail[-1:], trail
        assert closings[0]["open_steps"] == 0
