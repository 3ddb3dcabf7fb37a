"""Counter-based randomness: every draw is a pure function of (request seed, output index, purpose, token id).

Called by `verify.py` and by drafters; holds no state, so preemption, batch mates and draft lengths cannot shift a draw.
Nothing else in the engine may make random numbers for tokens.
"""

from enum import IntEnum

import torch

NUM_ROUNDS = 10
_MASK_32 = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)  # for counter words 0 and 2
_WEYL = (0x9E3779B9, 0xBB67AE85)  # added to the key after each round
_KEY_STEPS = tuple((r * _WEYL[0], r * _WEYL[1]) for r in range(NUM_ROUNDS))

NOISE_SPREAD = 25.4
"""Gumbel noise of 32-bit uniforms lies in [-3.10, 22.19]: a token more than this below the top logit never wins the arg-max."""


class Purpose(IntEnum):
    """The ledger of draws. Two draws of one output index never share a purpose, or the law of `ratio` breaks."""

    COUPLED = 0  # rule `coupled`: one Gumbel value per token id, shared on purpose by drafter and target
    DRAFT = 1  # rule `ratio`: the drafter's draw from q
    ACCEPT = 2  # rule `ratio`: the accept test of a draft token
    RESIDUAL = 3  # rule `ratio`: the draw from (p - q)+ after a rejection
    BONUS = 4  # rule `ratio`: the draw from p after the last accepted draft, or in a plain row


def philox4x32(even: torch.Tensor, odd: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Philox4x32-10: counter words 0 and 2 `[2, ...]`, words 1 and 3 `[2, ...]`, key `[2, ...]`, i64 with 32-bit values, broadcast.

    Returns the four output words, `[..., 4]` i64. Source: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3", section 3.3.
    """
    device = even.device
    multipliers = torch.tensor(_MULTIPLIERS, dtype=torch.int64, device=device).view(2, *(1,) * (even.dim() - 1))
    mask = torch.tensor(_MASK_32, dtype=torch.int64, device=device)
    word_bits = torch.tensor(32, dtype=torch.int64, device=device)
    for round_key in _round_keys(key):
        # The product wraps modulo 2^64; after an arithmetic shift its low 32 bits still are the true high word, so one mask is enough.
        product = (even * multipliers).flip(0)
        even = (product >> word_bits).bitwise_xor_(round_key).bitwise_xor(odd).bitwise_and_(mask)
        odd = product
    odd = odd & mask
    return torch.stack((even[0], odd[0], even[1], odd[1]), dim=-1)


def _round_keys(key: torch.Tensor) -> tuple[torch.Tensor, ...]:
    steps = torch.tensor(_KEY_STEPS, dtype=torch.int64, device=key.device).view(NUM_ROUNDS, 2, *(1,) * (key.dim() - 1))
    return (steps + key).bitwise_and_(_MASK_32).unbind(0)


def uniforms(seed: torch.Tensor, index: torch.Tensor, purpose: Purpose) -> torch.Tensor:
    """One uniform in (0, 1) per row, `[N]` f64, for seeds `[N]` i64 (the unsigned seed's bits) and output indexes `[N]` i64."""
    return _to_uniform(_words(seed, index, torch.zeros_like(index), purpose)[..., 0])


def gumbel(seed: torch.Tensor, index: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """COUPLED Gumbel noise `[M]` f64 of M (seed, output index, token id) triples, all `[M]` i64."""
    words = _words(seed, index, token_ids >> 2, Purpose.COUPLED)
    return _to_gumbel(words.gather(1, (token_ids & 3).unsqueeze(1)).squeeze(1))


def gumbel_all(seed: torch.Tensor, index: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """COUPLED Gumbel noise `[N, V]` f64 of every token id: the values of `gumbel` at a quarter of the Philox calls."""
    groups = torch.arange((vocab_size + 3) // 4, dtype=torch.int64, device=seed.device).unsqueeze(0)
    words = _words(seed.unsqueeze(1), index.unsqueeze(1), groups, Purpose.COUPLED)
    return _to_gumbel(words.view(seed.shape[0], -1)[:, :vocab_size])


def _words(seed: torch.Tensor, index: torch.Tensor, group: torch.Tensor, purpose: Purpose) -> torch.Tensor:
    """Counter: (output index, token id // 4, purpose, 0); key: the seed's low and high word. Word id % 4 belongs to token id."""
    even = torch.stack((index, torch.full_like(index, int(purpose))))
    odd = torch.stack((group, torch.zeros_like(group)))
    return philox4x32(even, odd, torch.stack((seed & _MASK_32, (seed >> 32) & _MASK_32)))


def _to_uniform(words: torch.Tensor) -> torch.Tensor:
    # (w + 1) / (2^32 + 1) is symmetric in (0, 1) and keeps the Gumbel range within 32 ln 2; w / 2^32 would reach 0.
    return words.double().add_(1.0).mul_(1.0 / (2.0**32 + 1.0))


def _to_gumbel(words: torch.Tensor) -> torch.Tensor:
    return _to_uniform(words).log_().neg_().log_().neg_()
