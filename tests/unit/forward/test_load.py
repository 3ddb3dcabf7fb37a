"""The choice of a runner, what is refused at load, progress and sizes."""

import sys
from dataclasses import replace

import pytest
import torch

from paceline.core.program import Program
from paceline.errors import BadInputError, UnsupportedModelError
from paceline.forward.load import Forced, Runner, load_forward
from tests.fakes.random_model import random_forward, random_program, random_spec, random_tensors


class Updates(list[tuple[str, int, int]]):
    def update(self, stage: str, done: int, total: int) -> None:
        self.append((stage, done, total))


def test_script_is_the_first_choice_and_walk_can_be_forced() -> None:
    first = random_forward(random_spec()).choices[0]
    assert (first.name, first.implementation) == ("forward", "script")
    forced = random_forward(random_spec(), forced=Forced(Runner.WALK)).choices[0]
    assert (forced.implementation, forced.reason) == ("walk", "asked for")


def test_reference_implementations_run_in_the_walk_only() -> None:
    forward = random_forward(random_spec(), forced=Forced(implementation="reference"))
    assert forward.choices[0].implementation == "walk"
    assert forward.choices[0].reason.startswith("not script: ")
    assert {choice.implementation.partition(",")[0] for choice in forward.choices[1:]} == {"reference"}
    with pytest.raises(BadInputError, match="the script runner was asked for, but the implementation of norm_qkv"):
        random_forward(random_spec(), forced=Forced(Runner.SCRIPT, "reference"))


def test_an_op_without_a_packed_form_is_walked() -> None:
    """head_dim 24 leaves one op to its oracle, so the whole program walks and says why."""
    choices = random_forward(random_spec(head_dim=24)).choices
    assert choices[0].implementation == "walk"
    assert "norm_qkv_rope_write" in choices[0].reason


def test_a_new_python_walks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 14, 0))
    choice = random_forward(random_spec()).choices[0]
    assert choice.implementation == "walk"
    assert "3.14" in choice.reason


@pytest.mark.parametrize(("cut", "words"), [(slice(0, -1), "has 11 ops, 2 layers make 12"), (slice(None, None, -1), "op 0 is norm_head")])
def test_an_unknown_order_of_ops_is_refused(cut: slice, words: str) -> None:
    program = random_program(random_spec())
    with pytest.raises(UnsupportedModelError, match=words):
        load_forward(Program(program.spec, program.ops[cut]), {}, torch.float32, "load", Updates())


def test_progress_counts_ops_and_bytes_follow_the_precision() -> None:
    spec = random_spec(architecture="qwen2")
    program, updates = random_program(spec), Updates()
    full = load_forward(program, random_tensors(program), torch.float32, "load target", updates)
    assert updates == [("load target", done, 12) for done in range(1, 13)]
    matrices = [t for t in random_tensors(program).values() if t.dim() == 2]
    assert full.weight_bytes == 4 * sum(t.numel() for t in matrices)
    half = load_forward(program, random_tensors(program), torch.bfloat16, "load", Updates())
    assert half.weight_bytes * 2 == full.weight_bytes
    assert full.spec is program.spec


def test_choices_of_equal_layers_stand_once() -> None:
    names = [choice.name for choice in random_forward(replace(random_spec(), num_layers=3)).choices]
    assert len(names) == len(set(names)) == 8
