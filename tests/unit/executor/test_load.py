"""What loading learns and refuses: the model's limits, and end tokens that the model does not have."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from paceline.config import EngineConfig
from paceline.core.progress import SilentProgress
from paceline.errors import BadInputError
from paceline.executor import load
from paceline.executor.load import load_executor
from paceline.executor.model_loader import Loaded, ModelLoader
from tests.fakes.tiny_models import make_tiny_model

CONFIG = EngineConfig(dtype="float32", draft="none", kv_cache_memory_bytes=4 << 20)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def test_facts_know_the_models_own_limit(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "model", max_position_embeddings=96)
    config = EngineConfig(dtype="float32", draft="none", kv_cache_memory_bytes=4 << 20, max_model_len=64)
    facts = load_executor(config, str(folder), None, SilentProgress())[1]
    assert (facts.max_model_len, facts.max_position_embeddings, facts.eos_token_ids) == (64, 96, (2,))


@pytest.mark.parametrize(("eos_token_id", "is_refused"), [([319], False), ([320], True), ([2, 99999], True)])
def test_end_tokens_must_be_the_models(tmp_path: Path, eos_token_id: list[int], is_refused: bool) -> None:
    folder = make_tiny_model(tmp_path / "model", vocab_size=320)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": eos_token_id}))
    if not is_refused:
        assert load_executor(CONFIG, str(folder), None, SilentProgress())[1].eos_token_ids == (*eos_token_id, 2)
        return
    with pytest.raises(BadInputError, match=r"end token (320|99,999), .*320 tokens, 0 to 319; correct eos_token_id"):
        load_executor(CONFIG, str(folder), None, SilentProgress())


def test_a_draft_model_takes_its_own_share_of_the_memory(tmp_path: Path) -> None:
    """Both halves of every page fit the budget, each by its own model's size."""
    target = make_tiny_model(tmp_path / "target", num_layers=3)
    draft = make_tiny_model(tmp_path / "draft", num_layers=1)
    config = EngineConfig(dtype="float32", draft=str(draft), kv_cache_memory_bytes=1 << 20)
    alone = load_executor(replace(config, draft="none"), str(target), None, SilentProgress())[1]
    both = load_executor(config, str(target), str(draft), SilentProgress())[1]
    assert (alone.drafter_page_bytes, alone.drafter_weight_bytes) == (0, 0)
    assert both.target_page_bytes == alone.target_page_bytes == 3 * both.drafter_page_bytes
    assert both.target_weight_bytes > both.drafter_weight_bytes > 0
    for facts in (alone, both):
        page_bytes = facts.target_page_bytes + facts.drafter_page_bytes
        assert facts.num_pages == (1 << 20) // page_bytes


def test_memory_is_planned_when_both_models_are_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is free is asked for once, after the weights of the draft model have been taken from it."""
    target, draft = make_tiny_model(tmp_path / "target"), make_tiny_model(tmp_path / "draft")
    events: list[str] = []
    honest = ModelLoader.load

    def load_model(loader: ModelLoader, folder: Path, stage: str) -> Loaded:
        events.append(stage)
        return honest(loader, folder, stage)

    monkeypatch.setattr(ModelLoader, "load", load_model)
    monkeypatch.setattr(load, "_available_bytes", lambda: events.append("free") or 8 << 20)
    facts = load_executor(EngineConfig(dtype="float32", draft=str(draft)), str(target), str(draft), SilentProgress())[1]
    assert events == ["load target", "load draft model", "free"]
    assert facts.num_pages * (facts.target_page_bytes + facts.drafter_page_bytes) <= 2 << 20


def test_a_draft_models_context_is_cut_to_the_configured_one(tmp_path: Path) -> None:
    target, short = make_tiny_model(tmp_path / "target"), make_tiny_model(tmp_path / "short", max_position_embeddings=48)
    config = EngineConfig(dtype="float32", draft=str(short), kv_cache_memory_bytes=4 << 20)
    for wanted, expected in ((40, 40), (64, 48)):
        facts = load_executor(replace(config, max_model_len=wanted), str(target), str(short), SilentProgress())[1]
        assert (facts.max_model_len, facts.drafter_max_len) == (wanted, expected)
