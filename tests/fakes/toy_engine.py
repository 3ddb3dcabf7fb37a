"""The real scheduler, executor, drafters and sampler over models that are tables: what the engine does, without the time models take.

For tests that run the whole engine many thousand times, or with logits of their own choice.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

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
from paceline.executor.grammar import Grammars
from paceline.executor.step import Target
from paceline.forward.forward import Forward
from paceline.forward.memory import allocate_kv
from paceline.scheduler.draft_length import DraftLengthPolicy
from paceline.scheduler.scheduler import Scheduler, SchedulerConfig
from paceline.speculative.drafter import DrafterSetup, DraftModel, load_drafter_class
from paceline.speculative.verify import Rule

PAGE_SIZE = 16


@dataclass(frozen=True)
class ToyLimits:
    """Sizes of an engine; pages for every row at full length unless told otherwise."""

    num_rows: int = 1024
    max_len: int = 64
    num_pages: int | None = None
    enable_prefix_caching: bool = False
    max_draft_length: int = 5

    @property
    def pages(self) -> int:
        return self.num_rows * -(-self.max_len // PAGE_SIZE) if self.num_pages is None else self.num_pages


DEFAULT_LIMITS = ToyLimits()


class TableForward:
    """Logits by the token and its position, as `table[position % P, token]`, `[P, V, V]` f32. Keeps no KV: others test that."""

    weight_bytes = 0
    kv_dtype = torch.float32
    choices: tuple[Choice, ...] = ()

    def __init__(self, table: torch.Tensor, max_len: int = 4096) -> None:
        self.spec = ModelSpec("toy", 1, 1, 1, 1, 1, 1, table.shape[-1], max_len, 1e-5, 1e4, None, True)
        self._table = table

    def run(self, batch: Batch, kv: KvPages) -> ForwardResult:
        rows = batch.logit_rows
        token_ids = batch.token_ids
        logits = self._table[batch.positions[rows] % self._table.shape[0], token_ids[rows]]
        return ForwardResult(logits, torch.zeros((token_ids.numel(), 1)))


def cycle_table(order: Sequence[int], vocab_size: int, strength: float = 20.0) -> torch.Tensor:
    """A model that says `order` again and again; greedy decoding knows no other text, and little noise does."""
    table = torch.zeros((1, vocab_size, vocab_size))
    for token, following in zip(order, (*order[1:], order[0]), strict=True):
        table[0, token, following] = strength
    return table


class ToyEngine:
    """One engine, used for many batches of requests. `draft` is a name of DRAFTERS; `policy` None: the scheduler's own."""

    def __init__(
        self,
        target: Forward,
        drafter: Forward,
        draft: str,
        rule: Rule = Rule.COUPLED,
        policy: DraftLengthPolicy | None = None,
        limits: ToyLimits = DEFAULT_LIMITS,
    ) -> None:
        drafter_class = load_drafter_class(draft)
        keeps_kv = drafter_class.keeps_kv
        self.facts = EngineFacts(
            model_name="toy",
            architecture="toy",
            device="cpu",
            dtype="float32",
            vocab_size=target.spec.vocab_size,
            max_model_len=limits.max_len,
            max_position_embeddings=limits.max_len,
            num_pages=limits.pages,
            page_size=PAGE_SIZE,
            target_page_bytes=1,
            drafter_page_bytes=1 if keeps_kv else 0,
            target_weight_bytes=0,
            drafter_weight_bytes=0,
            drafter=draft,
            drafter_max_len=min(limits.max_len, drafter.spec.max_position_embeddings) if keeps_kv else limits.max_len,
            max_draft_length=limits.max_draft_length,
            eos_token_ids=(),
            choices=(),
        )
        model = DraftModel(drafter, allocate_kv(drafter, limits.pages, PAGE_SIZE)) if keeps_kv else None
        made = drafter_class(DrafterSetup(rule, target.spec.vocab_size, model))
        grammars = Grammars(Path("a toy has no tokenizer"), target.spec.vocab_size, ())
        executor = Executor(Target(target, allocate_kv(target, limits.pages, PAGE_SIZE), rule), made, grammars)
        config = SchedulerConfig(limits.num_rows * limits.max_len, 1, limits.num_rows, 0.0, limits.enable_prefix_caching, 0.0)
        self.loop = EngineLoop(Scheduler(config, self.facts, policy), executor)

    def run(self, requests: Sequence[Request]) -> list[tuple[int, ...]]:
        """Output tokens in the order of the requests."""
        return [tuple(token for delta in deltas for token in delta.token_ids) for deltas in self.deltas(requests)]

    def deltas(self, requests: Sequence[Request]) -> list[list[TokenDelta]]:
        """The same with all that the deltas say."""
        outputs: dict[str, list[TokenDelta]] = {request.request_id: [] for request in requests}
        for request in requests:
            self.loop.add(request)
        while self.loop.has_unfinished:
            for delta in self.loop.step():
                outputs[delta.request_id].append(delta)
        return [outputs[request.request_id] for request in requests]

    def stats(self) -> EngineStats:
        return self.loop.stats()
