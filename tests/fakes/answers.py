"""Records of single answers, for tests that count by hand."""

from collections.abc import Sequence
from dataclasses import replace

from paceline.prove.record import Arm, BlockRun, Phase, RequestRecord

_ANSWER = RequestRecord(
    arm=Arm.SPECULATIVE,
    phase=Phase.MEASURE,
    concurrency=1,
    block=0,
    place=0,
    question_id="q",
    category="qa",
    turn=0,
    sent_s=0.0,
    chunk_times_s=(),
    chunk_tokens=(),
    end_s=0.0,
    num_prompt_tokens=50,
    num_cached_tokens=0,
    num_output_tokens=0,
    finish_reason="stop",
    status=200,
    error=None,
    text="",
    max_tokens=64,
)


def answer(
    arm: Arm = Arm.SPECULATIVE, times_s: Sequence[float] = (1.0, 2.0), tokens: Sequence[int] = (1, 1), **others: object
) -> RequestRecord:
    """Sent at 0, over with its last chunk; usage counts the tokens of its chunks. `others`: fields of the record that differ from an answer
    of one block alone."""
    made = replace(
        _ANSWER, arm=arm, chunk_times_s=tuple(times_s), chunk_tokens=tuple(tokens), end_s=times_s[-1], num_output_tokens=sum(tokens)
    )
    made = replace(made, **others)  # type: ignore[arg-type]
    return replace(made, place=2 * made.block + (arm is Arm.SPECULATIVE))


def block_run(arm: Arm, seconds: float, *, concurrency: int = 1, block: int = 0, phase: Phase = Phase.MEASURE) -> BlockRun:
    """The baseline runs first in even blocks."""
    is_first = (arm is Arm.BASELINE) == (block % 2 == 0)
    return BlockRun(arm, phase, concurrency, block, 2 * block + (not is_first), 0.0, seconds, {}, {})
