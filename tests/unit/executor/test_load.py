"""What loading learns and refuses: the model's limits, and end tokens that the model does not have."""

import json
from pathlib import Path

import pytest
import torch

from paceline.config import EngineConfig
from paceline.core.progress import SilentProgress
from paceline.errors import BadInputError
from paceline.executor.load import load_executor
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
