"""`Claims`: items of work that all replicas share through Redis, each in the hands of one replica at a time."""

from collections.abc import Collection
from typing import TYPE_CHECKING, Final, NamedTuple

from headrace_gateway.redis_keys import due_key, tokens_key
from headrace_gateway.scripts import script

if TYPE_CHECKING:
    import redis.asyncio

_ADD: Final = script("claims_prelude", "claims_add")
_TAKE: Final = script("claims_prelude", "claims_take")
_KEEP: Final = script("claims_prelude", "claims_keep")
_PUT_BACK_ALL: Final = script("claims_prelude", "claims_put_back_all")
_RELEASE: Final = script("claims_prelude", "claims_release")


class Claim(NamedTuple):
    """An item in this replica's hands."""

    item: str
    token: int
    """Greater than that of every earlier claim. A script that writes for the claim compares it, so that a replica
    which was paused for too long cannot write any more."""


class Claims:
    """One kind of work. A claim that is not kept for `seconds` can be taken by another replica.

    Methods raise Redis's errors.

    Args:
        client: from the broker's `connections.connect_async`.
        name: of the kind of work; the same in all replicas.
    """

    def __init__(self, client: "redis.asyncio.Redis", name: str, *, seconds: float = 30.0) -> None:
        self.seconds: Final = seconds
        self.due_key: Final = due_key(name)
        """Sorted set: item -> when it is due, milliseconds by Redis's clock."""
        self.token_key: Final = tokens_key(name)
        """Hash: item -> the token of whoever holds it."""
        self._add: Final = client.register_script(_ADD.text)
        self._take: Final = client.register_script(_TAKE.text)
        self._keep: Final = client.register_script(_KEEP.text)
        self._put_back_all: Final = client.register_script(_PUT_BACK_ALL.text)
        self._release: Final = client.register_script(_RELEASE.text)

    @property
    def _keys(self) -> list[str]:
        return _TAKE.keys(due=self.due_key, tokens=self.token_key)  # as of all its scripts

    async def add(self, item: str, *, after: float = 0.0) -> bool:
        """Add an item that may be taken `after` so many seconds; False where it is there already."""
        return bool(await self._add(keys=self._keys, args=[item, _milliseconds(after)]))

    async def take(self, limit: int) -> list[Claim]:
        """Take what is due, the longest due first, `limit` at most."""
        taken = await self._take(keys=self._keys, args=[limit, _milliseconds(self.seconds)])
        return [Claim(item.decode(), token) for item, token in taken]

    async def keep(self, claims: Collection[Claim]) -> set[Claim]:
        """Hold these for another `seconds`, and return those that are lost: another has them, or they are finished."""
        if not claims:
            return set()
        given = list(claims)
        args = [_milliseconds(self.seconds), *(part for claim in given for part in claim)]
        return {given[place] for place in await self._keep(keys=self._keys, args=args)}

    async def put_back(self, claim: Claim, *, after: float = 0.0) -> bool:
        """Let it be taken again after so many seconds; False where the claim is lost."""
        return bool(await self._release(keys=self._keys, args=[*claim, _milliseconds(after)]))

    async def put_back_all(self, claims: Collection[Claim], *, after: float) -> None:
        """Let these be taken again after so many seconds; those that are lost are left as they are."""
        if claims:
            args = [_milliseconds(after), *(part for claim in claims for part in claim)]
            await self._put_back_all(keys=self._keys, args=args)

    async def finish(self, claim: Claim) -> bool:
        """Remove the item; False where the claim is lost."""
        return bool(await self._release(keys=self._keys, args=[*claim, ""]))


def _milliseconds(seconds: float) -> int:
    return round(seconds * 1000)
