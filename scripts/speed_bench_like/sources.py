"""The public files behind the set, as rows: read from `data/prompts/`, each checked against the sha256 in SOURCES.md."""

import csv
import hashlib
import io
import json
import lzma
import re
from functools import cache
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "data" / "prompts"


@cache
def digests() -> dict[str, str]:
    """File name -> sha256 of its content, from the table of SOURCES.md."""
    table = (FOLDER / "SOURCES.md").read_text()
    return dict(re.findall(r"^\| (\S+) \| ([0-9a-f]{64}) \|", table, re.MULTILINE))


def content(name: str) -> bytes:
    """The file, decompressed and checked."""
    data = lzma.decompress((FOLDER / f"{name}.xz").read_bytes())
    found = hashlib.sha256(data).hexdigest()
    if found != digests()[name]:
        raise SystemExit(f"{name} has sha256 {found}, SOURCES.md says {digests()[name]}")
    return data


def rows(name: str) -> list[dict]:
    """The rows of a .jsonl, .json or .csv file."""
    text = content(name).decode()
    if name.endswith(".jsonl"):
        return [json.loads(line) for line in text.split("\n") if line]
    return json.loads(text) if name.endswith(".json") else list(csv.DictReader(io.StringIO(text)))


def texts(name: str, field: str) -> list[str]:
    """One field of every row, stripped, each text once."""
    return list(dict.fromkeys(row[field].strip() for row in rows(name)))


@cache
def _spec_bench() -> list[dict]:
    return rows("specbench_question.jsonl")


def spec_bench(category: str) -> list[list[str]]:
    """The turns of every row of one of Spec-Bench's categories (MT-Bench's eight, ten rows each, have two)."""
    return [[turn.strip() for turn in row["turns"]] for row in _spec_bench() if row["category"] == category]


def turns(name: str) -> list[str]:
    """The first turn of every row of a file in DeepSpec's form, each text once."""
    return list(dict.fromkeys(row["turns"][0].strip() for row in rows(name)))
