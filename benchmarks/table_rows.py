"""The rows of the table in docs/performance.md that need no other program; `decode.py` runs them."""

import statistics
import time
from collections.abc import Callable, Sequence

from engines import (
    QWEN,
    QWEN_SMALL,
    SMOLLM2,
    RandomDrafter,
    acceptance,
    ask,
    engine,
    quantization_of,
    quick_set,
    shipped_prompts,
    twin,
    window,
)
from figures import Figure, Row
from paired import Effort, Interval, inverse, median_of, ratio_of_means, run_rounds, scaled

from paceline.llm import LLM, Output
from paceline.native.library import Library
from paceline.speculative.drafters.none import NoDrafter

PROMPT, OUTPUT, LONG_PROMPT = 128, 128, 512
NUM_AT_ONCE, OUTPUT_AT_ONCE = 8, 64
NUM_VERIFIED = 4
ANSWER = 64  # tokens of an answer to a prompt of the sets
QWEN_OUTPUT, QWEN_ANSWER = 32, 48


def plain(model: str, quantization: str, num_outputs: int = OUTPUT) -> Callable[[Effort], Sequence[Figure]]:
    """Plain decoding of one request."""

    def measure(effort: Effort) -> list[Figure]:
        llm = twin(engine(model, quantization), NoDrafter)

        def token_s(number: int) -> float:
            return ask(llm, [window(llm, number)], num_outputs)[0].stats.decode_ms / 1e3 / (num_outputs - 1)

        rate, gb_s, details = _single(llm, token_s, effort)
        what = f"{model} {quantization_of(llm)}, plain decoding, prompt {PROMPT}, output {num_outputs}"
        return [Figure(f"plain {_short(model)} {quantization}", rate, "tokens/s", what, gb_s, details)]

    return measure


def prefill(effort: Effort) -> list[Figure]:
    """Prompt tokens per second of one request."""
    llm = twin(engine(SMOLLM2), NoDrafter)

    def token_s(number: int) -> float:
        return ask(llm, [window(llm, number, LONG_PROMPT)], 1)[0].stats.prefill_ms / 1e3 / LONG_PROMPT

    rate, _, details = _single(llm, token_s, effort)
    return [Figure("prompt", rate, "tokens/s", f"{SMOLLM2} {quantization_of(llm)}, a prompt of {LONG_PROMPT} tokens", None, details)]


def verify(effort: Effort) -> list[Figure]:
    """Whole steps, scheduler and drafter included, of which each verifies three drafts that are wrong, beside plain ones."""
    base = engine(SMOLLM2)
    drafted, single = twin(base, RandomDrafter, NUM_VERIFIED - 1), twin(base, NoDrafter)

    def step_s(llm: LLM, number: int) -> float:
        stats = ask(llm, [window(llm, number)], 64)[0].stats
        return stats.decode_ms / 1e3 / (stats.draft.num_spec_steps + stats.draft.num_plain_steps)

    (drafted_s, single_s), dropped = _rounds((lambda number: step_s(drafted, number), lambda number: step_s(single, number)), effort)
    one = scaled(median_of(single_s), 1e3)
    details = {"single_token_ms": round(one[0], 3), "num_rounds": len(drafted_s), "num_dropped": dropped}
    what = f"{SMOLLM2} {quantization_of(base)}, a whole step that verifies {NUM_VERIFIED} tokens; a plain step takes {one[0]:.2f} ms"
    gb_s = inverse(median_of(drafted_s), base.facts.target_weight_bytes / 1e9)
    return [Figure(f"step of {NUM_VERIFIED} tokens", scaled(median_of(drafted_s), 1e3), "ms", what, gb_s, details)]


def at_once(effort: Effort) -> list[Figure]:
    """Output tokens per second of concurrent requests together, the time of their prompts included."""
    llm = twin(engine(SMOLLM2), NoDrafter)
    total = NUM_AT_ONCE * OUTPUT_AT_ONCE

    def token_s(number: int) -> float:
        prompts = [window(llm, number + 8 * place) for place in range(NUM_AT_ONCE)]
        started_s = time.perf_counter()
        ask(llm, prompts, OUTPUT_AT_ONCE)
        return (time.perf_counter() - started_s) / total

    rate, _, details = _single(llm, token_s, effort)
    what = f"{SMOLLM2} {quantization_of(llm)}, {NUM_AT_ONCE} requests at once in all, prompts of {PROMPT} included, output {OUTPUT_AT_ONCE}"
    return [Figure(f"{NUM_AT_ONCE} at once", rate, "tokens/s", what, None, details)]


