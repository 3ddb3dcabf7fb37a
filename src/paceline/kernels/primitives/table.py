"""How an op comes to its implementation: the contract of an implementation module, and the choice among an op's table.

Used by the `__init__.py` of every op and by `linear.py`. The choice is made once, at load.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Protocol, cast

import torch

from paceline.core.facts import Choice
from paceline.core.program import ModelSpec, Op
from paceline.errors import BadInputError

Tensors = Mapping[str, torch.Tensor]  # checkpoint name -> tensor, float32 [out, in] for matrices


@dataclass(frozen=True, slots=True)
class Place:
    """Where and in which precision a model runs. `implementation` forces one for every op that has it in its table."""

    device: torch.device
    dtype: torch.dtype  # of the weights: float32 or bfloat16; activations are float32
    implementation: str | None = None


@dataclass(frozen=True, slots=True)
class Built:
    """An op ready to run."""

    module: torch.nn.Module
    weight_bytes: int
    linear: str = ""  # how its matrices are held; empty if it has none
    linear_reason: str = ""  # why they are not held in a better way
    is_scriptable: bool = True  # TorchScript can compile the module


@dataclass(frozen=True, slots=True)
class Prepared:
    """What `prepare` of an op returns: the op, and the line for the start-up table."""

    module: torch.nn.Module
    weight_bytes: int
    is_scriptable: bool
    choice: Choice


class Implementation(Protocol):
    """A module `kernels/<op>/x.py`."""

    def supports(self, spec: ModelSpec, place: Place) -> str | None:
        """None, or the reason why not."""
        ...

    def build(self, op: Op, spec: ModelSpec, tensors: Tensors, place: Place) -> Built: ...


def prepare(implementations: Sequence[str], op: Op, spec: ModelSpec, tensors: Tensors, place: Place) -> Prepared:
    """Build `op` with the first of its implementations that supports the place.

    Errors: BadInputError if none does, or if the forced one does not.
    """
    refusals: list[str] = []
    names = implementations
    if place.implementation is not None and place.implementation in implementations:
        names = [place.implementation]
    for name in names:
        module = cast(Implementation, import_module(f"paceline.kernels.{op.kind}.{name}"))
        reason = module.supports(spec, place)
        if reason is None:
            built = module.build(op, spec, tensors, place)
            detail = f"{name}, {built.linear}" if built.linear else name
            why = "; ".join([*refusals, built.linear_reason] if built.linear_reason else refusals) or "first choice"
            return Prepared(built.module, built.weight_bytes, built.is_scriptable, Choice(str(op.kind), detail, why))
        refusals.append(f"not {name}: {reason}")
    raise BadInputError(f"no implementation of {op.kind} runs on {place.device} in {place.dtype}: {'; '.join(refusals)}")


def weight(op: Op, role: str, tensors: Tensors) -> torch.Tensor:
    """The tensor of a role that the op must have."""
    name = op.weight(role)
    assert name is not None, f"{op.kind} needs a weight for {role}"
    return tensors[name]


def optional_weights(op: Op, roles: Sequence[str], tensors: Tensors) -> list[torch.Tensor] | None:
    """The tensors of roles of which a model has all or none (biases, qk-norms)."""
    names = [op.weight(role) for role in roles]
    present = [name for name in names if name is not None]
    assert len(present) in (0, len(names)), f"{op.kind} has only {present} of {list(roles)}"
    return [tensors[name] for name in present] or None
