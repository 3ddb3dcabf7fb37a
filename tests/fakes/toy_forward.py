"""A model without weights behind the `Forward` protocol: its logits hash the whole prefix as read back from its KV pages.

So one stale, missing or misplaced KV entry changes every later token, and `prefix_logits` says what the right ones were.
"""

from collections.abc import Sequence

import torch

from paceline.core.batch import Batch, ForwardResult
from paceline.core.facts import Choice
from paceline.core.kv import KvPages
from paceline.core.program import ModelSpec
from paceline.forward.memory import allocate_kv

_NUM_STATES = 997


class ToyForward:
    """Vocabulary of `vocab_size` tokens, random logits per hash of the prefix; repeats itself once in a while."""

    def __init__(self, vocab_size: int, seed: int = 0, max_len: int = 4096, spread: float = 2.0) -> None:
        self.spec = ModelSpec("toy", 1, 1, 1, 1, 1, 1, vocab_size, max_len, 1e-5, 1e4, None, True)
        self.weight_bytes = 0
        self.kv_dtype = torch.float32
        self.choices: tuple[Choice, ...] = ()
        self.table = torch.randn((_NUM_STATES, vocab_size), generator=torch.Generator().manual_seed(seed)) * spread
        self.num_runs = 0
        self.num_tokens_run = 0

    def run(self, batch: Batch, kv: KvPages) -> ForwardResult:
        self.num_runs += 1
        token_ids, positions = batch.token_ids, batch.positions
        self.num_tokens_run += token_ids.numel()
        kv.k[0, 0, batch.write_slots, 0] = token_ids.float() + 1  # 0 is a place never written
        rows = [row for row, page_ids in enumerate(batch.page_ids_host) for _ in range(*batch.query_start_host[row : row + 2])]
        logits: list[torch.Tensor] = []
        for token in batch.logit_rows.tolist():
            page_ids = batch.page_ids_host[rows[token]]
            places = [page_ids[i // kv.page_size] * kv.page_size + i % kv.page_size for i in range(int(positions[token]) + 1)]
            logits.append(self.prefix_logits([int(x) - 1 for x in kv.k[0, 0, places, 0].tolist()]))
        stacked = torch.stack(logits) if logits else torch.zeros((0, self.spec.vocab_size))
        return ForwardResult(stacked, torch.zeros((token_ids.numel(), 1)))

    def prefix_logits(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Logits `[V]` f32 of the token after `token_ids`."""
        state = 0
        for token in token_ids:
            state = (state * 31 + token + 1) % _NUM_STATES
        return self.table[state]

    def allocate_kv(self, num_pages: int, page_size: int) -> KvPages:
        return allocate_kv(self, num_pages, page_size)