def speculation(name: str, prompts: Callable[[], Sequence[str]], answer: int = ANSWER, draft: str = "") -> Callable[[Effort], list[Figure]]:
    """Mean tokens per second of a user over a set of prompts with `--speculation auto`, against the same engine without drafts."""

    def measure(effort: Effort) -> list[Figure]:
        drafting = engine(QWEN, draft=draft) if draft else engine(SMOLLM2)
        single, asked = twin(drafting, NoDrafter), prompts()
        outputs: dict[int, Output] = {}

        def token_s(llm: LLM, number: int) -> float:
            output = ask(llm, [asked[number % len(asked)]], answer)[0]
            if llm is drafting:
                outputs[number] = output
            return output.stats.decode_ms / 1e3 / (len(output.token_ids) - 1)

        whole = Effort(min(effort.num_rounds, len(asked)), effort.limit_s)
        arms = (lambda number: token_s(drafting, number), lambda number: token_s(single, number))
        (drafted_s, single_s), dropped = _rounds(arms, whole)
        with_tps, without_tps = [1 / value for value in drafted_s], [1 / value for value in single_s]
        ratio, rates = ratio_of_means(with_tps, without_tps), (statistics.mean(with_tps), statistics.mean(without_tps))
        details = {"user_tps": round(rates[0], 1), "plain_user_tps": round(rates[1], 1)} | acceptance(list(outputs.values()))
        details |= {"num_prompts": len(drafted_s), "num_dropped": dropped, "model": drafting.config.model, "drafter": drafting.config.draft}
        what = f"mean user TPS {rates[0]:.1f} against {rates[1]:.1f} plain, {len(drafted_s)} prompts, {drafting.config.draft} drafts"
        return [Figure(f"speculation {name}", ratio, "x", f"{drafting.config.model} {quantization_of(drafting)}, {what}", None, details)]

    return measure


def outside(effort: Effort) -> list[Figure]:
    """The share of plain decoding's time in which the native library does not run: scheduler, sampling and Python; without sockets."""
    llm, run, passes_s = twin(engine(SMOLLM2), NoDrafter), Library.run, []

    def timed(*arguments: object) -> int:
        started_s = time.perf_counter()
        status = run(*arguments)
        passes_s.append(time.perf_counter() - started_s)
        return status

    def share(number: int) -> float:
        passes_s.clear()
        decode_s = ask(llm, [window(llm, number)], OUTPUT)[0].stats.decode_ms / 1e3
        return 1 - sum(passes_s[1:]) / decode_s  # the first pass is the prompt's

    Library.run = timed
    try:
        (shares,), dropped = _rounds((share,), effort)
    finally:
        Library.run = run
    details = {"num_rounds": len(shares), "num_dropped": dropped}
    what = f"{SMOLLM2} {quantization_of(llm)}, share of a plain step outside the native call, in one process"
    return [Figure("outside the native call", scaled(median_of(shares), 100), "%", what, None, details)]


def _single(llm: LLM, token_s: Callable[[int], float], effort: Effort) -> tuple[Interval, Interval, dict[str, object]]:
    """Tokens per second, GB/s of weights at one pass per token, and details."""
    (times_s,), dropped = _rounds((token_s,), effort)
    rate = inverse(median_of(times_s))
    details = {"model": llm.config.model, "quantization": quantization_of(llm), "num_rounds": len(times_s), "num_dropped": dropped}
    return rate, scaled(rate, llm.facts.target_weight_bytes / 1e9), details


def _rounds(arms: Sequence[Callable[[int], float]], effort: Effort) -> tuple[list[list[float]], int]:
    """Warmed up."""
    for arm in arms:
        arm(0)
    return run_rounds(arms, effort)


def _short(model: str) -> str:
    return {SMOLLM2: "135M", QWEN_SMALL: "0.5B", QWEN: "1.5B"}.get(model, model)


TABLE: dict[str, Row] = {
    "plain-int4": Row(plain(SMOLLM2, "int4")),
    "plain-int8": Row(plain(SMOLLM2, "int8")),
    "speculation-quick": Row(speculation("quick set", quick_set), time_share=3),
    "speculation-copy": Row(speculation("copy", lambda: shipped_prompts("copy")), time_share=1.5),
    "speculation-code": Row(speculation("code", lambda: shipped_prompts("code")), time_share=1.5),
    "verify-4": Row(verify),
    "prompt": Row(prefill),
    "at-once-8": Row(at_once),
    "outside": Row(outside),
    "qwen-0.5b-int4": Row(plain(QWEN_SMALL, "int4", QWEN_OUTPUT), (QWEN_SMALL,)),
    "qwen-0.5b-int8": Row(plain(QWEN_SMALL, "int8", QWEN_OUTPUT), (QWEN_SMALL,)),
    "qwen-1.5b-int4": Row(plain(QWEN, "int4", QWEN_OUTPUT), (QWEN,)),
    "qwen-draft": Row(speculation("1.5B by 0.5B", lambda: shipped_prompts("code"), QWEN_ANSWER, QWEN_SMALL), (QWEN, QWEN_SMALL), 1.5),
}
