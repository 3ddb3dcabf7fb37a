"""One packed matrix for gate and up."""

import torch

from paceline.core.program import ModelSpec, Op
from paceline.kernels.primitives.linear import pack_linear
from paceline.kernels.primitives.residual import norm_gain, normalise
from paceline.kernels.primitives.table import Built, Place, Tensors, weight
from paceline.kernels.primitives.unsplit import rows_unsplit


class NormGateUp(torch.nn.Module):
    def __init__(self, gain: torch.Tensor, linear: torch.nn.Module, intermediate_size: int) -> None:
        super().__init__()
        self.gain = gain
        self.linear = linear
        self.intermediate_size = intermediate_size
        self.rows_per_silu = rows_unsplit(intermediate_size)

    def forward(self, stream: torch.Tensor) -> torch.Tensor:
        gate_up = self.linear(normalise(stream, self.gain))
        gate = gate_up.narrow(1, 0, self.intermediate_size)
        num_tokens = gate.size(0)
        if num_tokens <= self.rows_per_silu:
            torch.nn.functional.silu(gate, inplace=True)
        else:
            for start in range(0, num_tokens, self.rows_per_silu):
                torch.nn.functional.silu(gate.narrow(0, start, min(self.rows_per_silu, num_tokens - start)), inplace=True)
        return gate.mul(gate_up.narrow(1, self.intermediate_size, self.intermediate_size))


def supports(spec: ModelSpec, place: Place) -> str | None:
    return None


def build(op: Op, spec: ModelSpec, tensors: Tensors, place: Place) -> Built:
    packed = pack_linear(torch.cat([weight(op, "gate", tensors), weight(op, "up", tensors)]), None, place)
    gain = norm_gain(weight(op, "norm", tensors))
    return Built(NormGateUp(gain, packed.module, spec.intermediate_size), packed.weight_bytes, packed.name, packed.reason)
