"""Random draws as a pure function of (seed, position): no state, no order of calls, no global generator.

It is the only source of randomness of the sampler. So a request draws the same numbers in any batch, with any chunks,
after a preemption, and on another worker after a crash. A change of the draws increments `contracts.DRAWS`.
"""

import numpy as np
import numpy.typing as npt

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def uniform(seeds: npt.ArrayLike, positions: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """Return one number in [0, 1) for each (seed, position) pair. Seeds have 64 bits, signed or not.

    A counter-based generator: the SplitMix64 finaliser (Steele, Lea, Flood 2014) over the mixed seed plus the
    position's step of its Weyl sequence.
    """
    seed = np.asarray(seeds, dtype=np.int64).view(np.uint64)
    position = np.asarray(positions, dtype=np.int64).view(np.uint64)
    with np.errstate(over="ignore"):
        bits = _finalise(_finalise(seed + _GOLDEN) + (position + np.uint64(1)) * _GOLDEN)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _finalise(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * _MIX_1
    x = (x ^ (x >> np.uint64(27))) * _MIX_2
    return x ^ (x >> np.uint64(31))
