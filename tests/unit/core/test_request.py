"""Values that mean the same reach the engine as one, whoever asks."""

from dataclasses import replace

import pytest

from paceline.core.request import SamplingParams

GIVEN = SamplingParams(3, 0.5, 4, 0.9, 0.1, 7, (5,), True)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (replace(GIVEN, temperature=0.0), replace(GIVEN, temperature=0.0)),
        (replace(GIVEN, temperature=9e-6), replace(GIVEN, temperature=0.0)),
        (replace(GIVEN, temperature=1e-5), replace(GIVEN, temperature=1e-5)),
        (replace(GIVEN, top_k=-1), replace(GIVEN, top_k=0)),
        (replace(GIVEN, top_k=0), replace(GIVEN, top_k=0)),
        (replace(GIVEN, top_k=99), replace(GIVEN, top_k=99)),
        (replace(GIVEN, top_k=100), replace(GIVEN, top_k=0)),
        (replace(GIVEN, top_k=2**63 - 1), replace(GIVEN, top_k=0)),
        (replace(GIVEN, seed=None), replace(GIVEN, seed=None)),
        (replace(GIVEN, seed=-1), replace(GIVEN, seed=2**64 - 1)),
        (replace(GIVEN, seed=2**64 - 1), replace(GIVEN, seed=2**64 - 1)),
        (replace(GIVEN, seed=-(2**63)), replace(GIVEN, seed=2**63)),
        (GIVEN, GIVEN),
    ],
)
def test_values_are_normalised(given: SamplingParams, expected: SamplingParams) -> None:
    assert given.normalised(vocab_size=100) == expected
