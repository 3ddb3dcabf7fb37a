"""Attention for the CPU: a few matrix products per row over strided pages, in tiles that give a query the same bits in every company.

What was measured for MKL's products in float32 (AVX2, 1 to 8 threads, head_dim 16 to 128), and what the rules below rest on: a row of
a product has the same bits for any number of rows from 4 on (with one head per call, for multiples of 4); scores do not depend on
the number of keys from 12 keys on, nor does softmax from 8 on; a sum over up to 192 keys does not change when zeros are appended,
longer ones are cut at places that depend on their length. torch uses other code for products below 400 multiplications.
"""

import torch

from paceline.core.program import ModelSpec, Op
from paceline.kernels.primitives.layout import MIN_KEYS, PassLayout
from paceline.kernels.primitives.table import Built, Place, Tensors

_TILE = 64  # query tokens per product: bounds the scores' memory
_SPLIT = 128  # keys per product with the values, so that the order of every sum is fixed


class PagedAttention(torch.nn.Module):
    def __init__(self, layer: int, spec: ModelSpec) -> None:
        super().__init__()
        self.layer = layer
        self.num_heads = spec.num_heads
        self.num_kv_heads = spec.num_kv_heads
        self.head_dim = spec.head_dim
        self.group = spec.num_heads // spec.num_kv_heads
        self.min_rows = max(4, -(-256 // spec.head_dim))  # of a product: q tokens x group
        self.one_row_padded = _padded(self.group, self.min_rows, spec.num_kv_heads)
        # A lone token needs no copy of q: the rows that pad a group are the next heads of the same qkv row.
        self.is_one_row_strided = (spec.num_kv_heads - 1) * self.group + self.one_row_padded <= spec.num_heads + 2 * spec.num_kv_heads
        self.tile, self.split, self.min_keys = _TILE, _SPLIT, MIN_KEYS  # TorchScript reads no globals
        self.mask = _causal_mask(_TILE, self.group, _TILE + MIN_KEYS)

    def forward(self, qkv: torch.Tensor, kv: torch.Tensor, layout: PassLayout) -> torch.Tensor:
        pages = kv.select(0, self.layer)
        if qkv.size(0) == 1:
            return self.attend_one(qkv, self.keys_and_values(pages, layout, 0))
        if len(layout.groups) == 1 and len(layout.lone_rows) == 0:
            return self.attend_group(qkv, pages, layout, 0)
        out = torch.empty([qkv.size(0), self.num_heads * self.head_dim])
        for group in range(len(layout.groups)):
            tokens = layout.group_tokens[group]
            out.index_copy_(0, tokens, self.attend_group(qkv.index_select(0, tokens), pages, layout, group))
        for row in layout.lone_rows:
            row_kv = self.keys_and_values(pages, layout, row)
            row_end = layout.query_start[row + 1]
            for start in range(layout.query_start[row], row_end, self.tile):
                size = min(self.tile, row_end - start)
                visible = row_kv.narrow(2, 0, layout.kv_lens[row] - (row_end - start - size))
                queries = qkv.narrow(0, start, size)
                attended = self.attend_one(queries, visible) if size == 1 else self.attend(queries, visible)
                out.narrow(0, start, size).copy_(attended)
        return out

    def keys_and_values(self, pages: torch.Tensor, layout: PassLayout, row: int) -> torch.Tensor:
        """`[2, Hkv, n, d]` of one row: a view if its pages are consecutive, else a copy."""
        num_keys = layout.kv_lens[row]
        start = layout.kv_starts[row]
        if start >= 0:
            return pages.narrow(2, start, num_keys)
        by_page = pages.view(2, self.num_kv_heads, -1, layout.page_size * self.head_dim)
        own = by_page.index_select(2, layout.kv_pages[row])
        return own.view(2, self.num_kv_heads, -1, self.head_dim).narrow(2, 0, num_keys)

    def attend_group(self, qkv: torch.Tensor, pages: torch.Tensor, layout: PassLayout, group: int) -> torch.Tensor:
        """One query token of each row of a group over a padded copy of the rows' keys and values: `[rows, Hq * d]`."""
        mask = layout.group_masks[group]
        num_rows, longest = mask.size(0), mask.size(2)
        by_page = pages.view(2, self.num_kv_heads, -1, layout.page_size * self.head_dim)
        copy = by_page.index_select(2, layout.group_pages[group]).view(2, self.num_kv_heads, -1, self.head_dim)
        copy.index_fill_(2, layout.group_tails[group], 0.0)  # what other rows left in the pages may be infinite
        group_kv = copy.view(2, self.num_kv_heads * num_rows, longest, self.head_dim)
        queries = self.group_queries(qkv)
        scores = torch.bmm(queries, group_kv.select(0, 0).transpose(1, 2))
        scores.view(self.num_kv_heads, num_rows, -1, longest).add_(mask)
        sums = self.weighted_sums(torch.softmax(scores, -1), group_kv.select(0, 1))
        heads = sums.narrow(1, 0, self.group).view(self.num_kv_heads, num_rows, self.group, self.head_dim)
        return heads.transpose(0, 1).reshape(num_rows, -1)

    def attend_one(self, qkv: torch.Tensor, row_kv: torch.Tensor) -> torch.Tensor:
        """One query token over all keys: `[1, Hq * d]`. The same as `attend`, which costs more ops."""
        if row_kv.size(2) < self.min_keys or not self.is_one_row_strided:
            return self.attend(qkv, row_kv)
        queries = qkv.as_strided([self.num_kv_heads, self.one_row_padded, self.head_dim], [self.group * self.head_dim, self.head_dim, 1])
        scores = torch.bmm(queries, row_kv.select(0, 0).transpose(1, 2))
        sums = self.weighted_sums(torch.softmax(scores, -1), row_kv.select(0, 1))
        return sums.narrow(1, 0, self.group).reshape(1, -1)

    def attend(self, qkv: torch.Tensor, row_kv: torch.Tensor) -> torch.Tensor:
        """A tile of t query tokens over the keys that its last token sees: `[t, Hq * d]`."""
        num_tokens, num_keys = qkv.size(0), row_kv.size(2)
        num_masked = num_tokens  # columns from the tile's own first token on
        if num_keys < self.min_keys:
            num_masked += self.min_keys - num_keys
            row_kv = torch.cat([row_kv, torch.zeros([2, self.num_kv_heads, self.min_keys - num_keys, self.head_dim])], 2)
        num_rows = num_tokens * self.group
        scores = torch.bmm(self.queries(qkv), row_kv.select(0, 0).transpose(1, 2))
        mask = self.mask.narrow(0, 0, num_rows).narrow(1, 0, num_masked)
        scores.narrow(1, 0, num_rows).narrow(2, num_keys - num_tokens, num_masked).add_(mask)
        sums = self.weighted_sums(torch.softmax(scores, -1), row_kv.select(0, 1))
        heads = sums.narrow(1, 0, num_rows).view(self.num_kv_heads, num_tokens, self.group, self.head_dim)
        return heads.transpose(0, 1).reshape(num_tokens, -1)

    def group_queries(self, qkv: torch.Tensor) -> torch.Tensor:
        """q of one token per row as `[Hkv * rows, padded group, d]`."""
        num_rows = qkv.size(0)
        q = qkv.narrow(1, 0, self.num_heads * self.head_dim).view(num_rows, self.num_kv_heads, self.group, self.head_dim)
        padded = torch.zeros([self.num_kv_heads, num_rows, self.one_row_padded, self.head_dim])
        padded.narrow(2, 0, self.group).copy_(q.transpose(0, 1))
        return padded.view(self.num_kv_heads * num_rows, self.one_row_padded, self.head_dim)

    def queries(self, qkv: torch.Tensor) -> torch.Tensor:
        """q of a tile as `[Hkv, rows, d]`, row t * group + g; zero rows follow if the tile is small."""
        num_tokens = qkv.size(0)
        q = qkv.narrow(1, 0, self.num_heads * self.head_dim).view(num_tokens, self.num_kv_heads, self.group, self.head_dim)
        num_rows = num_tokens * self.group
        rows = q.transpose(0, 1).reshape(self.num_kv_heads, num_rows, self.head_dim)
        num_padding = _padded(num_rows, self.min_rows, self.num_kv_heads) - num_rows
        if num_padding > 0:
            rows = torch.cat([rows, torch.zeros([self.num_kv_heads, num_padding, self.head_dim])], 1)
        return rows

    def weighted_sums(self, probs: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """probs `[Hkv, rows, n]` x values `[Hkv, n, d]`, one split of keys after the other."""
        num_keys, split = values.size(1), self.split
        if num_keys <= split:
            return torch.bmm(probs, values)
        sums = torch.bmm(probs.narrow(2, 0, split), values.narrow(1, 0, split))
        for start in range(split, num_keys, split):
            size = min(split, num_keys - start)
            sums.baddbmm_(probs.narrow(2, start, size), values.narrow(1, start, size))
        return sums


def _padded(num_rows: int, min_rows: int, num_kv_heads: int) -> int:
    """The rows a product needs for bits that do not depend on their number."""
    if num_kv_heads == 1:  # then MKL divides the rows among its threads
        return max(num_rows + 3 - (num_rows + 3) % 4, min_rows)
    return max(num_rows, min_rows)


def _causal_mask(num_tokens: int, group: int, width: int) -> torch.Tensor:
    """`[num_tokens * group, width]`: token t sees columns 0..t."""
    mask = torch.full([num_tokens, width], -torch.inf).triu(1)
    return mask.repeat_interleave(group, 0)


def supports(spec: ModelSpec, place: Place) -> str | None:
    if place.device.type != "cpu":
        return f"it runs on the CPU, not on {place.device.type}"
    return None


def build(op: Op, spec: ModelSpec, tensors: Tensors, place: Place) -> Built:
    return Built(PagedAttention(op.layer, spec), 0)
