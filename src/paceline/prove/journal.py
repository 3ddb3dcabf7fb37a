"""The raw records of a measurement in a file, one JSON object a line, each in the file before anything is computed from it.

Append-only and flushed line by line: what was measured survives a crash and Ctrl-C. Written by `measure.py`, read by whoever computes.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import msgspec

from paceline.errors import BadInputError, MissingError, NotFoundError
from paceline.prove.record import BlockRun, RequestRecord

MAX_LINE_BYTES = 64 * 1024 * 1024
MAX_FILE_BYTES = 16 * 1024**3


class _Line(msgspec.Struct, frozen=True, omit_defaults=True):
    """One line: exactly one of these."""

    request: RequestRecord | None = None
    run: BlockRun | None = None
    note: dict[str, object] | None = None


@dataclass(frozen=True, slots=True)
class JournalContents:
    """What a journal holds, in its order."""

    records: tuple[RequestRecord, ...]
    runs: tuple[BlockRun, ...]
    notes: tuple[dict[str, object], ...]  # what was planned, and what the servers are
    num_torn: int  # lines that cannot be read: the last one, if the writer was killed while it wrote


class Journal:
    """An open journal. Raises MissingError where the file cannot be written."""

    def __init__(self, path: Path) -> None:
        """Continues a file that exists; a torn line at its end is closed off."""
        self.path = path
        self._encoder = msgspec.json.Encoder()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("ab+", buffering=0)  # nothing is left to write when a record is added, nor when the disk is full
            self._num_bytes = self._file.seek(0, 2)
            if self._num_bytes:
                self._file.seek(-1, 2)
                if self._file.read(1) != b"\n":
                    self._write(b"\n")
        except OSError as error:
            raise self._failure(error) from None

    def __enter__(self) -> "Journal":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        self._file.close()

    def add_request(self, record: RequestRecord) -> None:
        self._add(_Line(request=record))

    def add_run(self, run: BlockRun) -> None:
        self._add(_Line(run=run))

    def add_note(self, **facts: object) -> None:
        """Anything else that a reader will want to know; values must be what JSON can hold, or dataclasses."""
        self._add(_Line(note=facts))

    def _add(self, line: _Line) -> None:
        encoded = self._encoder.encode(line) + b"\n"
        if len(encoded) > MAX_LINE_BYTES:
            raise BadInputError(f"one record has {len(encoded):,} bytes, limit {MAX_LINE_BYTES:,}; ask for shorter answers")
        if self._num_bytes + len(encoded) > MAX_FILE_BYTES:
            raise BadInputError(f"{self.path} would grow beyond {MAX_FILE_BYTES:,} bytes; measure in several parts")
        try:
            self._write(encoded)
        except OSError as error:
            raise self._failure(error) from None

    def _write(self, encoded: bytes) -> None:
        rest = memoryview(encoded)
        while rest:
            rest = rest[self._file.write(rest) :]
        self._num_bytes += len(encoded)

    def _failure(self, error: OSError) -> MissingError:
        return MissingError(f"cannot write the raw records to {self.path}: {error.strerror}; free some space or name another file")


def read_journal(path: Path) -> JournalContents:
    """Everything that a journal holds. Raises NotFoundError if there is none, BadInputError if it is none."""
    records: list[RequestRecord] = []
    runs: list[BlockRun] = []
    notes: list[dict[str, object]] = []
    num_torn = 0
    decoder = msgspec.json.Decoder(_Line)
    for encoded in _lines(path):
        try:
            line = decoder.decode(encoded)
        except (msgspec.DecodeError, RecursionError):
            num_torn += 1
            continue
        if line.request is not None:
            records.append(line.request)
        elif line.run is not None:
            runs.append(line.run)
        elif line.note is not None:
            notes.append(line.note)
        else:
            num_torn += 1
    if num_torn and not (records or runs or notes):
        raise BadInputError(f"{path} holds no line of a journal; give the .jsonl file that a measurement wrote")
    return JournalContents(tuple(records), tuple(runs), tuple(notes), num_torn)


def _lines(path: Path) -> Iterator[bytes]:
    try:
        with path.open("rb") as file:
            while encoded := file.readline(MAX_LINE_BYTES + 1):
                if len(encoded) > MAX_LINE_BYTES:
                    raise BadInputError(f"{path} has a line of more than {MAX_LINE_BYTES:,} bytes; it is no journal")
                if encoded != b"\n":
                    yield encoded
    except FileNotFoundError:
        raise NotFoundError(f"there is no file {path}") from None
    except OSError as error:
        raise BadInputError(f"cannot read {path}: {error.strerror}") from None
