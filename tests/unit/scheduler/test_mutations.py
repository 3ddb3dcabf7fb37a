"""Planted faults: each must be caught by the random schedules. A fault that survives means that the properties have a hole."""

import inspect
import random
import sys
import textwrap
from types import FunctionType

import pytest

from paceline.scheduler.page_pool import PagePool
from paceline.scheduler.passes import StepBuilder
from paceline.scheduler.prefix_cache import PrefixCache
from paceline.scheduler.residents import Residents
from paceline.scheduler.row import Row
from paceline.scheduler.scheduler import Scheduler
from tests.unit.scheduler.test_invariants import careless_fits, check, random_scenario

MAX_SCENARIOS = 400

MUTATIONS = {
    # overlap arithmetic
    "upper bound ignores drafts in flight": (Row, "look_ahead", "max_len += span.draft_budget + 1", "max_len += 1", 2),
    "lower bound counts drafts as certain": (Row, "look_ahead", "min_len += 1", "min_len += span.draft_budget + 1", 2),
    "drafter pending forgets full acceptance": (Row, "look_ahead", "1 if span.draft_budget else 0", "0", 2),
    "drafter pending forgets the new token": (Row, "look_ahead", "draft_pending += 1", "pass", 2),
    "prefill in flight does not advance": (Row, "look_ahead", "span.start + span.num_new_tokens", "span.start", 2),
    "prefill in flight advances the drafter without catch-up": (Row, "look_ahead", "-= span.draft_catch_up", "-= span.num_new_tokens", 2),
    "partial catch-up counts as full": (Row, "look_ahead", "span.draft_catch_up >= draft_pending", "span.draft_catch_up > 0", 2),
    "decode may pass max_model_len": (StepBuilder, "_is_needed", "outlook.max_len <= self._limits.max_model_len and ", "", 2),
    "drafts may pass max_model_len": (StepBuilder, "_draft_room", "self._limits.max_model_len - max_len,", "", 2),
    "drafts may pass the drafter's context": (StepBuilder, "_draft_room", "self._limits.drafter_max_len - max_len,", "", 1),
    # pages
    "a row ends with a step in flight and its pages go back": (Scheduler, "_finish", "and not row.in_flight", "", 2),
    "pages of a step in flight are cut": (Scheduler, "_commit_row", "row.num_covered_tokens if row.in_flight else ", "", 2),
    "unused tail pages stay": (Scheduler, "_commit_row", "self._residents.trim(", "(lambda *_: None)(", 1),
    "pages of a finished row stay": (Scheduler, "commit", "self._residents.release(row)", "pass", 2),
    "the device is not told of cut pages": (Residents, "trim", "self._freed[row.sequence.slot] = num_pages", "pass", 1),
    "cut pages of the former owner of a slot are told": (Residents, "release", "self._freed.pop(slot, None)", "pass", 1),
    "a slot is not told to be released": (Residents, "release", "self._released.append(slot)", "pass", 1),
    "a victim has a step in flight": (StepBuilder, "_youngest_idle", "not victim.in_flight", "True", 2),
    "a victim keeps its count": (StepBuilder, "_preempt", "sequence.num_computed_tokens = 0", "pass", 1),
    "a victim queues at the end": (
        StepBuilder,
        "_preempt",
        "bisect_left(self._waiting, victim.order, key=lambda row: row.order)",
        "9999",
        1,
    ),
    "the blocked row's juniors run on": (StepBuilder, "_make_room", "self._blocked_order = row.order", "pass", 2),
    "a released page keeps its content's name": (PagePool, "reserve", "self._forget(page_id)", "pass", 1),
    "a shared page stays among the free": (PagePool, "share", "del self._kept[page_id]", "pass", 1),
    # prefix cache
    "a full hit leaves nothing to compute": (Residents, "match", "(len(token_ids) - 1)", "len(token_ids)", 1),
    "pages enter before they are computed": (
        Residents,
        "remember",
        "num_pages = sequence.num_computed_tokens",
        "num_pages = len(sequence.token_ids)",
        1,
    ),
    "a resumed row counts the cached pages it had": (
        Residents,
        "admit",
        "row.num_cached_pages = len(cached)",
        "row.num_cached_pages = max(row.num_cached_pages, len(cached))",
        1,
    ),
    "the drafter's half is taken as valid": (Residents, "admit", "num_draft_pages * self.pool", "len(cached) * self.pool", 1),
    "the drafter's half of another copy is filled": (PrefixCache, "fill_drafter_half", " and entry.page_id == page_id", "", 1),
    "the parent is not part of the hash": (PrefixCache, "hash_pages", "parent + tokens", "tokens", 1),
    # budget and ends
    "catch-up is free": (StepBuilder, "_spend", "share - max(work.draft_catch_up - 1, 0)", "share", 1),
    "catch-up passes its share": (StepBuilder, "_spend", "min(work.catch_up_wish, share + 1)", "work.catch_up_wish", 1),
    "a prompt chunk catches up beyond its end": (StepBuilder, "_draft_row", "num_pending = end - ", "num_pending = num_tokens + 9 - ", 1),
    "new tokens are not charged": (StepBuilder, "_add", "self._num_tokens_left -= work.num_new_tokens", "pass", 1),
    "the length cap comes before the stop token": (
        Scheduler,
        "_append",
        "if token_id in row.stop_token_ids:",
        "if token_id in row.stop_token_ids and len(sequence.token_ids) < max_len:",
        1,
    ),
    "tokens after the stop are delivered": (
        Scheduler,
        "_append",
        "return new_token_ids[:num_appended], FinishReason.STOP",
        "return new_token_ids, FinishReason.STOP",
        1,
    ),
    "an ended row still commits": (Scheduler, "commit", "if not row.is_finished:", "if True:", 2),
}


def plant(monkeypatch: pytest.MonkeyPatch, owner: type, name: str, old: str, new: str) -> None:
    """Replaces a method by its source with one edit."""
    source = textwrap.dedent(inspect.getsource(getattr(owner, name)))
    assert source.count(old) >= 1, f"{owner.__name__}.{name} no longer reads {old!r}"
    namespace = dict(vars(sys.modules[owner.__module__]))
    exec(source.replace(old, new), namespace)
    mutant = namespace[name]
    assert isinstance(mutant, FunctionType)
    monkeypatch.setattr(owner, name, mutant)


def first_failure(depth: int) -> int | None:
    for seed in range(MAX_SCENARIOS):
        with pytest.MonkeyPatch.context() as monkeypatch:
            if seed % 2:
                monkeypatch.setattr(StepBuilder, "_fits", careless_fits)
            try:
                check(random_scenario(random.Random(seed)), depth)
            except (AssertionError, LookupError, ValueError):
                return seed
    return None


@pytest.mark.parametrize("fault", MUTATIONS)
def test_fault_is_caught(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name, old, new, depth = MUTATIONS[fault]
    plant(monkeypatch, owner, name, old, new)
    assert first_failure(depth) is not None, f"survived {MAX_SCENARIOS} schedules"
