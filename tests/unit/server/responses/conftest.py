"""Servers whose model says a given text, with and without a format for tools and reasoning."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from paceline.config import ServerConfig
from tests.fakes.fake_engine import FACTS, FakeEngine, Faults
from tests.fakes.openai_types import check_response, read_events
from tests.unit.server.conftest import Site

PATH = "/v1/responses"
TOOL = {"type": "function", "name": "fox", "description": "jumps", "parameters": {"type": "object"}, "strict": False}
CALL = '<tool_call>\n{"name": "fox", "arguments": {"over": "dog"}}\n</tool_call>'
Speak = Callable[..., Site]

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


async def ask(site: Site, given: Any = "hi", **options: Any) -> dict[str, Any]:
    """A whole response, checked."""
    answer = await site.post(PATH, {"input": given, **options})
    assert answer.status == 200, answer.body
    check_response(answer.json())
    return answer.json()


async def stream(site: Site, given: Any = "hi", **options: Any) -> list[dict[str, Any]]:
    """The events of a streamed response, checked."""
    answer = await site.post(PATH, {"input": given, "stream": True, **options})
    assert answer.status == 200, answer.body
    assert answer.headers["content-type"].startswith("text/event-stream")
    return read_events(answer.body)


def plain(items: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """Items without what differs from answer to answer."""
    return [
        (item["type"], item["status"], item.get("name"), item.get("arguments"), [part["text"] for part in item.get("content", ())])
        for item in items
    ]
