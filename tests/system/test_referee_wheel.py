"""The wheel `paceline-prove`: built, installed where nothing else is, and made to judge a server without torch anywhere near."""

import asyncio
import json
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.fakes.mock_openai import Behaviour, MockOpenAi

pytestmark = pytest.mark.system

ROOT = Path(__file__).parents[2]
LIMIT_S = 600


@dataclass(frozen=True)
class Done:
    code: int
    output: str


async def run(folder: Path, *command: str) -> Done:
    """A command in `folder`, without this environment's own packages in reach. Async: the server to judge runs beside it."""
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(folder), "PYTHONNOUSERSITE": "1"}
    process = await asyncio.create_subprocess_exec(
        *command, cwd=folder, env=environment, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    try:
        output, _ = await asyncio.wait_for(process.communicate(), LIMIT_S)
    finally:
        if process.returncode is None:
            process.kill()
    return Done(process.returncode or 0, output.decode(errors="replace"))


async def must(folder: Path, *command: str) -> str:
    done = await run(folder, *command)
    assert done.code == 0, f"{shlex.join(command)}\n{done.output}"
    return done.output


@pytest.fixture
async def installed(tmp_path: Path) -> Path:
    """The folder of an environment that holds the wheel and what it declares, and nothing else."""
    await must(tmp_path, sys.executable, "-m", "venv", "venv")
    pip = (str(tmp_path / "venv/bin/python"), "-m", "pip", "install", "-q", "--no-compile", "-c", str(ROOT / "constraints.txt"))
    build = (sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(tmp_path / "dist"))
    await must(tmp_path, *build, str(ROOT / "packaging/paceline-prove"))
    (wheel,) = (tmp_path / "dist").glob("paceline_prove-*.whl")
    await must(tmp_path, *pip, str(wheel))
    return tmp_path


async def test_the_referee_stands_alone(installed: Path) -> None:
    python, command = str(installed / "venv/bin/python"), str(installed / "venv/bin/paceline-prove")
    listed = await must(installed, python, "-m", "pip", "list", "--format=json", "--disable-pip-version-check")
    packages = {entry["name"].lower() for entry in json.loads(listed)}
    assert "paceline-prove" in packages
    assert not {"torch", "fastapi", "uvicorn", "tokenizers", "paceline"} & packages
    files = await must(installed, python, "-m", "pip", "show", "-f", "paceline-prove")
    owned = {line.strip().split("/")[0].partition("-")[0] for line in files.partition("Files:")[2].splitlines() if line.strip()}
    assert owned == {"paceline_prove", ".."}, "a file of `paceline` would be overwritten by the other wheel"
    assert "LICENSE" in files
    assert "NOTICE" in files

    assert "--baseline-url" in await must(installed, command, "--help")
    assert (await run(installed, command, "--quick")).code == 2, "it has no server to start"

    outputs = ["--json", "out.json", "--html", "out.html", "--save-result", "saved"]
    arguments = ["--category", "qa", "--num-prompts", "4", "--concurrency", "2", "--num-blocks", "4", "--max-tokens", "16"]
    async with MockOpenAi(Behaviour(step_s=0.005)) as server:
        done = await run(installed, command, "--url", server.url, *arguments, *outputs)
    assert done.code in (0, 5), done.output
    assert "not SPEED-Bench" in done.output
    document = json.loads((installed / "out.json").read_text())
    assert document["verdict"] in ("PASS", "INCONCLUSIVE")
    assert document["speedup"]
    assert "<svg" in (installed / "out.html").read_text()
    again = await run(installed, command, "--from-records", "out.records.jsonl", "--json", "again.json")
    assert again.code == done.code
    assert json.loads((installed / "again.json").read_text()) == document
