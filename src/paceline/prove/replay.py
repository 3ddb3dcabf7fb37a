"""Equal work for arms that do not give the same tokens: one pass records each conversation, then both arms play it. For `measure.py`.

A recording fixes what later turns see and how long each answer is; the texts that an arm makes while it plays are its own. So both arms
read equal prompts and write equal numbers of tokens, and the ratio of their total times is over equal work.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import msgspec

from paceline.errors import BadInputError
from paceline.prove.datasets.prompt import Dataset, Prompt
from paceline.prove.journal import read_journal
from paceline.prove.plan import Plan, ReplayMode, ServerFacts
from paceline.prove.record import Arm, RecordedConversation, RecordedTurn, RequestRecord

MAX_LOST_SHARE = 0.01  # of a recording's conversations that may be missing before it is another measurement's


@dataclass(slots=True)
class Replay:
    """How a measurement stands with replay."""

    is_open: bool = False  # it begins as soon as the arms answer differently
    why: str = ""  # it is used, or why not
    recording: Mapping[str, tuple[RecordedTurn, ...]] | None = None  # by question; None: it is not used

    def turn(self, question_id: str, turn: int) -> RecordedTurn | None:
        turns = () if self.recording is None else self.recording.get(question_id, ())
        return turns[turn] if turn < len(turns) else None


def reason_to_replay(plan: Plan, servers: Mapping[Arm, ServerFacts]) -> str | None:
    """Why the arms are known to differ before they have answered anything; None if only their answers can tell."""
    if plan.recording:
        return "the conversations of an earlier measurement were given to be played again"
    if plan.replay is ReplayMode.ON:
        return "it was asked for"
    for facts in servers.values():
        if facts.is_lossless is False:
            return f"{facts.base_url} says of itself that its speculation changes the output (lossless: false)"
    if plan.temperature > 0 and any(facts.facts.get("verification") != "coupled" for facts in servers.values()):
        return "sampled answers are the same in both arms only with coupled verification, which not every server here says it has"
    return None


def has_equal_work(plan: Plan) -> bool:
    """Whether both arms do equal work whatever they say: all answers of full length, and none that a later turn sees."""
    return plan.ignore_eos and all(len(prompt.turns) == 1 for prompt in plan.dataset.prompts)


def recording_of(
    records: Iterable[RequestRecord], contents: Mapping[tuple[str, int], str], prompts: Iterable[Prompt]
) -> tuple[RecordedConversation, ...]:
    """What the records of a recording pass fix. `contents`: of each (question, turn) what later turns see of its answer.

    A conversation ends before its first answer that is not whole; one without any is left out.
    """
    whole = {(record.question_id, record.turn): record for record in records if record.error is None}
    found: list[RecordedConversation] = []
    for prompt in prompts:
        turns: list[RecordedTurn] = []
        for turn in range(len(prompt.turns)):
            key = (prompt.question_id, turn)
            if key not in whole or key not in contents:
                break
            turns.append(RecordedTurn(contents[key], max(whole[key].num_output_tokens, 1)))
        if turns:
            found.append(RecordedConversation(prompt.question_id, tuple(turns)))
    return tuple(found)


def played(prompts: Sequence[Prompt], recording: Mapping[str, tuple[RecordedTurn, ...]]) -> tuple[Prompt, ...]:
    """The prompts as far as they are recorded."""
    return tuple(
        replace(prompt, turns=prompt.turns[: len(recording[prompt.question_id])]) for prompt in prompts if prompt.question_id in recording
    )


def num_lost(prompts: Iterable[Prompt], recording: Mapping[str, tuple[RecordedTurn, ...]]) -> int:
    """Conversations that are not recorded to their end."""
    return sum(len(recording.get(prompt.question_id, ())) < len(prompt.turns) for prompt in prompts)


def read_recording(path: Path, dataset: Dataset) -> tuple[RecordedConversation, ...]:
    """The recording in the raw records of an earlier measurement of the same data.

    Raises NotFoundError if there is no such file, BadInputError if it holds no recording, or one of other prompts.
    """
    journal = read_journal(path)
    notes = [note["recording"] for note in journal.notes if "recording" in note]
    try:
        found = {one.question_id: one for one in (msgspec.convert(note, RecordedConversation) for note in notes)}
    except msgspec.ValidationError as error:
        raise BadInputError(f"{path} was not written by this version of `prove`: {error}") from None
    if not found:
        raise BadInputError(f"{path} holds no recorded conversations: the arms gave the same tokens there, or could not be made to replay")
    plans = [cast("dict[str, object]", note["plan"]) for note in journal.notes if "plan" in note]
    if all(plan.get("dataset_sha256") != dataset.sha256 for plan in plans):
        raise BadInputError(
            f"{path} was recorded with other prompts than {dataset.label} gives here; "
            "measure with the --data, --split, --category, --num-prompts and --seed of that time"
        )
    turns = {name: one.turns for name, one in found.items()}
    missing = num_lost(dataset.prompts, turns)
    if missing > MAX_LOST_SHARE * len(dataset.prompts):
        raise BadInputError(
            f"{path} lacks {missing:,} of the {len(dataset.prompts):,} conversations of {dataset.label}; "
            "its recording was interrupted: record again"
        )
    return tuple(found[prompt.question_id] for prompt in dataset.prompts if prompt.question_id in found)
