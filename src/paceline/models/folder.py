"""A model folder on disk as text: what must be in it, its config, its chat template and end tokens, its vocabulary. Torch-free.

The server, `weights/` and `loader.py` read folders through this. Nothing in a folder is ever imported or unpickled.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from tokenizers import Tokenizer

from paceline.errors import BadInputError, MissingError, NotFoundError, UnsupportedModelError

_MAX_JSON_BYTES = 256 << 20  # tokenizer.json of the largest vocabularies has 35 MB
_PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")
INDEX_FILE = "model.safetensors.index.json"
WEIGHTS_FILE = "model.safetensors"


@dataclass(frozen=True, slots=True)
class GenerationFacts:
    """What the files say about starting and ending a text."""

    eos_token_ids: tuple[int, ...]  # () if the folder names none: only max_tokens ends an answer
    bos_token_id: int | None
    chat_template: str | None  # Jinja source; None for a model without a chat format
    add_bos: bool  # plain prompts begin with the BOS token; tokenizer.json adds it by itself


def check_folder(folder: Path) -> None:
    """Refuse a folder that is no complete model in safetensors, with the file at fault and the remedy."""
    if not folder.is_dir():
        raise NotFoundError(f"there is no model folder {folder}")
    if not (folder / "config.json").is_file():
        raise BadInputError(f"{folder} has no config.json, so it is not a Hugging Face model folder")
    weight_files(folder)
    if not (folder / "tokenizer.json").is_file():
        raise UnsupportedModelError(
            f"{folder} has no tokenizer.json; make one with transformers: AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
        )


def weight_files(folder: Path) -> dict[str, str] | list[Path]:
    """The index (tensor name -> file name) of a sharded folder, or the safetensors files of one without an index.

    Errors: UnsupportedModelError if the weights are in a pickle format only, BadInputError if there are none or the index is unsafe.
    """
    if (folder / WEIGHTS_FILE).is_file():
        return [folder / WEIGHTS_FILE]
    if (folder / INDEX_FILE).is_file():
        return _read_index(folder)
    found = sorted(folder.glob("*.safetensors"))
    if len(found) == 1:
        return found
    if found:
        raise BadInputError(f"{folder} has {len(found)} safetensors files and no {INDEX_FILE}; fetch the index too")
    pickles = sorted(path.name for path in folder.iterdir() if path.suffix in _PICKLE_SUFFIXES)
    if pickles:
        raise UnsupportedModelError(
            f"{folder} holds its weights as {pickles[0]}, a pickle, which can run code when it is read; "
            "fetch the model's safetensors, or convert once with transformers: model.save_pretrained(folder, safe_serialization=True)"
        )
    raise BadInputError(f"{folder} holds no *.safetensors file")


def read_config(folder: Path) -> dict[str, object]:
    """config.json as a dictionary."""
    config = read_json(folder / "config.json")
    if config is None:
        raise BadInputError(f"{folder} has no config.json, so it is not a Hugging Face model folder")
    return config


def read_json(path: Path) -> dict[str, object] | None:
    """The JSON object in a file, or None if there is no such file."""
    try:
        size = path.stat().st_size
        if size > _MAX_JSON_BYTES:
            raise BadInputError(f"{path} has {size} bytes, the limit is {_MAX_JSON_BYTES}")
        value: object = json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise MissingError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise BadInputError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise BadInputError(f"{path} holds a {type(value).__name__}, not a JSON object")
    return cast(dict[str, object], value)


def read_generation_facts(folder: Path) -> GenerationFacts:
    """Merge generation_config.json, config.json and the tokenizer's files; the chat model's own end-of-turn token is included."""
    generation, config = read_json(folder / "generation_config.json") or {}, read_config(folder)
    tokenizer_config = read_json(folder / "tokenizer_config.json") or {}
    named = _token_ids(generation.get("eos_token_id"), "generation_config.json: eos_token_id")
    named = named or _token_ids(config.get("eos_token_id"), "config.json: eos_token_id")
    add_bos = tokenizer_config.get("add_bos_token")
    added = _added_tokens(folder, tokenizer_config) if not named or not isinstance(add_bos, bool) else _declared_tokens(tokenizer_config)
    own_end = added.by_text.get(_token_text(tokenizer_config.get("eos_token")))
    eos_token_ids = named if own_end is None else (*named, own_end)
    bos = added.by_text.get(_token_text(tokenizer_config.get("bos_token")))
    if bos is None:
        bos = next(iter(_token_ids(generation.get("bos_token_id") or config.get("bos_token_id"), "bos_token_id")), None)
    return GenerationFacts(
        eos_token_ids=tuple(dict.fromkeys(eos_token_ids)),
        bos_token_id=bos,
        chat_template=_chat_template(folder, tokenizer_config),
        add_bos=add_bos if isinstance(add_bos, bool) else added.template_adds_bos,
    )


def read_vocabulary(folder: Path) -> dict[str, int]:
    """The tokens of tokenizer.json and their ids, added tokens included."""
    path = folder / "tokenizer.json"
    try:
        return Tokenizer.from_file(str(path)).get_vocab(with_added_tokens=True)
    except Exception as error:  # the library raises bare Exception
        raise BadInputError(f"{path} cannot be read as a tokenizer: {error}") from error


def _read_index(folder: Path) -> dict[str, str]:
    index = read_json(folder / INDEX_FILE) or {}
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise BadInputError(f"{folder / INDEX_FILE} has no weight_map")
    files: dict[str, str] = {}
    for tensor, file in cast(dict[str, object], weight_map).items():
        if not isinstance(file, str) or not _is_plain_name(file):
            raise BadInputError(f"{folder / INDEX_FILE} places {tensor} in {file!r}, which is not a safetensors file of this folder")
        files[tensor] = file
    for file in sorted(set(files.values())):
        if not (folder / file).is_file():
            raise BadInputError(f"{folder} lacks {file}, which its {INDEX_FILE} names; fetch the folder again")
    return files


def _is_plain_name(name: str) -> bool:
    return name.endswith(".safetensors") and not any(sign in name for sign in ("/", "\\", "\0", ":"))


def _token_ids(value: object, what: str) -> tuple[int, ...]:
    if value is None:
        return ()
    values = cast(list[object], value) if isinstance(value, list) else [value]
    ids = tuple(token_id for token_id in values if isinstance(token_id, int) and not isinstance(token_id, bool) and token_id >= 0)
    if len(ids) != len(values):
        raise BadInputError(f"{what} must be a token id or a list of them, not {value!r}")
    return ids


def _token_text(value: object) -> str:
    """A token in tokenizer_config.json is a text or an object with `content`."""
    if isinstance(value, dict):
        value = cast(dict[str, object], value).get("content")
    return value if isinstance(value, str) else ""


@dataclass(frozen=True, slots=True)
class _AddedTokens:
    by_text: dict[str, int]
    template_adds_bos: bool


def _declared_tokens(tokenizer_config: Mapping[str, object]) -> _AddedTokens:
    by_text: dict[str, int] = {}
    declared = tokenizer_config.get("added_tokens_decoder")
    if isinstance(declared, dict):
        for token_id, token in cast(dict[str, object], declared).items():
            if token_id.isdecimal():
                by_text[_token_text(token)] = int(token_id)
    return _AddedTokens(by_text, template_adds_bos=False)


def _added_tokens(folder: Path, tokenizer_config: Mapping[str, object]) -> _AddedTokens:
    """The same from tokenizer.json itself, a large file that is parsed only when the small ones leave something open."""
    tokenizer = read_json(folder / "tokenizer.json") or {}
    by_text = dict(_declared_tokens(tokenizer_config).by_text)
    added = tokenizer.get("added_tokens")
    for token in cast(list[object], added) if isinstance(added, list) else []:
        if isinstance(token, dict):
            token_id = cast(dict[str, object], token).get("id")
            if isinstance(token_id, int):
                by_text[_token_text(cast(object, token))] = token_id
    bos = _token_text(tokenizer_config.get("bos_token"))
    return _AddedTokens(by_text, template_adds_bos=bool(bos) and _template_starts_with(tokenizer.get("post_processor"), bos))


def _template_starts_with(processor: object, token: str) -> bool:
    if not isinstance(processor, dict):
        return False
    fields = cast(dict[str, object], processor)
    if fields.get("type") == "Sequence":
        steps = fields.get("processors")
        return isinstance(steps, list) and any(_template_starts_with(step, token) for step in cast(list[object], steps))
    single = fields.get("single")
    if fields.get("type") != "TemplateProcessing" or not isinstance(single, list) or not single:
        return False
    first = cast(list[object], single)[0]
    special = cast(dict[str, object], first).get("SpecialToken") if isinstance(first, dict) else None
    return isinstance(special, dict) and cast(dict[str, object], special).get("id") == token


def _chat_template(folder: Path, tokenizer_config: Mapping[str, object]) -> str | None:
    """chat_template.jinja wins over tokenizer_config.json, as in transformers; of several templates the one named "default" counts."""
    try:
        return (folder / "chat_template.jinja").read_text(encoding="utf-8")
    except FileNotFoundError:
        pass
    except (OSError, UnicodeDecodeError) as error:
        raise BadInputError(f"cannot read {folder / 'chat_template.jinja'}: {error}") from error
    template = tokenizer_config.get("chat_template")
    if isinstance(template, list):
        named = [cast(dict[str, object], entry) for entry in cast(list[object], template) if isinstance(entry, dict)]
        template = next((entry.get("template") for entry in named if entry.get("name") == "default"), None)
    return template if isinstance(template, str) else None
