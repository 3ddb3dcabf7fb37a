"""A journal gives back what was written, a torn line excepted."""

from pathlib import Path

import pytest

from paceline.errors import BadInputError, MissingError, NotFoundError
from paceline.prove import journal
from paceline.prove.journal import Journal, read_journal
from paceline.prove.record import Acceptance, Arm, BlockRun, Phase, RequestRecord

RECORD = RequestRecord(
    Arm.SPECULATIVE, Phase.MEASURE, 4, 2, 7, "q" * 32, "coding", 1, 10.125, (10.5, 10.75), (1, 3), 10.8, 9, 0, 4, "stop", 200, None,
    'text "\n\u2028', (5, 6, 7, 8), 96, acceptance=Acceptance(1, 3, 2, (0, 0, 1, 0), 3, 0, 0),
)  # fmt: skip
RUN = BlockRun(Arm.BASELINE, Phase.WARM_UP, 0, 2, 7, 10.0, 11.5, {"a_total": 1.0}, {"a_total": 3.5}, rate_per_s=2.5)


def test_what_was_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "new" / "raw.jsonl"
    with Journal(path) as first:
        first.add_request(RECORD)
    with Journal(path) as second:  # a later measurement goes on in the same file
        second.add_run(RUN)
        second.add_note(arm=Arm.BASELINE, seeds=(1, 2))
    contents = read_journal(path)
    assert (contents.records, contents.runs, contents.num_torn) == ((RECORD,), (RUN,), 0)
    assert contents.notes == ({"arm": "baseline", "seeds": [1, 2]},)


def test_each_record_is_in_the_file_at_once(tmp_path: Path) -> None:
    path = tmp_path / "raw.jsonl"
    open_journal = Journal(path)
    open_journal.add_request(RECORD)
    assert read_journal(path).records == (RECORD,), "before the journal is closed"
    open_journal.close()


def test_a_torn_line_is_counted_and_does_not_spoil_the_next(tmp_path: Path) -> None:
    path = tmp_path / "raw.jsonl"
    with Journal(path) as writer:
        writer.add_request(RECORD)
        writer.add_run(RUN)
    whole = path.read_bytes()
    for cut in range(1, 60):
        path.write_bytes(whole[:-cut])
        contents = read_journal(path)
        assert contents.records == (RECORD,)
        assert len(contents.runs) + contents.num_torn == 1
        with Journal(path) as again:
            again.add_request(RECORD)
        assert read_journal(path).records == (RECORD, RECORD), cut


def test_what_is_no_journal_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError):
        read_journal(tmp_path / "none.jsonl")
    (tmp_path / "other").write_text('{"a": 1}\nhello\n')
    with pytest.raises(BadInputError, match="no line of a journal"):
        read_journal(tmp_path / "other")
    with pytest.raises(BadInputError, match="cannot read"):
        read_journal(tmp_path)


def test_bounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "raw.jsonl"
    with Journal(path) as writer:
        monkeypatch.setattr(journal, "MAX_LINE_BYTES", 100)
        with pytest.raises(BadInputError, match="shorter answers"):
            writer.add_request(RECORD)
        monkeypatch.setattr(journal, "MAX_LINE_BYTES", 10_000)
        monkeypatch.setattr(journal, "MAX_FILE_BYTES", 100)
        with pytest.raises(BadInputError, match="several parts"):
            writer.add_request(RECORD)
    assert path.read_bytes() == b""
    path.write_bytes(b"x" * 20_000)
    with pytest.raises(BadInputError, match="it is no journal"):
        read_journal(path)


def test_a_full_disk_says_so() -> None:
    with Journal(Path("/dev/full")) as full, pytest.raises(MissingError, match="free some space"):
        full.add_request(RECORD)
