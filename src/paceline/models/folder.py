"""A model folder on disk as text: what must be in it, its config, its chat format and end tokens, its vocabulary. Torch-free.

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
BLOCKS_FILE = "blocks.safetensors"  # beside it in a converted GGUF file: the quantised matrices as that file had them
_TEMPLATE_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """How the model writes a conversation as one text."""

    template: str  # Jinja source
    special_tokens: dict[str, str]  # the texts that a template knows as bos_token, eos_token ...


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


def stored_weight_files(folder: Path) -> list[str]:
    """The names of config.json and of all files that hold weights of the folder, the blocks of a converted GGUF file among them."""
    files = weight_files(folder)
    weights = sorted(set(files.values())) if isinstance(files, dict) else [path.name for path in files]
    return ["config.json", *weights, *([BLOCKS_FILE] if (folder / BLOCKS_FILE).is_file() else [])]


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


def read_eos_token_ids(folder: Path) -> tuple[int, ...]:
    """The tokens that end an answer: of generation_config.json, else config.json, and the tokenizer's own, a chat model's end of turn.

    () if no file names one: only max_tokens ends an answer then.
    """
    generation = read_json(folder / "generation_config.json") or {}
    named = _token_ids(generation.get("eos_token_id"), "generation_config.json: eos_token_id")
    named = named or _token_ids(read_config(folder).get("eos_token_id"), "config.json: eos_token_id")
    own_end = _eos_of_tokenizer(folder)
    return named if own_end is None else tuple(dict.fromkeys((*named, own_end)))


def read_chat_format(folder: Path) -> ChatFormat | None:
    """The chat template and the special tokens it may write; None for a model without a template."""
    tokenizer_config = read_json(folder / "tokenizer_config.json") or {}
    template = _chat_template(folder, tokenizer_config)
    if template is None:
        return None
    tokens = (read_json(folder / "special_tokens_map.json") or {}) | tokenizer_config
    texts = {name: _token_text(tokens.get(name)) for name in _TEMPLATE_TOKENS}
    return ChatFormat(template, {name: text for name, text in texts.items() if text is not None})


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
    return tuple(dict.fromkeys(ids))


def _token_text(value: object) -> str | None:
    """A token in tokenizer_config.json is a text or an object with `content`."""
    if isinstance(value, dict):
        value = cast(dict[str, object], value).get("content")
    return value if isinstance(value, str) else None


def _eos_of_tokenizer(folder: Path) -> int | None:
    """The id of tokenizer_config.json's eos_token, by its own list of added tokens or else by the one in tokenizer.json."""
    tokenizer_config = read_json(folder / "tokenizer_config.json") or {}
    text = _token_text(tokenizer_config.get("eos_token"))
    if not text:
        return None
    declared = tokenizer_config.get("added_tokens_decoder")
    if isinstance(declared, dict):
        for token_id, token in cast(dict[str, object], declared).items():
            if token_id.isdecimal() and len(token_id) < 10 and _token_text(token) == text:
                return int(token_id)
    added = (read_json(folder / "tokenizer.json") or {}).get("added_tokens")
    for token in cast(list[object], added) if isinstance(added, list) else []:
        if isinstance(token, dict) and _token_text(cast(object, token)) == text:
            token_id = cast(dict[str, object], token).get("id")
            if isinstance(token_id, int) and token_id >= 0:
                return token_id
    return None


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
