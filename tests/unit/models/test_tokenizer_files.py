"""Tokenizers rebuilt from GGUF metadata: splits of each pre-tokeniser, special tokens, BOS, and SentencePiece's merge order."""

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, pre_tokenizers

from paceline.errors import BadInputError, UnsupportedModelError
from paceline.models.gguf import GgufMetadata, GgufValue
from paceline.models.tokenizer_files import write_tokenizer_files

SPACE = "\u2581"
BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())


def byte_level(pre: str, **changes: GgufValue) -> dict[str, GgufValue]:
    """A byte-level vocabulary: three special tokens, the bytes, one merge, one user-defined token, one unused row."""
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *BYTES, "he", "<tool>", "[PAD]"]
    values: dict[str, GgufValue] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array([3, 3, 3, *[1] * 256, 1, 4, 5], np.int32),
        "tokenizer.ggml.merges": ["h e"],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
    return values | {f"tokenizer.{key}": value for key, value in changes.items()}


def build(values: dict[str, GgufValue], folder: Path) -> Tokenizer:
    write_tokenizer_files(GgufMetadata(Path("m.gguf"), values), folder, max_tokens=128)
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


@pytest.mark.parametrize(
    ("pre", "words"),
    [
        ("gpt-2", "It 's _12345 / / ok _ _!"),
        ("smollm", "It 's _ 1 2 3 4 5 / / ok _ _!"),
        ("qwen2", "It 's _ 1 2 3 4 5 // ok _ _!"),
        ("llama-bpe", "It 's _ 123 45 // ok _ _!"),
    ],
)
def test_each_pre_tokeniser_splits_as_its_model_was_trained(tmp_path: Path, pre: str, words: str) -> None:
    splitter = build(byte_level(pre), tmp_path).pre_tokenizer
    assert splitter is not None
    found = [word for word, _ in splitter.pre_tokenize_str("It's 12345\n\nok  !")]
    assert " ".join(found).replace("\u0120", "_").replace("\u010a", "/") == words


def test_only_qwen_composes_unicode(tmp_path: Path) -> None:
    decomposed, composed = "e\u0301", "\u00e9"
    for pre, same in (("qwen2", True), ("llama-bpe", False), ("smollm", False)):
        tokenizer = build(byte_level(pre), tmp_path)
        assert (tokenizer.encode(decomposed).ids == tokenizer.encode(composed).ids) is same


def test_special_and_user_defined_tokens(tmp_path: Path) -> None:
    tokenizer = build(byte_level("qwen2"), tmp_path)
    ids = tokenizer.encode("<|im_start|>he<tool><|im_end|>").ids
    assert ids == [1, 3 + 256, 3 + 257, 2]
    assert tokenizer.decode(ids) == "he<tool>"  # control tokens are no text, user-defined ones are
    assert tokenizer.get_vocab_size() == 3 + 258  # the padding at the end is no token
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert (config["eos_token"], config["bos_token"], config["add_bos_token"]) == ("<|im_end|>", "<|im_start|>", False)
    assert json.loads((tmp_path / "generation_config.json").read_text()) == {"eos_token_id": [2, 0], "bos_token_id": 1}


@pytest.mark.parametrize(
    ("pre", "changes", "adds"),
    [
        ("llama-bpe", {}, True),  # llama 3 begins with BOS unless the file says otherwise
        ("llama-bpe", {"ggml.add_bos_token": False}, False),
        ("qwen2", {}, False),
        ("qwen2", {"ggml.add_bos_token": True}, True),
    ],
)
def test_bos(tmp_path: Path, pre: str, changes: dict[str, GgufValue], adds: bool) -> None:
    tokenizer = build(byte_level(pre, **changes), tmp_path)
    assert tokenizer.encode("he").ids == ([1] if adds else []) + [259]
    assert tokenizer.encode("he", add_special_tokens=False).ids == [259]
    assert json.loads((tmp_path / "tokenizer_config.json").read_text())["add_bos_token"] is adds


