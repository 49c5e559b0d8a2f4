"""What a run of the chaos runner needs to know of the stack that it is about."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

from rara_client.security import Security

from rara_chaos.injector import Faults
from rara_chaos.load import Confirmed
from rara_chaos.schedule import Kind
from rara_chaos.shapes import Shape
from rara_chaos.verdict import Verdict


class Target(ABC):
    """A stack that runs. addresses: of its schedulers, for clients. ledger: as its handlers reach it.

    kinds, also: of faults, in the two decks of the schedule. left_out: kinds that cannot be had here, and why.
    database_url: for the verdict; empty: it is out of reach.
    """

    name: str
    kinds: Sequence[Kind]
    also: Sequence[Kind] = ()
    left_out: Mapping[Kind, str]
    deals_all: bool = True  # every kind is dealt, however short the run
    shapes: Sequence[Shape]
    addresses: Sequence[str]
    security: Security | None = None
    ledger: str
    numbers: int = 1_000_000  # so many different artifacts are made at most
    database_url: str
    quiet_s: float = 60.0
    look_s: float = 1.0  # between two looks at the memory
    wants_blobs: bool = True
    is_ours: bool = True  # nobody else uses it
    executor_kinds: Sequence[str]
    faults: Faults

    @abstractmethod
    async def beside(self) -> None:
        """What goes on beside the load, until cancelled."""

    @abstractmethod
    async def memory(self) -> Mapping[str, int]:
        """Bytes of each process or container that is up."""

    @abstractmethod
    async def judge(self, confirmed: Sequence[Confirmed]) -> Verdict:
        """When all is quiet."""
