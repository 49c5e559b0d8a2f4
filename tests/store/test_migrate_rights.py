"""What rights migrations need: those of the role that owns the database, as managed services give them."""

import asyncpg
import pytest
from rara_scheduler.store import migrate

OWNER = "owner_of_one_database"


async def test_a_role_that_owns_the_database_is_enough(empty_database_url: str) -> None:
    admin = await asyncpg.connect(empty_database_url)
    name = await admin.fetchval("select current_database()")
    try:
        await admin.execute(f"create role {OWNER} login password 'x'")
        await admin.execute(f"alter database {name} owner to {OWNER}")
        await admin.execute(f"set session authorization {OWNER}")
        for each in migrate.load_migrations():
            await admin.execute(each.sql)
    finally:
        await admin.execute("reset session authorization")
        await admin.execute(f"alter database {name} owner to session_user")
        await admin.execute(f"drop owned by {OWNER} cascade")
        await admin.execute(f"drop role {OWNER}")
        await admin.close()


@pytest.mark.parametrize(("digest", "is_known"), [(migrate.FORMER["0002"], True), ("0" * 64, False)])
async def test_a_database_of_the_text_before_is_as_good(
    database_url: str, digest: str, is_known: bool
) -> None:
    raw = await asyncpg.connect(database_url)
    await raw.execute("update rara.schema_migration set sha256 = $1 where version = '0002'", digest)
    await raw.close()
    if is_known:
        assert (await migrate.status(database_url)).is_current
    else:
        with pytest.raises(migrate.MigrationEdited):
            await migrate.status(database_url)
