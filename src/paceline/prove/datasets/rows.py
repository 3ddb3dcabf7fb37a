"""One row of a file as a prompt: what each format must hold, and what is refused with its line. Called by `load.py` for every row.

How bytes become rows is `files.py`'s; which rows are asked is `subset.py`'s.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import cast

from paceline.errors import BadInputError
from paceline.prove.datasets.prompt import CATEGORIES, ENTROPY_TIERS, Prompt

SENTINEL = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING SPECDEC_BENCH"
"""What SPEED-Bench puts where a licence forbids it to hold the text; a template may follow, so it is a prefix."""

HOW_TO_RESOLVE = (
    "SPEED-Bench is published as huggingface.co/datasets/nvidia/SPEED-Bench under the NVIDIA Evaluation Dataset License, without the texts "
    "that may not be passed on. Its resolver fetches them from their sources, on your terms with them (the gated cais/hle among them): "
    "examples/specdec_bench/prepare_data.py of github.com/NVIDIA/Model-Optimizer writes parquet, "
    "nemo_skills/dataset/speed-bench/prepare.py of github.com/NVIDIA-NeMo/Skills writes JSONL. Give the folder that it wrote. "
    "Without it: --data speed-bench-like"
)

SPEC_BENCH_CATEGORIES = (
    "writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities",
    "translation", "summarization", "qa", "math_reasoning", "rag",
)  # fmt: skip
"""MT-Bench's eight and Spec-Bench's five."""

UNCATEGORISED = "uncategorised"
ID_LENGTH = 32
MAX_TEXT_CHARS = 2_000_000  # of one turn: several times the longest context that is served today
MAX_TURNS = 64
MAX_CATEGORY_CHARS = 64
_SPEED_BENCH_FIELDS = frozenset({"src_id", "sub_category"})
_SHOWN_IDS = 5


class Format(StrEnum):
    SPEED_BENCH = "SPEED-Bench"
    SPEC_BENCH = "Spec-Bench"
    PROMPTS = "prompts"


@dataclass(frozen=True, slots=True)
class Row:
    """The fields of one row, and where it stands, for messages: "qualitative.jsonl, line 7"."""

    where: str
    fields: dict[str, object]


def guess(row: Row) -> Format:
    """The format by the fields of the first row.

    Raises:
        BadInputError: none that is known.
    """
    fields = row.fields
    question_id, category = fields.get("question_id"), fields.get("category")
    if isinstance(question_id, int) and "turns" in fields:
        return Format.SPEC_BENCH
    named = category in (*CATEGORIES, *ENTROPY_TIERS) and isinstance(question_id, str) and len(question_id) == ID_LENGTH
    if (named or _SPEED_BENCH_FIELDS & fields.keys()) and fields.keys() & {"turns", "messages"}:
        return Format.SPEED_BENCH
    if fields.keys() & {"prompt", "turns", "messages"}:
        return Format.PROMPTS
    names = ", ".join(sorted(map(str, fields))[:20]) or "none"
    raise BadInputError(
        f"{row.where}: no data set that is known has only these fields: {names}. "
        "SPEED-Bench has question_id, category and turns or messages; Spec-Bench question_id, category and turns; "
        "a file of prompts has prompt, turns or messages in every row"
    )


def refuse_placeholders(rows: Sequence[Row]) -> None:
    """Refuse rows whose text is not there, all of them in one message; nothing is fetched or left out in their place.

    Raises:
        BadInputError: how many of how many rows, the first ids, and where the text comes from.
    """
    found = [row for row in rows if any(text.startswith(SENTINEL) for text in _strings(row.fields))]
    if found:
        ids = ", ".join(str(row.fields.get("question_id", row.where))[:ID_LENGTH] for row in found[:_SHOWN_IDS])
        more = ", ..." if len(found) > _SHOWN_IDS else ""
        raise BadInputError(f"{len(found)} of {len(rows)} rows hold a placeholder instead of their text ({ids}{more}). {HOW_TO_RESOLVE}")


def _strings(fields: dict[str, object]) -> list[str]:
    """The texts of a row in any of the three forms, as far as they are texts."""
    found: list[object] = [fields.get("prompt")]
    for name in ("turns", "messages"):
        items = fields.get(name)
        inner = cast("list[object]", items) if isinstance(items, list) else []
        found += [cast("dict[str, object]", item).get("content") if isinstance(item, dict) else item for item in inner]
    return [text for text in found if isinstance(text, str)]


def speed_bench(row: Row, categories: Sequence[str]) -> Prompt:
    """A row of SPEED-Bench, with `turns` (parquet) or `messages` (JSONL).

    Raises:
        BadInputError: a field is missing or of another kind, the id has not 32 characters, the category is none of `categories`.
    """
    question_id = _string(row, "question_id")
    if len(question_id) != ID_LENGTH:
        raise BadInputError(
            f"{row.where}: question_id {question_id[:40]!r} has {len(question_id)} characters; SPEED-Bench's have {ID_LENGTH}"
        )
    category = _known_category(row, categories)
    system, turns = _conversation(row)
    return Prompt(question_id, category, turns, system, source=_optional_string(row, "source"))


def spec_bench(row: Row) -> Prompt:
    """A row of Spec-Bench's or MT-Bench's question.jsonl. Its number becomes the id, with zeros in front of it.

    Raises:
        BadInputError: a field is missing or of another kind, or the category is unknown.
    """
    number = row.fields.get("question_id")
    if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number < 10**ID_LENGTH:
        raise BadInputError(f"{row.where}: question_id {number!r} is no number; Spec-Bench's are")
    category = _known_category(row, SPEC_BENCH_CATEGORIES)
    return Prompt(f"{number:0{ID_LENGTH}}", category, _turns(row), source="hemingkx/Spec-Bench")


def prompt(row: Row) -> Prompt:
    """A row of a file of prompts: `prompt`, `turns` or `messages`; `system`, `category` and `id` or `question_id` may stand beside it.

    An id of other than 32 characters, or none, is replaced by the md5 of that id, or of the texts.

    Raises:
        BadInputError: none or several of the three, or a field of another kind.
    """
    forms = [name for name in ("prompt", "turns", "messages") if name in row.fields]
    if len(forms) != 1:
        raise BadInputError(f"{row.where}: needs one of prompt, turns and messages, has {' and '.join(forms) or 'none of them'}")
    system, turns = ("", (_text(row, "prompt", row.fields["prompt"]),)) if forms == ["prompt"] else _conversation(row)
    if "system" in row.fields:
        if system:
            raise BadInputError(f"{row.where}: a system message stands in system and in messages; keep one")
        system = _text(row, "system", row.fields["system"])
    category = row.fields.get("category", UNCATEGORISED)
    if not isinstance(category, str) or not category.isprintable() or not 0 < len(category.strip()) <= MAX_CATEGORY_CHARS:
        raise BadInputError(f"{row.where}: category {str(category)[:80]!r} is no name of 1 to {MAX_CATEGORY_CHARS} printable characters")
    return Prompt(_id(row, category, system, turns), category, turns, system, source=row.where)


def text_id(category: str, system: str, turns: Sequence[str]) -> str:
    """An id of 32 characters for a conversation that has none: the md5 of what it asks."""
    return _md5(json.dumps([category, system, *turns]))


def _md5(text: str) -> str:
    return hashlib.md5(text.encode(), usedforsecurity=False).hexdigest()


def _id(row: Row, category: str, system: str, turns: Sequence[str]) -> str:
    given = row.fields.get("question_id", row.fields.get("id"))
    if given is None:
        return text_id(category, system, turns)
    if isinstance(given, bool) or not isinstance(given, str | int) or given == "":
        raise BadInputError(f"{row.where}: id {str(given)[:40]!r} is neither a text nor a number; leave it out, and the texts give one")
    name = str(given)
    _check_encodes(row, "id", name)
    return name if len(name) == ID_LENGTH and name.isprintable() else _md5(name)


def _known_category(row: Row, categories: Sequence[str]) -> str:
    category = _string(row, "category")
    if category not in categories:
        raise BadInputError(f"{row.where}: category {category[:40]!r} is not known here; known: {', '.join(categories)}")
    return category


def _conversation(row: Row) -> tuple[str, tuple[str, ...]]:
    """The system message ("" for none) and the user's turns."""
    if "turns" in row.fields and "messages" in row.fields:
        raise BadInputError(f"{row.where}: has both turns and messages; keep one, or nobody can say which was asked")
    if "messages" not in row.fields:
        return "", _turns(row)
    system, turns = "", list[str]()
    for number, item in enumerate(_list(row, "messages")):
        where = f"messages[{number}]"
        message = cast("dict[str, object]", item) if isinstance(item, dict) else {}
        if "role" not in message or "content" not in message:
            raise BadInputError(f"{row.where}: {where} has no role and content")
        text = _text(row, f"{where}.content", message["content"])
        role = message["role"]
        if role == "user":
            turns.append(text)
        elif role == "system" and number == 0:
            system = text
        else:
            raise BadInputError(
                f"{row.where}: {where} has the role {str(role)[:40]!r}; user messages are asked after a system message at most, "
                "and the answers between them are the model's own: remove it"
            )
    if not turns:
        raise BadInputError(f"{row.where}: messages hold no user message")
    return system, tuple(turns)


