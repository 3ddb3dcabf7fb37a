"""A row's logits do not depend on its batch mates, its chunks, its drafts or its pages: bit for bit in float32 (invariant 10)."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.program import ModelSpec
from paceline.forward.forward import Forward
from paceline.forward.inputs import RowInput
from paceline.forward.memory import allocate_kv
from tests.fakes.random_model import random_forward, random_spec, run_rows

PAGE_SIZE = 16
NUM_ROWS = 4
MAX_LENGTH = 420
SPECS = [
    random_spec(),
    random_spec(9, 3, 64, 96),
    random_spec(14, 2, 64, 64, "qwen2"),
    random_spec(4, 2, 128, 64, "qwen3"),
    random_spec(3, 1, 64, 72),
]
STYLES = {"decode": [1], "drafts": [1, 2, 3, 5, 6, 9], "mixed": [1, 1, 4, 17, 64, 65, 200]}
_loaded: dict[ModelSpec, Forward] = {}


def loaded(spec: ModelSpec) -> Forward:
    return _loaded.setdefault(spec, random_forward(spec))


def whole_logits(forward: Forward, token_ids: list[int]) -> torch.Tensor:
    kv = allocate_kv(forward, -(-len(token_ids) // PAGE_SIZE), PAGE_SIZE)
    return run_rows(forward, kv, RowInput(token_ids, 0, list(range(kv.kv.shape[3] // PAGE_SIZE)), len(token_ids)))


def logits_by_steps(forward: Forward, sequences: list[list[int]], style: list[int], rng: random.Random) -> list[torch.Tensor]:
    """Run the sequences through shared steps of random composition, on pages that lie anywhere and hold another's leavings."""
    num_pages = [-(-len(sequence) // PAGE_SIZE) for sequence in sequences]
    kv = allocate_kv(forward, sum(num_pages) + 2, PAGE_SIZE)
    kv.kv.normal_()
    free = list(range(sum(num_pages) + 2))
    if rng.random() < 0.5:
        rng.shuffle(free)
    pages = [[free.pop(0) for _ in range(n)] for n in num_pages]
    done = [0] * len(sequences)
    parts: list[list[torch.Tensor]] = [[] for _ in sequences]
    while waiting := [i for i, sequence in enumerate(sequences) if done[i] < len(sequence)]:
        running = rng.sample(waiting, rng.randint(1, len(waiting)))
        sizes = [min(rng.choice(style), len(sequences[i]) - done[i]) for i in running]
        rows = [RowInput(sequences[i][done[i] : done[i] + n], done[i], pages[i], n) for i, n in zip(running, sizes, strict=True)]
        for i, n, part in zip(running, sizes, run_rows(forward, kv, *rows).split(sizes), strict=True):
            parts[i].append(part)
            done[i] += n
    return [torch.cat(part) for part in parts]


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: f"{spec.architecture}-{spec.num_heads}-{spec.num_kv_heads}-{spec.head_dim}")
@settings(max_examples=2, deadline=None)
@given(data=st.data())
def test_float32_logits_have_the_same_bits_in_any_schedule(spec: ModelSpec, style: str, num_threads: int, data: st.DataObject) -> None:
    torch.set_num_threads(num_threads)
    forward = loaded(spec)
    rng = random.Random(data.draw(st.integers(0, 10**6)))
    longest = 60 if style == "decode" else MAX_LENGTH
    sequences = [[rng.randrange(100) for _ in range(data.draw(st.integers(1, longest)))] for _ in range(NUM_ROWS)]
    for sequence, logits in zip(sequences, logits_by_steps(forward, sequences, STYLES[style], rng), strict=True):
        assert torch.equal(logits, whole_logits(forward, sequence))


def test_a_long_decode_has_the_bits_of_a_prompt() -> None:
    """Across the sizes at which the library's products change their way of summing."""
    torch.set_num_threads(1)
    forward = loaded(SPECS[1])
    token_ids = [(7 * i) % 100 for i in range(620)]
    whole = whole_logits(forward, token_ids)
    kv = allocate_kv(forward, 40, PAGE_SIZE)
    for start in range(620):
        alone = run_rows(forward, kv, RowInput(token_ids[start : start + 1], start, list(range(39)), 1))
        assert torch.equal(alone[0], whole[start]), f"token {start}"
