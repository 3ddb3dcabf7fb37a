"""What comes up: the truth of one step, and the token deltas that the scheduler makes of it."""

from dataclasses import dataclass, field

from paceline.core.request import FinishReason


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural logarithms of probabilities under the target's raw law, at one token's place."""

    logprob: float  # of the token that stands there
    top_token_ids: tuple[int, ...]  # the likeliest tokens, as many as were asked for, likeliest first
    top_logprobs: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class SlotOutcome:
    """What one span yielded. `new_token_ids` are the accepted drafts and then exactly one more; empty in mid-prompt."""

    slot: int
    new_token_ids: tuple[int, ...]
    num_drafted: int
    num_accepted: int
    num_draft_computed_tokens: int  # committed tokens with valid drafter KV after this step; 0 if it keeps none
    logprobs: tuple[TokenLogprobs, ...] = ()  # one per new token, if the request asks
    failure: str | None = None  # why the request cannot go on behind the new tokens, of which there may be none; its own fault
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()  # of the tokens behind those that a prompt chunk ran, as far as they are prompt


@dataclass(frozen=True, slots=True)
class StepStats:
    """Milliseconds by phase and sizes of one step; data until `metrics/` reads it."""

    propose_ms: float  # all that the drafter took, also to learn what came of the step
    forward_ms: float
    verify_ms: float
    total_ms: float
    num_rows: int
    num_tokens: int  # target tokens actually run, drafts included
    num_drafted_tokens: int
    num_accepted_tokens: int


@dataclass(frozen=True, slots=True)
class StepOutcome:
    step_id: int
    slots: tuple[SlotOutcome, ...]  # one per span, in the plan's order
    stats: StepStats


@dataclass(slots=True)
class DraftStats:
    """Acceptance of one request, in the terms of vLLM's per-request object (interface: `metrics.speculative_decoding`)."""

    num_spec_steps: int = 0  # steps that verified at least one draft token
    num_plain_steps: int = 0  # the others, control steps included
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    accepted_histogram: list[int] = field(default_factory=list[int])  # index: accepted in a step; sums to num_spec_steps
    num_control_steps: int = 0  # plain ones in which drafts were held back from everyone, to learn what plain decoding takes
    # `accepted_histogram` by the number of drafts in the step: what was not drafted was not rejected, and only this tells.
    histograms_by_draft_length: dict[int, list[int]] = field(default_factory=dict[int, list[int]])

    def count_drafts(self, num_drafted: int, num_accepted: int, num_steps: int = 1) -> None:
        """Steps that verified `num_drafted` (> 0) draft tokens each and accepted the first `num_accepted` of them."""
        self.num_spec_steps += num_steps
        self.num_draft_tokens += num_drafted * num_steps
        self.num_accepted_tokens += num_accepted * num_steps
        histogram = self.accepted_histogram
        histogram.extend([0] * (num_accepted + 1 - len(histogram)))
        histogram[num_accepted] += num_steps
        of_length = self.histograms_by_draft_length.get(num_drafted)
        if of_length is None:
            of_length = self.histograms_by_draft_length[num_drafted] = [0] * (num_drafted + 1)
        of_length[num_accepted] += num_steps


@dataclass(frozen=True, slots=True)
class RequestStats:
    """What a finished request cost; travels with its last delta."""

    draft: DraftStats
    max_draft_length: int  # the request's cap K
    num_cached_tokens: int  # prompt tokens that the prefix cache supplied at first admission
    num_preemptions: int
    queue_ms: float
    prefill_ms: float
    decode_ms: float


@dataclass(frozen=True, slots=True)
class TokenDelta:
    """New output of one request: 1 .. K+1 tokens of one step, the stop token included. The last one has a finish reason and stats.

    The server may end a request at a stop string, without a last delta; so the first delta has stats too (cached tokens, queue
    and prefill time), and every delta says how many drafts its step verified, and whether it held them back.
    """

    request_id: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    stats: RequestStats | None = None
    error: str | None = None  # why, when finish_reason is ERROR
    is_refusal: bool = False  # the error is the request's own fault, not the engine's
    num_drafted: int = 0  # draft tokens that this step verified for the request
    logprobs: tuple[TokenLogprobs, ...] = ()  # one per token, if the request asks
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()  # with the first delta: of the prompt's tokens from the second on
    is_control: bool = False  # this step held drafts back from everyone, this request included
