"""Names for the ranges of batch and context that figures of drafting are kept by: what holds at one row need not hold at sixty."""

from bisect import bisect_left

_MAX_ROWS = (1, 2, 4, 8, 16, 32, 64, 128)
_MAX_CONTEXTS = (1024, 4096, 16384)  # tokens of a row, on average

_ROW_BANDS = ("1", "2", "3-4", "5-8", "9-16", "17-32", "33-64", "65-128", "129+")
_CONTEXT_BANDS = ("0-1k", "1k-4k", "4k-16k", "16k+")


def rows_band(num_rows: float) -> str:
    """The label of a batch of so many decoding rows, such as `rows=5-8`."""
    return f"rows={_ROW_BANDS[bisect_left(_MAX_ROWS, num_rows)]}"


def rows_context_band(num_rows: float, num_context_tokens: float) -> str:
    """The label of so many decoding rows that have so many tokens before them, all rows together: `rows=5-8,context=1k-4k`."""
    rows, context = band_numbers(num_rows, num_context_tokens)
    return f"rows={_ROW_BANDS[rows]},context={_CONTEXT_BANDS[context]}"


def band_numbers(num_rows: float, num_context_tokens: float) -> tuple[int, int]:
    """The same without the words, for what every step looks up."""
    return bisect_left(_MAX_ROWS, num_rows), bisect_left(_MAX_CONTEXTS, num_context_tokens / max(num_rows, 1))
