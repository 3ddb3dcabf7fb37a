"""A server in-process: tiny real tokenizer and template, fake engine, direct ASGI calls."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from tokenizers import Tokenizer

from paceline.config import EngineConfig, ServerConfig
from paceline.server import grammar, template
from paceline.server.app import Server
from paceline.server.inflight import InFlight
from tests.fakes.asgi import AsgiClient
from tests.fakes.fake_engine import FakeEngine
from tests.fakes.inline_worker import InlineWorker
from tests.fakes.tiny_models import make_tiny_model


class Site(AsgiClient):
    """A client together with the server and the engine behind it."""

    def __init__(self, engine: FakeEngine, folder: Path, config: ServerConfig, kind: type[Server] = Server) -> None:
        self.engine = engine
        self.in_flight = InFlight()
        self.server = kind(engine, config, folder, self.in_flight)
        super().__init__(self.server.app)


@pytest.fixture(autouse=True)
def inline_workers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Most tests are not about the worker: templates are rendered and grammars compiled in this process, which starts none for each."""
    if "child_processes" not in request.fixturenames:
        monkeypatch.setattr(template, "Worker", InlineWorker)
        monkeypatch.setattr(grammar, "Worker", InlineWorker)


@pytest.fixture
def child_processes() -> Iterator[None]:
    """For tests whose templates and grammars must be worked on where a server does that. At the end no process is left."""
    yield
    assert not psutil.Process().children(recursive=True)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


@pytest.fixture
def folder_without_template(tmp_path: Path) -> Path:
    folder = make_tiny_model(tmp_path / "no-template")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    del config["chat_template"]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def make_site(folder: Path) -> Callable[..., Site]:
    def make(engine: FakeEngine | None = None, config: ServerConfig | None = None, model_folder: Path = folder) -> Site:
        return Site(engine or FakeEngine(), model_folder, config or ServerConfig(engine=EngineConfig(seed=7)))

    return make


@pytest.fixture
def site(make_site: Callable[..., Site]) -> Site:
    return make_site()
