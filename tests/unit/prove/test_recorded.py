"""What goes into a journal comes out of it as the measurement that it was."""

from dataclasses import replace
from pathlib import Path

import pytest

from paceline.errors import BadInputError, NotFoundError
from paceline.prove.journal import Journal
from paceline.prove.judgement import Objectives
from paceline.prove.plan import Measurement, Plan
from paceline.prove.recorded import note_before, note_certificate, note_environment, read_recorded
from paceline.prove.sides import told
from tests.fakes.made_proof import made_environment, made_proof
from tests.fakes.made_records import made_dataset, made_measurement

DATASET = made_dataset()
MEASUREMENT = made_measurement(DATASET)
OBJECTIVES = Objectives(ttft_ms=300.0, tpot_ms=None, e2e_ms=5000.0)


def record(path: Path, measurement: Measurement, draft_lengths: tuple[int, ...] = ()) -> None:
    """Write a journal as `run.prove` and `measure` do."""
    plan = Plan("http://127.0.0.1:1", DATASET, draft_lengths=draft_lengths)
    with Journal(path) as journal:
        note_before(journal, DATASET, is_quick=True, criteria="cpu", objectives=OBJECTIVES)
        journal.add_note(plan=told(plan), servers=measurement.servers, time_s=1.0)
        for one in measurement.records:
            journal.add_request(one)
        for run in measurement.runs:
            journal.add_run(run)
        journal.add_note(warnings=measurement.warnings, is_complete=measurement.is_complete, loop_lag_p99_ms=measurement.loop_lag_p99_ms)


def test_a_measurement_comes_back_whole(tmp_path: Path) -> None:
    path = tmp_path / "a.records.jsonl"
    measurement = replace(MEASUREMENT, warnings=("mind this",))
    certificate = made_proof().certificate
    assert certificate is not None
    record(path, measurement)
    with Journal(path) as journal:
        note_certificate(journal, certificate)
        note_environment(journal, made_environment())
    found = read_recorded(path)
    assert found.measurement == measurement
    assert found.dataset == DATASET
    assert found.dataset.sha256 == DATASET.sha256
    assert (found.is_quick, found.criteria, found.objectives) == (True, "cpu", OBJECTIVES)
    assert found.certificate == certificate
    assert found.environment == made_environment()


def test_records_from_before_there_were_objectives_have_the_built_in_ones(tmp_path: Path) -> None:
    path = tmp_path / "a.records.jsonl"
    record(path, MEASUREMENT)
    text = path.read_text()
    cut = text.replace(',"objectives":{"ttft_ms":300.0,"tpot_ms":null,"e2e_ms":5000.0}', "")
    assert cut != text
    path.write_text(cut)
    assert read_recorded(path).objectives == Objectives()


def test_draft_lengths_are_those_asked_for_or_those_a_pilot_chose(tmp_path: Path) -> None:
    record(tmp_path / "one", MEASUREMENT, (3,))
    assert read_recorded(tmp_path / "one").measurement.draft_lengths == {1: 3}
    record(tmp_path / "two", MEASUREMENT, (1, 5))
    with Journal(tmp_path / "two") as journal:
        journal.add_note(point="concurrency 1", draft_length=5, pilot_tokens_per_s={1: 9.0, 5: 10.0})
    assert read_recorded(tmp_path / "two").measurement.draft_lengths == {1: 5}


def test_what_was_killed_in_the_midst_is_incomplete_and_says_what_is_torn(tmp_path: Path) -> None:
    path = tmp_path / "a.records.jsonl"
    record(path, MEASUREMENT)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:-3]) + lines[-3][:20])
    found = read_recorded(path).measurement
    assert not found.is_complete
    assert "1 lines" in found.warnings[0]
    assert found.records == MEASUREMENT.records


def test_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.records.jsonl"
    with pytest.raises(NotFoundError):
        read_recorded(path)
    path.write_text('{"note": {"a": 1}}\n')
    with pytest.raises(BadInputError, match="0 measurements"):
        read_recorded(path)
    path.write_text('{"note": {"servers": 3}}\n')
    with pytest.raises(BadInputError, match="not written by this version"):
        read_recorded(path)
    path.unlink()
    record(path, MEASUREMENT)
    record(path, MEASUREMENT)
    with pytest.raises(BadInputError, match="2 measurements"):
        read_recorded(path)
