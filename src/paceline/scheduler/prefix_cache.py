"""Which pages hold which token prefix: a chain of keyed hashes over full, committed pages.

`residents.py` looks prompts up here at admission and enters pages at commit. Pages themselves belong to `page_pool.py`.
"""

import hashlib
import secrets
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

HASH_BYTES = 32


@dataclass(slots=True)
class CachedPage:
    """One entry. The target's half is always valid; the drafter's half may be filled in later (`both` instead of `target`)."""

    page_id: int
    has_drafter_half: bool = False


class PrefixCache:
    """Maps the hash of (all tokens up to a page's end, salt) to a page.

    The hash is blake2b with a key of this process, over the parent page's hash and the page's tokens, so that nobody can craft a
    collision; requests with different salts never share. An entry whose parent was forgotten is merely out of reach, not wrong.
    """

    def __init__(self, page_size: int, key: bytes | None = None) -> None:
        self._page_size = page_size  # tokens
        self._key = secrets.token_bytes(32) if key is None else key
        self._entries: dict[bytes, CachedPage] = {}
        self._hashes: dict[int, bytes] = {}  # page id -> the key of its entry

    def __len__(self) -> int:
        return len(self._entries)

    def hash_pages(self, hashes: list[bytes], salt: str, token_ids: Sequence[int], num_pages: int) -> None:
        """Extends the hash chain of a sequence in place to its first `num_pages` pages, which must be full."""
        size = self._page_size
        assert num_pages * size <= len(token_ids), f"{num_pages} pages of {size} are not full with {len(token_ids)} tokens"
        for index in range(len(hashes), num_pages):
            parent = hashes[index - 1] if index else self._digest(salt.encode(), b"salt")
            tokens = array("q", token_ids[index * size : (index + 1) * size]).tobytes()
            hashes.append(self._digest(parent + tokens, b"page"))

    def match(self, hashes: Sequence[bytes]) -> list[CachedPage]:
        """The longest leading run of cached pages."""
        found: list[CachedPage] = []
        for page_hash in hashes:
            entry = self._entries.get(page_hash)
            if entry is None:
                break
            found.append(entry)
        return found

    def insert(self, page_hash: bytes, page_id: int) -> bool:
        """Enters a full page whose target KV is committed; False if another page already holds the same prefix."""
        if page_hash in self._entries:
            return False
        assert page_id not in self._hashes, f"page {page_id} would hold two prefixes"
        self._entries[page_hash] = CachedPage(page_id)
        self._hashes[page_id] = page_hash
        return True

    def fill_drafter_half(self, page_hash: bytes, page_id: int) -> None:
        """Notes that the drafter's KV of a page is valid too; of no effect if the cached copy is another page."""
        entry = self._entries.get(page_hash)
        if entry is not None and entry.page_id == page_id:
            entry.has_drafter_half = True

    def forget(self, page_id: int) -> None:
        """Drops the entry of a page that is about to be reused."""
        del self._entries[self._hashes.pop(page_id)]

    def _digest(self, data: bytes, purpose: bytes) -> bytes:
        return hashlib.blake2b(data, digest_size=HASH_BYTES, key=self._key, person=purpose).digest()
