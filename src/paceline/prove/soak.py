"""Steady traffic for a long time: does the server leak, fail, or draft worse? What is watched, fitted and judged.

Options and result are in `soak_plan.py`. A server on this machine is watched through /proc, another one through its `process_*` metrics;
pages and acceptance through `/stats` and `/metrics` where the server has them.
"""

import asyncio
import re
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from paceline.errors import MissingError
from paceline.prove.client import WHOLE_REASONS, Answer, Ask, ChatClient
from paceline.prove.counters import NUM_ACCEPTED_TOKENS, NUM_DRAFT_TOKENS, parse
from paceline.prove.results import Verdict
from paceline.prove.soak_plan import SoakMinute, SoakOptions, SoakResult, Trend
from paceline.prove.soak_process import listening_pid, process_use
from paceline.prove.soak_trend import Limit, fit_trend

ShowProgress = Callable[[str, int, int], None]

PROMPTS = (
    "Repeat this list exactly: red, blue, green, black, white, red, blue, green, black, white.",
    "Explain in two sentences why the sky is blue.",
    "Write a Python function that adds two numbers, then write the same function for three numbers.",
    "List ten animals, one a line.",
    "Summarise: the ship left the harbour, the ship met a storm, the ship came back to the harbour.",
)
_LEAST_RSS_MIB, _LEAST_FDS, _LEAST_PAGES, _LEAST_ACCEPTANCE = 16.0, 8.0, 4.0, 0.05
_MIN_ACCEPTANCE_TOKENS = 50  # draft tokens between two looks, for their share to say something
_DRAIN_LIMIT_S = 10.0
_MIN_INTERVAL_S, _MAX_INTERVAL_S = 0.1, 30.0
_NUM_LOOKS = 300  # over a short soak
_PAUSE_S = 0.1
_MAX_ERROR_TEXTS = 50
_GAUGE = re.compile(r"^(process_resident_memory_bytes|process_open_fds)(?:\{[^\n]*\})? ([0-9.eE+]+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Look:
    """One look at the server. None: it could not be seen."""

    time_s: float  # since the start
    rss_mib: float | None = None
    num_fds: int | None = None
    num_free_pages: int | None = None
    num_drafted: float | None = None  # tokens, since the server's start
    num_accepted: float | None = None


@dataclass(slots=True)
class _Count:
    num_requests: int = 0
    num_errors: int = 0
    num_tokens: int = 0


@dataclass(slots=True)
class Traffic:
    """What was asked, counted as it comes: a long soak has millions of answers."""

    minutes: defaultdict[int, _Count] = field(default_factory=lambda: defaultdict(_Count))
    errors: Counter[str] = field(default_factory=Counter[str])  # by their text

    def add(self, time_s: float, error: str | None, num_tokens: int) -> None:
        """An answer that was over `time_s` after the start."""
        count = self.minutes[int(time_s // 60)]
        count.num_requests += 1
        count.num_tokens += num_tokens
        if error is not None:
            count.num_errors += 1
            self.errors[error if error in self.errors or len(self.errors) < _MAX_ERROR_TEXTS else "other errors"] += 1

    @property
    def num_requests(self) -> int:
        return sum(count.num_requests for count in self.minutes.values())


@dataclass(frozen=True, slots=True)
class Seen:
    """Everything that is judged."""

    traffic: Traffic
    looks: Sequence[Look]  # in the order of time
    duration_s: float
    is_complete: bool = True
    pages_before: int | None = None  # free ones, with no traffic
    pages_after: int | None = None


def _silent(stage: str, num_done: int, num_total: int) -> None:
    del stage, num_done, num_total


async def soak(base_url: str, options: SoakOptions, show: ShowProgress = _silent) -> SoakResult:
    """Ask without pause for `options.duration_s`, watching the server; judge. A cancelled soak returns what it has measured.

    Raises MissingError if no server answers at `base_url`.
    """
    async with ChatClient(base_url, options.api_key, options.timeout_s) as client:
        model = options.model or await _first_model(client)
        watcher = Watcher(client, options.pid or listening_pid(client.base_url))
        pages_before = (await watcher.look(0.0)).num_free_pages
        traffic, looks, is_complete = Traffic(), list[Look](), True
        start_s = time.monotonic()
        try:
            async with asyncio.TaskGroup() as group:
                watching = group.create_task(_watch(watcher, looks, options, start_s, show))
                await _ask_all(client, model, traffic, options, start_s)
                watching.cancel()
        except asyncio.CancelledError:
            is_complete = False
            if (task := asyncio.current_task()) is not None:
                task.uncancel()
        duration_s = time.monotonic() - start_s
        pages_after = await _drained_pages(watcher, pages_before)
    return judge(Seen(traffic, looks, duration_s, is_complete, pages_before, pages_after), options)


async def _ask_all(client: ChatClient, model: str, traffic: Traffic, options: SoakOptions, start_s: float) -> None:
    """Requests one after the other, in `options.concurrency` lanes."""
    prompts = options.prompts or PROMPTS

    async def lane(number: int) -> None:
        while (sent_s := time.monotonic() - start_s) < options.duration_s:
            ask = Ask(model, [{"role": "user", "content": prompts[number % len(prompts)]}], options.max_tokens)
            answer = await client.complete(ask)
            number += 1
            end_s = time.monotonic() - start_s
            traffic.add(end_s, fault_of(answer), answer.num_output_tokens)
            if answer.error is not None and end_s - sent_s < _PAUSE_S:
                await asyncio.sleep(_PAUSE_S)  # a server that refuses at once is not asked thousands of times a second

    async with asyncio.TaskGroup() as group:
        for first in range(options.concurrency):
            group.create_task(lane(first))


async def _watch(watcher: "Watcher", looks: list[Look], options: SoakOptions, start_s: float, show: ShowProgress) -> None:
    interval_s = min(max(options.duration_s / _NUM_LOOKS, _MIN_INTERVAL_S), _MAX_INTERVAL_S)
    while True:
        now_s = time.monotonic() - start_s
        looks.append(await watcher.look(now_s))
        show("soak", min(int(now_s), int(options.duration_s)), int(options.duration_s))
        await asyncio.sleep(interval_s)


def fault_of(answer: Answer) -> str | None:
    """What is wrong with an answer; cut streams and wrong finish reasons are errors like others."""
    if answer.error is not None:
        return answer.error
    return None if answer.finish_reason in WHOLE_REASONS else f"the finish reason is {answer.finish_reason}"


class Watcher:
    """Looks at one server, at what it shows."""

    def __init__(self, client: ChatClient, pid: int | None) -> None:
        self._client, self._pid = client, pid

    async def look(self, time_s: float) -> Look:
        """Never raises; what could not be seen is None."""
        use = None if self._pid is None else process_use(self._pid)
        metrics = (await self._get("/metrics")).decode(errors="replace")
        counters = parse(metrics).counters
        rss_mib, num_fds = (None, None) if use is None else (use.rss_mib, use.num_fds)
        if self._pid is None:
            gauges = {name: float(value) for name, value in _GAUGE.findall(metrics)}
            rss_bytes, fds = gauges.get("process_resident_memory_bytes"), gauges.get("process_open_fds")
            rss_mib, num_fds = None if rss_bytes is None else rss_bytes / 2**20, None if fds is None else int(fds)
        free_pages = _free_pages(await self._get("/stats"))
        return Look(time_s, rss_mib, num_fds, free_pages, counters.get(NUM_DRAFT_TOKENS), counters.get(NUM_ACCEPTED_TOKENS))

    async def _get(self, path: str) -> bytes:
        try:
            status, body = await self._client.get(path)
        except MissingError:
            return b""
        return body if status == 200 else b""


class _Pages(msgspec.Struct):
    num_free_pages: int


class _Stats(msgspec.Struct):
    engine: _Pages


def _free_pages(body: bytes) -> int | None:
    try:
        return msgspec.json.decode(body, type=_Stats).engine.num_free_pages
    except msgspec.DecodeError:
        return None


async def _first_model(client: ChatClient) -> str:
    status, body = await client.get("/v1/models")
    try:
        return str(msgspec.json.decode(body)["data"][0]["id"])
    except (msgspec.DecodeError, LookupError, TypeError):
        raise MissingError(f"{client.base_url}/v1/models lists no model (HTTP {status}); give the model's name") from None


async def _drained_pages(watcher: Watcher, num_before: int | None) -> int | None:
    """Free pages once nothing runs; the engine's figures come a moment late."""
    deadline_s = time.monotonic() + _DRAIN_LIMIT_S
    while True:
        num_free = (await watcher.look(0.0)).num_free_pages
        if num_free is None or num_before is None or num_free >= num_before or time.monotonic() > deadline_s:
            return num_free
        await asyncio.sleep(0.5)


def judge(seen: Seen, options: SoakOptions) -> SoakResult:
    """The result of what was seen."""
    settled_s = options.settle_share * seen.duration_s
    trends = _trends([look for look in seen.looks if look.time_s >= settled_s], options)
    num_requests, num_errors = seen.traffic.num_requests, seen.traffic.errors.total()
    reasons = [
        f"{trend.name} changes by {trend.per_hour:,.3g} an hour (99 % interval {trend.low:,.3g} to {trend.high:,.3g}), "
        f"beyond the bound of {trend.bound:,.3g}"
        for trend in trends
        if trend.is_leak
    ]
    if num_requests == 0 or num_errors > options.max_error_rate * num_requests:
        reasons.append(f"{num_errors:,} of {num_requests:,} requests failed; allowed is a share of {options.max_error_rate:g}")
    if seen.pages_before is not None and seen.pages_after is not None and seen.pages_after < seen.pages_before:
        num_lost = seen.pages_before - seen.pages_after
        reasons.append(f"{num_lost:,} of {seen.pages_before:,} free pages did not come back when the traffic ended")
    verdict = Verdict.FAIL if reasons else Verdict.PASS
    if verdict is Verdict.PASS and not seen.is_complete:
        verdict = Verdict.INCONCLUSIVE
        reasons.append(
            f"stopped after {seen.duration_s:,.0f} s of {options.duration_s:,.0f} s: nothing was wrong until then, the rest was not seen"
        )
    missing = {"rss_mib", "num_fds"} - {trend.name for trend in trends}
    if verdict is not Verdict.FAIL and missing:
        verdict = Verdict.INCONCLUSIVE
        reasons.append(
            f"{', '.join(sorted(missing))}: not watched long enough, or the server runs elsewhere and shows no process_* metrics"
        )
    return SoakResult(
        verdict=verdict,
        reasons=tuple(reasons),
        duration_s=seen.duration_s,
        is_complete=seen.is_complete,
        num_requests=num_requests,
        num_errors=num_errors,
        errors=dict(seen.traffic.errors),
        minutes=_minutes(seen),
        trends=tuple(trends),
    )


def _trends(looks: Sequence[Look], options: SoakOptions) -> list[Trend]:
    limits = (
        (Limit("rss_mib", +1, options.max_rss_mib_per_hour, _LEAST_RSS_MIB), [(look.time_s, look.rss_mib) for look in looks]),
        (Limit("num_fds", +1, options.max_fds_per_hour, _LEAST_FDS), [(look.time_s, look.num_fds) for look in looks]),
        (Limit("num_free_pages", -1, 1.0, _LEAST_PAGES), [(look.time_s, look.num_free_pages) for look in looks]),
        (Limit("acceptance", -1, options.max_acceptance_loss_per_hour, _LEAST_ACCEPTANCE), _acceptance(looks)),
    )
    trends: list[Trend] = []
    for limit, points in limits:
        seen = [(time_s, value) for time_s, value in points if value is not None]
        trend = fit_trend([time_s for time_s, _ in seen], [value for _, value in seen], limit)
        if trend is not None:
            trends.append(trend)
    return trends


def _acceptance(looks: Sequence[Look]) -> list[tuple[float, float]]:
    """Accepted / drafted tokens between looks that have enough of them between."""
    points: list[tuple[float, float]] = []
    last: Look | None = None
    for look in looks:
        if look.num_drafted is None or look.num_accepted is None:
            continue
        if last is None or look.num_drafted < (last.num_drafted or 0):  # the first, or a restarted server
            last = look
            continue
        num_drafted = look.num_drafted - (last.num_drafted or 0)
        if num_drafted >= _MIN_ACCEPTANCE_TOKENS:
            points.append(((look.time_s + last.time_s) / 2, (look.num_accepted - (last.num_accepted or 0)) / num_drafted))
            last = look
    return points


def _minutes(seen: Seen) -> tuple[SoakMinute, ...]:
    rows: list[SoakMinute] = []
    by_minute: defaultdict[int, list[Look]] = defaultdict(list)
    for look in seen.looks:
        by_minute[int(look.time_s // 60)].append(look)
    for minute in sorted({*seen.traffic.minutes, *by_minute}):
        count = seen.traffic.minutes.get(minute, _Count())
        looks = by_minute.get(minute) or [Look(60.0 * minute)]
        length_s = max(min(60.0, seen.duration_s - 60.0 * minute), 1.0)
        points = [share for _, share in _acceptance(looks)]
        rows.append(
            SoakMinute(
                minute=minute + 1,
                num_requests=count.num_requests,
                num_errors=count.num_errors,
                tokens_per_s=count.num_tokens / length_s,
                rss_mib=looks[-1].rss_mib,
                num_fds=looks[-1].num_fds,
                num_free_pages=looks[-1].num_free_pages,
                acceptance=sum(points) / len(points) if points else None,
            )
        )
    return tuple(rows)
