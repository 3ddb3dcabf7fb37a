"""The four shapes of an account of drafts, and the ways in which one cannot be true."""

import json
import re
from typing import Any

import pytest

from paceline.prove.acceptance import read_acceptance
from paceline.prove.record import Acceptance

VLLM = {  # interface: 41 steps, K = 3
    "mean_acceptance_length": 2.7, "draft_acceptance_rate": 0.57, "acceptance_histogram": [10, 8, 7, 16], "num_spec_steps": 41,
    "num_accepted_draft_tokens": 70, "num_draft_tokens": 123, "num_spec_tokens": 3,
}  # fmt: skip


def read(metrics: Any = None, sglext: Any = None, choice: Any = None, timings: Any = None) -> tuple[Acceptance | None, str | None]:
    return read_acceptance(*(b"" if told is None else json.dumps(told).encode() for told in (metrics, sglext, choice, timings)))


def test_vllms_and_ours() -> None:
    told = {"speculative_decoding": VLLM, "num_plain_steps": 4, "num_control_steps": 2, "queue_ms": 0.4}
    expected = Acceptance(41, 123, 70, (10, 8, 7, 16), num_spec_tokens=3, num_plain_steps=4, num_control_steps=2)
    assert read(told) == (expected, None)
    without = {name: value for name, value in VLLM.items() if name != "num_spec_tokens"}
    assert read({"speculative_decoding": without}) == (Acceptance(41, 123, 70, (10, 8, 7, 16)), None)


def test_histograms_by_draft_length() -> None:
    by_length = {"3": [8, 5, 5, 16], "1": [2, 3], "2": [0, 0, 2, 0]}
    acceptance, fault = read({"speculative_decoding": {**VLLM, "acceptance_histogram_by_draft_length": by_length}})
    assert fault is None
    assert acceptance is not None
    assert acceptance.histograms_by_draft_length == ((1, (2, 3)), (2, (0, 0, 2, 0)), (3, (8, 5, 5, 16)))


def test_tensorrt_llms_sglangs_and_llama_cpps() -> None:
    tensorrt = {
        "acceptance_rate": 0.5, "acceptance_histogram": [2, 0, 1], "num_spec_steps": 3, "num_spec_tokens": 2,
        "total_accepted_draft_tokens": 2, "total_draft_tokens": 6,
    }  # fmt: skip
    assert read(choice=tensorrt) == (Acceptance(3, 6, 2, (2, 0, 1), num_spec_tokens=2), None)
    sglang = {"spec_verify_ct": 3, "spec_num_correct_drafts": 2, "spec_num_proposed_drafts": 6, "spec_correct_drafts_histogram": [2, 0, 1]}
    assert read(sglext={"spec_tokens_details": sglang}) == (Acceptance(3, 6, 2, (2, 0, 1)), None)
    assert read(timings={"predicted_n": 30, "draft_n": 20, "draft_n_accepted": 9}) == (Acceptance(20, 20, 9, ()), None)
    plain = Acceptance(0, 0, 0, (), num_plain_steps=29)
    assert read(timings={"predicted_n": 30, "draft_n": 0, "draft_n_accepted": 0}) == (plain, None)


def test_no_account_is_not_an_account_of_zero() -> None:
    nothing = (None, None)
    assert read() == nothing
    assert read(metrics={"speculative_decoding": None, "queue_ms": 1.0}) == nothing
    assert read(metrics={"queue_ms": 1.0}, timings={"predicted_n": 5, "prompt_ms": 2.0}) == nothing
    assert read_acceptance(b"null", b"null", b"null", b"null") == nothing


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"num_spec_steps": 40}, "number of steps"),
        ({"num_accepted_draft_tokens": 71}, "accepted drafts"),
        ({"num_draft_tokens": 69}, "more drafts were accepted"),
        ({"num_spec_tokens": 4}, "one bin"),
        ({"acceptance_histogram": [10, 8, 7, -16]}, "negative"),
        ({"acceptance_histogram": [10.0, 8, 7, 16]}, "cannot be read"),
        ({"num_spec_steps": True}, "cannot be read"),
        ({"num_draft_tokens": None}, "cannot be read"),
        ({"num_draft_tokens": 10**30}, "(absurdly large|cannot be read)"),
        ({"acceptance_histogram_by_draft_length": {"3": [10, 8, 7, 15]}}, "by draft length do not add up"),
        ({"acceptance_histogram_by_draft_length": {"2": [10, 8, 7, 16]}}, "more than was drafted"),
        ({"acceptance_histogram_by_draft_length": {"x": [10, 8, 7, 16]}}, "more than was drafted"),
        ({"acceptance_histogram_by_draft_length": {"3": [10, 8, 7, 17], "1": [0, 0, 0, 0, -1]}}, "more than was drafted"),
        ({"acceptance_histogram": [41] + [0] * 5000, "num_accepted_draft_tokens": 0, "num_spec_tokens": 5000}, "longer than any draft"),
    ],
)
def test_what_does_not_add_up_is_refused_with_the_reason(given: dict[str, Any], reason: str) -> None:
    acceptance, fault = read({"speculative_decoding": {**VLLM, **given}})
    assert acceptance is None
    assert fault is not None
    assert re.search(reason, fault), fault
