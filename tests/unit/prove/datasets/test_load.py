"""What `--data` is taken for, and what is refused with its line."""

import json
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from paceline.errors import BadInputError, MissingError, NotFoundError
from paceline.prove.datasets import files, load, rows
from paceline.prove.datasets.prompt import CATEGORIES, Prompt
from paceline.prove.datasets.rows import SENTINEL


def speed_row(number: int, **changes: object) -> dict[str, object]:
    """A row as SPEED-Bench's resolver for parquet writes it; None takes a field away."""
    row = {
        "question_id": f"{number:032x}",
        "category": CATEGORIES[number % 11],
        "sub_category": "any",
        "turns": [f"question {number}", "and then?"][: 1 + (number % 5 == 0)],
        "source": "https://example.org",
        "src_id": f"x_{number}",
        "multiturn": number % 5 == 0,
        **changes,
    }
    return {name: value for name, value in row.items() if value is not None}


def as_messages(row: dict[str, object], system: str = "") -> dict[str, object]:
    """The same as its resolver for JSONL writes it."""
    turns = row.pop("turns")
    assert isinstance(turns, list)
    head = [{"role": "system", "content": system}] if system else []
    return {**row, "messages": [*head, *({"role": "user", "content": turn} for turn in turns)]}


def write_jsonl(path: Path, items: list[dict[str, object]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(item) + "\n" for item in items))
    return path


def write_parquet(path: Path, items: list[dict[str, object]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(items), path)
    return path


def refused(path: Path, split: str = "qualitative") -> str:
    with pytest.raises(BadInputError) as caught:
        load.load(str(path), split)
    assert caught.value.exit_code == 2
    return str(caught.value)


def test_both_forms_of_speed_bench_give_the_same_prompts(tmp_path: Path) -> None:
    items = [speed_row(number) for number in range(22)]
    from_parquet = load.load(str(write_parquet(tmp_path / "a/qualitative/test.parquet", items).parents[1]))
    from_jsonl = load.load(str(write_jsonl(tmp_path / "b/qualitative.jsonl", [as_messages(dict(item)) for item in items]).parent))
    assert from_parquet.label == "SPEED-Bench, qualitative (test.parquet)"
    assert from_jsonl.label == "SPEED-Bench, qualitative (qualitative.jsonl)"
    assert from_parquet.prompts == from_jsonl.prompts
    assert from_parquet.sha256 == from_jsonl.sha256
    assert from_parquet.prompts[5] == Prompt(f"{5:032x}", "rag", ("question 5", "and then?"), source="https://example.org")


def test_a_leading_system_message_is_kept_apart(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "x.jsonl", [as_messages(speed_row(1), system="Be brief.")])
    (prompt,) = load.load(str(path)).prompts
    assert (prompt.system, prompt.turns) == ("Be brief.", ("question 1",))


def test_throughput_splits_have_their_own_categories(tmp_path: Path) -> None:
    items = [speed_row(number, category=tier) for number, tier in enumerate(("low_entropy", "mixed", "high_entropy"))]
    write_parquet(tmp_path / "throughput_2k" / "test-00000-of-00001.parquet", items)
    dataset = load.load(str(tmp_path), "throughput_2k")
    assert (dataset.split, len(dataset.prompts)) == ("throughput_2k", 3)
    message = refused(tmp_path / "throughput_2k" / "test-00000-of-00001.parquet", "qualitative")
    assert "row 1: category 'low_entropy' is not known here; known: coding" in message


def test_shards_of_the_hub_are_one_split(tmp_path: Path) -> None:
    for shard in range(2):
        write_parquet(tmp_path / f"qualitative/test-0000{shard}-of-00002.parquet", [speed_row(10 * shard + number) for number in range(3)])
    assert len(load.load(str(tmp_path)).prompts) == 6


@pytest.mark.parametrize("form", ["parquet", "jsonl"])
def test_placeholders_are_refused_together_with_where_to_get_the_text(tmp_path: Path, form: str) -> None:
    items = [speed_row(number) for number in range(20)]
    for number in range(3, 12):
        items[number]["turns"] = [SENTINEL + ("\n\nAnswer {question}" if number % 2 else "")]
    if form == "parquet":
        path = write_parquet(tmp_path / "test.parquet", items)
    else:
        path = write_jsonl(tmp_path / "x.jsonl", [as_messages(item) for item in items])
    message = refused(path)
    assert "9 of 20 rows" in message
    assert f"{3:032x}, " in message
    assert f"{9:032x}" not in message, "the first ids only"
    for place in ("nvidia/SPEED-Bench", "NVIDIA Evaluation Dataset License", "prepare_data.py", "nemo_skills", "speed-bench-like"):
        assert place in message


def test_a_placeholder_in_a_later_turn_or_among_plain_prompts_is_found_too(tmp_path: Path) -> None:
    assert "1 of 1 rows" in refused(write_jsonl(tmp_path / "a.jsonl", [speed_row(1, turns=["fine", SENTINEL])]))
    assert "1 of 2 rows" in refused(write_jsonl(tmp_path / "b.jsonl", [{"prompt": "fine"}, {"prompt": SENTINEL}]))
    quoted = write_jsonl(tmp_path / "c.jsonl", [{"prompt": f"What does '{SENTINEL}' mean?"}])
    assert len(load.load(str(quoted)).prompts) == 1, "only what begins with it is a placeholder"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"question_id": "abc"}, "line 2: question_id 'abc' has 3 characters; SPEED-Bench's have 32"),
        ({"question_id": None}, "line 2: question_id is missing"),
        ({"question_id": 5}, "line 2: question_id is no text"),
        ({"category": "poetry"}, "line 2: category 'poetry' is not known here; known: coding, humanities"),
        ({"category": None}, "line 2: category is missing"),
        ({"turns": None}, "line 2: turns is missing"),
        ({"turns": []}, "line 2: turns is no list"),
        ({"turns": ["  "]}, "line 2: turns[0] is empty"),
        ({"turns": [3]}, "line 2: turns[0] is no text"),
        ({"turns": ["a"] * 65}, "line 2: 65 turns, limit 64"),
        ({"turns": ["\ud800"]}, "line 2: turns[0] holds half a surrogate pair at character 0"),
        ({"messages": [{"role": "user", "content": "a"}]}, "line 2: has both turns and messages"),
        ({"turns": None, "messages": [{"role": "user"}]}, "line 2: messages[0] has no role and content"),
        ({"turns": None, "messages": [{"role": "system", "content": "a"}]}, "line 2: messages hold no user message"),
        ({"question_id": f"{0:032x}"}, "line 2 repeats x.jsonl, line 1"),
    ],
)
def test_a_bad_row_is_named(tmp_path: Path, changes: dict[str, object], words: str) -> None:
    path = write_jsonl(tmp_path / "x.jsonl", [speed_row(0), speed_row(1, **changes)])
    assert words in refused(path)


