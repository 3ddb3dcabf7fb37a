"""The environment: its fixed keys, nothing made up, and no key in the command."""

from dataclasses import replace
from pathlib import Path

import pytest

from paceline.prove.environment import command_text, cpu_text, environment, is_on_this_machine
from paceline.prove.plan import Plan
from paceline.prove.record import Arm
from tests.fakes.made_records import made_dataset, made_measurement

DATASET = made_dataset()
MEASUREMENT = made_measurement(DATASET)
FIXED = {"paceline", "torch", "device", "driver", "cpu", "model_sha256", "draft_sha256", "seeds", "dataset", "command"}


def test_the_fixed_keys_are_there_and_what_is_not_told_is_none() -> None:
    plan = Plan("http://127.0.0.1:1", DATASET)
    found = environment(plan, MEASUREMENT, ["paceline", "prove"])
    assert found.keys() >= FIXED
    assert found["torch"] is None
    assert found["model_sha256"] is None
    assert isinstance(found["dataset"], dict)
    assert found["dataset"]["sha256"] == DATASET.sha256
    assert "not SPEED-Bench" in found["dataset"]["label"]
    assert "max_draft_length 0" in str(found["baseline"])


def test_what_the_server_tells_is_taken_over_and_the_rest_stands_beside_it() -> None:
    told = {"torch": "2.13.0", "device": "cpu", "drafter": "ngram", "architecture": "LlamaForCausalLM"}
    facts = replace(MEASUREMENT.servers[Arm.SPECULATIVE], facts=told, version="1.2")
    measurement = replace(MEASUREMENT, servers=dict.fromkeys(Arm, facts))
    found = environment(Plan("http://127.0.0.1:1", DATASET, baseline_url="http://127.0.0.1:2"), measurement, [])
    assert (found["torch"], found["device"], found["draft"]) == ("2.13.0", "cpu", "ngram")
    assert found["server_says"] == {"architecture": "LlamaForCausalLM"}
    assert "1.2" in str(found["baseline"])


def test_another_machines_cpu_is_not_claimed_to_be_known() -> None:
    facts = replace(MEASUREMENT.servers[Arm.SPECULATIVE], base_url="http://gpu.example:8000")
    found = environment(Plan("http://gpu.example:8000", DATASET), replace(MEASUREMENT, servers=dict.fromkeys(Arm, facts)), [])
    assert found["cpu"] is None
    assert "network" in str(found["measured_from"])


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["paceline", "prove", "--api-key", "s3cret", "--quick"], "paceline prove --api-key ... --quick"),
        (["paceline", "prove", "--api-key=s3cret"], "paceline prove --api-key=..."),
        (["paceline", "prove", "--api_key", "s3cret"], "paceline prove --api_key ..."),
        (["paceline", "prove", "--data", "my folder", "--json", "a;b"], "paceline prove --data 'my folder' --json 'a;b'"),
    ],
)
def test_the_command_can_be_run_again_and_holds_no_key(words: list[str], text: str) -> None:
    assert command_text(words) == text


def test_loopback_is_this_machine() -> None:
    assert all(map(is_on_this_machine, ("http://127.0.0.1:8000", "http://localhost/v1", "http://[::1]:8000")))
    assert not is_on_this_machine("http://10.0.0.5:8000")


def test_the_cpu_is_named_even_without_cpuinfo(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text("processor: 0\nmodel name\t: Some CPU @ 3 GHz\n")
    assert cpu_text(tmp_path / "cpuinfo").startswith("Some CPU @ 3 GHz, ")
    assert "cores" in cpu_text(tmp_path / "none")
