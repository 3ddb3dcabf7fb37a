"""What a soak is asked and what it gives: the two ends of `soak.soak`.

    result = await soak(base_url, SoakOptions(duration_s=180), show_progress)

A cancelled soak (Ctrl-C) returns what it has measured. Raises MissingError if there is no server.
"""

import re
from dataclasses import dataclass

from paceline.errors import BadInputError
from paceline.prove.results import Verdict

MIN_DURATION_S = 2.0
MAX_DURATION_S = 30 * 86_400.0
_UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}


@dataclass(frozen=True, slots=True)
class SoakOptions:
    """Traffic and bounds. Each bound is a rate; over a short soak it is what the least growth worth the name comes to."""

    duration_s: float
    concurrency: int = 4  # requests in flight, all the time
    prompts: tuple[str, ...] = ()  # asked in turn; empty: a few of our own
    max_tokens: int = 32
    model: str | None = None  # None: the first that the server lists
    api_key: str | None = None
    pid: int | None = None  # of a server on this machine; None: the process that listens on its port, if it can be found
    settle_share: float = 0.25  # of the duration, at its start: not fitted
    max_error_rate: float = 0.001
    max_rss_mib_per_hour: float = 2.0
    max_fds_per_hour: float = 1.0
    max_acceptance_loss_per_hour: float = 0.01
    timeout_s: float = 120.0

    def __post_init__(self) -> None:
        for name, value, low, high in (
            ("duration_s", self.duration_s, MIN_DURATION_S, MAX_DURATION_S),
            ("concurrency", self.concurrency, 1, 1024),
            ("max_tokens", self.max_tokens, 1, 1 << 20),
            ("settle_share", self.settle_share, 0, 0.8),
            ("max_error_rate", self.max_error_rate, 0, 1),
            ("timeout_s", self.timeout_s, 0.1, 86_400),
        ):
            if not low <= value <= high:
                raise BadInputError(f"{name} is {value}, allowed are {low:,} to {high:,}", param=name)


@dataclass(frozen=True, slots=True)
class SoakMinute:
    """One line of the table. None: it could not be watched."""

    minute: int
    num_requests: int
    num_errors: int
    tokens_per_s: float
    rss_mib: float | None
    num_fds: int | None
    num_free_pages: int | None
    acceptance: float | None  # accepted / drafted


@dataclass(frozen=True, slots=True)
class Trend:
    """The slope of one figure after settling, with its interval, against its bound."""

    name: str  # rss_mib, num_fds, num_free_pages, acceptance
    per_hour: float
    low: float  # 99 % interval of per_hour
    high: float
    bound: float  # per hour; a leak is a slope beyond it with the whole interval
    is_leak: bool
    num_points: int


@dataclass(frozen=True, slots=True)
class SoakResult:
    """Judged by `verdict`, whose exit code is the command's."""

    verdict: Verdict
    reasons: tuple[str, ...]
    duration_s: float  # of the traffic
    is_complete: bool  # False: stopped before its time
    num_requests: int
    num_errors: int
    errors: dict[str, int]  # by their text
    minutes: tuple[SoakMinute, ...]
    trends: tuple[Trend, ...]


def parse_duration(text: str) -> float:
    """Seconds of "72h", "3m", "90s", "1h30m". Raises BadInputError."""
    parts = re.findall(r"(\d+(?:\.\d+)?)([smhd])", text)
    if not parts or "".join(number + unit for number, unit in parts) != text:
        raise BadInputError(f"the duration {text[:40]!r} is not like 72h, 3m or 90s", param="soak")
    duration_s = sum(float(number) * _UNITS_S[unit] for number, unit in parts)
    if not MIN_DURATION_S <= duration_s <= MAX_DURATION_S:
        raise BadInputError(f"the duration {text} is outside 2s to 30d", param="soak")
    return duration_s
