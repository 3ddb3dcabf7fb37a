"""Records of both arms side by side: the blocks that can be compared, and in them each request with its twin. For `speedup.py`.

A block counts if both arms ran it to its end and every request of it is whole in both; the others are counted and left out of every ratio.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from paceline.prove.record import Arm, BlockRun, Phase, RequestRecord
from paceline.prove.results import Work

Pair = tuple[RequestRecord, RequestRecord]  # baseline, speculative
RequestKey = tuple[str, int, int]  # question, turn, and which asking of it within the block


@dataclass(frozen=True, slots=True)
class PairedBlock:
    runs: dict[Arm, BlockRun]
    pairs: tuple[Pair, ...]

    def wall_s(self, arm: Arm) -> float:
        return self.runs[arm].end_s - self.runs[arm].start_s

    def num_tokens(self, arm: Arm) -> int:
        side = 0 if arm is Arm.BASELINE else 1
        return sum(pair[side].num_output_tokens for pair in self.pairs)

    @property
    def is_baseline_first(self) -> bool:
        return self.runs[Arm.BASELINE].place < self.runs[Arm.SPECULATIVE].place


@dataclass(frozen=True, slots=True)
class Comparison:
    """One concurrency of a closed loop."""

    concurrency: int
    blocks: tuple[PairedBlock, ...]
    num_left_out: int  # blocks that were begun and cannot be compared

    @property
    def work(self) -> Work:
        """What the times are over; if any two answers differ in length, time per token is all that can be compared."""
        pairs = [pair for block in self.blocks for pair in block.pairs]
        if any(base.num_output_tokens != other.num_output_tokens for base, other in pairs):
            return Work.PER_TOKEN
        if pairs and all(record.is_replayed for pair in pairs for record in pair):
            return Work.REPLAYED
        is_same = all((base.text, base.token_ids) == (other.text, other.token_ids) for base, other in pairs)
        return Work.IDENTICAL if is_same else Work.EQUAL_LENGTHS

    @property
    def categories(self) -> tuple[str, ...]:
        return tuple(sorted({base.category for block in self.blocks for base, _ in block.pairs}))

    @property
    def num_prompts(self) -> int:
        return len(self._num_blocks_of_prompts)

    @property
    def num_repeated_prompts(self) -> int:
        """Those that stand in more than one block."""
        return sum(number > 1 for number in self._num_blocks_of_prompts.values())

    @property
    def _num_blocks_of_prompts(self) -> Counter[str]:
        return Counter(question for block in self.blocks for question in {base.question_id for base, _ in block.pairs})

    @property
    def num_pairs(self) -> int:
        return sum(len(block.pairs) for block in self.blocks)


def compare(records: Iterable[RequestRecord], runs: Iterable[BlockRun]) -> tuple[Comparison, ...]:
    """Each measured concurrency of the closed loop, ascending. An open loop has no total times to compare: arrivals set its pace."""
    requests: dict[tuple[int, int], dict[Arm, list[RequestRecord]]] = defaultdict(lambda: defaultdict(list))
    for record in records:
        if record.phase is Phase.MEASURE and record.concurrency > 0:
            requests[record.concurrency, record.block][record.arm].append(record)
    runs_of: dict[tuple[int, int], dict[Arm, BlockRun]] = defaultdict(dict)
    for run in runs:
        if run.phase is Phase.MEASURE and run.concurrency > 0:
            runs_of[run.concurrency, run.block][run.arm] = run
    comparisons: list[Comparison] = []
    for concurrency in sorted({concurrency for concurrency, _ in requests}):
        places = sorted(place for place in requests if place[0] == concurrency)
        blocks = [_paired_block(runs_of[place], requests[place]) for place in places]
        kept = tuple(block for block in blocks if block is not None)
        comparisons.append(Comparison(concurrency, kept, len(blocks) - len(kept)))
    return tuple(comparisons)


def _paired_block(runs: dict[Arm, BlockRun], requests: dict[Arm, list[RequestRecord]]) -> PairedBlock | None:
    if len(runs) < 2 or any(record.error is not None for arm in requests.values() for record in arm):
        return None
    sides = {arm: _by_key(requests[arm]) for arm in Arm}
    base, other = sides[Arm.BASELINE], sides[Arm.SPECULATIVE]
    if not base or base.keys() != other.keys() or min(run.end_s - run.start_s for run in runs.values()) <= 0:
        return None
    return PairedBlock(runs, tuple((base[key], other[key]) for key in sorted(base)))


def _by_key(records: list[RequestRecord]) -> dict[RequestKey, RequestRecord]:
    seen: Counter[tuple[str, int]] = Counter()
    found: dict[RequestKey, RequestRecord] = {}
    for record in sorted(records, key=lambda record: record.sent_s):
        seen[record.question_id, record.turn] += 1
        found[record.question_id, record.turn, seen[record.question_id, record.turn]] = record
    return found
