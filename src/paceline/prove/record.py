"""The raw record of one request, as the client saw it. Written to an append-only file before anything is computed from it.

Every number of a report can be computed again from these. Times are of the measuring process's monotonic clock.
"""

from dataclasses import dataclass, field
from enum import StrEnum


class Arm(StrEnum):
    """Which way of decoding a request ran."""

    BASELINE = "baseline"  # the best plain decoding
    SPECULATIVE = "speculative"


class Phase(StrEnum):
    WARM_UP = "warmup"  # never part of a figure
    MEASURE = "measure"
    SET_ASIDE = "set_aside"  # measured before it showed that the arms answer differently, and again by replay: part of no figure
    RECORD = "record"  # the pass that fixes what is replayed; part of no figure


@dataclass(frozen=True, slots=True)
class Acceptance:
    """The server's own account of one request: vLLM's `metrics.speculative_decoding`, and ours beside it.

    A server that tells nothing gives None in its place, never zeros.
    """

    num_spec_steps: int  # steps that verified at least one draft token
    num_draft_tokens: int
    num_accepted_draft_tokens: int
    histogram: tuple[int, ...]  # index: drafts accepted in a step; sums to num_spec_steps; empty where the server does not tell
    num_spec_tokens: int | None = None  # the cap K
    num_plain_steps: int | None = None
    num_control_steps: int | None = None
    histograms_by_draft_length: tuple[tuple[int, tuple[int, ...]], ...] = ()  # (drafts made, histogram) where the server tells them apart


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One request: one turn of one conversation in one arm."""

    arm: Arm
    phase: Phase
    concurrency: int  # conversations in flight in this part of the schedule; 0 in open loop
    block: int  # number of the block of prompts within (concurrency); both arms run every block
    place: int  # place of this block's run in the order of time, over the whole measurement: names the run, tells which arm came first
    question_id: str
    category: str
    turn: int  # from 0
    sent_s: float
    chunk_times_s: tuple[float, ...]  # when each chunk with text or tokens came, on the clock of sent_s
    chunk_tokens: tuple[int, ...]  # tokens in each chunk, as the server counts them; empty where it does not say
    end_s: float  # when the answer was over
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int  # from usage; 0 if it failed before any
    finish_reason: str | None
    status: int  # HTTP status; 0 if there was no answer
    error: str | None  # None for an answer that is whole: finish reason stop or length, usage present, stream ended properly
    text: str
    token_ids: tuple[int, ...] = ()  # where the server gives them
    max_tokens: int = 0  # what was asked for
    rate_per_s: float = 0.0  # arrival rate of an open loop; 0 in closed loop
    acceptance: Acceptance | None = None
    is_replayed: bool = False  # its history and its length were those of a recording, whatever the arm itself would have said


@dataclass(frozen=True, slots=True)
class RecordedTurn:
    """One answer as a recording keeps it: all of it that later work depends on."""

    content: str  # what later turns see
    num_tokens: int  # of the whole answer, thoughts included; at least 1


@dataclass(frozen=True, slots=True)
class RecordedConversation:
    """The answers of one conversation; fewer than its turns where one of them failed."""

    question_id: str
    turns: tuple[RecordedTurn, ...]


@dataclass(frozen=True, slots=True)
class BlockRun:
    """One block of prompts in one arm: the wall time that the ratio of total times is made of."""

    arm: Arm
    phase: Phase
    concurrency: int
    block: int
    place: int
    start_s: float  # first request sent, nothing else in flight
    end_s: float  # last answer over
    counters_before: dict[str, float]  # the server's `vllm:spec_decode_*_total` and generation tokens; empty where it has none
    counters_after: dict[str, float]
    rate_per_s: float = 0.0  # arrival rate of an open loop; 0 in closed loop
    gauges: dict[str, float] = field(default_factory=dict[str, float])  # use of the device, as the server published it in the run
