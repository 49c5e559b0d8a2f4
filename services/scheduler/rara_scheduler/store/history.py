"""The daily partitions of history."""

from rara_scheduler.store.database import Database
from rara_scheduler.store.queries import query


class HistoryStore:
    def __init__(self, database: Database) -> None:
        self._database = database

    async def create_partitions(self, days_ahead: int) -> list[str]:
        """Create what is missing for today and the days ahead; the names of the new ones."""
        async with self._database.transaction() as connection:
            rows = await connection.fetch(query("create_partitions"), days_ahead)
        return [row["created"] for row in rows]
