"""The set that ships, "speed-bench-like": SPEED-Bench's categories, counts and lengths over public texts, fixed by a hash per split.

Made by `scripts/build_speed_bench_like.py` from the files that data/prompts/SOURCES.md lists. It is easier than SPEED-Bench, so acceptance
is higher than in tables made with that; the label says which of the two was asked.
"""

import gzip
import zlib
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import cast

from paceline.errors import BadInputError, MissingError
from paceline.prove.datasets import rows
from paceline.prove.datasets.files import json_fields
from paceline.prove.datasets.prompt import CATEGORIES, Dataset, Prompt
from paceline.prove.datasets.throughput import NUM_K, Kind, Recipe, compose

NAME = "speed-bench-like"
VERSION = 1
QUALITATIVE_FILE = "speed_bench_like_qualitative.jsonl.gz"
THROUGHPUT_FILE = "speed_bench_like_throughput.jsonl.gz"
MAX_BYTES = 32 << 20  # of a decompressed file

SHA256 = {
    "qualitative": "ac1db6b15f137dcc6b8bbfc62a79e85552f97be78c2b25d3458c517839969d10",
    "throughput_1k": "06778c4f80171453ffe125ec6a4026812c124c294f0e9261152e8640fdf95e4d",
    "throughput_2k": "d2d0aa4b7bf2b1f075b41801d0d2f6dc436f6ac34ca85c8deb10d9a116cdcc5f",
    "throughput_8k": "395babe073d8a69071f008c245e296fc42c5c4f215ac13bb99eb85e29fe17fa2",
}
"""`Dataset.sha256` of every split. Other prompts are another version."""


def load(split: str) -> Dataset:
    """A split of the set.

    Raises:
        BadInputError: a split that it has not.
        MissingError: the installed files are not those of this version.
    """
    if split not in SHA256:
        raise BadInputError(f"{NAME} has no split {split}, only {', '.join(SHA256)}; SPEED-Bench itself has it: --data FOLDER")
    dataset = read(split, resources.files("paceline.prove") / "data")
    if dataset.sha256 != SHA256[split]:
        raise MissingError(
            f"{NAME}, {split} has the hash {dataset.sha256}, not {SHA256[split]}: its files were changed; reinstall the package"
        )
    return dataset


def read(split: str, folder: Path | Traversable) -> Dataset:
    """A split as the files in a folder give it, whatever its hash."""
    if split in NUM_K:
        prompts = tuple(compose(recipe, split) for recipe in _recipes(folder / THROUGHPUT_FILE))
    else:
        prompts = tuple(_prompts(folder / QUALITATIVE_FILE))
    return Dataset(f"{NAME} v{VERSION} (not SPEED-Bench), {split}", split, prompts)


def _fields(file: Path | Traversable) -> list[dict[str, object]]:
    try:
        with file.open("rb") as packed, gzip.open(packed) as lines:
            data = lines.read(MAX_BYTES + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise MissingError(f"{file} cannot be read ({error}); reinstall the package") from error
    if len(data) > MAX_BYTES:
        raise MissingError(f"{file} holds more than {MAX_BYTES:,} bytes; reinstall the package")
    return [json_fields(line, f"{file.name}, line {number}") for number, line in enumerate(data.splitlines(), 1)]


def _prompts(file: Path | Traversable) -> list[Prompt]:
    return [rows.speed_bench(rows.Row(f"{file.name}, line {number}", fields), CATEGORIES) for number, fields in enumerate(_fields(file), 1)]


def _recipes(file: Path | Traversable) -> list[Recipe]:
    """Lines with a `piece` each, then recipes that name their pieces as [first, count]."""
    pieces: list[str] = []
    recipes: list[Recipe] = []
    for fields in _fields(file):
        if "piece" in fields:
            pieces.append(cast("str", fields["piece"]))
            continue
        text = cast("dict[str, str]", fields)
        named = cast("list[list[int]]", fields["pieces"])
        chosen = tuple(piece for first, count in named for piece in pieces[first : first + count])
        recipes.append(Recipe(text["question_id"], Kind(text["kind"]), text["source"], text["head"], chosen, text["tail"]))
    return recipes
