"""How many rows an elementwise op may take at once, where its bits must not depend on the place of a row in the batch.

torch divides elementwise ops of 32768 elements or more among its threads, wherever that falls; the few elements beside a cut, and those
at the end of a range, take scalar code instead of vector code. Sums, products and quotients come out alike; complex products
and exponentials do not.
"""

_NUM_SPLIT = 32768  # at::internal::GRAIN_SIZE


def rows_unsplit(num_columns: int) -> int:
    """Rows of `num_columns` elements that one op handles in one piece; at least 1."""
    return max((_NUM_SPLIT - 1) // num_columns, 1)
