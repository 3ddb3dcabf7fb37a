"""The residual stream: hidden states with a few columns more, so that RMSNorm needs three small ops instead of six.

The first extra column holds sqrt(hidden_size * eps) and the rest 0, so the Euclidean norm of a whole row is
sqrt(sum(x^2) + hidden_size * eps), and x / norm * sqrt(hidden_size) is RMSNorm. On a CPU the number of ops is what a small
model pays for. Every op between embed and head takes and gives this form.
"""

import torch

NUM_EXTRA = 8  # columns; keeps rows as aligned as the hidden size is


def extra_columns(hidden_size: int, eps: float) -> torch.Tensor:
    """What embed appends to every row: `[1, NUM_EXTRA]` f32."""
    extra = torch.zeros(1, NUM_EXTRA)
    extra[0, 0] = (hidden_size * eps) ** 0.5
    return extra


def widen(hidden: torch.Tensor, extra: torch.Tensor) -> torch.Tensor:
    """The stream `[T, H + NUM_EXTRA]` f32 of hidden states `[T, H]` of any float dtype."""
    num_tokens, hidden_size = hidden.size(0), hidden.size(1)
    stream = torch.empty([num_tokens, hidden_size + extra.size(1)], dtype=torch.float32, device=hidden.device)
    stream.narrow(1, 0, hidden_size).copy_(hidden)
    stream.narrow(1, hidden_size, extra.size(1)).copy_(extra)
    return stream


def norm_gain(weight: torch.Tensor) -> torch.Tensor:
    """RMSNorm's weight `[H]` as `normalise` wants it, f32."""
    return weight.float() * float(weight.numel()) ** 0.5


def normalise(stream: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
    """RMSNorm of the stream's hidden states: `[T, H]` f32, contiguous."""
    norm = torch.ops.aten.linalg_vector_norm(stream, 2, [-1], True)
    return stream.narrow(1, 0, gain.size(0)).div(norm).mul_(gain)
