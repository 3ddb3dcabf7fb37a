"""The pages of the KV memory, as ids and reference counts.

`residents.py` takes pages for sequences here; `prefix_cache.py` decides which unreferenced pages are worth keeping. No tensors.
"""

from collections import OrderedDict
from collections.abc import Callable


class PagePool:
    """Reference-counted pages. Free ones are unused, or kept: unreferenced with content that the prefix cache still knows.

    Unused pages are handed out first, then kept ones, least recently used first; `forget` is told of each kept page that is reused.
    """

    def __init__(self, num_pages: int, page_size: int, forget: Callable[[int], None]) -> None:
        self.num_pages = num_pages
        self.page_size = page_size  # tokens
        self.ref_counts = [0] * num_pages
        self._unused = list(range(num_pages - 1, -1, -1))
        self._kept: OrderedDict[int, None] = OrderedDict()
        self._is_cached = bytearray(num_pages)
        self._forget = forget

    @property
    def num_free(self) -> int:
        """Pages that `reserve` can hand out now, kept ones included."""
        return len(self._unused) + len(self._kept)

    def pages_for(self, num_tokens: int) -> int:
        """The pages that `num_tokens` tokens fill or begin."""
        return -(-num_tokens // self.page_size)

    def reserve(self, num_pages: int) -> list[int]:
        """Takes pages, each with one reference. The caller has checked `num_free`."""
        assert num_pages <= self.num_free, f"{num_pages} pages wanted, {self.num_free} free"
        pages: list[int] = []
        for _ in range(num_pages):
            if self._unused:
                page_id = self._unused.pop()
            else:
                page_id, _none = self._kept.popitem(last=False)
                self._is_cached[page_id] = 0
                self._forget(page_id)
            self.ref_counts[page_id] = 1
            pages.append(page_id)
        return pages

    def share(self, page_id: int) -> None:
        """Adds a reference to a page that the prefix cache knows."""
        assert self._is_cached[page_id], f"page {page_id} is not in the prefix cache"
        if self.ref_counts[page_id] == 0:
            del self._kept[page_id]
        self.ref_counts[page_id] += 1

    def keep(self, page_id: int) -> None:
        """Marks a referenced page as known to the prefix cache: at its release it is kept as long as no other page is unused."""
        assert self.ref_counts[page_id] > 0, f"page {page_id} has no owner"
        self._is_cached[page_id] = 1

    def truncate(self, page_ids: list[int], num_pages: int) -> None:
        """Gives back the pages of a list beyond the first `num_pages`, in place.

        The tail goes first, so that of a chain of cached pages the last ones are reused before those they depend on.
        """
        while len(page_ids) > num_pages:
            page_id = page_ids.pop()
            self.ref_counts[page_id] -= 1
            assert self.ref_counts[page_id] >= 0, f"page {page_id} was given back twice"
            if self.ref_counts[page_id] == 0:
                if self._is_cached[page_id]:
                    self._kept[page_id] = None
                else:
                    self._unused.append(page_id)

    def release(self, page_ids: list[int]) -> None:
        """Gives back all pages of a list, in place."""
        self.truncate(page_ids, 0)
