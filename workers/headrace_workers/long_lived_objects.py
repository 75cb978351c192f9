"""Keeps the garbage collector away from what a process imports, and never gives back."""

import gc


def exempt_long_lived_objects() -> None:
    """Leave everything that exists now out of all later collections.

    Imports make some 80,000 objects. A full collection that looks through them holds up an event loop for 50 ms.
    """
    gc.collect()
    gc.freeze()
