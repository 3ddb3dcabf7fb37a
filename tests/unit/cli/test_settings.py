"""Flag over variable over file over default, and an error with a remedy for what nothing reads."""

from pathlib import Path

import pytest
import yaml

from paceline.cli.main import run
from paceline.cli.settings import ABSENT, canonical, misspelt_variables, read_file
from paceline.config import ServerConfig, settings, values
from paceline.errors import BadInputError


def show(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[dict[str, object], dict[str, str]]:
    """`paceline config show`: values and sources by name."""
    assert run(["config", "show", *arguments]) == 0
    printed = capsys.readouterr().out
    sources = {line.split(":")[0]: line.partition("# ")[2] for line in printed.splitlines()}
    return yaml.safe_load(printed), sources


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line of an error with exit code 2."""
    assert run(list(arguments)) == 2
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1
    assert captured.out == ""
    return captured.err


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "settings.yaml"
    path.write_text("port: 1111\nmax-batch-size: 11\nblock_size: 32\nspeculation: off\nwarmup: off\nmax_model_len: null\n")
    return path


def test_each_source_wins_over_the_ones_below_it(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, file: Path) -> None:
    monkeypatch.setenv("PACELINE_PORT", "2222")
    monkeypatch.setenv("PACELINE_MAX_BATCH_SIZE", "22")
    shown, sources = show(capsys, "--config", str(file), "--port", "3333")
    assert (shown["port"], sources["port"]) == (3333, "flag")
    assert (shown["max_batch_size"], sources["max_batch_size"]) == (22, "variable PACELINE_MAX_BATCH_SIZE")
    assert (shown["block_size"], sources["block_size"]) == (32, f"file {file}")
    assert (shown["draft"], sources["draft"]) == ("ngram", "default")


def test_without_any_source_every_value_is_the_default(capsys: pytest.CaptureFixture[str]) -> None:
    shown, sources = show(capsys)
    assert shown == values(ServerConfig())
    assert set(sources.values()) == {"default"}


def test_yamls_words_for_booleans_are_text_where_text_is_meant(capsys: pytest.CaptureFixture[str], file: Path) -> None:
    assert read_file(file)["speculation"] == "off"
    assert run(["config", "show", "--config", str(file)]) == 0
    printed = capsys.readouterr().out
    assert "speculation: off " in printed
    assert "warmup: false " in printed
    assert "max_model_len: null " in printed


def test_what_show_prints_is_a_file_that_gives_the_same(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    arguments = [
        "--max-batch-size",
        "3",
        "--no-warmup",
        "--kv-cache-memory-bytes",
        "1000000",
        "--batch-wait-ms",
        "1.5",
        "--speculation",
        "on",
    ]
    assert run(["config", "show", *arguments]) == 0
    printed = capsys.readouterr().out
    path = tmp_path / "again.yaml"
    path.write_text(printed)
    assert run(["config", "show", "--config", str(path)]) == 0
    again = capsys.readouterr().out
    assert [line.split("#")[0] for line in again.splitlines()] == [line.split("#")[0] for line in printed.splitlines()]


def test_the_variable_names_a_config_file_too(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, file: Path) -> None:
    monkeypatch.setenv("PACELINE_CONFIG", str(file))
    assert show(capsys)[0]["port"] == 1111


@pytest.mark.parametrize("spelling", ["--max-batch-size=7", "--max_batch_size=7", "--max-num-seqs=7", "--max_num_seqs=7"])
def test_dashes_underscores_and_the_alias_are_one_flag(capsys: pytest.CaptureFixture[str], spelling: str) -> None:
    shown, sources = show(capsys, spelling)
    assert (shown["max_batch_size"], sources["max_batch_size"]) == (7, "flag")


def test_the_alias_is_a_variable_too(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, file: Path) -> None:
    monkeypatch.setenv("PACELINE_MAX_NUM_SEQS", "7")
    shown, sources = show(capsys, "--config", str(file))
    assert (shown["max_batch_size"], sources["max_batch_size"]) == (7, "variable PACELINE_MAX_NUM_SEQS")
    assert (shown["block_size"], sources["block_size"]) == (32, f"file {file}")
    shown, sources = show(capsys, "--max-batch-size", "9")
    assert (shown["max_batch_size"], sources["max_batch_size"]) == (9, "flag")
    monkeypatch.setenv("PACELINE_MAX_NUM_SEQS", "many")
    assert "many" in refused(capsys, "config", "show")
    monkeypatch.setenv("PACELINE_MAX_NUM_SEQS", "7")
    monkeypatch.setenv("PACELINE_MAX_BATCH_SIZE", "8")
    assert "PACELINE_MAX_NUM_SEQS and PACELINE_MAX_BATCH_SIZE are one setting" in refused(capsys, "config", "show")


def test_every_setting_is_a_flag_and_a_variable(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    changed = {"host": "127.0.0.2", "model": "m", "model_dir": "d", "draft": "none", "served_model_name": "n", "batch_size": "256"}
    changed |= {
        "dtype": "float32",
        "quantization": "none",
        "device": "cpu",
        "speculation": "on",
        "verification": "ratio",
        "log_format": "json",
    }
    for item, kind in settings(ServerConfig):
        usual = item.default
        text = changed.get(item.name) or (str(not usual).lower() if kind is bool else str(int(usual or 1000) + (kind is not float) * 0))
        with monkeypatch.context() as patch:
            patch.setenv(f"PACELINE_{item.name.upper()}", text)
            _, by_variable = show(capsys)
        _, by_flag = show(capsys, f"--{item.name.replace('_', '-')}={text}")
        assert by_variable[item.name] == f"variable PACELINE_{item.name.upper()}"
        assert by_flag[item.name] == "flag"


def test_batch_size_shows_what_it_sets(capsys: pytest.CaptureFixture[str]) -> None:
    shown, sources = show(capsys, "--batch-size", "8")
    assert (shown["min_batch_size"], shown["max_batch_size"]) == (8, 8)
    assert sources["max_batch_size"] == "batch_size"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["serve", "--max-bach-size", "3"], ["--max-bach-size", "Did you mean --max-batch-size"]),
        (["srve"], ["srve", 'Did you mean "serve"']),
        (["serve", "--device", "cuda"], ["cuda", "auto", "cpu"]),
        (["serve", "--port", "abc"], ["abc", "--port"]),
        (["serve", "--port", "3.5"], ["3.5", "--port", "whole number"]),
        (["serve", "--max-model-len", "1e3"], ["1e3", "whole number"]),
        (["serve", "--port"], ["--port", "requires an argument"]),
        (["serve", "--host", "0.0.0.0"], ["0.0.0.0", "--insecure"]),
        (["serve", "a", "b"], ["b"]),
        (["serve", "--quantization", "fp8"], ["--quantization", "fp8", "int4"]),
        (["serve", "--tensor_parallel_size=2"], ["--tensor-parallel-size", "one CPU"]),
        (["generate", ""], ["prompt is empty"]),
        (["generate", "x", "--top-p", "1.5"], ["--top-p", "1.5", "above 0 and at most 1"]),
        (["generate", "x", "--top-p", "0"], ["--top-p", "above 0"]),
        (["generate", "x", "--top-k", "99999999999999999999"], ["--top-k", "99999999999999999999", "between -1 and"]),
        (["generate", "x", "--temperature", "inf"], ["--temperature", "inf", "between 0 and 100"]),
        (["chat", "--url", "http://127.0.0.1:1", "--top-p", "0"], ["--top-p", "above 0"]),
        (["serve", "--shutdown-timeout", "inf"], ["--shutdown-timeout", "inf", "between 0 and 86400"]),
        (["serve", "--kv-cache-memory-bytes", "9" * 30], ["--kv-cache-memory-bytes"]),
    ],
)
def test_a_wrong_command_line_is_one_line_with_the_remedy(
    capsys: pytest.CaptureFixture[str], arguments: list[str], words: list[str]
) -> None:
    message = refused(capsys, *arguments)
    assert all(word in message for word in words), message


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("prt: 1", ["prt", "did you mean port?"]),
        ("port: abc", ["port", "abc"]),
        ("port: [1]", ["port", "one value"]),
        ("port: {a: 1}", ["port", "one value"]),
        ("- port", ["name: value"]),
        ("port: 1: 2", ["not YAML"]),
        ("api_key: secret", ["--api-key", "no keys"]),
        ("a: !!python/object/apply:os.system [ls]", ["unknown name a"]),
    ],
)
def test_a_wrong_file_is_one_line_with_the_remedy(capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str, words: list[str]) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text(text)
    message = refused(capsys, "config", "show", "--config", str(path))
    assert all(word in message for word in (*words, str(path) if "secret" not in text else "")), message


def test_a_missing_file_and_an_empty_one(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "No such file" in refused(capsys, "config", "show", "--config", str(tmp_path / "no.yaml"))
    (tmp_path / "empty.yaml").write_text("# nothing\n")
    assert show(capsys, "--config", str(tmp_path / "empty.yaml"))[0]["port"] == 8000


def test_a_key_in_the_environment_is_never_ignored_silently(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_API_KEY", "secret")
    message = refused(capsys, "config", "show")
    assert "PACELINE_API_KEY" in message
    assert "secret" not in message


def test_absent_flags_are_no_settings_and_the_rest_of_a_command_line_is_text() -> None:
    assert not set(ABSENT) & set(values(ServerConfig()))
    assert canonical(["generate", "--", "--api-key"]) == ["generate", "--", "--api-key"]
    with pytest.raises(BadInputError):
        canonical(["serve", "--api-key=x"])


def test_misspelt_variables_are_pointed_out_and_others_left_alone() -> None:
    assert misspelt_variables({"PACELINE_PROT": "1"}) == ["the variable PACELINE_PROT has no effect; did you mean PACELINE_PORT?"]
    assert misspelt_variables({"PACELINE_PORT": "1", "PACELINE_CACHE": "x", "PACELINE_REQUIRE_ALL": "1", "PROT": "1"}) == []
