"""Builds the shipped set "speed-bench-like" from the public files in data/prompts: python scripts/build_speed_bench_like.py

Writes src/paceline/prove/data/*.jsonl.gz and prints the hashes that stand in prove/datasets/shipped.py. The same files give the same
content each time. With --tokenizer FILE (a tokenizer.json) it also prints the characters per token that prove/datasets/throughput.py
goes by.
"""

import argparse
import gzip
import json
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path

from paceline.prove.datasets import shipped
from paceline.prove.datasets.prompt import CATEGORIES
from paceline.prove.datasets.throughput import Kind, Recipe, compose
from speed_bench_like import long_prompts, multilingual, personas, questions, readings
from speed_bench_like.conversations import NUM_PER_CATEGORY, Conversation

ROOT = Path(__file__).parents[1]
BUILDERS = {
    "coding": questions.coding,
    "humanities": questions.humanities,
    "math": questions.math,
    "multilingual": multilingual.multilingual,
    "qa": questions.qa,
    "rag": readings.rag,
    "reasoning": questions.reasoning,
    "roleplay": personas.roleplay,
    "stem": questions.stem,
    "summarization": readings.summarization,
    "writing": personas.writing,
}


def qualitative() -> list[Conversation]:
    """The 880 conversations in the order of their categories."""
    assert tuple(BUILDERS) == CATEGORIES
    found: list[Conversation] = []
    for category, build in BUILDERS.items():
        conversations = list(build())
        assert len(conversations) == NUM_PER_CATEGORY, (category, len(conversations))
        assert {conversation.category for conversation in conversations} == {category}
        found += conversations
    return found


def throughput_rows(recipes: list[Recipe]) -> Iterator[dict[str, object]]:
    """Every piece once, then the recipes with the numbers of theirs: the recipes share most of their pieces."""
    numbers: dict[str, int] = {}
    for recipe in recipes:
        for piece in recipe.pieces:
            numbers.setdefault(piece, len(numbers))
    for piece in numbers:
        yield {"piece": piece}
    for recipe in recipes:
        yield {
            "question_id": recipe.question_id,
            "kind": recipe.kind.value,
            "source": recipe.source,
            "head": recipe.head,
            "pieces": runs([numbers[piece] for piece in recipe.pieces]),
            "tail": recipe.tail,
        }


def runs(numbers: list[int]) -> list[list[int]]:
    """Numbers as [first, count] of consecutive ones."""
    found: list[list[int]] = []
    for number in numbers:
        if found and number == sum(found[-1]):
            found[-1][1] += 1
        else:
            found.append([number, 1])
    return found


def write(path: Path, rows: Iterator[dict[str, object]]) -> None:
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    # No time and no name of a file in the head; zlib's version may still change the compressed bytes, so hashes are over the content.
    path.write_bytes(gzip.compress(text.encode(), 9, mtime=0))
    print(f"{path}: {path.stat().st_size:,} bytes, {len(text):,} characters", file=sys.stderr)


def measure(recipes: list[Recipe], tokenizer_file: str) -> None:
    """Characters per token by kind, over the prompts of 2k tokens without their padding."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(tokenizer_file)
    for kind in Kind:
        texts = [compose(recipe, "throughput_2k").turns[0].split("\nAnswer now please.")[0] for recipe in recipes if recipe.kind is kind]
        ratios = [len(text) / len(tokenizer.encode(text, add_special_tokens=False).ids) for text in texts]
        print(f"{kind.value:10} {statistics.mean(ratios):.3f} characters per token, {min(ratios):.2f} to {max(ratios):.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "src/paceline/prove/data", help="folder to write into")
    parser.add_argument("--tokenizer", help="a tokenizer.json to measure characters per token with")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    recipes = list(long_prompts.recipes())
    write(arguments.out / shipped.QUALITATIVE_FILE, (conversation.row() for conversation in qualitative()))
    write(arguments.out / shipped.THROUGHPUT_FILE, throughput_rows(recipes))
    for split in shipped.SHA256:
        print(f"{split}: {shipped.read(split, arguments.out).sha256}")
    if arguments.tokenizer:
        measure(recipes, arguments.tokenizer)


if __name__ == "__main__":
    main()