def test_llama3_takes_whole_words_that_are_tokens(tmp_path: Path) -> None:
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *BYTES, "he", "<tool>", "hehe"]
    values = byte_level("llama-bpe") | {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.add_bos_token": False}
    values["tokenizer.ggml.token_type"] = np.array([3, 3, 3, *[1] * 256, 1, 4, 1], np.int32)
    assert build(values, tmp_path).encode("hehe").ids == [261]
    assert build(values | {"tokenizer.ggml.pre": "qwen2"}, tmp_path).encode("hehe").ids == [259, 259]


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"ggml.pre": "tekken"}, UnsupportedModelError, "pre-tokeniser 'tekken' is not supported, only gpt-2, llama-bpe, qwen2, smollm"),
        ({"ggml.model": "t5"}, UnsupportedModelError, "'t5'"),
        ({"ggml.merges": ["h e", "h zz"]}, BadInputError, "merge 'h zz'"),
        ({"ggml.merges": ["nospace"]}, BadInputError, "merge 'nospace'"),
        ({"ggml.merges": ["h a"]}, BadInputError, "merge 'h a'"),
        ({"ggml.tokens": ["a", "a"], "ggml.token_type": np.array([1, 1], np.int32)}, BadInputError, "twice"),
        ({"ggml.token_type": np.array([1], np.int32)}, BadInputError, "262 tokens and 1 token types"),
        ({"ggml.eos_token_id": 262}, BadInputError, "eos_token_id is 262, the vocabulary has 261"),
    ],
)
def test_refusals(tmp_path: Path, changes: dict[str, GgufValue], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        build(byte_level("qwen2", **changes), tmp_path)


PIECES = ["a", "b", "c", SPACE, "ab", "bc", "abc", "aa", SPACE + "a", "ca", "cab", SPACE + "abc", "bb"]
SCORES = {piece: -float(rank) for rank, piece in enumerate(["bc", "ab", "aa", SPACE + "a", "ca", "abc", "bb", "cab", SPACE + "abc"])}


def spm_values(adds_space: bool) -> dict[str, GgufValue]:
    tokens = ["<unk>", "<s>", "</s>", *[f"<0x{byte:02X}>" for byte in range(256)], *PIECES]
    scores = [0.0] * 259 + [SCORES.get(piece, -1000.0) for piece in PIECES]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": np.array(scores, np.float32),
        "tokenizer.ggml.token_type": np.array([2, 3, 3, *[6] * 256, *[1] * len(PIECES)], np.int32),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.ggml.add_space_prefix": adds_space,
    }


def sentencepiece(text: str, adds_space: bool) -> list[str]:
    """SentencePiece's BPE: join the neighbours with the best score, the leftmost of equals, until none is a piece."""
    symbols = list(((" " if adds_space and text else "") + text).replace(" ", SPACE))
    while True:
        joins = [(SCORES[one + two], -i) for i, (one, two) in enumerate(pairwise(symbols)) if one + two in SCORES]
        if not joins:
            break
        at = -max(joins)[1]
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
    pieces: list[str] = []
    for symbol in symbols:
        pieces += [symbol] if symbol in PIECES else [f"<0x{byte:02X}>" for byte in symbol.encode()]
    return pieces


@pytest.fixture(scope="module")
def spm(tmp_path_factory: pytest.TempPathFactory) -> Callable[[bool], Tokenizer]:
    built = {adds_space: build(spm_values(adds_space), tmp_path_factory.mktemp("spm")) for adds_space in (True, False)}
    return built.__getitem__


@settings(max_examples=300, deadline=None)
@given(text=st.text(alphabet="aabbcc \u00e9\U0001f916x", max_size=24), adds_space=st.booleans())
def test_spm_merges_as_sentencepiece_does(spm: Callable[[bool], Tokenizer], text: str, adds_space: bool) -> None:
    tokenizer = spm(adds_space)
    encoding = tokenizer.encode(text)
    assert encoding.tokens == sentencepiece(text, adds_space)
    assert tokenizer.decode(encoding.ids) == text


def test_spm_needs_scores_and_bytes(tmp_path: Path) -> None:
    without_scores = {key: value for key, value in spm_values(True).items() if key != "tokenizer.ggml.scores"}
    with pytest.raises(BadInputError, match="one score per token"):
        build(without_scores, tmp_path)
    values = spm_values(True)
    tokens = values["tokenizer.ggml.tokens"]
    assert isinstance(tokens, list)
    values["tokenizer.ggml.tokens"] = [token.replace("<0x0A>", "newline") for token in tokens]
    with pytest.raises(UnsupportedModelError, match="lacks 1 of the 256"):
        build(values, tmp_path)
