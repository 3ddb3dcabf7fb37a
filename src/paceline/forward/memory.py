"""Sizes of KV memory and its allocation. The engine plans pages with `page_bytes`, then allocates once per model."""

import numpy as np
import torch

from paceline.core.kv import KvPages
from paceline.errors import MissingError
from paceline.forward.forward import Forward

_NUMPY = {torch.float32: np.float32, torch.float16: np.float16}


def page_bytes(forward: Forward, page_size: int) -> int:
    """Bytes of one page of `page_size` tokens: keys and values of all layers, in the number format that the model's runner keeps."""
    spec = forward.spec
    return 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * page_size * forward.kv_dtype.itemsize


def allocate_kv(forward: Forward, num_pages: int, page_size: int) -> KvPages:
    """KV memory of `num_pages` pages for a model, all zero.

    Errors: MissingError if the memory cannot be had.
    """
    spec = forward.spec
    shape = (spec.num_layers, 2, spec.num_kv_heads, num_pages * page_size, spec.head_dim)
    try:
        # numpy's zeros come from the operating system and cost no memory until they are written; torch's are written at once.
        return KvPages(torch.as_tensor(np.zeros(shape, _NUMPY[forward.kv_dtype])), page_size)
    except (MemoryError, ValueError) as error:
        needed = num_pages * page_bytes(forward, page_size)
        raise MissingError(
            f"KV memory of {num_pages:,} pages ({needed:,} bytes) cannot be allocated; lower --kv-cache-memory-bytes"
        ) from error
