"""`paceline models` and `paceline doctor` on a cache of their own."""

from pathlib import Path

import pytest

from paceline.cli import doctor
from paceline.cli.main import run
from paceline.core.program import OpKind
from tests.fakes.tiny_models import make_tiny_model

CPUINFO = """processor\t: 0
model name\t: Some CPU
flags\t\t: fpu avx2 f16c avx512_bf16

processor\t: 1
model name\t: Another
"""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_an_empty_cache_lists_what_can_be_pulled(capsys: pytest.CaptureFixture[str], cache: Path) -> None:
    assert run(["models", "list"]) == 0
    printed = capsys.readouterr().out
    assert "smollm2-135m-instruct          absent" in printed
    assert "92.9 MB to download" in printed
    assert f"cache: {cache}" in printed
    assert not cache.exists(), "looking does not write"


@pytest.mark.parametrize("verb", ["verify", "evict"])
def test_what_is_not_there_is_named(capsys: pytest.CaptureFixture[str], verb: str) -> None:
    assert run(["models", verb, "smollm2-135m-instruct"]) == 2
    assert "is not in the cache" in capsys.readouterr().err


def test_an_unknown_name_is_not_pulled(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["models", "pull", "smollm2-135m-instuct"]) == 2
    assert "did you mean smollm2-135m-instruct" in capsys.readouterr().err


def test_doctor_without_a_model_says_how_to_get_it(capsys: pytest.CaptureFixture[str], cache: Path) -> None:
    assert run(["doctor"]) == 0
    printed = capsys.readouterr().out
    assert "paceline 0." in printed
    assert "torch 2." in printed
    assert "logical cores usable" in printed
    assert "paceline models pull smollm2-135m-instruct" in printed
    assert not cache.exists(), "doctor downloads nothing"


def test_doctor_with_a_model_shows_memory_and_kernels(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "model", "qwen3", vocab_size=320)
    assert run(["doctor", "--model", str(folder), "--dtype", "float32", "--kv-cache-memory-bytes", "1000000"]) == 0
    printed = capsys.readouterr().out
    assert "qwen3, float32 on cpu" in printed
    assert "pages of 16 tokens" in printed
    ops = [line.split()[1] for line in printed.splitlines() if line.startswith("op ")]
    assert {"embed", "paged_attention", "norm_head"} <= set(ops)


def test_doctor_shows_the_time_of_each_op(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "model", "qwen3", vocab_size=320)
    common = ["doctor", "--model", str(folder), "--draft", "none", "--kv-cache-memory-bytes", "1000000", "--profile"]
    assert run(common) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["op", "forward", "native"] in [words[:3] for words in lines]
    profile = [words for words in lines if words[0] == "profile"]
    assert [words[1] for words in profile] == [str(kind) for kind in OpKind] + ["all,"]
    total_ms = [float(words[words.index("ms") - 1]) for words in profile]
    assert min(total_ms) >= 0
    assert total_ms[-1] == pytest.approx(sum(total_ms[:-1]), abs=0.01)
    assert run([*common, "--quantization", "none"]) == 0
    assert "only the native step measures its ops" in capsys.readouterr().out


def test_doctor_says_why_weights_are_not_quantised(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "model", head_dim=8)
    assert run(["doctor", "--model", str(folder), "--kv-cache-memory-bytes", "1000000"]) == 0
    assert "heads have 8 elements, not a multiple of 16" in capsys.readouterr().out
    assert run(["doctor", "--model", str(folder), "--quantization", "int4"]) == 2
    assert "--quantization none" in capsys.readouterr().err
    assert run(["doctor", "--model", str(folder), "--quantization", "int4", "--dtype", "float32"]) == 2
    assert "contradict each other" in capsys.readouterr().err


def test_doctor_tries_a_configuration(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "model", "llama", vocab_size=320)
    assert run(["doctor", "--model", str(folder), "--kv-cache-memory-bytes", "1"]) == 2
    assert "--kv-cache-memory-bytes" in capsys.readouterr().err
    assert run(["doctor", "--model", str(folder), "--draft", "not-there"]) == 0
    assert "not-there is not here yet" in capsys.readouterr().out


def test_the_first_processors_features_are_read(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text(CPUINFO)
    name, has, lacks = doctor.cpu_lines(tmp_path / "cpuinfo")
    assert name.startswith("Some CPU, ")
    assert has == "has avx2, f16c, avx512_bf16"
    assert "avx512_vnni" in lacks
    assert "avx2" not in lacks.split(", ")
    assert len(list(doctor.cpu_lines(tmp_path / "missing"))) == 3


def test_doctor_needs_the_draft_model_where_serve_does(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "tiny")
    common = ["doctor", "--model", str(folder), "--kv-cache-memory-bytes", "1000000", "--draft", "qwen2.5-coder-0.5b-instruct"]
    assert run(common) == 0
    assert "qwen2.5-coder-0.5b-instruct is not here yet" in capsys.readouterr().out
    assert run([*common, "--max-draft-length", "0"]) == 0
    assert "not here yet; `paceline models pull qwen2.5" not in capsys.readouterr().out
