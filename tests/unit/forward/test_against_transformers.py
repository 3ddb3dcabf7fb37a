"""Whole models against transformers in float32, and the bfloat16 path against its own float32: chunked prompts, drafts, scattered pages."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from paceline.core.progress import SilentProgress
from paceline.forward.forward import Forward
from paceline.forward.inputs import RowInput
from paceline.forward.load import Forced, Runner, load_forward
from paceline.forward.memory import allocate_kv
from paceline.models.loader import load_program, load_weights
from tests.fakes.random_model import run_rows
from tests.fakes.tiny_models import make_tiny_model

ARCHITECTURES = ["llama", "llama3", "qwen2", "qwen3"]
CHUNKS = [(13, 20, 1, 1, 5, 1, 90, 1, 6), (138,)]
FORCED = {"script": Forced(Runner.SCRIPT), "walk": Forced(Runner.WALK), "reference": Forced(implementation="reference")}


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module", params=ARCHITECTURES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp(request.param), request.param)


def load(folder: Path, dtype: torch.dtype, forced: Forced) -> Forward:
    program = load_program(folder)
    with load_weights(folder, program, torch.float32) as tensors:
        return load_forward(program, tensors, dtype, "load", SilentProgress(), forced=forced)


def all_logits(forward: Forward, token_ids: list[int], chunks: tuple[int, ...], page_ids: list[int]) -> torch.Tensor:
    """Logits `[T, V]` of one sequence that is run in `chunks`."""
    kv = allocate_kv(forward, len(page_ids) + 2, 16)
    parts: list[torch.Tensor] = []
    start = 0
    for size in chunks:
        parts.append(run_rows(forward, kv, RowInput(token_ids[start : start + size], start, page_ids, size)))
        start += size
    return torch.cat(parts)


@pytest.mark.parametrize("chunks", CHUNKS, ids=["chunked", "whole"])
@pytest.mark.parametrize("forced", FORCED)
def test_float32_logits_are_those_of_transformers(folder: Path, forced: str, chunks: tuple[int, ...]) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    token_ids = torch.randint(0, 320, (138,), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = model(token_ids.unsqueeze(0)).logits[0]
    got = all_logits(load(folder, torch.float32, FORCED[forced]), token_ids.tolist(), chunks, [5, 2, 7, 1, 0, 3, 4, 6, 8])
    assert (got - expected).abs().max() <= 1e-4
    assert expected.abs().max() > 1, "the model must say something"


@pytest.mark.parametrize("forced", ["script", "reference"])
def test_bfloat16_weights_change_logits_by_their_rounding_only(folder: Path, forced: str) -> None:
    """Relative to the largest logit. The script path keeps activations in float32, the oracle rounds them to bfloat16."""
    token_ids = torch.randint(0, 320, (138,), generator=torch.Generator().manual_seed(1)).tolist()
    full = all_logits(load(folder, torch.float32, FORCED["script"]), token_ids, CHUNKS[0], list(range(9)))
    half = all_logits(load(folder, torch.bfloat16, FORCED[forced]), token_ids, CHUNKS[0], list(range(9)))
    error = (half - full).abs().max() / full.abs().max()
    assert 0 < error <= (0.02 if forced == "script" else 0.05)


def test_script_and_walk_give_the_same_bits(folder: Path) -> None:
    token_ids = list(range(138))
    for dtype in (torch.float32, torch.bfloat16):
        script, walk = (load(folder, dtype, FORCED[name]) for name in ("script", "walk"))
        pages = [3, 1, 2, 0, 4, 5, 6, 8, 7]
        assert torch.equal(all_logits(script, token_ids, CHUNKS[0], pages), all_logits(walk, token_ids, CHUNKS[0], pages))


def test_bfloat16_checkpoints_lose_nothing(folder: Path) -> None:
    """A checkpoint whose weights are bfloat16 numbers gives the same logits in both precisions, up to the order of float32 sums."""
    program = load_program(folder)
    with load_weights(folder, program, torch.bfloat16) as tensors:
        rounded = {name: tensors[name].float() for name in tensors}
    full, half = (load_forward(program, rounded, dtype, "load", SilentProgress()) for dtype in (torch.float32, torch.bfloat16))
    token_ids = list(range(138))
    full_logits, half_logits = (all_logits(forward, token_ids, CHUNKS[1], list(range(9))) for forward in (full, half))
    if "fbgemm_fp16" in half.choices[2].implementation:
        assert (full_logits - half_logits).abs().max() <= 1e-4


def test_hidden_is_the_last_layer_before_the_final_norm(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    forward = load(folder, torch.float32, FORCED["script"])
    captured: list[torch.Tensor] = []
    model.model.norm.register_forward_pre_hook(lambda module, inputs: captured.append(inputs[0]))
    with torch.no_grad():
        model(torch.arange(20).unsqueeze(0))
    from paceline.forward.inputs import build_batch

    kv = allocate_kv(forward, 4, 16)
    hidden = forward.run(build_batch([RowInput(list(range(20)), 0, [0, 1], 1)], 16), kv).hidden
    assert (hidden - captured[0][0]).abs().max() <= 1e-4
