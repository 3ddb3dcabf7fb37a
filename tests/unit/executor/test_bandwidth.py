import time

import pytest
import torch

from paceline.executor.bandwidth import read_bandwidth


def test_it_reads_as_fast_as_some_memory_does_and_only_once() -> None:
    threads = torch.get_num_threads()
    read_bandwidth.cache_clear()
    first = read_bandwidth(threads)
    assert 1e8 < first < 2e13
    began_s = time.process_time()
    assert read_bandwidth(threads) == first
    assert time.process_time() - began_s < 0.01


def test_it_takes_the_fastest_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = iter([0.0, 0.0, 0.010, 0.010, 0.010, 0.014, 0.020, 0.020, 0.040, 0.060])
    monkeypatch.setattr("paceline.executor.bandwidth.time.perf_counter", lambda: next(now_s))
    read_bandwidth.cache_clear()
    try:
        assert read_bandwidth(-1) == (32 << 20) / 0.004
    finally:
        read_bandwidth.cache_clear()
