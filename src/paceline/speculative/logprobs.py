"""Log-probabilities of tokens under the target's own law: raw logits, before penalties, masks and temperature. Pure.

Called by `executor/step.py` for requests that ask. Each row is computed alone, in f64, so the figures do not depend on its company.
"""

from collections.abc import Sequence

import torch

from paceline.core.outcome import TokenLogprobs
from paceline.speculative.rows import host_int_rows


def token_logprobs(logits: torch.Tensor, token_ids: Sequence[int], num_top: int) -> tuple[TokenLogprobs, ...]:
    """What each row of raw logits `[n, V]` f32 says of its token `token_ids[i]` and of the `num_top` likeliest ones.

    Equally likely tokens come by rising id.
    """
    if not token_ids:
        return ()
    rows = logits.double()
    rows = rows - torch.logsumexp(rows, 1, keepdim=True)
    own = _floats(rows.gather(1, torch.tensor(token_ids).unsqueeze(1)))
    order = torch.sort(rows, dim=1, descending=True, stable=True).indices[:, :num_top]
    top_ids, top = host_int_rows(order), _floats(rows.gather(1, order))
    return tuple(TokenLogprobs(own[i][0], tuple(top_ids[i]), tuple(top[i])) for i in range(len(token_ids)))


def _floats(values: torch.Tensor) -> list[list[float]]:
    return values.tolist()  # pyright: ignore[reportUnknownMemberType,reportUnknownVariableType] - torch leaves tolist untyped