def test_answers_in_messages_are_refused_for_they_are_the_models_own(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    message = refused(write_jsonl(tmp_path / "x.jsonl", [{"messages": messages}]))
    assert "messages[1] has the role 'assistant'" in message
    assert "remove it" in message


def test_spec_bench_is_known_by_its_numbers(tmp_path: Path) -> None:
    items: list[dict[str, object]] = [
        {"question_id": 81, "category": "writing", "turns": ["a", "b"]},
        {"question_id": 161, "category": "translation", "turns": ["c"], "reference": ["d"]},
    ]
    path = write_jsonl(tmp_path / "question.jsonl", items)
    dataset = load.load(str(tmp_path))
    assert dataset.label == "Spec-Bench (question.jsonl)"
    assert dataset.prompts[0] == Prompt("0" * 30 + "81", "writing", ("a", "b"), source="hemingkx/Spec-Bench")
    items[1]["category"] = "cooking"
    write_jsonl(path, items)
    assert "line 2: category 'cooking'" in refused(path)
    assert "no splits" in refused(path, "throughput_1k")


def test_any_prompts_are_taken_as_they_are(tmp_path: Path) -> None:
    items: list[dict[str, object]] = [
        {"prompt": "a"},
        {"turns": ["b", "c"], "category": "mine", "id": "x" * 32},
        {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "d"}], "id": 7},
        {"prompt": "e", "system": "t", "difficulty": "hard"},
    ]
    dataset = load.load(str(write_jsonl(tmp_path / "mine.jsonl", items)))
    assert dataset.label == "a file of prompts (mine.jsonl)"
    assert [prompt.turns for prompt in dataset.prompts] == [("a",), ("b", "c"), ("d",), ("e",)]
    assert [prompt.system for prompt in dataset.prompts] == ["", "", "s", "t"]
    assert [prompt.category for prompt in dataset.prompts] == ["uncategorised", "mine", "uncategorised", "uncategorised"]
    assert dataset.prompts[1].question_id == "x" * 32
    assert {len(prompt.question_id) for prompt in dataset.prompts} == {32}
    assert dataset.prompts[0].question_id == rows.text_id("uncategorised", "", ["a"])


