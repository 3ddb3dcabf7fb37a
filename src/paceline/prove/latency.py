"""Times of one answer, true to its tokens: a server sends several tokens in a chunk, and a time per chunk says nothing of a token.

For `summary.py`. Every function takes a whole answer (`error` None) and gives None where the answer is too short or its counts are missing.
"""

from collections.abc import Iterable
from itertools import pairwise

import numpy as np

from paceline.prove.record import Arm, RequestRecord
from paceline.prove.results import Percentiles


def ttft_ms(record: RequestRecord) -> float | None:
    """Until the first chunk with text or tokens came."""
    return (record.chunk_times_s[0] - record.sent_s) * 1e3 if record.chunk_times_s else None


def e2e_s(record: RequestRecord) -> float:
    return record.end_s - record.sent_s


def num_first_tokens(record: RequestRecord) -> int:
    """Tokens of the first chunk; 1, that of the prompt's own pass, where the server does not say."""
    return max(1, record.chunk_tokens[0]) if record.chunk_tokens else 1


def num_decode_tokens(record: RequestRecord) -> int:
    """Tokens that came after the first chunk."""
    return max(0, record.num_output_tokens - num_first_tokens(record))


def decode_s(record: RequestRecord) -> float:
    """From the first chunk to the last: the wait for the first token is no part of it."""
    return record.chunk_times_s[-1] - record.chunk_times_s[0] if record.chunk_times_s else 0.0


def tpot_ms(record: RequestRecord) -> float | None:
    """Time per output token after the first chunk."""
    num_tokens = num_decode_tokens(record)
    return decode_s(record) * 1e3 / num_tokens if num_tokens and decode_s(record) > 0 else None


def user_tps(record: RequestRecord) -> float | None:
    """Tokens per second as one reader sees them, once they flow."""
    time_ms = tpot_ms(record)
    return None if time_ms is None else 1e3 / time_ms


def chunk_gaps_ms(record: RequestRecord) -> list[float]:
    return [(later - earlier) * 1e3 for earlier, later in pairwise(record.chunk_times_s)]


def inter_token_ms(record: RequestRecord) -> tuple[list[float], list[int]]:
    """Each chunk after the first as (time per token in it, its tokens); chunks without a token lend their time to the next one."""
    if not record.chunk_tokens:
        return [], []
    per_token_ms: list[float] = []
    counts: list[int] = []
    since_s = record.chunk_times_s[0]
    for time_s, num_tokens in zip(record.chunk_times_s[1:], record.chunk_tokens[1:], strict=True):
        if num_tokens > 0:
            per_token_ms.append((time_s - since_s) * 1e3 / num_tokens)
            counts.append(num_tokens)
            since_s = time_s
    return per_token_ms, counts


def num_decode_steps(record: RequestRecord) -> float | None:
    """Steps of the model between the first chunk and the last.

    A step gives one token and its accepted drafts, the prompt's pass one more token: so the server's count of accepted drafts gives the
    steps, however it cuts its stream into chunks. Without such a count, a plain answer has a step per token, and any other one per chunk.
    """
    num_tokens = num_decode_tokens(record)
    if num_tokens == 0 or decode_s(record) <= 0:
        return None
    told = record.acceptance
    if told is not None:
        num_after_prompt = record.num_output_tokens - 1
        num_steps = num_after_prompt - told.num_accepted_draft_tokens
        return num_tokens * num_steps / num_after_prompt if num_steps > 0 else None
    if record.arm is Arm.BASELINE:
        return float(num_tokens)
    return float(sum(1 for tokens in record.chunk_tokens[1:] if tokens > 0)) or None


def percentiles(values: Iterable[float], counts: Iterable[int] | None = None) -> Percentiles | None:
    """50th, 95th and 99th, between neighbours by straight lines; `counts`: how often each value occurs."""
    array = np.array(list(values), dtype=np.float64)
    if counts is not None:
        array = np.repeat(array, np.array(list(counts), dtype=np.intp))
    if not array.size:
        return None
    p50, p95, p99 = np.percentile(array, [50, 95, 99])
    return Percentiles(float(p50), float(p95), float(p99))
