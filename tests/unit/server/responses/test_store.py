"""The store: never over its bound, the oldest that have ended go first, one hour, and nobody sees another's."""

import pytest

from paceline.server.responses.reply import End
from paceline.server.responses.store import LIFE_S, Record, ResponseStore, owner_of


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def record(name: str, num_bytes: int = 1000, owner: bytes = b"") -> Record:
    """One that takes so many bytes beside the 1,024 of each, in its input."""
    return Record(name, owner, (b"x" * num_bytes,), is_background=False, num_reserved_bytes=0, show=lambda: b"running")


def end(store: ResponseStore, ended: Record, num_bytes: int = 0) -> None:
    store.end(ended, End("completed", b"b" * num_bytes, b""))


def names(store: ResponseStore, candidates: str) -> str:
    return "".join(name for name in candidates if store.get(b"", name) is not None)


def test_the_oldest_that_have_ended_make_room() -> None:
    store = ResponseStore(3 * 2024)
    a, b, c, d = (record(name) for name in "abcd")
    for each in (a, b, c):
        assert store.add(each)
    end(store, b)
    end(store, a)
    assert names(store, "abc") == "abc"
    assert store.add(d)
    assert names(store, "abcd") == "acd"
    assert store.num_bytes == 3 * 2024


def test_those_that_run_do_not() -> None:
    store = ResponseStore(2 * 2024)
    a, b = record("a"), record("b")
    assert store.add(a)
    assert store.add(b)
    assert not store.add(record("c"))
    assert names(store, "abc") == "ab"
    end(store, b)
    assert not store.add(record("d", num_bytes=2000)), "even with b gone there is no room"
    assert names(store, "ab") == "ab", "and so it stays"
    assert store.add(record("c"))
    assert names(store, "abc") == "ac"


def test_an_answer_that_grows_makes_its_room_or_goes() -> None:
    store = ResponseStore(2 * 2024)
    a, b = record("a"), record("b")
    store.add(a)
    store.add(b)
    end(store, a)
    end(store, b, num_bytes=500)
    assert names(store, "ab") == "b"
    assert store.num_bytes == 2524
    c = record("c", num_bytes=400)
    store.add(c)
    end(store, c, num_bytes=10_000)
    assert names(store, "bc") == ""
    assert (store.num_bytes, len(store)) == (0, 0)


def test_what_is_reserved_counts_while_it_runs() -> None:
    store = ResponseStore(10_000)
    big = Record("a", b"", (), is_background=False, num_reserved_bytes=8000, show=lambda: b"")
    assert store.add(big)
    assert not store.add(record("b"))
    end(store, big, num_bytes=10)
    assert store.num_bytes == 1034
    assert store.add(record("b"))


def test_an_hour_after_its_end_it_is_gone() -> None:
    clock = Clock()
    store = ResponseStore(10_000, clock)
    a, b, c = record("a"), record("b"), record("c")
    for each in (a, b, c):
        store.add(each)
    end(store, a)
    clock.now_s += 10
    end(store, b)
    clock.now_s += LIFE_S - 10.5
    assert names(store, "abc") == "abc"
    clock.now_s += 0.5
    assert names(store, "abc") == "bc"
    clock.now_s += 10
    assert names(store, "abc") == "c", "one that runs stays"
    assert store.num_bytes == c.num_bytes


def test_what_is_removed_while_it_runs_stays_so() -> None:
    store = ResponseStore(10_000)
    a = record("a")
    store.add(a)
    store.remove(a)
    end(store, a)
    assert (names(store, "a"), store.num_bytes) == ("", 0)
    assert store.add(record("b", num_bytes=8900)), "its room is free again"
    assert a.body == b"", "who still holds it can read it"


def test_an_id_is_worth_nothing_with_another_key() -> None:
    mine, yours = owner_of("Bearer sk-1"), owner_of("Bearer sk-2")
    store = ResponseStore(10_000)
    store.add(record("a", owner=mine))
    assert store.get(mine, "a") is not None
    assert store.get(yours, "a") is None
    assert store.get(b"", "a") is None


@pytest.mark.parametrize(
    ("header", "same_as"),
    [("bearer  sk-1 ", "Bearer sk-1"), (None, ""), ("Bearer ", None), ("Basic c2s=", None)],
)
def test_who_an_owner_is(header: str | None, same_as: str | None) -> None:
    assert owner_of(header) == owner_of(same_as)
    assert owner_of("Bearer sk-1") not in (owner_of("Bearer sk-10"), owner_of(None))
    assert b"sk-1" not in owner_of("Bearer sk-1")
