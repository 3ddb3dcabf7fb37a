"""Model folders as text: what is refused and why, where end tokens and templates come from."""

import json
from pathlib import Path

import pytest

from paceline.errors import BadInputError, NotFoundError, UnsupportedModelError
from paceline.models.folder import (
    check_folder,
    read_chat_format,
    read_config,
    read_eos_token_ids,
    read_json,
    read_vocabulary,
    weight_files,
)
from tests.fakes.tiny_models import make_tiny_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_tiny_model(tmp_path / "model")


def edit(path: Path, **changes: object) -> None:
    """Set keys of a JSON file; None deletes one."""
    values = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({key: value for key, value in (values | changes).items() if value is not None}))


def test_a_whole_folder_passes(folder: Path) -> None:
    check_folder(folder)
    assert weight_files(folder) == [folder / "model.safetensors"]


@pytest.mark.parametrize(
    ("lost", "error", "words"),
    [
        ("config.json", BadInputError, "has no config.json"),
        ("tokenizer.json", UnsupportedModelError, "has no tokenizer.json; make one with transformers"),
        ("model.safetensors", BadInputError, "holds no .*safetensors file"),
    ],
)
def test_a_missing_file_is_named(folder: Path, lost: str, error: type[Exception], words: str) -> None:
    (folder / lost).unlink()
    with pytest.raises(error, match=words):
        check_folder(folder)


def test_no_folder(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="there is no model folder"):
        check_folder(tmp_path / "absent")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model.pt"])
def test_pickles_are_refused_with_reason_and_remedy(folder: Path, name: str) -> None:
    (folder / "model.safetensors").rename(folder / name)
    with pytest.raises(UnsupportedModelError, match=rf"{name}, a pickle, which can run code.*safetensors"):
        check_folder(folder)


def test_several_files_need_an_index(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    assert weight_files(folder) == [folder / "model-00001-of-00002.safetensors"]
    (folder / "model-00002-of-00002.safetensors").touch()
    with pytest.raises(BadInputError, match=r"2 safetensors files and no model\.safetensors\.index\.json"):
        check_folder(folder)


@pytest.mark.parametrize(
    "name", ["../../secret.safetensors", "/etc/passwd.safetensors", "sub/x.safetensors", "a\\b.safetensors", "x.bin", 3, ""]
)
def test_the_index_cannot_leave_the_folder(folder: Path, name: object) -> None:
    (folder / "model.safetensors").unlink()
    edit(folder / "model.safetensors.index.json", weight_map={"model.norm.weight": name})
    with pytest.raises(BadInputError, match=r"places model\.norm\.weight in .*, which is not a safetensors file of this folder"):
        check_folder(folder)


def test_the_index_names_only_files_that_are_there(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    edit(folder / "model.safetensors.index.json", weight_map={"model.norm.weight": "lost.safetensors"})
    with pytest.raises(BadInputError, match=r"lacks lost\.safetensors"):
        check_folder(folder)
    edit(folder / "model.safetensors.index.json", weight_map={})
    with pytest.raises(BadInputError, match="has no weight_map"):
        check_folder(folder)


@pytest.mark.parametrize("content", [b"{", b"[1]", b"\xff\xfe", b"[" * 100_000])
def test_broken_json(folder: Path, content: bytes) -> None:
    (folder / "config.json").write_bytes(content)
    with pytest.raises(BadInputError, match=r"config\.json"):
        read_config(folder)


def test_absent_json_is_none(tmp_path: Path) -> None:
    assert read_json(tmp_path / "absent.json") is None


def test_end_tokens_come_from_the_first_file_that_names_any(folder: Path) -> None:
    edit(folder / "tokenizer_config.json", eos_token=None)
    edit(folder / "generation_config.json", eos_token_id=[7, 8, 7])
    assert read_eos_token_ids(folder) == (7, 8)
    edit(folder / "generation_config.json", eos_token_id=None)
    edit(folder / "config.json", eos_token_id=9)
    assert read_eos_token_ids(folder) == (9,)
    edit(folder / "config.json", eos_token_id=None)
    assert read_eos_token_ids(folder) == ()


@pytest.mark.parametrize("declared", [None, {"2": {"content": "<|im_end|>"}, "x": {"content": "<|im_end|>"}, "9" * 5000: "<|im_end|>"}])
def test_the_chat_models_own_end_of_turn_is_added(folder: Path, declared: object) -> None:
    """It is looked up in the small file, and in tokenizer.json where the small one has no list."""
    edit(folder / "generation_config.json", eos_token_id=0)
    edit(folder / "tokenizer_config.json", eos_token={"content": "<|im_end|>"}, added_tokens_decoder=declared)
    if declared is not None:
        (folder / "tokenizer.json").unlink()
    assert read_eos_token_ids(folder) == (0, 2)


def test_an_end_of_turn_that_is_no_token_is_left_out(folder: Path) -> None:
    edit(folder / "tokenizer_config.json", eos_token="<|other|>", added_tokens_decoder={"9" * 5000: "<|other|>"})
    assert read_eos_token_ids(folder) == (2,)


@pytest.mark.parametrize("value", ["2", -1, [1, None], True, 1.0])
def test_end_tokens_are_checked(folder: Path, value: object) -> None:
    edit(folder / "generation_config.json", eos_token_id=value)
    with pytest.raises(BadInputError, match="eos_token_id must be a token id"):
        read_eos_token_ids(folder)


def test_the_chat_format_of_the_tiny_folder(folder: Path) -> None:
    chat = read_chat_format(folder)
    assert chat is not None
    assert "<|im_start|>" in chat.template
    assert chat.special_tokens == {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}


def test_special_tokens_of_two_files(folder: Path) -> None:
    """Old folders keep them in a file of their own, which the newer one wins over."""
    edit(folder / "special_tokens_map.json", bos_token={"content": "<s>"}, eos_token="loses", cls_token=5, other="x")
    chat = read_chat_format(folder)
    assert chat is not None
    assert chat.special_tokens == {"bos_token": "<s>", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}


def test_chat_templates(folder: Path) -> None:
    def template() -> str | None:
        chat = read_chat_format(folder)
        return None if chat is None else chat.template

    edit(folder / "tokenizer_config.json", chat_template=[{"name": "rag", "template": "R"}, {"name": "default", "template": "D"}])
    assert template() == "D"
    (folder / "chat_template.jinja").write_text("J")
    assert template() == "J"
    (folder / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(BadInputError, match=r"cannot read .*chat_template\.jinja"):
        template()
    (folder / "chat_template.jinja").unlink()
    edit(folder / "tokenizer_config.json", chat_template=[{"name": "rag", "template": "R"}])
    assert template() is None
    edit(folder / "tokenizer_config.json", chat_template=None)
    assert template() is None


@pytest.mark.parametrize("name", ["tokenizer_config.json", "special_tokens_map.json"])
def test_a_deep_file_is_a_bad_input(folder: Path, name: str) -> None:
    (folder / name).write_bytes(b'{"a":' * 100_000 + b"1" + b"}" * 100_000)
    (folder / "chat_template.jinja").write_text("J")
    with pytest.raises(BadInputError, match=name):
        read_chat_format(folder)


def test_vocabulary(folder: Path) -> None:
    vocabulary = read_vocabulary(folder)
    assert len(vocabulary) == 320
    assert (vocabulary["<|im_end|>"], min(vocabulary.values()), max(vocabulary.values())) == (2, 0, 319)
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(BadInputError, match="cannot be read as a tokenizer"):
        read_vocabulary(folder)
