"""What servers tell of the drafts of one request, in the four shapes that are in use, as one `Acceptance`. Called by `client.py`.

What does not add up is refused with the reason: a wrong counter must not look like a figure, nor like a server without drafts.
"""

from collections.abc import Callable, Sequence

import msgspec

from paceline.prove.record import Acceptance

MAX_DRAFT_LENGTH = 4096


class _Vllm(msgspec.Struct, frozen=True):
    acceptance_histogram: list[int]
    num_spec_steps: int
    num_accepted_draft_tokens: int
    num_draft_tokens: int
    num_spec_tokens: int | None = None
    acceptance_histogram_by_draft_length: dict[str, list[int]] = {}


class _VllmMetrics(msgspec.Struct, frozen=True):
    """vLLM's root object `metrics`; the counts beside its own are ours."""

    speculative_decoding: _Vllm | None = None
    num_plain_steps: int | None = None
    num_control_steps: int | None = None


class _TensorRt(msgspec.Struct, frozen=True):
    """TensorRT-LLM's `choices[0].speculative_decoding`."""

    acceptance_histogram: list[int]
    num_spec_steps: int
    total_accepted_draft_tokens: int
    total_draft_tokens: int
    num_spec_tokens: int | None = None


class _SglangDetails(msgspec.Struct, frozen=True):
    spec_verify_ct: int
    spec_num_correct_drafts: int
    spec_num_proposed_drafts: int
    spec_correct_drafts_histogram: list[int] | None = None


class _Sglang(msgspec.Struct, frozen=True):
    """SGLang's root object `sglext`."""

    spec_tokens_details: _SglangDetails | None = None


class _LlamaCpp(msgspec.Struct, frozen=True):
    """llama.cpp's root object `timings`."""

    predicted_n: int | None = None
    draft_n: int | None = None
    draft_n_accepted: int | None = None


def read_acceptance(metrics: bytes, sglext: bytes, of_choice: bytes, timings: bytes) -> tuple[Acceptance | None, str | None]:
    """The account that one of these JSON objects gives (empty: the server sent none), and why it cannot be believed if it cannot."""
    readers: tuple[tuple[bytes, Callable[[bytes], Acceptance | None]], ...] = (
        (metrics, _from_vllm),
        (of_choice, _from_tensorrt),
        (sglext, _from_sglang),
        (timings, _from_llama_cpp),
    )
    for encoded, read in readers:
        if not encoded or encoded == b"null":
            continue
        try:
            acceptance = read(encoded)
        except (msgspec.DecodeError, RecursionError) as error:  # ValidationError is one
            return None, f"the counts of accepted drafts cannot be read: {error}"
        if acceptance is not None:
            fault = _fault_of(acceptance)
            return (acceptance, None) if fault is None else (None, fault)
    return None, None


def _from_vllm(encoded: bytes) -> Acceptance | None:
    told = msgspec.json.decode(encoded, type=_VllmMetrics)
    counts = told.speculative_decoding
    if counts is None:
        return None
    return Acceptance(
        num_spec_steps=counts.num_spec_steps,
        num_draft_tokens=counts.num_draft_tokens,
        num_accepted_draft_tokens=counts.num_accepted_draft_tokens,
        histogram=tuple(counts.acceptance_histogram),
        num_spec_tokens=counts.num_spec_tokens,
        num_plain_steps=told.num_plain_steps,
        num_control_steps=told.num_control_steps,
        histograms_by_draft_length=_by_length(counts.acceptance_histogram_by_draft_length),
    )


def _by_length(told: dict[str, list[int]]) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """Histograms by the drafts that a step had, shortest first; a key that is no number is given as -1, which is refused."""
    lengths = {length: int(length) if length.isdecimal() and len(length) < 6 else -1 for length in told}
    return tuple(sorted((lengths[length], tuple(histogram)) for length, histogram in told.items()))


def _from_tensorrt(encoded: bytes) -> Acceptance:
    told = msgspec.json.decode(encoded, type=_TensorRt)
    return Acceptance(
        num_spec_steps=told.num_spec_steps,
        num_draft_tokens=told.total_draft_tokens,
        num_accepted_draft_tokens=told.total_accepted_draft_tokens,
        histogram=tuple(told.acceptance_histogram),
        num_spec_tokens=told.num_spec_tokens,
    )


def _from_sglang(encoded: bytes) -> Acceptance | None:
    told = msgspec.json.decode(encoded, type=_Sglang).spec_tokens_details
    if told is None:
        return None
    return Acceptance(
        num_spec_steps=told.spec_verify_ct,
        num_draft_tokens=told.spec_num_proposed_drafts,
        num_accepted_draft_tokens=told.spec_num_correct_drafts,
        histogram=tuple(told.spec_correct_drafts_histogram or ()),
    )


def _from_llama_cpp(encoded: bytes) -> Acceptance | None:
    """It does not count steps: every token that was no accepted draft ended one, the prompt's token excepted."""
    told = msgspec.json.decode(encoded, type=_LlamaCpp)
    if told.predicted_n is None or told.draft_n is None or told.draft_n_accepted is None:
        return None
    num_steps = max(told.predicted_n - told.draft_n_accepted - 1, 0)
    return Acceptance(
        num_spec_steps=num_steps if told.draft_n else 0,
        num_draft_tokens=told.draft_n,
        num_accepted_draft_tokens=told.draft_n_accepted,
        histogram=(),
        num_plain_steps=None if told.draft_n else num_steps,
    )


def _fault_of(told: Acceptance) -> str | None:
    """Why these counts cannot all be true."""
    counts = (told.num_spec_steps, told.num_draft_tokens, told.num_accepted_draft_tokens, *told.histogram)
    extra = tuple(count for count in (told.num_spec_tokens, told.num_plain_steps, told.num_control_steps) if count is not None)
    if min((*counts, *extra)) < 0 or max((*counts, *extra)) >= 1 << 53:
        return "a count of drafts is negative or absurdly large"
    if told.num_accepted_draft_tokens > told.num_draft_tokens:
        return "more drafts were accepted than drafted"
    if len(told.histogram) > MAX_DRAFT_LENGTH + 1:
        return "the histogram of accepted drafts is longer than any draft"
    if told.histogram and (fault := _histogram_fault(told.histogram, told)):
        return fault
    return _by_length_fault(told) if told.histograms_by_draft_length else None


def _histogram_fault(histogram: Sequence[int], told: Acceptance) -> str | None:
    if sum(histogram) != told.num_spec_steps:
        return "the histogram of accepted drafts does not add up to the number of steps"
    if sum(index * count for index, count in enumerate(histogram)) != told.num_accepted_draft_tokens:
        return "the histogram of accepted drafts does not add up to the accepted drafts"
    if told.num_spec_tokens is not None and len(histogram) != told.num_spec_tokens + 1:
        return "the histogram of accepted drafts has not one bin for each number from 0 to the longest draft"
    return None


def _by_length_fault(told: Acceptance) -> str | None:
    """Some servers take drafts that a grammar forbids out of the count of draft tokens, so that one cannot be checked here."""
    total = [0] * len(told.histogram)
    for length, histogram in told.histograms_by_draft_length:
        last = max((index for index, count in enumerate(histogram) if count), default=0)
        if min(histogram, default=0) < 0 or not 0 < length <= MAX_DRAFT_LENGTH or last > length or last >= len(total):
            return "a histogram by draft length accepts more than was drafted"
        for index, count in enumerate(histogram[: last + 1]):
            total[index] += count
    return None if tuple(total) == told.histogram else "the histograms by draft length do not add up to the histogram of accepted drafts"
