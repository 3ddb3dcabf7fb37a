"""Makes a `Forward` from a program and its weights: packs these, then takes the first runner that supports the program.

Called once per model, by `executor/load.py`, which has decided whether the weights are quantised: then the native step runs them, else
torch does.
"""

from dataclasses import dataclass
from enum import StrEnum

import torch

from paceline.core.program import Program
from paceline.core.progress import Progress
from paceline.errors import BadInputError, UnsupportedModelError
from paceline.forward import native, script, walk
from paceline.forward.forward import Forward
from paceline.forward.model import assemble
from paceline.forward.packed import Weights, packed_matrices, plan_matrices, weight_choice
from paceline.forward.packed_cache import PackedCache
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


def load_native(
    program: Program,
    weights: Weights,
    scheme: str,
    pool: native.Pool,
    cache: PackedCache | None,
    stage: str,
    progress: Progress,
) -> Forward:
    """Load `program` for the native step, its weights quantised under `scheme` (a name of SCHEMES) or mapped from `cache`.

    Errors: BadInputError if the native step does not run the program, or for weights that cannot be quantised.
    """
    refusal = native.supports(program)
    if refusal is not None:
        raise BadInputError(f"the native step does not run this model: {refusal}; start with --quantization none")
    plans = plan_matrices(program, scheme, weights)
    matrices = packed_matrices(plans, weights, pool.library, cache, stage, progress)
    return native.Native(program, matrices, native.read_vectors(program, weights.tensors), pool, (weight_choice(plans, weights),))
