"""Who lives on the device: slots and pages of running rows, and the changes that the next plan must tell the device of.

Every change of a page list or slot goes through here, so that the device's lists, extended by plans alone, never drift. The four
passes (`passes.py`) and the commit (`scheduler.py`) decide; nothing is decided here.
"""

from bisect import insort
from dataclasses import dataclass

from paceline.core.plan import Admission
from paceline.core.sequence import SequenceStatus
from paceline.scheduler.page_pool import PagePool
from paceline.scheduler.prefix_cache import CachedPage, PrefixCache
from paceline.scheduler.row import Row


@dataclass(frozen=True, slots=True)
class DeviceChanges:
    """The bookkeeping half of a StepPlan; see there for the order."""

    released_slots: tuple[int, ...]
    admitted: tuple[Admission, ...]
    freed_pages: tuple[tuple[int, int], ...]
    new_pages: tuple[tuple[int, tuple[int, ...]], ...]


class Residents:
    """Slots, page lists and the rows that own them."""

    def __init__(self, num_slots: int, num_pages: int, page_size: int, enable_prefix_caching: bool) -> None:
        self.cache = PrefixCache(page_size)
        self.pool = PagePool(num_pages, page_size, self.cache.forget)
        self.running: list[Row] = []  # oldest first
        self.by_slot: dict[int, Row] = {}  # also finished rows that a step in flight still works for
        self._enable_prefix_caching = enable_prefix_caching
        self._free_slots = list(range(num_slots - 1, -1, -1))
        self._released: list[int] = []
        self._admitted: list[Admission] = []
        self._freed: dict[int, int] = {}
        self._added: dict[int, list[int]] = {}

    @property
    def has_free_slot(self) -> bool:
        return bool(self._free_slots)

    def match(self, row: Row) -> list[CachedPage]:
        """Cached pages that hold the row's leading tokens. One token always stays to be computed: its logits are wanted.

        Of a prompt whose log-probabilities are asked for all tokens are.
        """
        if not self._enable_prefix_caching or row.request.sampling.num_prompt_logprobs is not None:
            return []
        token_ids = row.sequence.token_ids
        num_pages = (len(token_ids) - 1) // self.pool.page_size
        self.cache.hash_pages(row.page_hashes, row.request.cache_salt, token_ids, num_pages)
        return self.cache.match(row.page_hashes[:num_pages])

    def admit(self, row: Row, cached: list[CachedPage]) -> None:
        """Gives a waiting row a slot and the cached pages that `match` found."""
        sequence = row.sequence
        assert sequence.slot is None, f"{row.request.request_id} already has slot {sequence.slot}"
        assert not sequence.page_ids, f"{row.request.request_id} has pages without a slot"
        slot = self._free_slots.pop()
        num_draft_pages = next((i for i, page in enumerate(cached) if not page.has_drafter_half), len(cached))
        for page in cached:
            self.pool.share(page.page_id)
            sequence.page_ids.append(page.page_id)
        sequence.slot = slot
        sequence.status = SequenceStatus.RUNNING
        sequence.num_computed_tokens = len(cached) * self.pool.page_size
        sequence.num_draft_computed_tokens = num_draft_pages * self.pool.page_size
        row.num_cached_pages = len(cached)
        row.num_cached_draft_pages = num_draft_pages
        if cached:
            self._added[slot] = list(sequence.page_ids)
        self._admitted.append(
            Admission(
                slot=slot,
                token_ids=tuple(sequence.token_ids),
                num_prompt_tokens=sequence.num_prompt_tokens,
                sampling=row.request.sampling,
                stop_token_ids=tuple(sorted(row.stop_token_ids)),
                num_computed_tokens=sequence.num_computed_tokens,
                num_draft_computed_tokens=sequence.num_draft_computed_tokens,
                prediction_token_ids=row.request.prediction_token_ids,
            )
        )
        self.by_slot[slot] = row
        insort(self.running, row, key=lambda each: each.order)

    def grow(self, row: Row, num_tokens: int) -> bool:
        """Extends the row's pages to cover `num_tokens` tokens; False, with nothing taken, if the free pages do not suffice."""
        page_ids = row.sequence.page_ids
        if num_tokens <= len(page_ids) * self.pool.page_size:
            return True
        num_missing = self.pool.pages_for(num_tokens) - len(page_ids)
        if num_missing > self.pool.num_free:
            return False
        self._take(row, num_missing)
        return True

    def stretch(self, row: Row, num_tokens: int) -> int:
        """Extends the row's pages towards `num_tokens` tokens as far as free pages allow; returns how many of them are covered."""
        num_missing = self.pool.pages_for(num_tokens) - len(row.sequence.page_ids)
        num_taken = min(num_missing, self.pool.num_free)
        if num_taken > 0:
            self._take(row, num_taken)
        return min(num_tokens, len(row.sequence.page_ids) * self.pool.page_size)

    def trim(self, row: Row, num_tokens: int) -> None:
        """Gives back the row's pages beyond `num_tokens` tokens."""
        page_ids = row.sequence.page_ids
        num_pages = self.pool.pages_for(num_tokens)
        if len(page_ids) > num_pages:
            self.pool.truncate(page_ids, num_pages)
            assert row.sequence.slot is not None, "a row with pages has a slot"
            self._freed[row.sequence.slot] = num_pages

    def remember(self, row: Row) -> None:
        """Enters the row's full pages of committed tokens into the prefix cache, and the drafter's halves as they become valid."""
        if not self._enable_prefix_caching:
            return
        sequence = row.sequence
        num_pages = sequence.num_computed_tokens // self.pool.page_size
        num_draft_pages = min(sequence.num_draft_computed_tokens // self.pool.page_size, num_pages)
        if num_pages > row.num_cached_pages:
            self.cache.hash_pages(row.page_hashes, row.request.cache_salt, sequence.token_ids, num_pages)
            for index in range(row.num_cached_pages, num_pages):
                # A row that computed the same prefix at the same time keeps its own copy, unknown to the cache.
                if self.cache.insert(row.page_hashes[index], sequence.page_ids[index]):
                    self.pool.keep(sequence.page_ids[index])
            row.num_cached_pages = num_pages
        for index in range(row.num_cached_draft_pages, num_draft_pages):
            self.cache.fill_drafter_half(row.page_hashes[index], sequence.page_ids[index])
        row.num_cached_draft_pages = max(row.num_cached_draft_pages, num_draft_pages)

    def stop_running(self, row: Row) -> None:
        """A finished row runs no more, but keeps slot and pages until `release`."""
        self.running.remove(row)

    def release(self, row: Row) -> None:
        """Gives back the slot and all pages of a row that no step in flight works for."""
        sequence = row.sequence
        slot = sequence.slot
        assert slot is not None, "only a row with a slot can give it back"
        assert not row.in_flight, f"slot {slot} is released with {len(row.in_flight)} steps in flight"
        assert slot not in self._added, f"slot {slot} is released in the plan that extends it"
        self.pool.release(sequence.page_ids)
        sequence.slot = None
        del self.by_slot[slot]
        self._freed.pop(slot, None)
        self._free_slots.append(slot)
        self._released.append(slot)

    def take_changes(self) -> DeviceChanges:
        """What the device must be told, once."""
        changes = DeviceChanges(
            released_slots=tuple(self._released),
            admitted=tuple(self._admitted),
            freed_pages=tuple(self._freed.items()),
            new_pages=tuple((slot, tuple(page_ids)) for slot, page_ids in self._added.items()),
        )
        self._released.clear()
        self._admitted.clear()
        self._freed.clear()
        self._added.clear()
        return changes

    def _take(self, row: Row, num_pages: int) -> None:
        pages = self.pool.reserve(num_pages)
        row.sequence.page_ids.extend(pages)
        assert row.sequence.slot is not None, "pages belong to a row with a slot"
        self._added.setdefault(row.sequence.slot, []).extend(pages)
