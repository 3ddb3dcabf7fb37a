"""The library under test: the built one, or the one that PACELINE_TEST_NATIVE names (the sanitizer run builds its own)."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.native.library import VARIANTS, Library, load


def _find() -> Library | str:
    named = os.environ.get("PACELINE_TEST_NATIVE")
    return load(Path(named)) if named else load()


def variants_here() -> list[str]:
    """The instruction sets that this processor and build have; all of them where the library is missing, to be skipped with the reason."""
    library = _find()
    if isinstance(library, str):
        return list(VARIANTS)
    usual = library.variant
    here = [name for name in VARIANTS if library.force_variant(name)]
    assert library.force_variant(usual)
    return here


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "variant" in metafunc.fixturenames:
        metafunc.parametrize("variant", variants_here(), indirect=True)


@pytest.fixture(scope="session")
def library() -> Library:
    found = _find()
    if isinstance(found, str):
        pytest.skip(f"{found}; in a checkout `python -m paceline.native.compile` builds it")
    return found


@pytest.fixture
def variant(request: pytest.FixtureRequest, library: Library) -> Iterator[Library]:
    """The library with each instruction set in turn."""
    usual = library.variant
    assert library.force_variant(request.param)
    yield library
    assert library.force_variant(usual)
