"""How much of a model is loaded, in the log. A worker shows it in its health and its metrics, too."""

import logging
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, Final, TypeVar

logger = logging.getLogger(__name__)

Item = TypeVar("Item")
RECORD_FIELD: Final = "load_progress"
"""Attribute of a log record: the share of the weights that is loaded, 0 to 1."""
_SECONDS: Final = 2.0
"""Between two lines. A small model has none."""


def with_progress(
    items: Iterable[Item],
    total: float,
    size_of: Callable[[Item], float] = lambda _item: 1,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Item]:
    """Yield the items, and log how many of them are done.

    Args:
        total: the sum of the sizes.
    """
    done, told_at = 0.0, clock()
    for item in items:
        yield item
        done += size_of(item)
        if clock() - told_at >= _SECONDS:
            told_at = clock()
            _tell(min(1.0, done / max(total, 1)))


def tqdm_hook(make: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Log the progress of a bar of transformers that counts the items of a collection. See its `set_tqdm_hook`."""
    items = args[0] if args else options.get("iterable")
    return with_progress(items, len(items)) if isinstance(items, Collection) else make(*args, **options)


def _tell(share: float) -> None:
    logger.info("loading the weights: %d %%", 100 * share, extra={RECORD_FIELD: share})
