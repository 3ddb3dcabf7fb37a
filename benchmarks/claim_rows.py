"""Rows of `decode.py` beyond the table: what one thing costs or gives, as the ratio of two arms in turn."""

import statistics
import time

from engines import PROMPTS, SMOLLM2, acceptance, ask, decode_s, engine, twin, window
from figures import Figure, Row
from paired import Effort, Interval, Paired, run_pairs, run_rounds

from paceline.config import EngineConfig
from paceline.llm import LLM
from paceline.speculative.drafters.none import NoDrafter

PROMPT, OUTPUT = 128, 128


def plain_against_transformers(effort: Effort) -> list[Figure]:
    """Both greedy on the same folder, in bfloat16."""
    import torch
    from transformers import AutoModelForCausalLM

    llm = LLM(EngineConfig(model=SMOLLM2, draft="none", dtype="bfloat16", enable_prefix_caching=False))
    model = AutoModelForCausalLM.from_pretrained(llm.folder, dtype=torch.bfloat16).eval()

    def generate_s(ids: torch.Tensor, num_tokens: int) -> float:
        started_s = time.perf_counter()
        with torch.inference_mode():
            model.generate(ids, max_new_tokens=num_tokens, min_new_tokens=num_tokens, do_sample=False, pad_token_id=0)
        return time.perf_counter() - started_s

    def reference(number: int) -> float:
        """Decode alone: the time of all tokens less that of the first one, which carries the prompt."""
        ids = torch.tensor([window(llm, number)])
        return generate_s(ids, OUTPUT) - generate_s(ids, 1)

    reference(0), decode_s(llm, window(llm, 0), OUTPUT)
    (own_s, reference_s), dropped = run_rounds((lambda number: decode_s(llm, window(llm, number), OUTPUT), reference), effort)
    return _ratio(
        "plain-vs-transformers", Paired(own_s, reference_s, dropped), OUTPUT - 1, "plain bfloat16, against transformers' bfloat16"
    )


def int4_against_half(effort: Effort) -> list[Figure]:
    packed, half = engine(SMOLLM2, "int4"), LLM(EngineConfig(model=SMOLLM2, draft="none", dtype="bfloat16", enable_prefix_caching=False))
    plainly = twin(packed, NoDrafter)
    arms = [lambda number, llm=llm: decode_s(llm, window(llm, number), OUTPUT) for llm in (plainly, half)]
    for arm in arms:
        arm(0)
    (packed_s, half_s), dropped = run_rounds(arms, effort)
    return _ratio("int4-vs-bfloat16", Paired(packed_s, half_s, dropped), OUTPUT - 1, "plain, 4 bits in C, against 16 bits through torch")


def zero_drafts_against_none(effort: Effort) -> list[Figure]:
    loaded = engine(SMOLLM2)
    none = twin(loaded, NoDrafter)
    decode_s(loaded, window(loaded, 0), 64, 0), decode_s(none, window(none, 0), 64)
    arms = (lambda number: decode_s(loaded, window(loaded, number), 64, 0), lambda number: decode_s(none, window(none, number), 64))
    (loaded_s, none_s), dropped = run_rounds(arms, effort)
    return _ratio("k0-vs-none", Paired(loaded_s, none_s, dropped), 63, "an ngram drafter that is loaded but held at K = 0, against none")


def copy_with_ngram(effort: Effort) -> list[Figure]:
    llm = engine(SMOLLM2)
    prompt = llm.encode((PROMPTS / "copy.txt").read_text())
    drafted = ask(llm, [prompt], OUTPUT)[0]
    assert drafted.token_ids == ask(llm, [prompt], OUTPUT, 0)[0].token_ids, "drafts changed the answer"
    paired = run_pairs(lambda: decode_s(llm, prompt, OUTPUT), lambda: decode_s(llm, prompt, OUTPUT, 0), effort)
    figures = _ratio("copy-ngram", paired, OUTPUT - 1, "rewriting a given text with ngram drafts, against K = 0")
    figures[0].details.update(acceptance([drafted]))
    return figures


def eight_against_one(effort: Effort) -> list[Figure]:
    """The time of all tokens less that of the first, which carries the prompt; with prompts the ratio is lower, and stands beside."""
    llm = twin(engine(SMOLLM2), NoDrafter)
    prompts = [window(llm, place, stride=8) for place in range(8)]
    whole_s: dict[int, list[float]] = {1: [], 8: []}

    def run_s(num_requests: int, num_tokens: int) -> float:
        started_s = time.perf_counter()
        ask(llm, prompts[:num_requests], num_tokens)
        return time.perf_counter() - started_s

    def arm(num_requests: int) -> float:
        """Seconds of decoding per request."""
        first_s, all_s = run_s(num_requests, 1), run_s(num_requests, 64)
        whole_s[num_requests].append(all_s)
        return (all_s - first_s) / num_requests

    paired = run_pairs(lambda: arm(8), lambda: arm(1), effort)
    figures = _ratio("batch-8", paired, 63, "decoding of 8 requests at once, all together, against one")
    figures[0].details["ratio_with_prompts"] = round(8 * statistics.median(whole_s[1]) / statistics.median(whole_s[8]), 2)
    return figures


def _ratio(name: str, paired: Paired, num_tokens: int, what: str) -> list[Figure]:
    a_tok_s, b_tok_s = (round(num_tokens / statistics.median(times_s), 2) for times_s in (paired.a_s, paired.b_s))
    details = {"a_tok_s": a_tok_s, "b_tok_s": b_tok_s, "num_pairs": len(paired.a_s), "num_dropped": paired.num_dropped}
    ratio: Interval = paired.ratio()
    return [Figure(name, ratio, "x", f"{what}: {a_tok_s} and {b_tok_s} tokens/s", None, dict(details))]


CLAIMS: dict[str, Row] = {
    "plain-vs-transformers": Row(plain_against_transformers),
    "int4-vs-bfloat16": Row(int4_against_half),
    "k0-vs-none": Row(zero_drafts_against_none),
    "copy-ngram": Row(copy_with_ngram),
    "batch-8": Row(eight_against_one),
}
