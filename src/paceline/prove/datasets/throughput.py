"""Prompts of 1k, 2k or 8k tokens from the recipes that ship: pieces as far as they fit, then SPEED-Bench's padding. Called by `shipped.py`.

One recipe gives all three lengths, so that a comparison over lengths is one over lengths and not over topics.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from paceline.prove.datasets.prompt import Prompt

PADDING = "Answer now please.\n"
"""What SPEED-Bench appends to a text that is too short; the last one is cut where the length is reached."""

TOKENS_PER_K = 1_000  # SPEED-Bench's k
NUM_K = {"throughput_1k": 1, "throughput_2k": 2, "throughput_8k": 8}


class Kind(StrEnum):
    """What is asked for; each kind belongs to one tier."""

    SORT = "sort"  # low entropy: shuffled paragraphs, to be written out in order
    CODE = "code"  # low entropy: a file to be written out and completed, after others of its project
    ABSTRACTS = "abstracts"  # mixed: a question on a study, after solved ones
    EXAMS = "exams"  # mixed: an exam question, after solved ones
    DIALOGUE = "dialogue"  # high entropy: a meeting to be continued
    STORIES = "stories"  # high entropy: one more story after a collection


TIERS = {
    Kind.SORT: "low_entropy",
    Kind.CODE: "low_entropy",
    Kind.ABSTRACTS: "mixed",
    Kind.EXAMS: "mixed",
    Kind.DIALOGUE: "high_entropy",
    Kind.STORIES: "high_entropy",
}

RUNNING = (Kind.CODE, Kind.DIALOGUE)
"""Kinds whose pieces follow on one another: none may be left out."""

CHARS_PER_TOKEN = {
    Kind.SORT: 4.41,
    Kind.CODE: 3.52,
    Kind.ABSTRACTS: 4.3,
    Kind.EXAMS: 4.0,
    Kind.DIALOGUE: 4.54,
    Kind.STORIES: 4.52,
}
"""The rule by which tokens are counted: no tokenizer is imported here. Measured by
`scripts/build_speed_bench_like.py --tokenizer FILE` with that of SmolLM2-135M-Instruct, the default model, over the 2k prompts; single
prompts lie within 16 % of their length. SPEED-Bench counts tokens of o200k_base. With any other tokenizer a length is a label, and the
server's own count is the figure."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """What one prompt is made of at every length."""

    question_id: str
    kind: Kind
    source: str
    head: str  # the instruction
    pieces: tuple[str, ...]  # taken from the first on
    tail: str  # what is to be answered or continued, after the pieces


def compose(recipe: Recipe, split: str) -> Prompt:
    """The prompt of a recipe at the length of a split.

    A running text is cut where the room ends; of pieces that stand alone every one is taken that still fits. What is missing then is
    padded, so each prompt has exactly the characters that its kind needs for the length.
    """
    num_chars = target_chars(recipe.kind, split)
    pieces = _fitting(recipe, num_chars - len(recipe.head) - len(recipe.tail))
    if recipe.kind is Kind.SORT:
        pieces = shuffled(pieces, recipe.question_id)
    text = recipe.head + "".join(pieces) + recipe.tail
    missing = num_chars - len(text)
    assert missing >= 0, (recipe.question_id, split, missing)
    text += "\n" * (missing > 0) + PADDING * (missing // len(PADDING) + 1)
    question_id = hashlib.md5(f"{split} {recipe.question_id}".encode(), usedforsecurity=False).hexdigest()
    return Prompt(question_id, TIERS[recipe.kind], (text[:num_chars],), source=recipe.source)


def target_chars(kind: Kind, split: str) -> int:
    """Characters of a prompt of that kind and split."""
    return round(NUM_K[split] * TOKENS_PER_K * CHARS_PER_TOKEN[kind])


def shuffled(pieces: Sequence[str], seed: str) -> list[str]:
    """The pieces in an order that is random, and the same on every machine."""
    return sorted(pieces, key=lambda piece: hashlib.sha256(f"{seed} {piece}".encode()).digest())


def _fitting(recipe: Recipe, room: int) -> list[str]:
    found: list[str] = []
    for piece in recipe.pieces:
        if len(piece) <= room:
            found.append(piece)
            room -= len(piece)
        elif recipe.kind in RUNNING:
            return [*found, piece[:room]]
    return found
