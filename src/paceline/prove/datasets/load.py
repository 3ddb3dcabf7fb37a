"""`--data` and `--split` as a data set: the shipped one by its name, or a file or folder, taken for what its content says.

Called by `paceline prove`. Nothing is fetched, repaired or left out: what cannot be asked as it stands is refused with its line.
"""

from collections.abc import Iterator
from pathlib import Path

from paceline.errors import BadInputError, MissingError, NotFoundError
from paceline.prove.datasets import rows as row_forms
from paceline.prove.datasets import shipped
from paceline.prove.datasets.files import MAX_ROWS, read_rows
from paceline.prove.datasets.prompt import CATEGORIES, ENTROPY_TIERS, Dataset, Prompt
from paceline.prove.datasets.rows import Format, Row

QUALITATIVE = "qualitative"
THROUGHPUT = ("throughput_1k", "throughput_2k", "throughput_8k", "throughput_16k", "throughput_32k")
SPLITS = (QUALITATIVE, *THROUGHPUT)
"""SPEED-Bench's."""

_SHOWN_FILES = 10


def load(data: str, split: str = QUALITATIVE) -> Dataset:
    """The data set that `--data` names; its label says what it was taken for.

    Args:
        data: "speed-bench-like", or a file or folder: SPEED-Bench (parquet or JSONL, prepared by either of its resolvers), Spec-Bench's
            or MT-Bench's question.jsonl, or JSON lines with `prompt`, `turns` or `messages`.
        split: one of SPLITS. Only SPEED-Bench and the shipped set have several.

    Raises:
        BadInputError: unknown split, or a row that cannot be asked, with its line.
        NotFoundError: no such file, or none for that split in the folder.
        MissingError: parquet without pyarrow, or the file cannot be read.
    """
    if split not in SPLITS:
        raise BadInputError(f"--split {split!r} is unknown; SPEED-Bench has {', '.join(SPLITS)}")
    if data == shipped.NAME:
        return shipped.load(split)
    try:
        paths = find(Path(data).expanduser(), split)
    except (OSError, RuntimeError) as error:  # a name that is too long, a folder that may not be listed, a user without a home
        raise MissingError(f"cannot look for {data[:200]}: {error}") from error
    found = [row for path in paths for row in read_rows(path)]
    if len(found) > MAX_ROWS:
        raise BadInputError(f"{len(found):,} rows in {len(paths)} files, limit {MAX_ROWS:,}; take a part of them")
    form = row_forms.guess(found[0])
    if form is not Format.SPEED_BENCH and split != QUALITATIVE:
        raise BadInputError(f"{paths[0]} was taken for {_name(form)}, which has no splits; leave --split out")
    row_forms.refuse_placeholders(found)
    prompts = tuple(_prompts(form, found, split))
    if form is Format.SPEED_BENCH:
        # Only the original's rows say which row of which source they are: files of others' in its form are not called by its name.
        name = "SPEED-Bench" if all("src_id" in row.fields for row in found) else "prompts in SPEED-Bench's form"
        return Dataset(f"{name}, {split} ({paths[0].name})", split, prompts)
    return Dataset(f"{_name(form)} ({paths[0].name})", form.value.lower(), prompts)


def _name(form: Format) -> str:
    return "a file of prompts" if form is Format.PROMPTS else form.value


def _prompts(form: Format, found: list[Row], split: str) -> Iterator[Prompt]:
    seen: dict[str, str] = {}
    for row in found:
        if form is Format.SPEED_BENCH:
            prompt = row_forms.speed_bench(row, CATEGORIES if split == QUALITATIVE else ENTROPY_TIERS)
        else:
            prompt = row_forms.spec_bench(row) if form is Format.SPEC_BENCH else row_forms.prompt(row)
        if prompt.question_id in seen:
            raise BadInputError(f"{row.where} repeats {seen[prompt.question_id]}: both have the id {prompt.question_id}; remove one")
        seen[prompt.question_id] = row.where
        yield prompt


def find(path: Path, split: str) -> list[Path]:
    """The files of a split: the file itself, or in a folder those under the names that the resolvers and the hub give them.

    Raises:
        NotFoundError: nothing there, with what is.
        BadInputError: several that would do.
    """
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise NotFoundError(f"no file or folder {path}; --data takes one, or {shipped.NAME}")
    names = [f"{split}.jsonl", f"{split}.parquet", *(["question.jsonl"] if split == QUALITATIVE else [])]
    choices = [[path / name] for name in names if (path / name).is_file()]
    for folder in (path / split, path if path.name == split else path / split / "data"):
        shards = sorted(folder.glob("test*.parquet"))
        choices += [shards] if shards else []
    if len(choices) > 1:
        raise BadInputError(
            f"{path} holds {split} twice: {', '.join(str(files[0].relative_to(path)) for files in choices)}; give one of them"
        )
    if not choices:
        there = sorted(item.name for item in path.iterdir())
        shown = ", ".join(there[:_SHOWN_FILES]) + (", ..." if len(there) > _SHOWN_FILES else "") or "nothing"
        raise NotFoundError(
            f"{path} has no split {split}: neither {split}.jsonl nor {split}.parquet nor {split}/test.parquet, only {shown}; "
            "give a file by its name, or another --split"
        )
    return choices[0]
