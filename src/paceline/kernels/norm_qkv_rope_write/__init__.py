"""RMSNorm, the q, k and v projections, (qk-norm,) rotary positions, and the write of k and v into their pages."""

from paceline.core.program import ModelSpec, Op
from paceline.kernels.primitives import table
from paceline.kernels.primitives.table import Place, Prepared, Tensors

IMPLEMENTATIONS = ("packed", "reference")


def prepare(op: Op, spec: ModelSpec, tensors: Tensors, place: Place) -> Prepared:
    """A module with `forward(stream, kv, rotation, layout) -> qkv`. Weights: norm, q, k, v; q_bias, k_bias, v_bias; q_norm, k_norm.

    `rotation` is what `primitives.rotation.Rotation` makes of the pass's positions, for all layers alike; the oracle does without.
    `qkv` is `[T, (Hq + 2 Hkv) * d]` f32: q turned and scaled by d^-0.5, k turned, v. An implementation may order the elements of
    q and k heads as it likes, alike for both; `kv` `[layers, 2, Hkv, slots, d]` f32 is written in the same order.
    """
    return table.prepare(IMPLEMENTATIONS, op, spec, tensors, place)
