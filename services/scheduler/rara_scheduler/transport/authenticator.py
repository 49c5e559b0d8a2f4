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
from typing import Final, Protocol

import structlog

from rara_scheduler.domain.errors import Code, Fault
from rara_scheduler.domain.tokens import Token, is_token, token_hash
from rara_scheduler.store.database import Conflict
from rara_scheduler.store.tokens import StoredToken

log = structlog.get_logger(__name__)

MAX_KNOWN: Final = 10_000
MAX_LOOK_UPS: Final = 2  # at once: strangers must not take all connections of those who are known
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
        self._look_ups = asyncio.Semaphore(MAX_LOOK_UPS)

    async def authenticate(self, authorization: list[str]) -> Credential:
        """What a call's `authorization` values stand for. Raises Fault: CREDENTIAL_INVALID, STORE_UNAVAILABLE."""
        digest = token_hash(_text(authorization))
        known = self._known.get(digest)
        if known is None or self._clock() - known.looked_up_at > self._recheck_s:
            known = await self._look_up(digest)
        if known.expires_at <= self._clock():
            raise invalid("the token has expired")
        self._used.add(known.token.token_id)
        return known

    async def _look_up(self, digest: bytes) -> Credential:
        asked_at = self._clock()
        async with self._look_ups:
            stored = await self._tokens.find(digest)
        # Found by its hash, which nobody can aim at; compared all the same, in constant time.
        if stored is None or not hmac.compare_digest(stored.hash, digest):
            self._known.pop(digest, None)
            raise invalid("the token is not known")
        if stored.is_revoked:
            self._known.pop(digest, None)
            raise invalid("the token was revoked")
        left_s = float("inf") if stored.expires_in_s is None else stored.expires_in_s
        known = Credential(stored.token, asked_at, asked_at + left_s)
        self._known[digest] = known
        self._known.move_to_end(digest)
        while len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)
        return known

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
