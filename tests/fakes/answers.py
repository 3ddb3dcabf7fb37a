"""Records of single answers, for tests that count by hand."""

from collections.abc import Sequence

from paceline.prove.record import Acceptance, Arm, BlockRun, Phase, RequestRecord


def answer(
    arm: Arm = Arm.SPECULATIVE,
    *,
    times_s: Sequence[float] = (1.0, 2.0),
    tokens: Sequence[int] = (1, 1),
    num_output_tokens: int | None = None,
    acceptance: Acceptance | None = None,
    category: str = "qa",
    question_id: str = "q",
    concurrency: int = 1,
    block: int = 0,
    error: str | None = None,
    phase: Phase = Phase.MEASURE,
) -> RequestRecord:
    """Sent at 0; the answer is over with its last chunk."""
    return RequestRecord(
        arm=arm,
        phase=phase,
        concurrency=concurrency,
        block=block,
        place=2 * block + (arm is Arm.SPECULATIVE),
        question_id=question_id,
        category=category,
        turn=0,
        sent_s=0.0,
        chunk_times_s=tuple(times_s),
        chunk_tokens=tuple(tokens),
        end_s=times_s[-1],
        num_prompt_tokens=50,
        num_cached_tokens=0,
        num_output_tokens=sum(tokens) if num_output_tokens is None else num_output_tokens,
        finish_reason="stop",
        status=200,
        error=error,
        text="",
        max_tokens=64,
        acceptance=acceptance,
    )


def block_run(arm: Arm, seconds: float, *, concurrency: int = 1, block: int = 0, phase: Phase = Phase.MEASURE) -> BlockRun:
    """The baseline runs first in even blocks."""
    is_first = (arm is Arm.BASELINE) == (block % 2 == 0)
    return BlockRun(arm, phase, concurrency, block, 2 * block + (not is_first), 0.0, seconds, {}, {})
