"""The two promises to a newcomer: `make serve` answers from a fresh clone, and the wheel gives the same command line without make."""

import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

pytestmark = pytest.mark.system

FIRST_START_LIMIT_S = 300  # 180 s is the promise on an idle machine
SECOND_START_LIMIT_S = 30
ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Checkout:
    folder: Path
    environment: dict[str, str]


@pytest.fixture(scope="session")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Checkout]:
    """A fresh copy of the repository with a home and a model cache of its own, as a newcomer has after cloning."""
    base = tmp_path_factory.mktemp("newcomer")
    folder, home = base / "repository", base / "home"
    home.mkdir()
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard", "-z"], cwd=ROOT, capture_output=True, check=True, text=True)
    for name in listed.stdout.split("\0"):
        source = ROOT / name
        if name and source.is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, folder / name)
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PACELINE_", "VIRTUAL_ENV", "MAKE", "MFLAGS"))}
    path = os.pathsep.join(part for part in inherited["PATH"].split(os.pathsep) if ".venv" not in part)
    yield Checkout(folder, {**inherited, "PATH": path, "HOME": str(home)})
    shutil.rmtree(base, ignore_errors=True)  # a gigabyte of packages and a model


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def session_members(session: int) -> list[int]:
    """The processes of a session, from /proc; zombies do not count."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == session and fields[0] != "Z":
            found.append(int(folder.name))
    return found


def ask(url: str) -> dict:
    body = {"messages": [{"role": "user", "content": "Name the capital of France."}], "max_tokens": 16, "temperature": 0}
    request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)


def serve_until_answered(checkout: Checkout, environment: dict[str, str], limit_s: float) -> tuple[str, float]:
    """`make serve`, one answer, Ctrl-C; returns what it printed and the seconds until it was ready."""
    port = free_port()
    output = checkout.folder.parent / "serve.log"
    started_s = time.monotonic()
    with output.open("w") as log:
        command = ["make", "serve", f"PORT={port}"]
        process = subprocess.Popen(
            command,
            cwd=checkout.folder,
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        while "curl" not in output.read_text():
            assert process.poll() is None, output.read_text()
            assert time.monotonic() - started_s < limit_s, output.read_text()
            time.sleep(0.1)
        ready_s = time.monotonic() - started_s
        answer = ask(f"http://127.0.0.1:{port}")
        assert "Paris" in answer["choices"][0]["message"]["content"]
        assert len(session_members(process.pid)) >= 3, "make, the server and the engine"
        os.killpg(process.pid, signal.SIGINT)  # what Ctrl-C does
        process.wait(60)
        left = session_members(process.pid)
        assert not left, f"processes {left} outlived Ctrl-C"
    finally:
        if session_members(process.pid):
            os.killpg(process.pid, signal.SIGKILL)
    return output.read_text(), ready_s


def test_make_serve_from_a_fresh_clone_then_again_without_network(checkout: Checkout) -> None:
    printed, first_s = serve_until_answered(checkout, checkout.environment, FIRST_START_LIMIT_S)
    assert "Traceback" not in printed
    # A proxy that does not exist stands for a network that does not.
    offline = {**checkout.environment, "HTTPS_PROXY": "http://127.0.0.1:9", "HTTP_PROXY": "http://127.0.0.1:9", "PIP_NO_INDEX": "1"}
    again, second_s = serve_until_answered(checkout, offline, SECOND_START_LIMIT_S)
    assert "installing" not in again
    print(f"first start {first_s:.0f} s, second {second_s:.1f} s")


def test_the_wheel_is_complete_and_runs_without_make(checkout: Checkout, tmp_path: Path) -> None:
    def run(*command: str) -> str:
        done = subprocess.run(command, check=False, cwd=tmp_path, env=checkout.environment, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    python = str(tmp_path / "venv/bin/python")
    run("python3", "-m", "venv", "venv")
    pip = [python, "-m", "pip", "install", "-q", "--no-compile", *shlex.split(checkout.environment.get("PIP_ARGS", ""))]
    run(*pip, "build", "hatchling", "-c", str(checkout.folder / "constraints.txt"))
    run(python, "-m", "build", "--no-isolation", "--outdir", str(tmp_path / "dist"), str(checkout.folder))
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    run(*pip, "-c", str(checkout.folder / "constraints.txt"), str(wheel))

    names = run(python, "-m", "zipfile", "-l", str(wheel))
    assert re.search(r"licenses/LICENSE\b", names)
    assert re.search(r"licenses/NOTICE\b", names)
    assert "paceline/py.typed" in names
    assert "paceline/native/libpaceline.so" in names
    assert "tests/" not in names
    paceline = str(tmp_path / "venv/bin/paceline")
    assert re.fullmatch(r"\d+\.\d+\.\d+\s*", run(paceline, "--version"))
    # Nothing of the development extra is there, so an answer shows that the declared dependencies are enough.
    assert "pytest" not in run(*pip[:3], "list")
    assert "Paris" in run(paceline, "generate", "Name the capital of France.", "--max-tokens", "16")
