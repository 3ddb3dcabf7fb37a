"""Servers whose model says a given text, with and without a format for tools and reasoning."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from paceline.config import ServerConfig
from tests.fakes.fake_engine import FACTS, FakeEngine, Faults
from tests.unit.server.conftest import Site

_QWEN = Path(__file__).parents[3] / "data" / "templates" / "qwen2.5-coder.jinja"


@pytest.fixture
def speak(make_site: Callable[..., Site], tokenizer: Tokenizer) -> Callable[..., Site]:
    """A site that says `text`, `chunk` tokens at a time."""

    def make(text: str = "the quick brown fox", chunk: int = 1, faults: Faults | None = None, config: ServerConfig | None = None) -> Site:
        token_ids = tokenizer.encode(text, add_special_tokens=False).ids
        facts = replace(FACTS, max_model_len=1024)
        return make_site(FakeEngine(facts, answer=lambda _: [*token_ids, 2], chunk=chunk, faults=faults or Faults()), config)

    return make


@pytest.fixture
def think(make_site: Callable[..., Site], folder: Path, tokenizer: Tokenizer, tmp_path: Path) -> Callable[..., Site]:
    """The same with Qwen's format of calls, from a model that may think."""
    model = tmp_path / "qwen"
    shutil.copytree(folder, model)
    (model / "chat_template.jinja").write_text("{# <think> </think> #}" + _QWEN.read_text())

    def make(text: str, chunk: int = 1, faults: Faults | None = None) -> Site:
        token_ids = tokenizer.encode(text, add_special_tokens=False).ids
        facts = replace(FACTS, max_model_len=4096)
        engine = FakeEngine(facts, answer=lambda _: [*token_ids, 2], chunk=chunk, faults=faults or Faults())
        return make_site(engine, model_folder=model)

    return make


@pytest.fixture
def shown(tokenizer: Tokenizer) -> Callable[..., str]:
    """The prompt that a request of the engine came with, as text."""

    def show(site: Site, index: int = -1) -> str:
        return tokenizer.decode(list(site.engine.requests[index].prompt_token_ids), skip_special_tokens=False)

    return show
