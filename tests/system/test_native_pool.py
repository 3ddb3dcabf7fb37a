"""The native pool of threads: planted mistakes that hang, and data races."""

from pathlib import Path

import pytest

from tests.fakes.pool_stress import build, mistaken, source, stress

pytestmark = pytest.mark.system

WORD_STORE = "atomic_store(&pool->word, number << (2 * COUNT_BITS) | (uint64_t)num_tasks << COUNT_BITS);"
MISTAKES = {
    "a thread counts one of its tasks": ("num_run++;", "num_run = 1;"),
    "a ticket is looked at, not taken": (
        "word = atomic_fetch_add_explicit(&pool->word, 1, memory_order_acq_rel);\n        if",
        "word = atomic_load(&pool->word);\n        if",
    ),
    "the caller is not woken": ("atomic_load(&pool->is_caller_sleeping) || ", ""),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_found(tmp_path: Path, name: str) -> None:
    program = build(tmp_path, mistaken(*MISTAKES[name]))
    assert stress(program, 3, 500, limit_s=10)[0] != 0


def test_no_data_races(tmp_path: Path) -> None:
    flags = ("-g", "-fsanitize=thread")
    program = build(tmp_path / "right", source(), *flags)
    for num_threads in (2, 4):
        assert stress(program, num_threads, 300) == (0, "")
    relaxed = WORD_STORE.replace("atomic_store(", "atomic_store_explicit(").replace(");", ", memory_order_relaxed);")
    program = build(tmp_path / "wrong", mistaken(WORD_STORE, relaxed), *flags)
    assert "data race" in stress(program, 4, 300)[1]
