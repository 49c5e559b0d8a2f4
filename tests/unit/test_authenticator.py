"""How long an answer about a token is good: with a store and a clock of the test's own."""

import asyncio
from dataclasses import dataclass, field

import pytest
from rara_scheduler.domain.errors import Code, Fault
from rara_scheduler.domain.secrets import find_secret, redact_text
from rara_scheduler.domain.tokens import (
    Role,
    Token,
    allows_kind,
    is_kind_pattern,
    is_token,
    new_token,
    token_hash,
)
from rara_scheduler.store.database import StoreUnavailable
from rara_scheduler.store.tokens import StoredToken
from rara_scheduler.transport.authenticator import (
    MAX_LOOK_UPS,
    MAX_REFUSED,
    MAX_STRANGERS,
    REFUSED_S,
    Authenticator,
)


@dataclass
class Tokens:
    """What a database would say."""

    stored: dict[bytes, StoredToken] = field(default_factory=dict)
    asked: int = 0
    away: bool = False
    over: set[str] = field(default_factory=set)
    used: list[str] = field(default_factory=list)
    pending: list[asyncio.Future[None]] | None = None  # where answers are held back, one for each look-up

    def add(self, *, expires_in_s: float | None = None, is_revoked: bool = False) -> str:
        text = new_token(Role.CLIENT)
        token = Token(f"id-{len(self.stored)}", "lab", Role.CLIENT)
        self.stored[token_hash(text)] = StoredToken(token, token_hash(text), is_revoked, expires_in_s)
        return text

    async def find(self, token_hash: bytes) -> StoredToken | None:
        self.asked += 1
        if self.pending is not None:
            self.pending.append(asyncio.get_running_loop().create_future())
            await self.pending[-1]
        self._answer()
        return self.stored.get(token_hash)

    async def valid(self, token_ids: list[str]) -> set[str]:
        self._answer()
        return set(token_ids) - self.over

    async def note_use(self, token_ids: list[str]) -> None:
        self.used += token_ids

    def _answer(self) -> None:
        if self.away:
            raise StoreUnavailable("down")


@dataclass
class World:
    now: float = 0.0
    tokens: Tokens = field(default_factory=Tokens)

    def __post_init__(self) -> None:
        self.authenticator = Authenticator(self.tokens, recheck_s=5.0, clock=lambda: self.now)

    async def code(self, text: str) -> str:
        try:
            await self.authenticator.authenticate([f"Bearer {text}"])
        except Fault as fault:
            return str(fault.code) if text not in fault.message else "told the token"
        return "OK"


async def test_a_good_answer_is_kept_for_the_recheck_and_no_longer() -> None:
    world = World()
    text = world.tokens.add()
    assert [await world.code(text) for _ in range(3)] == ["OK"] * 3
    assert world.tokens.asked == 1
    world.tokens.away = True
    world.now = 5.0
    assert await world.code(text) == "OK"
    world.now = 5.1
    assert await world.code(text) == Code.STORE_UNAVAILABLE  # not known to be bad: the caller may try again
    world.tokens.stored.clear()
    world.tokens.away = False
    assert await world.code(text) == Code.CREDENTIAL_INVALID


async def test_a_token_ends_at_its_instant_also_while_its_answer_is_kept() -> None:
    world = World()
    text = world.tokens.add(expires_in_s=3.0)
    assert await world.code(text) == "OK"
    world.now = 3.0
    assert (await world.code(text), world.tokens.asked) == (Code.CREDENTIAL_INVALID, 1)


async def test_a_stream_ends_by_its_known_instant_also_while_the_database_is_away() -> None:
    world = World()
    brief = await world.authenticator.authenticate([f"Bearer {world.tokens.add(expires_in_s=3.0)}"])
    lasting = await world.authenticator.authenticate([f"Bearer {world.tokens.add()}"])
    with world.authenticator.serving(brief) as ends, world.authenticator.serving(lasting) as stays:
        world.tokens.away = True
        world.now = 4.0
        with pytest.raises(StoreUnavailable):
            await world.authenticator.look_again()
        assert (ends.over.is_set(), stays.over.is_set()) == (True, False)
        world.tokens.away = False
        world.tokens.over.add(lasting.token.token_id)
        await world.authenticator.look_again()
        assert stays.over.is_set()
    assert sorted(set(world.tokens.used)) == ["id-0", "id-1"]


async def settle() -> None:
    """Let all tasks go on until they wait."""
    for _ in range(5):
        await asyncio.sleep(0)


