"""The set that ships: its shape, its hashes, that its script still makes it, and that the wheel holds it."""

import gzip
import os
import shutil
import statistics
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from paceline.errors import BadInputError, MissingError
from paceline.prove.datasets import load, shipped, throughput
from paceline.prove.datasets.prompt import CATEGORIES, ENTROPY_TIERS
from paceline.prove.datasets.rows import SENTINEL, text_id
from paceline.prove.datasets.throughput import PADDING, Kind, Recipe

ROOT = Path(__file__).parents[4]
DATA = ROOT / "src/paceline/prove/data"
MAX_WHEEL_BYTES = 2_500_000


@pytest.mark.parametrize("split", list(shipped.SHA256))
def test_every_split_has_its_hash(split: str) -> None:
    dataset = load.load("speed-bench-like", split)
    assert dataset.sha256 == shipped.SHA256[split]
    assert dataset.label == f"speed-bench-like v1 (not SPEED-Bench), {split}"


def test_a_changed_text_is_found_by_its_hash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(DATA, tmp_path / "data")
    path = tmp_path / "data" / shipped.QUALITATIVE_FILE
    text = gzip.decompress(path.read_bytes())
    monkeypatch.setattr(shipped.resources, "files", lambda _: tmp_path)
    assert shipped.load("qualitative").prompts
    path.write_bytes(gzip.compress(text.replace(b"the", b"teh", 1)))
    with pytest.raises(MissingError, match="its files were changed; reinstall"):
        shipped.load("qualitative")
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(MissingError, match="cannot be read"):
        shipped.load("qualitative")


def test_the_qualitative_split_has_speed_benchs_shape() -> None:
    prompts = shipped.load("qualitative").prompts
    assert Counter(prompt.category for prompt in prompts) == dict.fromkeys(CATEGORIES, 80)
    assert tuple(dict.fromkeys(prompt.category for prompt in prompts)) == CATEGORIES
    several = [prompt for prompt in prompts if len(prompt.turns) > 1]
    assert Counter(prompt.category for prompt in several) == dict.fromkeys(CATEGORIES, 16), "a fifth of 80"
    assert {len(prompt.turns) for prompt in several} == {2, 3, 4, 5}
    assert len({prompt.question_id for prompt in prompts}) == 880
    assert all(prompt.question_id == text_id(prompt.category, "", prompt.turns) for prompt in prompts)
    assert len({turn for prompt in prompts for turn in prompt.turns[:1]}) > 870, "hardly any conversation begins like another"
    assert not any(turn.startswith(SENTINEL) for prompt in prompts for turn in prompt.turns)


def test_lengths_are_as_unlike_as_speed_benchs() -> None:
    prompts = shipped.load("qualitative").prompts
    lengths = {name: [sum(map(len, prompt.turns)) for prompt in prompts if prompt.category == name] for name in CATEGORIES}
    means = {name: statistics.mean(values) / 4 for name, values in lengths.items()}
    assert min(means, key=means.__getitem__) == "qa"
    assert {name for name, mean in means.items() if mean > 250} == {"rag", "roleplay", "summarization", "writing"}, means
    assert all(max(values) > 3 * min(values) for values in lengths.values())


def test_multilingual_has_many_languages() -> None:
    starts = {prompt.turns[0][:12] for prompt in shipped.load("qualitative").prompts if prompt.category == "multilingual"}
    assert len(starts) >= 40, "two instructions in each of some 20 languages"


@pytest.mark.parametrize(("split", "num_k"), [("throughput_1k", 1), ("throughput_2k", 2), ("throughput_8k", 8)])
def test_throughput_prompts_have_their_length(split: str, num_k: int) -> None:
    prompts = shipped.load(split).prompts
    assert Counter(prompt.category for prompt in prompts) == dict.fromkeys(ENTROPY_TIERS, 64)
    assert all(len(prompt.turns) == 1 and len(prompt.question_id) == 32 for prompt in prompts)
    assert len({prompt.turns for prompt in prompts}) == len(prompts)
    # 1,000 tokens a k, at 3.52 to 4.54 characters a token as the kinds were measured.
    assert {len(prompt.turns[0]) for prompt in prompts} == {round(num_k * 1000 * ratio) for ratio in throughput.CHARS_PER_TOKEN.values()}
    padded = [prompt.turns[0].count("Answer now please") * len(PADDING) / len(prompt.turns[0]) for prompt in prompts]
    assert statistics.mean(padded) < 0.02, "what repeats itself would flatter a drafter"
    assert max(padded) < 0.15


