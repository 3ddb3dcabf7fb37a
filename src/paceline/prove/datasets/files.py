"""Files of prompts as rows: JSON lines, and parquet through pyarrow if it is there. Called by `load.py`; knows nothing of data sets.

Sizes are checked before anything is read into memory.
"""

import importlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol, cast

from paceline.errors import BadInputError, MissingError
from paceline.prove.datasets.rows import Row

MAX_FILE_BYTES = 512 << 20  # SPEED-Bench's largest split has 111 MB
MAX_LINE_BYTES = 64 << 20
MAX_ROWS = 100_000
PARQUET_COLUMNS = ("question_id", "category", "turns", "messages", "prompt", "system", "source", "src_id")
_PARQUET_MAGIC = b"PAR1"


def read_rows(path: Path) -> list[Row]:
    """Every row of a parquet or JSON-lines file, told apart by the first bytes.

    Raises:
        BadInputError: not such a file, or too large.
        MissingError: the file is parquet and pyarrow is not installed, or the file cannot be read.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            is_parquet = file.read(len(_PARQUET_MAGIC)) == _PARQUET_MAGIC
    except OSError as error:
        raise MissingError(f"cannot read {path}: {error.strerror}") from error
    if size > MAX_FILE_BYTES:
        raise BadInputError(f"{path} has {size:,} bytes, limit {MAX_FILE_BYTES:,}; split it")
    rows = list(_parquet_rows(path) if is_parquet else _json_rows(path))
    if not rows:
        raise BadInputError(f"{path} holds no row")
    return rows


def _json_rows(path: Path) -> Iterator[Row]:
    with path.open("rb") as file:
        for number in range(1, 10 * MAX_ROWS):
            line = file.readline(MAX_LINE_BYTES + 1)
            if not line:
                return
            where = f"{path.name}, line {number}"
            if len(line) > MAX_LINE_BYTES:
                raise BadInputError(f"{where} has more than {MAX_LINE_BYTES:,} bytes; one JSON object a line is read")
            if number > MAX_ROWS:
                raise BadInputError(f"{path} has more than {MAX_ROWS:,} lines; take a part of it")
            if line.strip():
                yield Row(where, json_fields(line.removeprefix(b"\xef\xbb\xbf"), where))


def json_fields(line: bytes, where: str) -> dict[str, object]:
    """The JSON object of one line.

    Raises:
        BadInputError: the line is no JSON object.
    """
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise BadInputError(f"{where} is no JSON ({error}); one JSON object a line is read") from None
    if not isinstance(fields, dict):
        raise BadInputError(f"{where} is no JSON object but a {type(fields).__name__}; one JSON object a line is read")
    return cast("dict[str, object]", fields)


class _Schema(Protocol):
    names: Sequence[str]


class _RowGroup(Protocol):
    total_byte_size: int


class _Metadata(Protocol):
    num_rows: int
    num_row_groups: int

    def row_group(self, index: int, /) -> _RowGroup: ...


class _Batch(Protocol):
    def to_pylist(self) -> list[dict[str, object]]: ...


class _ParquetFile(Protocol):
    metadata: _Metadata
    schema_arrow: _Schema

    def iter_batches(self, *, batch_size: int, columns: Sequence[str]) -> Iterator[_Batch]: ...


class _Parquet(Protocol):
    """The part of pyarrow.parquet that is used here; the package has no types of its own."""

    def ParquetFile(self, source: str, /) -> _ParquetFile: ...  # noqa: N802 - its name


def _parquet_rows(path: Path) -> Iterator[Row]:
    try:
        parquet = cast("_Parquet", importlib.import_module("pyarrow.parquet"))
    except ImportError:
        raise MissingError(f"{path} is parquet, which needs pyarrow: pip install 'paceline[prove]'") from None
    try:
        file = parquet.ParquetFile(str(path))
        metadata = file.metadata
        num_bytes = sum(metadata.row_group(index).total_byte_size for index in range(metadata.num_row_groups))
        if metadata.num_rows > MAX_ROWS or num_bytes > MAX_FILE_BYTES:
            raise BadInputError(
                f"{path} has {metadata.num_rows:,} rows of {num_bytes:,} bytes, limits {MAX_ROWS:,} and {MAX_FILE_BYTES:,}; "
                "take a part of it"
            )
        columns = [name for name in PARQUET_COLUMNS if name in file.schema_arrow.names]
        number = 0
        for batch in file.iter_batches(batch_size=256, columns=columns):
            for fields in batch.to_pylist():
                number += 1
                yield Row(f"{path.name}, row {number}", {name: value for name, value in fields.items() if value is not None})
    except (ValueError, OSError) as error:  # pyarrow's own errors are kinds of these
        raise BadInputError(f"{path} is no parquet file that can be read: {error}") from None
