"""A soak finds what leaks and passes what does not; from what was seen, and against real processes."""

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from paceline.errors import BadInputError, MissingError
from paceline.prove.client import Answer
from paceline.prove.results import Verdict
from paceline.prove.soak import Look, Seen, Traffic, fault_of, judge, soak
from paceline.prove.soak_plan import SoakOptions, parse_duration
from paceline.prove.soak_process import listening_pid, process_use

LEAKY = Path(__file__).parents[2] / "fakes" / "leaky_server.py"
OPTIONS = SoakOptions(duration_s=600)


def seen(num_errors: int = 0, **slopes: float) -> Seen:
    """Ten noisy minutes of 1,200 requests; `slopes` are changes over all of it."""
    rng = np.random.default_rng(3)
    traffic = Traffic()
    for index in range(1200):
        traffic.add(index / 2, "HTTP 500" if index < num_errors else None, 20)
    looks, drafted, accepted = list[Look](), 0.0, 0.0
    for time_s in np.arange(0, 600, 2.0):
        share = time_s / 600
        drafted += 100
        accepted += rng.binomial(100, 0.6 + slopes.get("acceptance", 0) * share)
        looks.append(
            Look(
                time_s=float(time_s),
                rss_mib=900 + slopes.get("rss_mib", 0) * share + rng.normal(0, 3),
                num_fds=int(40 + slopes.get("num_fds", 0) * share + rng.integers(0, 5)),
                num_free_pages=int(1000 + slopes.get("num_free_pages", 0) * share - rng.integers(0, 40)),
                num_drafted=drafted,
                num_accepted=accepted,
            )
        )
    return Seen(traffic, looks, 600.0, pages_before=1000, pages_after=1000)


def test_a_steady_server_passes() -> None:
    result = judge(seen(), OPTIONS)
    assert (result.verdict, result.reasons) == (Verdict.PASS, ())
    assert [trend.name for trend in result.trends] == ["rss_mib", "num_fds", "num_free_pages", "acceptance"]
    assert [minute.minute for minute in result.minutes] == list(range(1, 11))
    assert [minute.num_requests for minute in result.minutes] == [120] * 10
    assert result.minutes[0].tokens_per_s == pytest.approx(40)
    assert result.minutes[4].acceptance == pytest.approx(0.6, abs=0.03)


@pytest.mark.parametrize(("name", "change"), [("rss_mib", 60.0), ("num_fds", 30.0), ("num_free_pages", -120.0), ("acceptance", -0.3)])
def test_a_planted_leak_of_each_kind_fails(name: str, change: float) -> None:
    result = judge(seen(**{name: change}), OPTIONS)
    assert result.verdict is Verdict.FAIL
    (reason,) = result.reasons
    assert reason.startswith(f"{name} changes by")
    assert judge(seen(**{name: -change}), OPTIONS).verdict is Verdict.PASS, "the other direction harms nobody"


def test_errors_and_lost_pages_fail() -> None:
    assert judge(seen(num_errors=1), OPTIONS).verdict is Verdict.PASS, "1 of 1,200 is below 0.1 %"
    failing = judge(seen(num_errors=3), OPTIONS)
    assert failing.verdict is Verdict.FAIL
    assert failing.errors == {"HTTP 500": 3}
    lost = judge(replace(seen(), pages_after=998), OPTIONS)
    assert lost.reasons == ("2 of 1,000 free pages did not come back when the traffic ended",)
    assert judge(Seen(Traffic(), (), 600.0), OPTIONS).verdict is Verdict.FAIL, "nobody was answered"


def test_a_server_that_cannot_be_watched_is_not_passed() -> None:
    blind = replace(seen(), looks=[Look(float(time_s)) for time_s in range(0, 600, 2)])
    result = judge(blind, OPTIONS)
    assert result.verdict is Verdict.INCONCLUSIVE
    assert "num_fds, rss_mib" in result.reasons[0]
    assert judge(replace(seen(), looks=seen().looks[:20]), OPTIONS).verdict is Verdict.INCONCLUSIVE, "stopped while it settled"


