"""Servers whose model writes calls as Qwen does, thinks if asked for, and says a given text."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from paceline.config import EngineConfig, ServerConfig
from tests.fakes.fake_engine import FACTS, FakeEngine, Faults
from tests.unit.server.conftest import Site

QWEN = Path(__file__).parents[3] / "data" / "templates" / "qwen2.5-coder.jinja"


@pytest.fixture(scope="session")
def qwen_folder(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = tmp_path_factory.mktemp("qwen") / "model"
    shutil.copytree(folder, model)
    (model / "chat_template.jinja").write_text(QWEN.read_text())
    return model


@pytest.fixture(scope="session")
def thinking_folder(qwen_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = tmp_path_factory.mktemp("thinking") / "model"
    shutil.copytree(qwen_folder, model)
    (model / "chat_template.jinja").write_text("{# <think> #}" + QWEN.read_text())
    return model


@pytest.fixture
def speak(make_site: Callable[..., Site], qwen_folder: Path, thinking_folder: Path, tokenizer: Tokenizer) -> Callable[..., Site]:
    """A site that says `text`, `chunk` tokens at a time; `settings` are the server's."""

    def make(text: str, *, chunk: int = 1, thinks: bool = False, faults: Faults | None = None, **settings: object) -> Site:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        facts = replace(FACTS, max_model_len=4096)  # Qwen's template has much to say of tools
        engine = FakeEngine(facts, answer=lambda _: [*ids, 2], chunk=chunk, faults=faults or Faults())
        config = ServerConfig(EngineConfig(seed=7), **settings)  # type: ignore[arg-type]
        return make_site(engine, config, thinking_folder if thinks else qwen_folder)

    return make
