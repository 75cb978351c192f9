"""`UsageEntry`: what one message has used. Its acknowledgement adds it to the ledger, in the same script."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

from headrace_broker.keys import ENDED_SECONDS
from headrace_broker.packing import pack
from headrace_broker.results import Usage
from headrace_wire.request import name_problems

UsageKind: TypeAlias = Literal["completions", "embeddings"]
"""The endpoint of the usage API that counts a request. Every pooling task counts as embeddings."""


@dataclass(frozen=True, slots=True)
class UsageEntry:
    """Tenant, priority, deliveries and seconds are not here: the script reads them from the lease's record."""

    kind: UsageKind
    key_name: str
    """The name of the API key, never the key itself; '' if the message names none."""
    usage: Usage

    def packed(self, days: int, result_seconds: int) -> bytes:
        """Return the argument of the script.

        Args:
            days: how long the sums are kept; 0: the ledger is off.
            result_seconds: how long the stream and the result of the request are kept; 0: they do not exist.
        """
        usage = self.usage
        counts = (usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens)
        kept = result_seconds + ENDED_SECONDS if result_seconds else 0
        return pack([days, kept, self.kind, self.key_name, *counts])


def key_name_of(header: object) -> str:
    """Return the name of the API key in a message's header `key_name`; '' if it is missing or no name."""
    return header if isinstance(header, str) and not name_problems("key_name", header) else ""
