"""`Claims`: work items that all replicas share through Redis. One replica at a time holds the claim of an item."""

from collections.abc import Collection
from typing import TYPE_CHECKING, Final, NamedTuple

from headrace_gateway.redis.keys import due_key, script, tokens_key

if TYPE_CHECKING:
    import redis.asyncio

_ADD: Final = script("claims_prelude", "claims_add")
_TAKE: Final = script("claims_prelude", "claims_take")
_RENEW: Final = script("claims_prelude", "claims_renew")
_RELEASE_ALL: Final = script("claims_prelude", "claims_release_all")
_RELEASE: Final = script("claims_prelude", "claims_release")


class Claim(NamedTuple):
    """An item that this replica holds."""

    item: str
    token: int
    """Greater than the token of every earlier claim. A script that writes for the claim compares it, so a replica that
    was paused for too long cannot write."""


class Claims:
    """One kind of work. A claim that is not renewed for `seconds` expires, and another replica can take the item.

    Methods raise redis-py's errors.

    Args:
        client: from the broker's `connections.connect_async`.
        name: the kind of work; the same in all replicas.
    """

    def __init__(self, client: "redis.asyncio.Redis", name: str, *, seconds: float = 30.0) -> None:
        self.seconds: Final = seconds
        self.due_key: Final = due_key(name)
        """Sorted set: item -> when it is due, in milliseconds of Redis's clock."""
        self.token_key: Final = tokens_key(name)
        """Hash: item -> the token of its claim."""
        self._keys: Final = _TAKE.keys(due=self.due_key, tokens=self.token_key)  # all scripts have the same keys
        self._add: Final = client.register_script(_ADD.text)
        self._take: Final = client.register_script(_TAKE.text)
        self._renew: Final = client.register_script(_RENEW.text)
        self._release_all: Final = client.register_script(_RELEASE_ALL.text)
        self._release: Final = client.register_script(_RELEASE.text)

    async def add(self, item: str, *, after: float = 0.0) -> bool:
        """Add an item that is due in `after` seconds; return False if it exists already."""
        return bool(await self._add(keys=self._keys, args=[item, _milliseconds(after)]))

    async def take(self, limit: int) -> list[Claim]:
        """Take at most `limit` due items, the earliest first."""
        taken = await self._take(keys=self._keys, args=[limit, _milliseconds(self.seconds)])
        return [Claim(item.decode(), token) for item, token in taken]

    async def renew(self, claims: Collection[Claim]) -> set[Claim]:
        """Renew these claims for another `seconds`; return those that are lost (taken over, or finished)."""
        if not claims:
            return set()
        given = list(claims)
        args = [_milliseconds(self.seconds), *(part for claim in given for part in claim)]
        return {given[place] for place in await self._renew(keys=self._keys, args=args)}

    async def release(self, claim: Claim, *, after: float = 0.0) -> bool:
        """Release a claim, so that its item is due again in `after` seconds; return False if the claim is lost."""
        return bool(await self._release(keys=self._keys, args=[*claim, _milliseconds(after)]))

    async def release_all(self, claims: Collection[Claim], *, after: float) -> None:
        """Release these claims, so that their items are due again in `after` seconds; skip those that are lost."""
        if claims:
            args = [_milliseconds(after), *(part for claim in claims for part in claim)]
            await self._release_all(keys=self._keys, args=args)

    async def finish(self, claim: Claim) -> bool:
        """Remove the item; return False if the claim is lost."""
        return bool(await self._release(keys=self._keys, args=[*claim, ""]))


def _milliseconds(seconds: float) -> int:
    return round(seconds * 1000)
