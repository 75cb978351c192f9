"""The position of a reader in a stream: `<entry id>.<k>`, the k-th chunk of a stream entry."""

import re
from typing import Final, NamedTuple, Self

from headrace_gateway.errors import invalid

PATTERN: Final = r"([0-9]{1,19})-([0-9]{1,19})\.([0-9]{1,9})"
_FORM: Final = re.compile(PATTERN)


class Cursor(NamedTuple):
    """Cursors of one stream sort in the order of its chunks."""

    attempt: int
    offset: int
    chunk: int

    @classmethod
    def parse(cls, text: str, *, param: str) -> Self:
        """Parse a cursor. Raises ApiError 400 for a text that is not one."""
        found = _FORM.fullmatch(text)
        if found is None:
            raise invalid(f"{param} must be an event's id, such as 1-12.0", code="invalid_cursor", param=param)
        return cls(*map(int, found.groups()))

    @classmethod
    def of(cls, entry_id: str, chunk: int) -> Self:
        attempt, _, offset = entry_id.partition("-")
        return cls(int(attempt), int(offset), chunk)

    def __str__(self) -> str:
        return f"{self.attempt}-{self.offset}.{self.chunk}"
