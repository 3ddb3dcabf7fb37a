"""What the engine says of itself each 250 ms: cumulative counters and gauges that feed `/metrics` and `/health`. Torch-free."""

from dataclasses import dataclass, field


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
    # measured by control blocks
    speedups: tuple[Speedup, ...] = ()  # of the bands with enough triples
