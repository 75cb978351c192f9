"""`UsageQuery`: the checked query of a usage endpoint."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Self

from starlette.datastructures import QueryParams

from headrace_broker.usage.ledger import DAY, HOUR, UsageGroup
from headrace_gateway.errors import ApiError, invalid
from headrace_gateway.http.json import read_integer, read_limit
from headrace_wire.codes import GatewayCode

LATEST: Final = 2**33
"""Unix seconds."""
WIDTHS: Final = {"1h": (HOUR, 24, 168), "1d": (DAY, 7, 31)}
"""By `bucket_width`: its seconds, the default of `limit`, and its maximum."""
GROUPS: Final[dict[str, Callable[[UsageGroup], str | None]]] = {
    "project_id": lambda group: group.tenant or None,
    "user_id": lambda _: None,
    "api_key_id": lambda group: group.key_name or None,
    "model": lambda group: group.model,
}
"""By value of `group_by`: that field of a result. A project is a tenant. Headrace knows no users."""
FILTERS: Final = {"project_ids": "project_id", "user_ids": "user_id", "api_key_ids": "api_key_id", "models": "model"}
_REFUSED: Final = ("batch", "service_tier", "api_source")
_PAGE: Final = "page_"


@dataclass(frozen=True, slots=True)
class UsageQuery:
    """Which buckets to return, and which rows of them."""

    width: int
    """Seconds of a bucket."""
    start: int
    """Beginning of the first bucket, unix seconds."""
    end: int
    """Unix seconds before which the last bucket begins."""
    limit: int
    """Number of buckets."""
    groups: tuple[str, ...]
    filters: dict[str, frozenset[str]]
    """By group: its allowed values."""

    @classmethod
    def read(cls, query: QueryParams, now: Callable[[], float] = time.time) -> Self:
        """Read a query. Raises ApiError 400."""
        if "start_time" not in query:
            raise invalid("start_time is required: unix seconds", param="start_time")
        start = read_integer(query["start_time"], "start_time", 0, LATEST)
        end = int(now()) + 1
        if "end_time" in query:
            end = min(end, read_integer(query["end_time"], "end_time", 0, LATEST))
        width_name = query.get("bucket_width", "1d")
        if width_name not in WIDTHS:
            raise invalid(f"bucket_width must be 1h or 1d, got {width_name[:20]!r}", param="bucket_width")
        width, default, most = WIDTHS[width_name]
        if "batch" in query:
            raise _unsupported("batch", "batch")
        groups = _values(query, "group_by")
        for group in groups:
            if group in _REFUSED:
                raise _unsupported(f"group_by {group}", "group_by")
            if group not in GROUPS:
                raise invalid(f"group_by must be some of {', '.join(GROUPS)}, got {group[:40]!r}", param="group_by")
        page = query.get("page")
        if page is not None:
            start = max(start, read_integer(page.removeprefix(_PAGE), "page", 0, LATEST))
        return cls(
            width=width,
            start=start // width * width,
            end=end,
            limit=read_limit(query, default, most),
            groups=groups,
            filters={group: frozenset(_values(query, name)) for name, group in FILTERS.items() if _values(query, name)},
        )

    @property
    def starts(self) -> Sequence[int]:
        """Beginnings of the buckets of this page."""
        return range(self.start, self.end, self.width)[: self.limit]

    @property
    def next_page(self) -> str | None:
        """The `page` of the next buckets; None if there are none."""
        after = self.start + self.width * self.limit
        return f"{_PAGE}{after}" if after < self.end else None

    def selects(self, group: UsageGroup) -> bool:
        return all(GROUPS[name](group) in allowed for name, allowed in self.filters.items())

    def names_of(self, group: UsageGroup) -> tuple[str | None, ...]:
        """Return the fields of a result for all groups. Those that the query does not name are None."""
        return tuple(read(group) if name in self.groups else None for name, read in GROUPS.items())


def _values(query: QueryParams, name: str) -> tuple[str, ...]:
    """Return the values of an array: `name=a&name=b` or `name[]=a&name[]=b`. A name may contain a comma."""
    return tuple(dict.fromkeys([*query.getlist(name), *query.getlist(f"{name}[]")]))


def _unsupported(what: str, param: str) -> ApiError:
    return invalid(f"{what} is not supported", code=GatewayCode.UNSUPPORTED_PARAMETER, param=param)
