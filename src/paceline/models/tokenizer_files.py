"""The tokenizer of a GGUF file as Hugging Face files: tokenizer.json, tokenizer_config.json, generation_config.json. Torch-free.

`convert.py` is the only user. Pre-tokenisers are named by llama.cpp's `tokenizer.ggml.pre`; one this build does not know is refused,
because a wrong split gives wrong tokens without an error.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from paceline.errors import BadInputError, UnsupportedModelError
from paceline.models.gguf import GgufMetadata

_CONTROL, _USER_DEFINED, _UNUSED = 3, 4, 5  # values of tokenizer.ggml.token_type
_SPM_SPACE = "\u2581"
# Control tokens that end an answer whatever the file's eos id says: chat models end a turn with one and a document with another.
_ENDING_TOKENS = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "</s>")
_SPLIT_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_SPLIT_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN2_SPLIT = _SPLIT_WORDS + r"\p{N}" + _SPLIT_REST
_LLAMA3_SPLIT = _SPLIT_WORDS + r"\p{N}{1,3}" + _SPLIT_REST


@dataclass(frozen=True, slots=True)
class TokenizerFacts:
    """What the files say beside the vocabulary itself."""

    num_tokens: int  # entries of the GGUF vocabulary, padding included
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    add_bos: bool


@dataclass(frozen=True, slots=True)
class _Vocabulary:
    tokens: list[str]
    kinds: list[int]  # tokenizer.ggml.token_type
    num_used: int  # tokens before the padding at the end

    def index(self) -> dict[str, int]:
        return {token: token_id for token_id, token in enumerate(self.tokens[: self.num_used])}

    def text(self, token_id: int | None) -> str | None:
        return None if token_id is None else self.tokens[token_id]


def write_tokenizer_files(metadata: GgufMetadata, folder: Path, max_tokens: int) -> TokenizerFacts:
    """Write the three files into `folder`; `max_tokens` goes into the configuration as the model's context length.

    Errors: UnsupportedModelError for a tokenizer that cannot be rebuilt exactly, BadInputError for a damaged one.
    """
    model = metadata.text("tokenizer.ggml.model")
    vocabulary = _read_vocabulary(metadata)
    if model == "gpt2":
        tokenizer, bos_default = _byte_level_bpe(metadata, vocabulary)
    elif model == "llama":
        tokenizer, bos_default = _spm_bpe(metadata, vocabulary), True
    else:
        raise UnsupportedModelError(
            f"{metadata.path}: the tokenizer is of kind {model!r}; supported are gpt2 (byte-level BPE) and llama (SPM)"
        )
    _add_special_tokens(tokenizer, vocabulary)
    facts = _read_facts(metadata, vocabulary, bos_default)
    if facts.add_bos:
        bos = vocabulary.text(facts.bos_token_id)
        assert bos is not None  # _read_facts drops the flag without an id
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[bos, "$A"], pair=[bos, "$A", f"{bos}:1", "$B:1"], special_tokens=[(bos, facts.bos_token_id)]
        )
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    _write_json(folder / "tokenizer_config.json", _tokenizer_config(metadata, vocabulary, facts, max_tokens))
    _write_json(folder / "generation_config.json", _generation_config(facts))
    return facts


def _read_vocabulary(metadata: GgufMetadata) -> _Vocabulary:
    tokens = metadata.strings("tokenizer.ggml.tokens")
    kinds_array = metadata.find_array("tokenizer.ggml.token_type")
    kinds = [1] * len(tokens) if kinds_array is None else [int(kind) for kind in kinds_array.tolist()]
    if len(kinds) != len(tokens):
        raise BadInputError(f"{metadata.path}: the vocabulary has {len(tokens)} tokens and {len(kinds)} token types")
    num_used = len(tokens)
    while num_used and kinds[num_used - 1] == _UNUSED:  # rows that only pad the embedding
        num_used -= 1
    if len(set(tokens[:num_used])) != num_used:
        raise BadInputError(f"{metadata.path}: the vocabulary holds some token twice; convert the file again")
    return _Vocabulary(tokens, kinds, num_used)


def _byte_level_bpe(metadata: GgufMetadata, vocabulary: _Vocabulary) -> tuple[Tokenizer, bool]:
    pre = metadata.find_text("tokenizer.ggml.pre") or "default"
    if pre not in _PRE_TOKENIZERS:
        raise UnsupportedModelError(
            f"{metadata.path}: the pre-tokeniser {pre!r} is not supported, only {', '.join(sorted(_PRE_TOKENIZERS))}; "
            "use the model's original folder with its tokenizer.json"
        )
    index = vocabulary.index()
    merges: list[tuple[str, str]] = []
    for merge in metadata.strings("tokenizer.ggml.merges"):
        left, space, right = merge.partition(" ")
        if not space or left not in index or right not in index or left + right not in index:
            raise BadInputError(f"{metadata.path}: the merge {merge!r} does not join two tokens to a third; convert the file again")
        merges.append((left, right))
    is_llama3 = pre == "llama-bpe"
    tokenizer = Tokenizer(models.BPE(vocab=index, merges=merges, ignore_merges=is_llama3))
    _PRE_TOKENIZERS[pre](tokenizer)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, is_llama3


def _set_gpt2(tokenizer: Tokenizer) -> None:
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _set_smollm(tokenizer: Tokenizer) -> None:
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)])


def _set_qwen2(tokenizer: Tokenizer) -> None:
    tokenizer.normalizer = normalizers.NFC()
    _set_split(tokenizer, _QWEN2_SPLIT)


def _set_llama3(tokenizer: Tokenizer) -> None:
    _set_split(tokenizer, _LLAMA3_SPLIT)


def _set_split(tokenizer: Tokenizer, pattern: str) -> None:
    split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


_PRE_TOKENIZERS: dict[str, Callable[[Tokenizer], None]] = {
    "gpt-2": _set_gpt2,
    "smollm": _set_smollm,
    "qwen2": _set_qwen2,
    "llama-bpe": _set_llama3,
}


def _spm_bpe(metadata: GgufMetadata, vocabulary: _Vocabulary) -> Tokenizer:
    """SentencePiece BPE as `tokenizers` runs it: merges rebuilt from scores, bytes for what no piece covers.

    SentencePiece joins, at each step, the neighbours whose union has the highest score, so the merge order is the order of scores.
    """
    scores = metadata.find_array("tokenizer.ggml.scores")
    if scores is None or len(scores) != len(vocabulary.tokens):
        raise BadInputError(f"{metadata.path}: the SPM vocabulary needs one score per token in tokenizer.ggml.scores")
    index = vocabulary.index()
    missing = [byte for byte in range(256) if f"<0x{byte:02X}>" not in index]
    if missing:
        raise UnsupportedModelError(f"{metadata.path}: the SPM vocabulary lacks {len(missing)} of the 256 byte tokens")
    unknown = vocabulary.text(_checked_id(metadata, "tokenizer.ggml.unknown_token_id", vocabulary))
    merges = _merges_from_scores(vocabulary, np.asarray(scores, dtype=np.float64), index)
    model = models.BPE(vocab=index, merges=merges, byte_fallback=True, fuse_unk=True, unk_token=unknown)
    tokenizer = Tokenizer(model)
    adds_space = metadata.find_flag("tokenizer.ggml.add_space_prefix") is not False
    replace = normalizers.Replace(" ", _SPM_SPACE)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPM_SPACE), replace]) if adds_space else replace
    steps = [decoders.Replace(_SPM_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if adds_space else steps)
    return tokenizer


def _merges_from_scores(vocabulary: _Vocabulary, scores: np.ndarray, index: dict[str, int]) -> list[tuple[str, str]]:
    ranked: list[tuple[float, int, int, str, str]] = []
    for token_id, token in enumerate(vocabulary.tokens[: vocabulary.num_used]):
        if vocabulary.kinds[token_id] not in (1, _USER_DEFINED):
            continue
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in index and right in index:
                ranked.append((-float(scores[token_id]), index[left], index[right], left, right))
    ranked.sort()
    return [(left, right) for _, _, _, left, right in ranked]


def _add_special_tokens(tokenizer: Tokenizer, vocabulary: _Vocabulary) -> None:
    control: list[AddedToken] = []
    plain: list[AddedToken] = []
    for token, kind in zip(vocabulary.tokens[: vocabulary.num_used], vocabulary.kinds, strict=False):
        if kind == _CONTROL:
            control.append(AddedToken(token, special=True, normalized=False))
        elif kind == _USER_DEFINED:
            plain.append(AddedToken(token, special=False, normalized=False))
    tokenizer.add_special_tokens(control)  # pyright: ignore[reportUnknownMemberType]
    tokenizer.add_tokens(plain)  # pyright: ignore[reportUnknownMemberType]


def _checked_id(metadata: GgufMetadata, key: str, vocabulary: _Vocabulary) -> int | None:
    token_id = metadata.find_int(key)
    if token_id is not None and not 0 <= token_id < vocabulary.num_used:
        raise BadInputError(f"{metadata.path}: {key} is {token_id}, the vocabulary has {vocabulary.num_used} tokens")
    return token_id


def _read_facts(metadata: GgufMetadata, vocabulary: _Vocabulary, bos_default: bool) -> TokenizerFacts:
    bos = _checked_id(metadata, "tokenizer.ggml.bos_token_id", vocabulary)
    ending = [_checked_id(metadata, f"tokenizer.ggml.{name}_token_id", vocabulary) for name in ("eos", "eot", "eom")]
    by_text = {token: token_id for token_id, token in enumerate(vocabulary.tokens) if vocabulary.kinds[token_id] == _CONTROL}
    ending += [by_text.get(token) for token in _ENDING_TOKENS]
    eos_token_ids = tuple(dict.fromkeys(token_id for token_id in ending if token_id is not None))
    add_bos = metadata.find_flag("tokenizer.ggml.add_bos_token")
    wants_bos = bos_default if add_bos is None else add_bos
    return TokenizerFacts(len(vocabulary.tokens), eos_token_ids, bos, wants_bos and bos is not None)


def _tokenizer_config(metadata: GgufMetadata, vocabulary: _Vocabulary, facts: TokenizerFacts, max_tokens: int) -> dict[str, object]:
    padding = _checked_id(metadata, "tokenizer.ggml.padding_token_id", vocabulary)
    unknown = _checked_id(metadata, "tokenizer.ggml.unknown_token_id", vocabulary)
    config: dict[str, object] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": facts.add_bos,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_tokens,
        "bos_token": vocabulary.text(facts.bos_token_id),
        "eos_token": vocabulary.text(facts.eos_token_ids[0]) if facts.eos_token_ids else None,
        "pad_token": vocabulary.text(padding),
        "unk_token": vocabulary.text(unknown),
        "chat_template": metadata.find_text("tokenizer.chat_template"),
    }
    return {key: value for key, value in config.items() if value is not None}


def _generation_config(facts: TokenizerFacts) -> dict[str, object]:
    config: dict[str, object] = {"eos_token_id": list(facts.eos_token_ids)}
    if facts.bos_token_id is not None:
        config["bos_token_id"] = facts.bos_token_id
    return config


def _write_json(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