async def test_a_known_token_does_not_wait_for_strangers_and_these_are_bounded() -> None:
    world = World()
    text = world.tokens.add()
    assert await world.code(text) == "OK"
    world.now = 5.1
    world.tokens.pending = []
    flood = [asyncio.create_task(world.code(new_token(Role.CLIENT))) for _ in range(10_000)]
    await settle()
    # Two are looked up and 998 wait; the others are told at once to come again.
    assert len(world.tokens.pending) == MAX_LOOK_UPS
    ended = [task.result() for task in flood if task.done()]
    assert ended == [Code.POOL_TIMEOUT] * (10_000 - MAX_STRANGERS)
    known = asyncio.create_task(world.code(text))
    await settle()
    assert len(world.tokens.pending) == MAX_LOOK_UPS + 1
    world.tokens.pending[-1].set_result(None)
    assert await known == "OK"
    held, world.tokens.pending = world.tokens.pending, None
    for answer in held[:-1]:
        answer.set_result(None)
    assert (await asyncio.gather(*flood)).count(str(Code.CREDENTIAL_INVALID)) == MAX_STRANGERS
    assert world.tokens.asked == 2 + MAX_STRANGERS
    assert await world.code(world.tokens.add()) == "OK"


async def test_calls_with_one_token_share_one_look_up_whoever_hangs_up() -> None:
    world = World()
    text = world.tokens.add()
    world.tokens.pending = []
    calls = [asyncio.create_task(world.code(text)) for _ in range(1000)]
    await settle()
    calls[0].cancel()
    await settle()
    assert (world.tokens.asked, len(world.tokens.pending)) == (1, 1)
    world.tokens.pending[0].set_result(None)
    assert await asyncio.gather(*calls[1:]) == ["OK"] * 999
    assert world.tokens.asked == 1


async def test_what_was_no_good_is_not_looked_up_again_for_a_moment() -> None:
    world = World()
    unknown, revoked = new_token(Role.CLIENT), world.tokens.add(is_revoked=True)
    for text in (unknown, revoked):
        assert [await world.code(text) for _ in range(100)] == [Code.CREDENTIAL_INVALID] * 100
    assert world.tokens.asked == 2
    world.now = REFUSED_S + 0.1
    assert await world.code(unknown) == Code.CREDENTIAL_INVALID
    assert world.tokens.asked == 3
    # Of these, too, a bounded number is kept; and an outage is no answer.
    for _ in range(MAX_REFUSED):
        await world.code(new_token(Role.CLIENT))
    assert await world.code(unknown) == Code.CREDENTIAL_INVALID
    assert world.tokens.asked == 4 + MAX_REFUSED
    world.tokens.away = True
    late = world.tokens.add()
    assert await world.code(late) == Code.STORE_UNAVAILABLE
    world.tokens.away = False
    assert await world.code(late) == "OK"


@pytest.mark.parametrize(
    "authorization", [[], ["Bearer "], ["Basic x"], ["Bearer a", "Bearer b"], ["Bearer rara_client_"]]
)
async def test_what_is_no_token_costs_no_look_up(authorization: list[str]) -> None:
    world = World()
    with pytest.raises(Fault) as refused:
        await world.authenticator.authenticate(authorization)
    assert (refused.value.code, world.tokens.asked) == (Code.CREDENTIAL_INVALID, 0)


@pytest.mark.parametrize(
    ("patterns", "kind", "allowed"),
    [
        (["a.b"], "a.b", True),
        (["a.b"], "a.b.c", False),
        (["a.*"], "a.b.c", True),
        (["a.*"], "a", False),
        (["a.*"], "ab.c", False),
        (["*"], "a.b", True),
        (["a..b", "c."], "a..b", True),
        (["a..b", "c."], "c.", True),
        (["c..*"], "c..d", True),
        ([], "a.b", False),
    ],
)
def test_kinds_are_matched_whole_or_below_a_prefix(patterns: list[str], kind: str, allowed: bool) -> None:
    assert all(is_kind_pattern(pattern) for pattern in patterns)
    assert allows_kind(patterns, kind) is allowed


@pytest.mark.parametrize(
    ("text", "is_one"),
    [("a" * 128, True), ("a" * 129, False), ("a" * 128 + ".*", True), ("", False), (".*", False), ("-a", False),
     ("a*", False), ("*.a", False), ("a.*.b", False), ("é", False), ("**", False), ("a b", False)],
)  # fmt: skip
def test_a_pattern_is_a_kind_or_what_is_below_one(text: str, is_one: bool) -> None:
    assert is_kind_pattern(text) is is_one


@pytest.mark.parametrize("role", Role)
def test_a_token_is_known_as_a_secret_where_it_is_found(role: Role) -> None:
    text = new_token(role)
    assert is_token(text)
    assert len({new_token(role) for _ in range(100)}) == 100
    found = find_secret({"note": f"use {text} for it"})
    assert found is not None
    assert found.rule == "rara_token"
    assert redact_text(f"with {text}.") == "with [redacted rara_token]."
