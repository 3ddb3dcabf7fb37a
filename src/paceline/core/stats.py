"""What the engine says of itself each 250 ms: cumulative counters and gauges that feed `/metrics` and `/health`. Torch-free."""

from dataclasses import dataclass, field
from enum import StrEnum


class GuardState(StrEnum):
    """What the guard of speculation does with a range of batches."""

    DRAFTING = "drafting"
    PLAIN = "plain"  # drafts are not expected to pay
    TRIAL = "trial"  # the same, with a single draft now and then to see whether that has changed
    MEASURING = "measuring"  # plain steps, to learn what they cost
    INSOLVENT = "insolvent"  # drafts are expected to pay, but too much was lost with them before


class SwitchOff(StrEnum):
    """Why drafting stopped."""

    ACCEPTANCE = "acceptance"  # too few drafts are accepted
    DRAFTER_TIME = "drafter_time"  # enough are accepted, but drafting and verifying them takes too long
    ROW = "row"  # a request of the batch would be slowed down for the others
    POSITION = "position"  # drafts beyond a position are no longer accepted: shorter ones go on
    ACCOUNT = "account"  # what may be lost against plain decoding is spent


@dataclass(frozen=True, slots=True)
class Speedup:
    """What speculation gains on the traffic at hand, for one range of batch and context."""

    band: str
    ratio: float  # committed tokens per row-second, speculative over plain
    low: float  # 95 % interval
    high: float
    num_triples: int  # blocks of plain steps that it comes from, each between two speculative ones


@dataclass(slots=True)
class EngineStats:
    """Counters grow from engine start; gauges are the values at `time_s`. All token counts are of the target model."""

    time_s: float = 0.0  # time.monotonic() when this was taken
    last_step_s: float = 0.0  # time.monotonic() of the last finished step
    # gauges
    num_running: int = 0
    num_waiting: int = 0
    num_pages: int = 0
    num_free_pages: int = 0
    # counters
    num_steps: int = 0
    num_prompt_tokens: int = 0  # prompt tokens of admitted requests, cached ones included
    num_generation_tokens: int = 0
    num_preemptions: int = 0
    num_prefix_query_tokens: int = 0
    num_prefix_hit_tokens: int = 0
    num_drafts: int = 0  # verification rows with at least one draft token
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_tokens_per_pos: list[int] = field(default_factory=list[int])  # index: draft position
    propose_s: float = 0.0
    forward_s: float = 0.0
    verify_s: float = 0.0
    step_s: float = 0.0
    decode_read_rate: float = 0.0  # bytes/s that recent decode steps had to read at least: the target's weights once, and KV; 0: none yet
    # measured by control blocks
    speedups: tuple[Speedup, ...] = ()  # of the bands with enough triples
    # the guard of speculation, by range of decoding rows (`scheduler/bands.py`); nothing for a range that was not seen yet
    guard_state_by_band: dict[str, GuardState] = field(default_factory=dict[str, GuardState])
    draft_length_by_band: dict[str, float] = field(default_factory=dict[str, float])  # planned for a row that may draft; a recent mean
    num_switch_offs_by_reason: dict[str, int] = field(default_factory=dict[str, int])  # keys: SwitchOff