def _turns(row: Row) -> tuple[str, ...]:
    return tuple(_text(row, f"turns[{number}]", text) for number, text in enumerate(_list(row, "turns")))


def _list(row: Row, name: str) -> list[object]:
    value = row.fields.get(name)
    items = cast("list[object]", value) if isinstance(value, list) else []
    if not items:
        raise BadInputError(f"{row.where}: {name} {'is missing' if value is None else 'is no list with something in it'}")
    if len(items) > MAX_TURNS:
        raise BadInputError(f"{row.where}: {len(items)} {name}, limit {MAX_TURNS}; split the conversation")
    return items


def _text(row: Row, name: str, text: object) -> str:
    if not isinstance(text, str):
        raise BadInputError(f"{row.where}: {name} is no text")
    if not text.strip():
        raise BadInputError(f"{row.where}: {name} is empty")
    if len(text) > MAX_TEXT_CHARS:
        raise BadInputError(f"{row.where}: {name} has {len(text):,} characters, limit {MAX_TEXT_CHARS:,}; shorten it")
    _check_encodes(row, name, text)
    return text


def _check_encodes(row: Row, name: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadInputError(
            f"{row.where}: {name} holds half a surrogate pair at character {error.start}; no server can be sent it"
        ) from None


def _string(row: Row, name: str) -> str:
    value = row.fields.get(name)
    if not isinstance(value, str) or not value:
        raise BadInputError(f"{row.where}: {name} {'is missing' if value in (None, '') else 'is no text'}")
    _check_encodes(row, name, value)
    return value


def _optional_string(row: Row, name: str) -> str:
    return "" if row.fields.get(name) is None else _string(row, name)
