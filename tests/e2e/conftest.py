"""Real servers for the end-to-end tests: `paceline serve` as a process, on the real default model or on a tiny random one."""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from paceline.core.progress import SilentProgress
from paceline.weights.resolve import resolve
from tests.fakes.tiny_models import make_tiny_model

DEFAULT_MODEL = "smollm2-135m-instruct"
TEMPLATES = Path(__file__).parents[1] / "data" / "templates"
_START_LIMIT_S = 240.0  # the first start on a fresh machine downloads and converts the model


@dataclass(frozen=True)
class RunningServer:
    url: str
    process: psutil.Process

    def get(self, path: str) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(self.url + path, timeout=30) as response:
                return response.status, response.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def post(self, path: str, body: dict[str, object]) -> dict[str, object]:
        request = urllib.request.Request(self.url + path, json.dumps(body).encode(), {"content-type": "application/json"})
        with urllib.request.urlopen(request, timeout=300) as response:
            return json.load(response)

    def metric(self, name: str) -> float:
        """The sum over labels of a sample in /metrics."""
        _, text = self.get("/metrics")
        values = [float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.split("{")[0].split(" ")[0] == name]
        assert values, f"{name} is not in /metrics"
        return sum(values)

    def engine(self) -> psutil.Process:
        """The engine's process, the server's only child that runs our loop."""
        return next(child for child in self.process.children(recursive=True) if "paceline.engine.loop" in " ".join(child.cmdline()))


@contextlib.contextmanager
def serve(arguments: Sequence[str], verb: str = "serve") -> Iterator[RunningServer]:
    """`paceline serve ARGUMENTS` (or `draft-server`) on a free port; on leaving, SIGTERM, and nothing may be left behind."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "paceline.cli", verb, *arguments, "--port", str(port)]
    popen = subprocess.Popen(command, env={**os.environ, "PACELINE_SHUTDOWN_TIMEOUT": "5"})
    server = RunningServer(f"http://127.0.0.1:{port}", psutil.Process(popen.pid))
    try:
        deadline_s = time.monotonic() + _START_LIMIT_S
        while True:
            assert popen.poll() is None, f"the server ended with status {popen.returncode} while starting"
            assert time.monotonic() < deadline_s, "the server did not become ready"
            with contextlib.suppress(OSError):
                if server.get("/ready")[0] == 200:
                    break
            time.sleep(0.2)
        yield server
    finally:
        children = server.process.children(recursive=True) if popen.poll() is None else []
        popen.send_signal(signal.SIGTERM)
        popen.wait(40)
        _, alive = psutil.wait_procs(children, timeout=10)
        for child in alive:
            child.kill()
        assert not alive, f"processes outlived the server: {alive}"


@pytest.fixture(scope="session")
def real_server() -> Iterator[RunningServer]:
    """The default model in float32, where equality is exact, with ngram drafts."""
    with serve([DEFAULT_MODEL, "--dtype", "float32", "--speculation", "on"]) as server:
        yield server


@pytest.fixture(scope="session")
def tools_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """The default model as `tools`: under a template that has tools, as its own has none. It repeats calls that it has seen."""
    folder = tmp_path_factory.mktemp("tools") / "model"
    folder.mkdir()
    for file in resolve(DEFAULT_MODEL, progress=SilentProgress()).path.iterdir():
        if file.name != "paceline.json":
            (folder / file.name).symlink_to(file)
    shutil.copy(TEMPLATES / "qwen2.5-coder.jinja", folder / "chat_template.jinja")
    with serve([str(folder), "--served-model-name", "tools", "--dtype", "float32", "--speculation", "on"]) as server:
        yield server


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny") / "model", "llama", vocab_size=320)
