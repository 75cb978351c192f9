"""`Grant`: the number of a lease among all leases of its message, and who has it. A claim of the stream gives both."""

import hashlib
from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True, slots=True)
class Grant:
    """A lease, as the stream of its message knows it."""

    number: int
    """The later lease of a message has the higher number. The number of the attempt."""
    owner: str
    """32 hex digits of a digest: readers of the stream must not learn the lease's owner, which is the right to it."""

    @classmethod
    def of(cls, number: int, owner: str, lease_id: str) -> Self | None:
        """Make the grant of a lease; None for the number 0: a message without a record has no number."""
        if number <= 0:
            return None
        digest = hashlib.sha1(f"{owner}/{lease_id}".encode(), usedforsecurity=False).hexdigest()
        return cls(number, digest[:32])
