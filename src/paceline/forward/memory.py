"""Sizes of KV memory and its allocation. The engine plans pages with `page_bytes`, then allocates once per model."""

import numpy as np
import torch

from paceline.core.kv import KvPages
from paceline.core.program import ModelSpec
from paceline.errors import MissingError

_KV_DTYPE = torch.float32  # the CPU's products read float32 only; a narrower cache would be widened on every step


def page_bytes(spec: ModelSpec, page_size: int) -> int:
    """Bytes of one page of `page_size` tokens: keys and values of all layers."""
    return 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * page_size * _KV_DTYPE.itemsize


def allocate_kv(spec: ModelSpec, num_pages: int, page_size: int) -> KvPages:
    """KV memory of `num_pages` pages, all zero.

    Errors: MissingError if the memory cannot be had.
    """
    shape = (spec.num_layers, 2, spec.num_kv_heads, num_pages * page_size, spec.head_dim)
    try:
        # numpy's zeros come from the operating system and cost no memory until they are written; torch's are written at once.
        return KvPages(torch.as_tensor(np.zeros(shape, np.float32)), page_size)
    except (MemoryError, ValueError) as error:
        needed = num_pages * page_bytes(spec, page_size)
        raise MissingError(
            f"KV memory of {num_pages:,} pages ({needed:,} bytes) cannot be allocated; lower --kv-cache-memory-bytes"
        ) from error
