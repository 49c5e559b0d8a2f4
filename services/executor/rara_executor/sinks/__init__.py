"""Writes to stores outside that a superseded attempt loses, however late they come.

    from rara_executor import sinks

    await sinks.upsert(connection, job, table="scores", key={"model": "m1"}, values={"score": 0.93})
    await sinks.put_object(store, job, "models/current", path)
    sinks.write_file(job, "/data/report.json", data)

Each write carries the job's lease token, which is larger for every later attempt, and the store keeps the largest: a
write under a smaller one raises Superseded and changes nothing. The same token may write again.
"""

from rara_executor.sinks.files import open_file, write_file
from rara_executor.sinks.objects import Pointer, check_store, get_object, put_object, read_pointer
from rara_executor.sinks.postgres import upsert, upsert_statement
from rara_executor.sinks.token import Superseded, Tokened

__all__ = [
    "Pointer",
    "Superseded",
    "Tokened",
    "check_store",
    "get_object",
    "open_file",
    "put_object",
    "read_pointer",
    "upsert",
    "upsert_statement",
    "write_file",
]
