"""What goes down: one step, decided by the scheduler, carried out by the executor, never changed by it."""

from dataclasses import dataclass
from enum import StrEnum

from paceline.core.request import SamplingParams


class SpanKind(StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True)
class Span:
    """The work of one slot in one step.

    A prefill span runs `token_ids[start : start + num_new_tokens]`, all known. A decode span runs the one pending token,
    then at most `draft_budget` drafts. While an earlier step is in flight a decode span's true start is known only to the
    device: it lies in `start .. start_max`; pages cover `start_max + 1 + draft_budget` tokens. For prefill both are equal.
    """

    slot: int
    kind: SpanKind
    start: int
    start_max: int
    num_new_tokens: int
    draft_budget: int  # drafts this row may propose; 0 is plain decoding
    draft_catch_up: int  # committed tokens the drafter may run in this step, the last one included; 0 if it keeps no KV
    emits: bool  # the span ends at the last committed token, so verification yields 1 .. draft_budget + 1 tokens


@dataclass(frozen=True, slots=True)
class Admission:
    """A sequence that enters a slot: everything the device must know of it. `token_ids` holds the output too after preemption."""

    slot: int
    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    sampling: SamplingParams
    stop_token_ids: tuple[int, ...]  # every token that ends the sequence, the model's own included
    num_computed_tokens: int  # leading tokens whose target KV the prefix cache supplied
    num_draft_computed_tokens: int  # the same for the drafter's KV, <= num_computed_tokens
    prediction_token_ids: tuple[int, ...] = ()  # output that the client expects


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step. Order on the device: release slots, admit, extend page lists, propose, forward, verify, commit."""

    step_id: int
    released_slots: tuple[int, ...]
    admitted: tuple[Admission, ...]
    new_pages: tuple[tuple[int, tuple[int, ...]], ...]  # (slot, page ids to append to the slot's list)
    freed_pages: tuple[tuple[int, int], ...]  # (slot, length to cut the slot's page list to), applied before new_pages
    spans: tuple[Span, ...]  # at most one per slot
    num_tokens_upper_bound: int  # target tokens if every draft budget is used
