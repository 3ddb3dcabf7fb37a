"""Where a native step's time goes, by kind of op. For `paceline doctor --profile`; runs on KV memory of its own."""

from dataclasses import dataclass

import numpy as np

from paceline.core.program import OpKind
from paceline.forward.inputs import RowInput, build_batch
from paceline.forward.memory import allocate_kv
from paceline.forward.native import OP_KINDS, Native

_PAGE_SIZE = 16
_CONTEXT = 128
_NUM_PASSES = 20
_NUM_WARM_PASSES = 3


@dataclass(frozen=True, slots=True)
class OpTime:
    """All ops of one kind in one pass of one token."""

    name: str
    ms: float
    num_bytes: int  # that it has to read: weights, and keys and values

    @property
    def bytes_per_s(self) -> float:
        return self.num_bytes / (self.ms * 1e-3) if self.ms > 0 else 0.0


def op_times(forward: Native) -> tuple[OpTime, ...]:
    """The mean of some passes of one token behind 127 others."""
    spec = forward.spec
    num_pages = _CONTEXT // _PAGE_SIZE
    kv = allocate_kv(forward, num_pages, _PAGE_SIZE)
    batch = build_batch([RowInput([0], _CONTEXT - 1, list(range(num_pages)), 1)], _PAGE_SIZE)
    total_ns = np.zeros(len(OP_KINDS), np.int64)
    before, forward.profile_ns = forward.profile_ns, total_ns
    try:
        for index in range(_NUM_WARM_PASSES + _NUM_PASSES):
            if index == _NUM_WARM_PASSES:
                total_ns.fill(0)
            forward.run(batch, kv)
    finally:
        forward.profile_ns = before
    read = dict(forward.weight_bytes_by_kind)
    read[OpKind.EMBED] //= spec.vocab_size  # one row
    read[OpKind.PAGED_ATTENTION] = kv.kv.nbytes
    return tuple(OpTime(str(kind), float(ns) / _NUM_PASSES * 1e-6, read[kind]) for kind, ns in zip(OP_KINDS, total_ns, strict=True))