def test_ids_tell_the_lengths_apart() -> None:
    ids = [prompt.question_id for split in list(shipped.SHA256)[1:] for prompt in shipped.load(split).prompts]
    assert len(set(ids)) == 3 * 192


def test_splits_that_are_not_shipped_are_refused() -> None:
    with pytest.raises(BadInputError, match="has no split throughput_32k, only qualitative, throughput_1k"):
        load.load("speed-bench-like", "throughput_32k")


def recipe(kind: Kind, pieces: tuple[str, ...]) -> Recipe:
    return Recipe("0" * 32, kind, "test", "head\n", pieces, "tail")


def text_of(made: Recipe) -> str:
    return throughput.compose(made, "throughput_1k").turns[0]


def test_solved_examples_fill_the_room_and_padding_the_rest() -> None:
    text = text_of(recipe(Kind.EXAMS, ("a" * 3_900, "b" * 3_000, "c" * 50)))
    assert text.startswith("head\n" + "a" * 3_900 + "c" * 50 + "tail\nAnswer now")
    assert len(text) == 4_000
    assert text_of(recipe(Kind.EXAMS, ())) == ("head\ntail\n" + PADDING * 300)[:4_000]
    assert text_of(recipe(Kind.EXAMS, ("a" * 3_991,))).endswith("tail"), "nothing is padded where nothing is missing"


def test_running_text_is_cut_and_never_skips() -> None:
    text = text_of(recipe(Kind.DIALOGUE, ("a" * 4_000, "b" * 3_000, "c" * 50)))
    assert text == "head\n" + "a" * 4_000 + "b" * 531 + "tail"


def test_paragraphs_to_sort_are_those_of_the_beginning_in_another_order() -> None:
    pieces = tuple(f"{number:04}" * 10 for number in range(200))
    body = text_of(recipe(Kind.SORT, pieces)).removeprefix("head\n").split("tail")[0]
    found = [body[start : start + 40] for start in range(0, len(body), 40)]
    assert sorted(found) == list(pieces[: len(found)])
    assert found != sorted(found)
    assert len(found) == (4_410 - 9) // 40


def test_the_script_still_makes_these_files(tmp_path: Path) -> None:
    """Contents are compared, not files: another zlib may pack them otherwise."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "PYTHONHASHSEED": "7"}
    script = ROOT / "scripts/build_speed_bench_like.py"
    done = subprocess.run([sys.executable, script, "--out", tmp_path], env=environment, capture_output=True, text=True, check=True)
    for split, digest in shipped.SHA256.items():
        assert f"{split}: {digest}" in done.stdout
    for name in (shipped.QUALITATIVE_FILE, shipped.THROUGHPUT_FILE):
        assert gzip.decompress((tmp_path / name).read_bytes()) == gzip.decompress((DATA / name).read_bytes())
    assert sum(path.stat().st_size for path in DATA.iterdir()) < MAX_WHEEL_BYTES


def test_sources_are_the_ones_in_their_table() -> None:
    """Every file is in the table with a licence, and nothing else lies there; the script checks their hashes."""
    folder = ROOT / "data/prompts"
    lines = [line for line in (folder / "SOURCES.md").read_text().splitlines() if line.startswith("| ") and "| sha256 |" not in line]
    table = {cells[1].strip(): cells[5].strip() for cells in (line.split("|") for line in lines)}
    assert {path.name.removesuffix(".xz") for path in folder.glob("*.xz")} == set(table)
    assert all(licence.startswith(("Apache-2.0", "MIT", "CC0-1.0", "CC-BY-4.0", "ODC-By-1.0")) for licence in table.values())
    notice = (ROOT / "NOTICE").read_text()
    assert all(name in notice for name in ("ACI-Bench", "MBPP", "Multi-LexSum")), "their licences ask for attribution"
