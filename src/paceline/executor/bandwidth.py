"""Measures once how fast this machine reads memory: what decoding at small batches is bounded by. Called by `executor/load.py`."""

import time
from functools import cache

import torch

_NUM_BYTES = 32 << 20  # beyond the caches of most processors; where they are larger the result is their speed, too high
_MAX_S = 0.05
_MAX_PASSES = 5


@cache
def read_bandwidth(num_threads: int) -> float:
    """Bytes per second that torch's threads, `num_threads` as set before the call, read together.

    The fastest of a few sums over one block of memory, which take some 50 ms together; once per process and number of threads.
    """
    started_s = time.perf_counter()
    block = torch.ones(_NUM_BYTES // 4, dtype=torch.float32)  # written, so that every page is there
    times_s: list[float] = []
    while not times_s or (len(times_s) < _MAX_PASSES and time.perf_counter() - started_s < _MAX_S):
        began_s = time.perf_counter()
        block.sum()
        times_s.append(time.perf_counter() - began_s)
    return _NUM_BYTES / min(times_s)