def test_a_soak_that_was_stopped_is_not_passed() -> None:
    stopped = replace(seen(), is_complete=False)
    result = judge(stopped, replace(OPTIONS, duration_s=3600))
    assert (result.verdict, result.is_complete) == (Verdict.INCONCLUSIVE, False)
    assert result.reasons == ("stopped after 600 s of 3,600 s: nothing was wrong until then, the rest was not seen",)
    leaking = judge(replace(seen(rss_mib=60.0), is_complete=False), OPTIONS)
    assert leaking.verdict is Verdict.FAIL, "what was seen was seen"


def test_a_restart_of_the_server_is_no_negative_acceptance() -> None:
    looks: Sequence[Look] = seen().looks
    restarted = [
        look if index < 200 else replace(look, num_drafted=(look.num_drafted or 0) - 20_000, num_accepted=(look.num_accepted or 0) - 12_000)
        for index, look in enumerate(looks)
    ]
    result = judge(replace(seen(), looks=restarted), OPTIONS)
    assert all(0 < (minute.acceptance or 0) < 1 for minute in result.minutes)


def test_many_kinds_of_errors_stay_bounded() -> None:
    traffic = Traffic()
    for index in range(1000):
        traffic.add(1.0, f"error {index}", 0)
    assert len(traffic.errors) <= 51
    assert traffic.errors.total() == 1000


def test_what_counts_as_an_error() -> None:
    whole = Answer(0.0, 1.0, 200, None, finish_reason="length")
    assert fault_of(whole) is None
    assert fault_of(replace(whole, finish_reason="abort")) == "the finish reason is abort"
    assert fault_of(replace(whole, error="the stream ended early")) == "the stream ended early"


@contextlib.contextmanager
def leaky(mib_per_s: float, files_per_s: float) -> Iterator[tuple[str, int]]:
    command = [sys.executable, str(LEAKY), str(mib_per_s), str(files_per_s)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield f"http://127.0.0.1:{int(process.stdout.readline())}", process.pid
        finally:
            process.kill()


async def test_a_process_that_grows_is_found_by_its_port() -> None:
    with leaky(40.0, 40.0) as (url, pid):
        assert listening_pid(url) == pid
        result = await soak(url, SoakOptions(4.0, concurrency=2, max_tokens=4))
    assert result.verdict is Verdict.FAIL
    assert [reason.split()[0] for reason in result.reasons] == ["rss_mib", "num_fds"]
    assert result.num_errors == 0


async def test_a_process_that_does_not_passes_and_a_cancelled_soak_keeps_what_it_has() -> None:
    with leaky(0.0, 0) as (url, pid):
        result = await soak(url, SoakOptions(3.0, concurrency=2, pid=pid))
        assert (result.verdict, result.is_complete) == (Verdict.PASS, True)
        running = asyncio.create_task(soak(url, SoakOptions(600.0, concurrency=1)))
        await asyncio.sleep(0.5)
        running.cancel()
        cut = await running
    assert cut.is_complete is False
    assert cut.num_requests > 0
    assert cut.duration_s < 60


async def test_no_server_is_an_error() -> None:
    with pytest.raises(MissingError):
        await soak("http://127.0.0.1:9", SoakOptions(2.0))


def test_a_process_counts_with_its_children() -> None:
    alone = process_use(os.getpid())
    with subprocess.Popen([sys.executable, "-c", "print(flush=True); import time; time.sleep(60)"], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        both = process_use(os.getpid())
        child.kill()
    assert alone is not None and both is not None
    assert both.num_processes == alone.num_processes + 1
    assert both.rss_mib > alone.rss_mib + 4
    assert process_use(2**22 + 1) is None
    assert listening_pid("http://127.0.0.1:9") is None
    assert listening_pid("http://example.invalid:80") is None


def test_durations() -> None:
    assert [parse_duration(text) for text in ("72h", "3m", "90s", "1h30m", "2.5m", "7d")] == [259_200, 180, 90, 5400, 150, 604_800]
    for text in ("", "3", "3 m", "m3", "3x", "1s", "99d", "-3m"):
        with pytest.raises(BadInputError, match="duration"):
            parse_duration(text)
    with pytest.raises(BadInputError, match="concurrency is 0"):
        SoakOptions(60.0, concurrency=0)
