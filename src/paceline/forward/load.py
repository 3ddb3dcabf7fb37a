"""Makes a `Forward` from a program and its tensors: packs the weights, then takes the first runner that supports the program.

Called once per model, by `executor/load.py`.
"""

from dataclasses import dataclass
from enum import StrEnum

import torch

from paceline.core.program import Program
from paceline.core.progress import Progress
from paceline.errors import BadInputError, UnsupportedModelError
from paceline.forward import script, walk
from paceline.forward.forward import Forward
from paceline.forward.model import assemble
from paceline.kernels.primitives.table import Place, Tensors


class Runner(StrEnum):
    SCRIPT = "script"
    WALK = "walk"


@dataclass(frozen=True, slots=True)
class Forced:
    """Choices that are not left to the tables; what is forced and cannot run is refused at load."""

    runner: Runner | None = None
    implementation: str | None = None  # of every op that has it in its table


_CPU = torch.device("cpu")
_NOTHING_FORCED = Forced()


def load_forward(
    program: Program,
    tensors: Tensors,
    dtype: torch.dtype,
    stage: str,
    progress: Progress,
    device: torch.device = _CPU,
    forced: Forced = _NOTHING_FORCED,
) -> Forward:
    """Load `program` from float32 `tensors`, its weights held in `dtype`, telling `progress` of each op under the name `stage`.

    Errors: UnsupportedModelError if no runner runs the program; BadInputError if what is forced does not, or no op runs on `device`.
    """
    refusal = walk.supports(program)
    if refusal is not None:
        raise UnsupportedModelError(f"no runner of this build runs the {program.spec.architecture} program: {refusal}")
    with torch.no_grad():
        assembled = assemble(program, tensors, Place(device, dtype, forced.implementation), stage, progress)
    if forced.runner is Runner.WALK:
        return walk.Walk(program.spec, assembled, "asked for")
    refusal = script.supports(program, assembled)
    if refusal is None:
        return script.Script(program.spec, assembled)
    if forced.runner is Runner.SCRIPT:
        raise BadInputError(f"the script runner was asked for, but {refusal}")
    return walk.Walk(program.spec, assembled, f"not script: {refusal}")
