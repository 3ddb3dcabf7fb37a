"""Random tokens are told from text: none of the shipped prompts, in any language, is taken for noise."""

import random
from functools import cache

import pytest

from paceline.prove.datasets.load import load
from paceline.prove.datasets.prompt import Prompt
from paceline.prove.plain_text import check_text, looks_random, units

SPLITS = ("qualitative", "throughput_1k", "throughput_2k", "throughput_8k")


@cache
def vocabulary() -> tuple[str, ...]:
    """As a tokenizer's: distinct pieces of the words of many languages, most with a space before them, each once."""
    words = sorted({word for prompt in load("speed-bench-like", "qualitative").prompts for turn in prompt.turns for word in turn.split()})
    rng = random.Random(0)
    return tuple(sorted({f" {word[: rng.randint(1, 8)]}" for word in words} | {word[-rng.randint(1, 5) :] for word in words}))


def random_prompts(num_prompts: int, num_tokens: int, category: str = "noise") -> list[Prompt]:
    rng = random.Random(1)
    return [Prompt(str(number), category, ("".join(rng.choices(vocabulary(), k=num_tokens)),)) for number in range(num_prompts)]


@pytest.mark.parametrize("split", SPLITS)
def test_no_shipped_prompt_looks_random(split: str) -> None:
    prompts = load("speed-bench-like", split).prompts
    check = check_text(prompts if split == "qualitative" else prompts[::8])
    assert check.random_share <= 0.001
    assert check.random_categories == ()


@pytest.mark.parametrize("num_tokens", [64, 256, 1024])
def test_random_tokens_look_random(num_tokens: int) -> None:
    check = check_text(random_prompts(30, num_tokens))
    assert check.random_share == 1.0
    assert check.random_categories == ("noise",)


def test_a_random_category_among_text_is_named() -> None:
    prompts = [*load("speed-bench-like", "qualitative").prompts[:80], *random_prompts(40, 256, "rag")]
    check = check_text(prompts)
    assert check.random_categories == ("rag",)
    assert 0 < check.random_share < 1


def test_words_are_counted_where_scripts_have_them_and_letters_elsewhere() -> None:
    assert units("The cat, the CAT; caf\u00e9 42") == ["the", "cat", "the", "cat", "caf\u00e9"]
    assert units("求CE的长度") == ["求", "ce", "的", "长", "度"]
    assert units("Xin chào Việt Nam") == ["xin", "chào", "việt", "nam"]


def test_too_few_words_are_never_called_random() -> None:
    assert not looks_random([["one", "two", "three"]])
    assert check_text([]).random_share == 0.0
