import pytest

from paceline.scheduler.prefix_cache import PrefixCache


def chain(cache: PrefixCache, tokens: tuple[int, ...], salt: str = "") -> list[bytes]:
    hashes: list[bytes] = []
    cache.hash_pages(hashes, salt, tokens, len(tokens) // 2)
    return hashes


def test_match_is_the_longest_leading_run() -> None:
    cache = PrefixCache(2)
    hashes = chain(cache, (1, 2, 3, 4, 5, 6))
    assert cache.insert(hashes[0], 7)
    assert cache.insert(hashes[2], 9)
    assert [page.page_id for page in cache.match(hashes)] == [7]
    assert cache.insert(hashes[1], 8)
    assert [page.page_id for page in cache.match(hashes)] == [7, 8, 9]
    assert [page.page_id for page in cache.match(chain(cache, (1, 2, 9, 9)))] == [7]
    assert cache.match(chain(cache, (3, 4))) == [], "the same tokens after another prefix are another page"


def test_salts_do_not_share() -> None:
    cache = PrefixCache(2)
    assert set(chain(cache, (1, 2, 3, 4), "a")).isdisjoint(chain(cache, (1, 2, 3, 4), "b"))


def test_keys_of_two_processes_differ() -> None:
    assert chain(PrefixCache(2), (1, 2)) != chain(PrefixCache(2), (1, 2))
    assert chain(PrefixCache(2, b"k"), (1, 2)) == chain(PrefixCache(2, b"k"), (1, 2))


def test_hashes_are_extended_not_computed_again() -> None:
    cache = PrefixCache(2)
    hashes = [b"given"]
    cache.hash_pages(hashes, "", (1, 2, 3, 4), 2)
    assert hashes[0] == b"given"
    assert len(hashes) == 2


def test_a_partly_filled_page_is_never_hashed() -> None:
    with pytest.raises(AssertionError, match="not full"):
        PrefixCache(2).hash_pages([], "", (1, 2, 3), 2)


def test_second_copy_stays_out_and_does_not_fill_the_first_ones_drafter_half() -> None:
    cache = PrefixCache(2)
    (page_hash,) = chain(cache, (1, 2))
    assert cache.insert(page_hash, 3)
    assert not cache.insert(page_hash, 4)
    cache.fill_drafter_half(page_hash, 4)
    assert not cache.match([page_hash])[0].has_drafter_half
    cache.fill_drafter_half(page_hash, 3)
    assert cache.match([page_hash])[0].has_drafter_half


def test_forget() -> None:
    cache = PrefixCache(2)
    (page_hash,) = chain(cache, (1, 2))
    cache.insert(page_hash, 3)
    cache.forget(3)
    assert cache.match([page_hash]) == []
    assert len(cache) == 0
    cache.fill_drafter_half(page_hash, 3)
    assert cache.insert(page_hash, 3)
