"""Max-min fair division of spare tokens. Pure arithmetic; the fourth pass of a step calls it."""


def fair_shares(wishes: list[int], num_tokens: int, first: int) -> list[int]:
    """Divides `num_tokens` among wishes: as if handed out one by one, round after round, starting at index `first`.

    Small wishes are met in full before large ones get more than an equal part. O(n log n), and O(n) if there is enough for all.
    """
    if sum(wishes) <= num_tokens:
        return wishes
    shares = [0] * len(wishes)
    num_left = num_tokens
    by_size = sorted((index for index, wish in enumerate(wishes) if wish > 0), key=wishes.__getitem__)
    for position, index in enumerate(by_size):
        level = num_left // (len(by_size) - position)
        if wishes[index] > level:
            _share_level(shares, by_size[position:], num_left, first)
            break
        shares[index] = wishes[index]
        num_left -= wishes[index]
    return shares


def _share_level(shares: list[int], indices: list[int], num_tokens: int, first: int) -> None:
    """Equal parts for wishes that all exceed their part; the remainder goes to the first ones in turn."""
    level, num_extra = divmod(num_tokens, len(indices))
    in_turn = sorted(indices, key=lambda index: (index - first) % len(shares))
    for position, index in enumerate(in_turn):
        shares[index] = level + (position < num_extra)
