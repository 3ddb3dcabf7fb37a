"""The real scheduler, executor, drafters and sampler over models that are tables: what the engine does, without the time models take.

For tests that run the whole engine many thousand times, or with logits of their own choice.
"""

from collections.abc import Sequence

import torch

from paceline.core.batch import Batch, ForwardResult
from paceline.core.facts import Choice, EngineFacts
from paceline.core.kv import KvPages
from paceline.core.outcome import TokenDelta
from paceline.core.program import ModelSpec
from paceline.core.request import Request
from paceline.core.stats import EngineStats
from paceline.engine.loop import EngineLoop
from paceline.executor.executor import Executor
from paceline.executor.step import Target
from paceline.forward.memory import allocate_kv
from paceline.scheduler.draft_length import DraftLengthPolicy
from paceline.scheduler.scheduler import Scheduler, SchedulerConfig
from paceline.speculative.drafter import DrafterSetup, DraftModel, load_drafter_class
from paceline.speculative.verify import Rule

PAGE_SIZE = 16
NUM_ROWS = 1024
MAX_LEN = 2 * PAGE_SIZE


class TableForward:
    """Logits by the token and its position, as `table[position % P, token]`, `[P, V, V]` f32. Keeps no KV: others test that."""

    weight_bytes = 0
    choices: tuple[Choice, ...] = ()

    def __init__(self, table: torch.Tensor, max_len: int = 4096) -> None:
        self.spec = ModelSpec("toy", 1, 1, 1, 1, 1, 1, table.shape[-1], max_len, 1e-5, 1e4, None, True)
        self._table = table

    def run(self, batch: Batch, kv: KvPages) -> ForwardResult:
        rows = batch.logit_rows
        logits = self._table[batch.positions[rows] % self._table.shape[0], batch.token_ids[rows]]
        return ForwardResult(logits, torch.zeros((batch.token_ids.numel(), 1)))


class ToyEngine:
    """One engine; `run` decodes requests to their end. `draft` is a name of DRAFTERS."""

    def __init__(self, target: TableForward, drafter: TableForward, draft: str, rule: Rule, policy: DraftLengthPolicy, k: int) -> None:
        drafter_class = load_drafter_class(draft)
        vocab_size = target.spec.vocab_size
        num_pages = NUM_ROWS * MAX_LEN // PAGE_SIZE
        model = DraftModel(drafter, allocate_kv(drafter.spec, num_pages, PAGE_SIZE)) if drafter_class.keeps_kv else None
        facts = EngineFacts(
            model_name="toy",
            architecture="toy",
            device="cpu",
            dtype="float32",
            vocab_size=vocab_size,
            max_model_len=MAX_LEN,
            max_position_embeddings=MAX_LEN,
            num_pages=num_pages,
            page_size=PAGE_SIZE,
            target_page_bytes=1,
            drafter_page_bytes=1 if drafter_class.keeps_kv else 0,
            target_weight_bytes=0,
            drafter_weight_bytes=0,
            drafter=draft,
            drafter_max_len=min(MAX_LEN, drafter.spec.max_position_embeddings) if drafter_class.keeps_kv else MAX_LEN,
            max_draft_length=k,
            eos_token_ids=(),
            choices=(),
        )
        config = SchedulerConfig(NUM_ROWS * MAX_LEN, 1, NUM_ROWS, 0.0, enable_prefix_caching=False)
        kv = allocate_kv(target.spec, num_pages, PAGE_SIZE)
        executor = Executor(Target(target, kv, rule), drafter_class(DrafterSetup(rule, vocab_size, model)))
        self._loop = EngineLoop(Scheduler(config, facts, policy), executor)

    def run(self, requests: Sequence[Request]) -> list[tuple[int, ...]]:
        """Output tokens in the order of the requests."""
        return [tuple(token for delta in deltas for token in delta.token_ids) for deltas in self.deltas(requests)]

    def deltas(self, requests: Sequence[Request]) -> list[list[TokenDelta]]:
        """The same with all that the deltas say."""
        outputs: dict[str, list[TokenDelta]] = {request.request_id: [] for request in requests}
        for request in requests:
            self._loop.add(request)
        while self._loop.has_unfinished:
            for delta in self._loop.step():
                outputs[delta.request_id].append(delta)
        return [outputs[request.request_id] for request in requests]

    def stats(self) -> EngineStats:
        return self._loop.stats()