@pytest.mark.parametrize(
    ("item", "words"),
    [
        ({"text": "a"}, "no data set that is known has only these fields: text"),
        ({"prompt": "a", "turns": ["b"]}, "needs one of prompt, turns and messages, has prompt and turns"),
        ({"prompt": ["a"]}, "prompt is no text"),
        ({"prompt": "a", "category": "x\ny"}, "category 'x\\ny' is no name"),
        ({"prompt": "a", "category": "x" * 65}, "no name of 1 to 64"),
        ({"prompt": "a", "id": 1.5}, "id '1.5' is neither"),
        ({"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "d"}], "system": "t"}, "keep one"),
    ],
)
def test_prompts_that_are_unclear_are_refused(tmp_path: Path, item: dict[str, object], words: str) -> None:
    message = refused(write_jsonl(tmp_path / "x.jsonl", [item]))
    assert words in message
    assert "x.jsonl, line 1" in message


def test_prompts_that_are_asked_twice_are_refused(tmp_path: Path) -> None:
    assert "line 3 repeats x.jsonl, line 1" in refused(
        write_jsonl(tmp_path / "x.jsonl", [{"prompt": "a"}, {"prompt": "b"}, {"prompt": "a"}])
    )


def test_files_in_speed_benchs_form_are_not_called_by_its_name(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "x.jsonl", [speed_row(1, src_id=None, sub_category=None, multiturn=None)])
    assert load.load(str(path)).label == "prompts in SPEED-Bench's form, qualitative (x.jsonl)"


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "holds no row"),
        (b"\n \n", "holds no row"),
        (b'{"prompt": "a"}\n{"prompt":\n', "line 2 is no JSON"),
        (b'["a"]\n', "line 1 is no JSON object but a list"),
        (b'{"prompt": "\xff"}\n', "line 1 is no JSON"),
        (b'{"prompt": ' + b"[" * 100_000 + b"\n", "line 1 is no JSON"),
        (b"PAR1 but nothing else", "is no parquet file that can be read"),
        (b"\x1f\x8b\x08\x00", "line 1 is no JSON"),
    ],
)
def test_what_is_no_file_of_rows_is_refused(tmp_path: Path, data: bytes, words: str) -> None:
    (tmp_path / "x.jsonl").write_bytes(data)
    assert words in refused(tmp_path / "x.jsonl")


def test_byte_order_mark_and_empty_lines_do_no_harm(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\r\n\r\n{"prompt": "b"}')
    assert [prompt.turns for prompt in load.load(str(tmp_path / "x.jsonl")).prompts] == [("a",), ("b",)]


def test_sizes_are_checked_before_reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_jsonl(tmp_path / "x.jsonl", [{"prompt": f"{number:05}" * 10} for number in range(20)])
    parquet = write_parquet(tmp_path / "x.parquet", [speed_row(number) for number in range(20)])
    with monkeypatch.context() as limits:
        limits.setattr(files, "MAX_ROWS", 19)
        assert "more than 19 lines" in refused(path)
        assert "20 rows of" in refused(parquet)
    with monkeypatch.context() as limits:
        limits.setattr(files, "MAX_LINE_BYTES", 50)
        assert "line 1 has more than 50 bytes" in refused(path)
    with monkeypatch.context() as limits:
        limits.setattr(files, "MAX_FILE_BYTES", 1000)
        assert "bytes, limit 1,000" in refused(path)
    with monkeypatch.context() as limits:
        limits.setattr(rows, "MAX_TEXT_CHARS", 49)
        assert "prompt has 50 characters, limit 49" in refused(path)
    assert len(load.load(str(path)).prompts) == 20


def test_parquet_without_pyarrow_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_parquet(tmp_path / "x.parquet", [speed_row(1)])
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(MissingError, match=r"pip install 'paceline\[prove\]'") as caught:
        load.load(str(path))
    assert caught.value.exit_code == 3
    assert load.load(str(write_jsonl(tmp_path / "x.jsonl", [speed_row(1)]))).prompts, "JSONL needs no package"


def test_a_folder_without_the_split_says_what_it_has(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="no file or folder"):
        load.load(str(tmp_path / "none"))
    with pytest.raises(MissingError, match="cannot look for aaa"):
        load.load("a" * 5_000)
    with pytest.raises(MissingError, match="cannot look for ~nobody-of-that-name"):
        load.load("~nobody-of-that-name/data")
    write_jsonl(tmp_path / "other.jsonl", [speed_row(1)])
    with pytest.raises(NotFoundError, match=r"no split qualitative.*only other\.jsonl; give a file by its name"):
        load.load(str(tmp_path))
    write_jsonl(tmp_path / "qualitative.jsonl", [speed_row(1)])
    write_parquet(tmp_path / "qualitative" / "test.parquet", [speed_row(2)])
    assert "holds qualitative twice" in refused(tmp_path)
    with pytest.raises(BadInputError, match="--split 'throughput_3k' is unknown; SPEED-Bench has qualitative, throughput_1k"):
        load.load(str(tmp_path), "throughput_3k")
