import pytest

from paceline.scheduler.page_pool import PagePool


@pytest.fixture
def forgotten() -> list[int]:
    return []


@pytest.fixture
def pool(forgotten: list[int]) -> PagePool:
    return PagePool(4, 16, forgotten.append)


def test_pages_for_counts_begun_pages(pool: PagePool) -> None:
    assert [pool.pages_for(n) for n in (0, 1, 16, 17, 32)] == [0, 1, 1, 2, 2]


def test_reserve_and_release_return_to_the_start(pool: PagePool) -> None:
    pages = pool.reserve(3)
    assert len(set(pages)) == 3
    assert pool.num_free == 1
    pool.release(pages)
    assert pages == []
    assert pool.num_free == 4


def test_truncate_gives_back_the_tail(pool: PagePool) -> None:
    pages = pool.reserve(3)
    first = pages[0]
    pool.truncate(pages, 1)
    assert pages == [first]
    assert pool.num_free == 3
    pool.truncate(pages, 2)
    assert pages == [first]


def test_kept_pages_are_reused_last_and_the_oldest_chain_tail_first(pool: PagePool, forgotten: list[int]) -> None:
    old, new = pool.reserve(2), pool.reserve(1)
    chain = list(old)
    for page_id in (*old, *new):
        pool.keep(page_id)
    pool.release(old)
    pool.release(new)
    assert pool.num_free == 4
    taken = pool.reserve(2)
    assert forgotten == [chain[1]], "one unused page first, then the tail of the chain released first"
    assert chain[1] in taken
    pool.reserve(1)
    assert forgotten == [chain[1], chain[0]]


def test_a_shared_page_is_free_after_its_last_release(pool: PagePool, forgotten: list[int]) -> None:
    first = pool.reserve(1)
    page_id = first[0]
    pool.keep(page_id)
    pool.share(page_id)
    second = [page_id]
    pool.release(first)
    assert pool.num_free == 3
    pool.release(second)
    assert pool.num_free == 4
    pool.share(page_id)  # a hit on a kept page revives it
    assert pool.num_free == 3
    pool.reserve(3)
    assert forgotten == []


def test_giving_back_twice_is_caught(pool: PagePool) -> None:
    pages = pool.reserve(1)
    again = list(pages)
    pool.release(pages)
    with pytest.raises(AssertionError, match="twice"):
        pool.release(again)


def test_more_than_free_is_caught(pool: PagePool) -> None:
    with pytest.raises(AssertionError, match="5 pages wanted, 4 free"):
        pool.reserve(5)
