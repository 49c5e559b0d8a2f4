"""Whose token a call carries, and for how long that answer holds.

A token is looked up by its hash, kept for a moment, and looked up again; streams that live on are looked after by
`run`. So a token that was revoked or has expired stops within `recheck_s` everywhere, whatever it is used for.
"""

import asyncio
import hmac
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final, Protocol, TypeVar

import structlog

from rara_scheduler.domain.errors import Code, Fault
from rara_scheduler.domain.tokens import Token, is_token, token_hash
from rara_scheduler.store.database import Conflict
from rara_scheduler.store.tokens import StoredToken

T = TypeVar("T")

log = structlog.get_logger(__name__)

MAX_KNOWN: Final = 10_000
MAX_LOOK_UPS: Final = 2  # at once, of those who were known and of strangers each: calls need connections too
MAX_STRANGERS: Final = 1000  # whose look-ups are under way or wait
MAX_REFUSED: Final = 10_000  # answers kept
REFUSED_S: Final = 1.0  # for so long a token that was no good is not looked up again
_SCHEME: Final = "bearer"


class Tokens(Protocol):
    async def find(self, token_hash: bytes) -> StoredToken | None: ...

    async def valid(self, token_ids: list[str]) -> set[str]: ...

    async def note_use(self, token_ids: list[str]) -> None: ...


@dataclass(frozen=True, slots=True)
class Credential:
    """A token that was found good; the instants are of our clock."""

    token: Token
    looked_up_at: float
    expires_at: float


@dataclass(slots=True, eq=False)
class LiveCall:
    """A stream that is served for a token. `over` is set when the token is."""

    token: Token
    expires_at: float
    over: asyncio.Event = field(default_factory=asyncio.Event)


def invalid(why: str) -> Fault:
    return Fault(Code.CREDENTIAL_INVALID, why)


class Authenticator:
    """Knows the tokens of the calls that are under way. recheck_s: how old an answer may be."""

    def __init__(
        self, tokens: Tokens, *, recheck_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._tokens = tokens
        self._recheck_s = recheck_s
        self._clock = clock
        self._known: OrderedDict[bytes, Credential] = OrderedDict()
        self._live: set[LiveCall] = set()
        self._used: set[str] = set()
        self._refused: OrderedDict[bytes, tuple[str, float]] = OrderedDict()  # why, and until when
        self._asking: dict[bytes, asyncio.Task[Credential]] = {}
        self._strangers = 0
        self._strangers_lane = asyncio.Semaphore(MAX_LOOK_UPS)
        self._known_lane = asyncio.Semaphore(MAX_LOOK_UPS)

    async def authenticate(self, authorization: list[str]) -> Credential:
        """What a call's `authorization` values stand for.

        Raises Fault: CREDENTIAL_INVALID, STORE_UNAVAILABLE; POOL_TIMEOUT when too many strangers ask at once.
        """
        digest = token_hash(_text(authorization))
        known = self._known.get(digest)
        if known is None or self._clock() - known.looked_up_at > self._recheck_s:
            known = await self._look_up(digest)
        if known.expires_at <= self._clock():
            raise invalid("the token has expired")
        self._used.add(known.token.token_id)
        return known

    async def _look_up(self, digest: bytes) -> Credential:
        """One look-up for all who ask for the same token meanwhile; it goes on when one of them hangs up."""
        why, until = self._refused.get(digest, ("", float("-inf")))
        if self._clock() < until:
            raise invalid(why)
        asking = self._asking.get(digest)
        if asking is None:
            is_known = digest in self._known
            if not is_known and self._strangers >= MAX_STRANGERS:
                raise Fault(
                    Code.POOL_TIMEOUT, "too many unknown tokens are being looked up", retry_after_s=0.5
                )
            self._strangers += not is_known
            asking = self._asking[digest] = asyncio.create_task(
                self._ask(digest, is_known=is_known), name="look-up of a token"
            )
            asking.add_done_callback(lambda task: self._asked(digest, task, is_known=is_known))
        return await asyncio.shield(asking)

    def _asked(self, digest: bytes, asking: "asyncio.Task[Credential]", *, is_known: bool) -> None:
        del self._asking[digest]
        self._strangers -= not is_known
        if not asking.cancelled():
            asking.exception()  # whoever asked may have gone

    async def _ask(self, digest: bytes, *, is_known: bool) -> Credential:
        # Whoever was known has a lane alone: strangers, however many, do not hold up their look-ups.
        async with self._known_lane if is_known else self._strangers_lane:
            asked_at = self._clock()
            stored = await self._tokens.find(digest)
        # Found by its hash, which nobody can aim at; compared all the same, in constant time.
        if stored is None or not hmac.compare_digest(stored.hash, digest):
            raise self._refuse(digest, "the token is not known")
        if stored.is_revoked:
            raise self._refuse(digest, "the token was revoked")
        left_s = float("inf") if stored.expires_in_s is None else stored.expires_in_s
        known = Credential(stored.token, asked_at, asked_at + left_s)
        _keep(self._known, digest, known, MAX_KNOWN)
        return known

    def _refuse(self, digest: bytes, why: str) -> Fault:
        self._known.pop(digest, None)
        _keep(self._refused, digest, (why, self._clock() + REFUSED_S), MAX_REFUSED)
        return invalid(why)

    @contextmanager
    def serving(self, credential: Credential) -> Iterator[LiveCall]:
        """A stream for this credential, from now until the block ends."""
        call = LiveCall(credential.token, credential.expires_at)
        self._live.add(call)
        try:
            yield call
        finally:
            self._live.discard(call)

    async def run(self) -> None:
        """Look after the streams until cancelled."""
        while True:
            await asyncio.sleep(self._recheck_s / 2)
            try:
                async with asyncio.timeout(self._recheck_s):
                    await self.look_again()
            except (Fault, Conflict, TimeoutError) as error:
                # The database is away: streams stay up meanwhile, but for those whose time is known to be over.
                log.warning("auth.recheck_failed", error=str(error))

    async def look_again(self) -> None:
        """End the streams whose token is over. Raises what the store raises."""
        now = self._clock()
        for call in self._live:
            if call.expires_at <= now:
                call.over.set()
        live = {call.token.token_id for call in self._live}
        if live:
            over = live - await self._tokens.valid(sorted(live))
            for call in self._live:
                if call.token.token_id in over:
                    call.over.set()
            if over:
                for digest, known in list(self._known.items()):
                    if known.token.token_id in over:
                        del self._known[digest]
        if used := sorted(self._used | live):
            self._used.clear()
            await self._tokens.note_use(used)


def _keep(kept: OrderedDict[bytes, T], digest: bytes, value: T, most: int) -> None:
    """Keep a value as the newest; the oldest go."""
    kept[digest] = value
    kept.move_to_end(digest)
    while len(kept) > most:
        kept.popitem(last=False)


def _text(authorization: list[str]) -> str:
    """The token's text. Raises Fault, without the text."""
    if not authorization:
        raise invalid("the call carries no token: send it as `authorization: Bearer TOKEN`")
    if len(authorization) > 1:
        raise invalid("the call carries more than one authorization")
    scheme, _, text = authorization[0].partition(" ")
    if scheme.lower() != _SCHEME or not is_token(text):
        raise invalid("the authorization is not `Bearer` and a token")
    return text
