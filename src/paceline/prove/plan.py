"""What is to be measured, and what a measurement gives: the two ends of `measure.measure`.

    measurement = await measure(plan, journal, show_progress)

The command line makes the plan; summaries, fairness and the report read the measurement. No judgement here.
"""

from dataclasses import dataclass, field
from enum import StrEnum

from paceline.errors import BadInputError
from paceline.prove.datasets.prompt import Dataset
from paceline.prove.record import Arm, BlockRun, RecordedConversation, RequestRecord

MIN_BLOCKS = 8  # a cell with fewer has no interval worth the name
MAX_CONCURRENCY = 1024
MAX_TIMEOUT_S = 24 * 3600.0
MAX_TOKENS = 1 << 20
MAX_GPUS = 1 << 20


class ReplayMode(StrEnum):
    """Whether conversations are recorded once and played in both arms, so that both do equal work."""

    AUTO = "auto"  # where the arms do not give the same tokens, and the servers can do it
    ON = "on"
    OFF = "off"


@dataclass(frozen=True, slots=True)
class Plan:
    """One proof: the same prompts in each arm, at each concurrency or arrival rate. Raises BadInputError for what cannot be measured."""

    base_url: str  # of the speculative arm; with or without /v1 at its end
    dataset: Dataset
    baseline_url: str | None = None  # a server of its own for the baseline; None: the same one, with `max_draft_length: 0`
    model: str | None = None  # None: the first that the server lists
    api_key: str | None = None
    concurrencies: tuple[int, ...] = (1, 4, 16)  # closed loop: conversations in flight
    rates_per_s: tuple[float, ...] = ()  # open loop: Poisson arrivals of conversations; measured after the closed ones
    num_blocks: int = MIN_BLOCKS  # of prompts, at each concurrency and rate
    max_tokens: int = 256
    temperature: float = 0.0
    seed: int = 0  # of everything random: order, arrivals, salts, and the requests' own seeds
    draft_lengths: tuple[int, ...] = ()  # of the speculative arm; none: the server's choice; several: a pilot takes the fastest
    arms: tuple[Arm, ...] = (Arm.BASELINE, Arm.SPECULATIVE)  # one alone measures, and compares nothing
    timeout_s: float = 600.0  # of one request
    ignore_eos: bool = False
    wants_token_ids: bool = False  # keep them in the records, where the server gives them
    warm_up_tokens: int = 32  # of each answer of a warm-up
    replay: ReplayMode = ReplayMode.AUTO
    recording: tuple[RecordedConversation, ...] = ()  # of an earlier measurement, to be played again; none: made anew if one is needed
    num_gpus: int | None = None  # of a server that does not say it itself

    def __post_init__(self) -> None:
        _check_range("concurrency", self.concurrencies, 1, MAX_CONCURRENCY)
        _check_range("rate", self.rates_per_s, 1e-3, 1e4)
        _check_range("draft length", self.draft_lengths, 1, 1024)
        _check_range("max_tokens", (self.max_tokens,), 1, MAX_TOKENS)
        _check_range("warm_up_tokens", (self.warm_up_tokens,), 1, MAX_TOKENS)
        _check_range("num_blocks", (self.num_blocks,), 1, 10_000)
        _check_range("temperature", (self.temperature,), 0, 100)
        _check_range("timeout_s", (self.timeout_s,), 0.1, MAX_TIMEOUT_S)
        if self.num_gpus is not None:
            _check_range("gpus", (self.num_gpus,), 1, MAX_GPUS)
        longest = max((turn.num_tokens for one in self.recording for turn in one.turns), default=0)
        if longest > self.max_tokens:
            raise BadInputError(
                f"the recording has an answer of {longest:,} tokens, max_tokens is {self.max_tokens:,}; give --max-tokens {longest}"
            )
        if not self.concurrencies and not self.rates_per_s:
            raise BadInputError("there is nothing to measure: give at least one concurrency or arrival rate")
        if not self.dataset.prompts:
            raise BadInputError(f"the data set {self.dataset.label!r} has no prompts")
        if not self.arms or len(set(self.arms)) != len(self.arms):
            raise BadInputError("the arms to measure must be one or two different ones")


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a measurement is, told after each answer."""

    stage: str  # such as "concurrency 4, block 3 of 8, speculative"
    num_done: int  # requests, warm-up included
    num_total: int
    seconds_left: float | None  # None before there is anything to tell it from


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """What a server is and can, as far as it says so or was tried out. None: it could not be told."""

    base_url: str  # without /v1
    kind: str  # paceline, vllm, sglang, llama.cpp, or what it calls its owner
    model: str
    version: str | None = None
    max_model_len: int | None = None
    is_lossless: bool | None = None  # whether it claims that speculation leaves its law of output as it is
    optional_fields: frozenset[str] = frozenset()  # request fields beyond OpenAI's that it does not refuse
    has_stream_usage: bool = False
    has_chunk_usage: bool = False  # usage in each chunk: token counts per chunk are true
    gives_token_ids: bool = False  # in each chunk, which gives the counts as well
    gives_acceptance: bool = False  # per request
    honours_draft_length: bool | None = None  # `max_draft_length: 0` was seen to stop speculation
    separates_salts: bool | None = None  # another `cache_salt` was seen to miss what the same one hit
    counters: frozenset[str] = frozenset()  # names of the Prometheus counters that are recorded with each block
    dtype: str | None = None
    num_gpus: int | None = None  # that it computes on; None on a CPU, and where it does not say
    facts: dict[str, object] = field(default_factory=dict[str, object])  # whatever else it says of itself, for the report's environment


@dataclass(frozen=True, slots=True)
class Measurement:
    """Everything measured, in the order of time. A block that lacks the BlockRun of an arm was cut short: not to be compared."""

    records: tuple[RequestRecord, ...]
    runs: tuple[BlockRun, ...]
    servers: dict[Arm, ServerFacts]
    draft_lengths: dict[int, int | None]  # of the speculative arm, by concurrency (0: open loop); None: the server's choice
    warnings: tuple[str, ...]
    loop_lag_p99_ms: float  # how late the measuring process itself was
    is_complete: bool  # False: interrupted, and what is here is what was measured until then
    replay_why: str = ""  # why it was recorded and replayed, or why not although the arms differ; empty: nothing called for it


def _check_range(name: str, values: tuple[int, ...] | tuple[float, ...], low: float, high: float) -> None:
    for value in values:
        if not low <= value <= high:
            raise BadInputError(f"{name} is {value:,}, allowed are {low:,} to {high:,}")
