"""A measurement with all that its judgement needs, in a journal and back: a report can be computed again without the server.

`measure` journals answers and runs; the notes added here are the prompts, the options of the judgement and the environment.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar, cast

import msgspec

from paceline.errors import BadInputError
from paceline.prove.certificate.server import Exchange
from paceline.prove.datasets.prompt import Dataset, Prompt
from paceline.prove.journal import Journal, JournalContents, read_journal
from paceline.prove.judgement import Objectives
from paceline.prove.plan import Measurement, ServerFacts
from paceline.prove.record import Arm, BlockRun, Phase, RequestRecord
from paceline.prove.results import Certificate

T = TypeVar("T")
R = TypeVar("R", RequestRecord, BlockRun)
_Notes = Sequence[dict[str, object]]


@dataclass(frozen=True, slots=True)
class Recorded:
    """What a journal held."""

    dataset: Dataset
    measurement: Measurement
    is_quick: bool
    criteria: str | None
    objectives: Objectives
    certificate: Certificate | None
    environment: dict[str, object]


def note_before(journal: Journal, dataset: Dataset, is_quick: bool, criteria: str | None, objectives: Objectives) -> None:
    """What is known before anything is measured; a line per prompt, for one line may not hold a whole split."""
    judged = {"is_quick": is_quick, "criteria": criteria, "objectives": objectives}
    journal.add_note(judged=judged, dataset={"label": dataset.label, "split": dataset.split})
    for prompt in dataset.prompts:
        journal.add_note(prompt=prompt)


def note_certificate(journal: Journal, certificate: Certificate) -> None:
    journal.add_note(certificate=certificate)


def note_exchange(journal: Journal, exchange: Exchange) -> None:
    """One completion of the certificate: kept for whoever doubts it, read by nobody here."""
    journal.add_note(certificate_request=exchange)


def note_environment(journal: Journal, environment: Mapping[str, object]) -> None:
    journal.add_note(environment=dict(environment))


def read_recorded(path: Path) -> Recorded:
    """Raises NotFoundError if there is no such file, BadInputError if it does not hold exactly one measurement."""
    contents = read_journal(path)
    plans = [note for note in contents.notes if "servers" in note]
    if len(plans) != 1:
        raise BadInputError(f"{path} holds {len(plans)} measurements, exactly one can be judged; give the file that one `prove` wrote")
    try:
        return _recorded(contents, plans[0])
    except (msgspec.ValidationError, LookupError, TypeError, AttributeError) as error:
        raise BadInputError(f"{path} was not written by this version of `prove`: {' '.join(str(error).split())}") from None


def _recorded(contents: JournalContents, plan: dict[str, object]) -> Recorded:
    notes = contents.notes
    judged, about = cast(dict[str, Any], _last(notes, "judged", {})), cast(dict[str, Any], _last(notes, "dataset", {}))
    prompts = tuple(msgspec.convert(note["prompt"], Prompt) for note in notes if "prompt" in note)
    certificate, warnings = _last(notes, "certificate", None), _last(notes, "warnings", [])
    torn = (f"{contents.num_torn} lines of the raw records cannot be read",) if contents.num_torn else ()
    set_aside = {place for note in notes if "set_aside" in note for place in msgspec.convert(note["set_aside"], list[int])}
    replay = msgspec.convert(_last(notes, "replay", {}), dict[str, object])
    measurement = Measurement(
        records=tuple(_set_aside(record, set_aside) for record in contents.records),
        runs=tuple(_set_aside(run, set_aside) for run in contents.runs),
        servers=msgspec.convert(plan["servers"], dict[Arm, ServerFacts]),
        draft_lengths=_draft_lengths(contents, plan),
        warnings=(*msgspec.convert(warnings, tuple[str, ...]), *torn),
        loop_lag_p99_ms=msgspec.convert(_last(notes, "loop_lag_p99_ms", 0.0), float),
        is_complete=_last(notes, "is_complete", False) is True,
        replay_why=str(replay.get("why", "")),
    )
    return Recorded(
        dataset=Dataset(str(about["label"]), str(about["split"]), prompts),
        measurement=measurement,
        is_quick=bool(judged["is_quick"]),
        criteria=msgspec.convert(judged["criteria"], str | None),
        objectives=msgspec.convert(judged.get("objectives", {}), Objectives),  # older records have none: the built-in ones
        certificate=None if certificate is None else msgspec.convert(certificate, Certificate),
        environment=msgspec.convert(_last(notes, "environment", {}), dict[str, object]),
    )


def _set_aside(one: R, places: set[int]) -> R:
    """What was measured again by replay, as the first pass that it then became."""
    return replace(one, phase=Phase.SET_ASIDE) if one.place in places else one


def _last(notes: _Notes, name: str, missing: object) -> object:
    return next((note[name] for note in reversed(notes) if name in note), missing)


def _draft_lengths(contents: JournalContents, plan: dict[str, object]) -> dict[int, int | None]:
    """By concurrency: the one that was asked for, or the one that a pilot chose."""
    given = msgspec.convert(cast(dict[str, object], plan["plan"])["draft_lengths"], tuple[int, ...])
    lengths: dict[int, int | None] = {run.concurrency: given[0] if len(given) == 1 else None for run in contents.runs}
    for note in contents.notes:
        if "point" in note and "draft_length" in note:
            number = str(note["point"]).removeprefix("concurrency ")
            lengths[int(number) if number.isdecimal() else 0] = msgspec.convert(note["draft_length"], int)
    return lengths
