"""Records of a measurement whose figures are known exactly: tokens come in equal steps, a chunk per step. No clock, no server."""

from paceline.prove.datasets.prompt import Dataset, Prompt
from paceline.prove.plan import Measurement, ServerFacts
from paceline.prove.record import Acceptance, Arm, BlockRun, Phase, RequestRecord

STEP_S = {Arm.BASELINE: 0.02, Arm.SPECULATIVE: 0.025}
TOKENS_PER_STEP = {Arm.BASELINE: 1, Arm.SPECULATIVE: 2}
NUM_TOKENS = 41  # the first, and 40 in steps
TTFT_S = 0.1


def made_dataset(num_blocks: int = 8, per_block: int = 2) -> Dataset:
    """Half coding, half qa; every other conversation has two turns."""
    prompts = tuple(
        Prompt(f"{place:032d}", ("coding", "qa")[place % 2], ("first?", "and then?")[: 1 + place % 2])
        for place in range(num_blocks * per_block)
    )
    return Dataset("made up (not SPEED-Bench)", "qualitative", prompts)


def made_record(arm: Arm, prompt: Prompt, turn: int, block: int, place: int, sent_s: float) -> RequestRecord:
    size = TOKENS_PER_STEP[arm]
    num_steps = (NUM_TOKENS - 1) // size
    first_s = sent_s + TTFT_S
    times_s = tuple(first_s + STEP_S[arm] * step for step in range(num_steps + 1))
    acceptance = None
    if arm == Arm.SPECULATIVE:  # of two drafts, one accepted in every step
        acceptance = Acceptance(num_steps, 2 * num_steps, num_steps, (0, num_steps, 0), num_spec_tokens=2)
    return RequestRecord(
        arm=arm,
        phase=Phase.MEASURE,
        concurrency=1,
        block=block,
        place=place,
        question_id=prompt.question_id,
        category=prompt.category,
        turn=turn,
        sent_s=sent_s,
        chunk_times_s=times_s,
        chunk_tokens=(1,) + (size,) * num_steps,
        end_s=times_s[-1],
        num_prompt_tokens=20,
        num_cached_tokens=0,
        num_output_tokens=NUM_TOKENS,
        finish_reason="length",
        status=200,
        error=None,
        text=f"answer to {prompt.question_id[-2:]}",
        token_ids=tuple(range(NUM_TOKENS)),
        max_tokens=NUM_TOKENS,
        acceptance=acceptance,
    )


def made_measurement(dataset: Dataset, per_block: int = 2) -> Measurement:
    """Concurrency 1, arms in ABBA order over blocks of `per_block` prompts."""
    records: list[RequestRecord] = []
    runs: list[BlockRun] = []
    now_s, place = 1000.0, 0
    for block in range(len(dataset.prompts) // per_block):
        prompts = dataset.prompts[block * per_block : (block + 1) * per_block]
        for arm in (Arm.BASELINE, Arm.SPECULATIVE) if block % 2 == 0 else (Arm.SPECULATIVE, Arm.BASELINE):
            start_s = now_s
            for prompt in prompts:
                for turn in range(len(prompt.turns)):
                    records.append(made_record(arm, prompt, turn, block, place, now_s))
                    now_s = records[-1].end_s
            runs.append(BlockRun(arm, Phase.MEASURE, 1, block, place, start_s, now_s, {}, {}))
            place += 1
            now_s += 0.5
    facts = ServerFacts("http://127.0.0.1:1", "paceline", "toy", dtype="float32", honours_draft_length=True, gives_acceptance=True)
    return Measurement(tuple(records), tuple(runs), dict.fromkeys(Arm, facts), {1: None}, (), 0.1, True)
