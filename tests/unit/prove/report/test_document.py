"""The JSON: the fixed keys, null for what is missing, and a way back."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.errors import BadInputError
from paceline.prove.report.document import as_document, read_document, write_document
from paceline.prove.results import Verdict
from tests.fakes.made_proof import made_proof

TOP_LEVEL = ["verdict", "reasons", "environment", "criteria", "arms", "speedup", "certificate", "pareto"]


def test_the_keys_are_those_that_tools_rely_on() -> None:
    document = as_document(made_proof())
    assert list(document) == TOP_LEVEL
    assert document["verdict"] == "PASS"
    assert {"name", "threshold", "value", "pass"} <= document["criteria"][0].keys()
    assert "passed" not in document["criteria"][0]
    arm = document["arms"][0]
    assert {
        "arm",
        "concurrency",
        "category",
        "num_requests",
        "num_errors",
        "user_tps",
        "output_tps",
        "conditional_acceptance",
    } <= arm.keys()
    for name in ("ttft_ms", "tpot_ms", "e2e_ms"):
        assert arm[name].keys() == {"p50", "p95", "p99"}
    fast = next(one for one in document["arms"] if one["arm"] == "speculative")
    assert fast["acceptance_length"].keys() == {"mean_of_means", "token_weighted"}
    cell = document["speedup"][0]
    names = {"category", "concurrency", "ratio", "user_tps_ratio", "output_tps_ratio", "ci95", "simultaneous_low", "projected_ratio"}
    assert {*names, "num_pairs"} <= cell.keys()
    assert len(cell["ci95"]) == 2
    assert {"greedy_identical", "divergences", "law_tests"} <= document["certificate"].keys()
    assert {"option", "chi2", "p"} <= document["certificate"]["law_tests"][0].keys()
    assert document["pareto"][0].keys() == {"concurrency", "arm", "user_tps", "output_tps", "output_tps_per_gpu"}
    assert cell["work"] == "identical tokens"


def test_a_proof_comes_back_as_it_was_written(tmp_path: Path) -> None:
    proof = made_proof(Verdict.FAIL)
    write_document(proof, tmp_path / "prove.json")
    assert read_document(tmp_path / "prove.json") == proof


def test_what_is_not_finite_is_null_so_that_every_reader_takes_it(tmp_path: Path) -> None:
    proof = made_proof()
    cell = replace(proof.speedup[0], projected_ratio=float("nan"), simultaneous_high=float("inf"))
    write_document(replace(proof, speedup=(cell,)), tmp_path / "prove.json")

    def refuse(text: str) -> None:
        raise AssertionError(f"{text} is not JSON")

    document = json.loads((tmp_path / "prove.json").read_text(), parse_constant=refuse)
    assert document["speedup"][0]["projected_ratio"] is None
    assert document["speedup"][0]["simultaneous_high"] is None


def test_an_interval_without_an_end_comes_back_as_one(tmp_path: Path) -> None:
    proof = made_proof()
    cell = replace(proof.speedup[0], ci95=(0.0, float("inf")))
    write_document(replace(proof, speedup=(cell,)), tmp_path / "prove.json")
    (found,) = read_document(tmp_path / "prove.json").speedup
    assert found.ci95[0] == 0.0
    assert math.isnan(found.ci95[1])


@pytest.mark.parametrize("content", [b"", b"[1]", b"{}", b'{"verdict": "PASS"}', b"\xff\xfe", b'{"verdict": "MAYBE", "criteria": []}'])
def test_another_file_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "other.json"
    path.write_bytes(content)
    with pytest.raises(BadInputError, match=r"other\.json"):
        read_document(path)
    with pytest.raises(BadInputError, match="absent"):
        read_document(tmp_path / "absent.json")
