"""Texts of random token ids, for the benchmarks of embeddings."""

import random

Texts = list[list[int]]


def mixed(count: int, longest: int, vocabulary: int) -> Texts:
    """Texts whose lengths are log-normal with a median of about 55 tokens, in random order."""
    draw = random.Random(1)
    lengths = [min(longest, max(6, round(draw.lognormvariate(4.0, 0.75)))) for _ in range(count)]
    return [[draw.randrange(1000, vocabulary - 1) for _ in range(length)] for length in lengths]


def equal(count: int, length: int, vocabulary: int) -> Texts:
    draw = random.Random(2)
    return [[draw.randrange(1000, vocabulary - 1) for _ in range(length)] for _ in range(count)]
