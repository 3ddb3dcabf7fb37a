"""/health: green only while tokens come. A frozen engine, busy or idle, is found out; a slow but working one is left alone."""

import asyncio
from collections.abc import Callable

import pytest

from paceline.core.stats import EngineStats
from paceline.server import health
from tests.fakes.fake_engine import FakeEngine, Faults, busy_stats
from tests.unit.server.conftest import Site


def probes(site: Site) -> int:
    return sum(request.request_id.startswith("health-") for request in site.engine.requests)


async def busy(site: Site) -> None:
    """A request that never ends, as far as this server knows."""
    site.engine.faults = Faults(hang_after=1)
    connection = site.open("/v1/completions", {"prompt": "x", "stream": True})
    await connection.num_chunks(1)
    site.engine.faults = Faults()


async def test_an_idle_engine_is_asked_for_one_real_token(site: Site) -> None:
    answer = await site.get("/health")
    assert (answer.status, answer.json()["status"]) == (200, "ok")
    request = site.engine.requests[0]
    assert (request.sampling.max_tokens, request.max_draft_length) == (1, 0)
    assert site.engine.num_active == 0


async def test_frequent_checks_share_a_token(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = await asyncio.gather(*(site.get("/health") for _ in range(20)))
    answers += [await site.get("/health") for _ in range(5)]
    assert {answer.status for answer in answers} == {200}
    assert probes(site) == 1
    monkeypatch.setattr(health, "_PROBE_LIFETIME_S", 0.0)
    await site.get("/health")
    assert probes(site) == 2


async def test_probes_are_no_requests_of_users(site: Site) -> None:
    await site.get("/health")
    assert sum(site.server.metrics.finished_by_reason.values()) == 0


async def test_an_idle_engine_that_hangs(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "_PROBE_TIMEOUT_S", 0.05)
    site.engine.faults = Faults(hang_after=0)
    answer = await site.get("/health")
    assert answer.status == 503
    assert "no token" in answer.json()["reason"]
    assert site.engine.num_active == 0, "the probe itself must not stay in the engine"


async def test_it_recovers(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "_PROBE_TIMEOUT_S", 0.05)
    monkeypatch.setattr(health, "_PROBE_LIFETIME_S", 0.0)
    site.engine.faults = Faults(hang_after=0)
    assert (await site.get("/health")).status == 503
    site.engine.faults = Faults()
    assert (await site.get("/health")).status == 200


@pytest.mark.parametrize("faults", [Faults(fail_after=0), Faults(die_after=0)])
async def test_an_idle_engine_that_fails(site: Site, faults: Faults) -> None:
    site.engine.faults = faults
    assert (await site.get("/health")).status == 503


async def test_a_dead_engine(site: Site) -> None:
    site.engine.kill()
    answer = await site.get("/health")
    assert answer.status == 503
    assert answer.json()["reason"] == "the engine has stopped"


@pytest.mark.parametrize(
    ("last_step_age_s", "step_s", "stalled_s", "status"),
    [
        # 1 ms per token and 512 tokens a step: the floor of 5 s holds
        (0.1, 1.0, 30, 200),
        (6.0, 1.0, 30, 503),
        # 40 ms per token: a full prefill may take 20 s
        (15.0, 40.0, 30, 200),
        (25.0, 40.0, 30, 503),
        # the last step was long ago, but the work is new
        (3600.0, 1.0, 0, 200),
        # no step yet: a first long prefill
        (None, 0.0, 30, 200),
        (None, 0.0, 61, 503),
        # never more than two minutes
        (125.0, 9000.0, 200, 503),
    ],
)
async def test_a_busy_engine_must_have_stepped_lately(
    site: Site, last_step_age_s: float | None, step_s: float, stalled_s: float, status: int
) -> None:
    """`stalled_s`: for how long the server has had work. `step_s`: time of all steps so far, for 1,000 tokens."""
    await busy(site)
    num_probes = probes(site)
    site.engine.current_stats = EngineStats() if last_step_age_s is None else busy_stats(last_step_age_s, step_s, num_tokens=1000)
    site.in_flight._busy_since_s -= stalled_s
    answer = await site.get("/health")
    assert answer.status == status, answer.json()
    assert probes(site) == num_probes, "a busy engine needs no probe"


async def test_the_first_of_several_requests_begins_the_busy_time(site: Site) -> None:
    await busy(site)
    since_s = site.in_flight.busy_since_s
    await busy(site)
    assert site.in_flight.busy_since_s == since_s is not None


async def test_work_that_arrives_during_a_probe_is_judged_by_its_steps(
    make_site: Callable[..., Site], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The probe may have to wait behind a long prefill: that is not a hang."""
    monkeypatch.setattr(health, "_PROBE_TIMEOUT_S", 0.2)
    site = make_site(FakeEngine(faults=Faults(hang_after=0)))
    check = site.open("/health", method="GET")
    await site.engine.started.wait()
    site.engine.faults = Faults(hang_after=1)
    connection = site.open("/v1/completions", {"prompt": "x", "stream": True})
    await connection.num_chunks(1)
    site.engine.current_stats = busy_stats(0.0)
    await check.task
    assert check.answer.status == 200
    await connection.leave()
