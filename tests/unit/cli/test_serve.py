"""The order of `paceline serve`: what is wrong shows before anything is downloaded or loaded; and the facts it prints."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.cli import serve
from paceline.cli.facts import choice_lines, facts_lines
from paceline.cli.main import run
from paceline.config import EngineConfig, ServerConfig
from paceline.core.facts import Choice, EngineFacts
from paceline.engine.process import EngineProcess


def facts(drafter: str, drafter_page_bytes: int = 0, drafter_weight_bytes: int = 0) -> EngineFacts:
    return EngineFacts(
        model_name="folder",
        architecture="llama",
        device="cpu",
        dtype="bfloat16",
        vocab_size=100,
        max_model_len=8192,
        max_position_embeddings=8192,
        num_pages=1000,
        page_size=16,
        target_page_bytes=737_280,
        drafter_page_bytes=drafter_page_bytes,
        target_weight_bytes=269_000_000,
        drafter_weight_bytes=drafter_weight_bytes,
        drafter=drafter,
        drafter_max_len=8192,
        max_draft_length=5,
        eos_token_ids=(2,),
        choices=(Choice("norm_head", "packed", "first choice"),),
    )


def test_a_taken_port_says_so_before_the_model_is_looked_for(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert run(["serve", "no-such-model", "--port", str(port)]) == 3
    message = capsys.readouterr().err
    assert f"port {port}" in message
    assert "taken" in message


def test_what_cannot_be_served_leaves_no_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    spawned: list[EngineProcess] = []
    spawn = EngineProcess.spawn

    def record(process: EngineProcess, threads: int | None) -> None:
        spawn(process, threads)
        spawned.append(process)

    monkeypatch.setattr(EngineProcess, "spawn", record)
    assert run(["serve", "no-such-model", "--port", "0"]) != 0
    (process,) = spawned
    assert process.exit_code() is not None
    assert not list(tmp_path.iterdir())


def test_a_bad_setting_says_so_before_the_port_is_taken(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["serve", "--max-batch-size", "0"]) == 2
    assert "--max-batch-size" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["no-such-model"], ["no-such-model", "smollm2-135m-instruct"]),
        (["smollm2-135m-instuct"], ["did you mean smollm2-135m-instruct?"]),
    ],
)
def test_an_unknown_model_names_the_known_ones(arguments: list[str], words: list[str]) -> None:
    command = [sys.executable, "-m", "paceline.cli", "serve", "--port", "0", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 2
    assert all(word in done.stderr for word in words)
    assert done.stderr.count("\n") == 1


def test_the_facts_name_the_drafters_memory_apart() -> None:
    text = "\n".join(facts_lines("tiny", facts("draft_model", 196_608, 988_000_000), EngineConfig(draft="small")))
    assert "tiny: llama, bfloat16 on cpu, 269.0 MB of weights, context 8,192 tokens" in text
    assert "small, up to 5 tokens per step, rule coupled, 988.0 MB of weights" in text
    assert "1,000 pages of 16 tokens: 737.3 MB for the target, 196.6 MB for the drafter" in text


def test_the_facts_of_other_drafters() -> None:
    assert any("none: plain decoding" in line for line in facts_lines("tiny", facts("none"), EngineConfig()))
    assert any("ngram, up to 5 tokens" in line for line in facts_lines("tiny", facts("ngram"), EngineConfig()))
    (line,) = choice_lines(facts("none").choices)
    assert line.split() == ["op", "norm_head", "packed", "first", "choice"]


def settled(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> tuple[ServerConfig, bool]:
    """What a command line comes to, and whether it is a draft server's."""
    given: list[tuple[ServerConfig, bool]] = []
    monkeypatch.setattr(serve, "_run", lambda config, is_draft_server: given.append((config, is_draft_server)))
    assert run([*arguments]) == 0
    return given[0]


def test_a_draft_server_is_a_server_that_decodes_plainly(monkeypatch: pytest.MonkeyPatch) -> None:
    config, is_draft_server = settled(monkeypatch, "draft-server", "small", "--max-batch-size", "8")
    assert is_draft_server
    assert (config.port, config.engine.model, config.engine.max_batch_size) == (8100, "small", 8)
    assert (config.engine.draft, config.engine.speculation) == ("none", "off")
    assert settled(monkeypatch, "draft-server", "--port", "8000", "--speculation", "off")[0].port == 8000
    monkeypatch.setenv("PACELINE_PORT", "9000")
    assert settled(monkeypatch, "draft-server")[0].port == 9000
    assert settled(monkeypatch, "serve") == (ServerConfig(port=9000), False)


@pytest.mark.parametrize("arguments", [["--draft", "small"], ["--speculation", "on"], ["--max-draft-length", "3"], ["--host", "0.0.0.0"]])
def test_settings_that_a_draft_server_cannot_have(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    assert run(["draft-server", *arguments]) == 2
    assert f"{arguments[0]} {arguments[1]}" in capsys.readouterr().err


def test_a_variable_that_a_draft_server_cannot_have(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_DRAFT", "small")
    assert run(["draft-server"]) == 2
    assert "draft" in capsys.readouterr().err
