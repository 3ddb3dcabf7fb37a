"""Decode speed on this machine, as interleaved pairs: `python benchmarks/decode.py [ROW ...]`; without a row, all but `qwen-draft`.

Every row is one claim: two arms in the same process, in turn, >= 20 pairs, the ratio of medians with its 95 % interval.
Results are printed and appended to benchmarks/results/decode-cpu.jsonl with machine, versions and commit.
"""

import argparse
import copy
import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from paired import Paired, append_result, environment, run_pairs  # sets the served engine's OpenMP environment

from paceline.config import EngineConfig
from paceline.core.request import SamplingParams
from paceline.engine.loop import EngineLoop
from paceline.executor.executor import Executor
from paceline.llm import LLM, Output
from paceline.scheduler.scheduler import Scheduler, SchedulerConfig
from paceline.speculative.drafter import DrafterSetup
from paceline.speculative.drafters.none import NoDrafter

RESULTS = Path(__file__).parent / "results" / "decode-cpu.jsonl"
TEXT = Path(__file__).parent / "prompts" / "prose.txt"
COPY = Path(__file__).parent / "prompts" / "copy.txt"
CODE = Path(__file__).parent / "prompts" / "code.jsonl"
SMOLLM2 = "smollm2-135m-instruct"


def plain_against_transformers(num_pairs: int) -> tuple[Paired, dict[str, object]]:
    """Plain bf16 decode, batch 1, prompt 128, output 128, against transformers' bf16 greedy decode of the same folder."""
    import torch
    from transformers import AutoModelForCausalLM

    llm = LLM(EngineConfig(model=SMOLLM2, draft="none", dtype="bfloat16"))
    prompts, reference_prompts = _windows(llm), _windows(llm)
    model = AutoModelForCausalLM.from_pretrained(llm.folder, dtype=torch.bfloat16).eval()

    def generate_s(ids: torch.Tensor, num_tokens: int) -> float:
        started_s = time.perf_counter()
        with torch.inference_mode():
            model.generate(ids, max_new_tokens=num_tokens, min_new_tokens=num_tokens, do_sample=False, pad_token_id=0)
        return time.perf_counter() - started_s

    def reference() -> float:
        """Decode alone: the time of 128 tokens less that of the first one, which carries the prompt."""
        ids = torch.tensor([next(reference_prompts)])
        return generate_s(ids, 128) - generate_s(ids, 1)

    paired = run_pairs(lambda: _decode_s(llm, next(prompts), 128), reference, num_pairs)
    return paired, _speeds(paired, 127)


def int4_against_half(num_pairs: int) -> tuple[Paired, dict[str, object]]:
    """Plain decode of the default, 4-bit weights through the C program, against 16-bit weights through torch; prompt 128, output 128."""
    packed, half = LLM(EngineConfig(model=SMOLLM2, draft="none")), LLM(EngineConfig(model=SMOLLM2, draft="none", dtype="bfloat16"))
    prompts, same_prompts = _windows(packed), _windows(half)
    paired = run_pairs(lambda: _decode_s(packed, next(prompts), 128), lambda: _decode_s(half, next(same_prompts), 128), num_pairs)
    return paired, _speeds(paired, 127)


def zero_drafts_against_none(num_pairs: int) -> tuple[Paired, dict[str, object]]:
    """A loaded ngram drafter with K forced to 0, against an engine without a drafter.

    Both engines run over one copy of weights and KV memory: of two models loaded alike one is 2 to 4 % slower, by where its weights lie.
    """
    loaded = LLM(EngineConfig(model=SMOLLM2, enable_prefix_caching=False))
    none = _without_drafter(loaded)
    prompts, same_prompts = _windows(loaded), _windows(none)
    paired = run_pairs(lambda: _decode_s(loaded, next(prompts), 64, 0), lambda: _decode_s(none, next(same_prompts), 64), num_pairs)
    return paired, _speeds(paired, 63)


def copy_with_ngram(num_pairs: int) -> tuple[Paired, dict[str, object]]:
    """Rewriting a given text with ngram drafts, against K=0 in the same engine."""
    llm = LLM(EngineConfig(model=SMOLLM2))
    prompt = llm.encode(COPY.read_text())
    drafted = _run(llm, [prompt], 128)[0]
    assert drafted.token_ids == _run(llm, [prompt], 128, 0)[0].token_ids, "the copy task is a near tie: choose another"
    paired = run_pairs(lambda: _decode_s(llm, prompt, 128), lambda: _decode_s(llm, prompt, 128, 0), num_pairs)
    return paired, _speeds(paired, len(drafted.token_ids) - 1) | _acceptance([drafted])


def eight_against_one(num_pairs: int) -> tuple[Paired, dict[str, object]]:
    """Decode tokens per second of 8 concurrent requests in total, against one request alone; prompt 128, output 64.

    The pairs time decoding: the time of 64 tokens less that of the first, which carries the prompt. A prompt's tokens fill the
    processor's arithmetic whether one or eight prompts run, so the ratio with prompts is lower; it stands beside, of all runs.
    """
    llm = LLM(EngineConfig(model=SMOLLM2, draft="none", enable_prefix_caching=False))
    text = llm.encode(TEXT.read_text())
    prompts = [text[8 * i : 8 * i + 128] for i in range(8)]
    whole_s: dict[int, list[float]] = {1: [], 8: []}

    def run_s(num_requests: int, num_tokens: int) -> float:
        started_s = time.perf_counter()
        _run(llm, prompts[:num_requests], num_tokens)
        return time.perf_counter() - started_s

    def arm(num_requests: int) -> float:
        """Seconds of decoding per request."""
        first_s = run_s(num_requests, 1)
        all_s = run_s(num_requests, 64)
        whole_s[num_requests].append(all_s)
        return (all_s - first_s) / num_requests

    paired = run_pairs(lambda: arm(8), lambda: arm(1), num_pairs)
    with_prompts = 8 * statistics.median(whole_s[1]) / statistics.median(whole_s[8])
    return paired, _speeds(paired, 63) | {"ratio_with_prompts": round(with_prompts, 2)}


def draft_model(num_pairs: int) -> tuple[Paired, dict[str, object]]:
    """Qwen2.5-Coder 1.5B with the 0.5B drafter, K=3, greedy, six code prompts in turn, against K=0 in the same engine."""
    config = EngineConfig(
        model="qwen2.5-coder-1.5b-instruct",
        draft="qwen2.5-coder-0.5b-instruct",
        max_draft_length=3,
        enable_prefix_caching=False,
    )
    llm = LLM(config)
    prompts = [llm.encode(json.loads(line)["prompt"]) for line in CODE.read_text().splitlines()]
    outputs: dict[int | None, list[Output]] = {None: [], 0: []}

    def arm(max_draft_length: int | None) -> float:
        done = outputs[max_draft_length]
        output = _run(llm, [prompts[len(done) % len(prompts)]], 48, max_draft_length)[0]
        done.append(output)
        return output.stats.decode_ms / 1e3

    paired = run_pairs(lambda: arm(None), lambda: arm(0), num_pairs)
    drafted, plain = outputs[None][: len(prompts)], outputs[0][: len(prompts)]
    same = sum(a.token_ids == b.token_ids for a, b in zip(drafted, plain, strict=True))
    return paired, _speeds(paired, 47) | _acceptance(drafted) | {"identical_answers": f"{same} of {len(drafted)}"}


ROWS: dict[str, Callable[[int], tuple[Paired, dict[str, object]]]] = {
    "plain-vs-transformers": plain_against_transformers,
    "int4-vs-bfloat16": int4_against_half,
    "k0-vs-none": zero_drafts_against_none,
    "copy-ngram": copy_with_ngram,
    "batch-8": eight_against_one,
    "qwen-draft": draft_model,
}


def _without_drafter(llm: LLM) -> LLM:
    """An engine of its own for `--draft none` over the loaded model of `llm`; the two must take turns and cache no prefixes."""
    config, shared = replace(llm.config, draft="none"), llm._loop._executor
    facts = replace(llm.facts, drafter="none", max_draft_length=0)
    twin = copy.copy(llm)
    drafter = NoDrafter(DrafterSetup(shared._target.rule, facts.vocab_size))
    executor = Executor(shared._target, drafter, shared._slots.grammars)
    twin.config, twin.facts, twin._received = config, facts, {}
    twin._loop = EngineLoop(Scheduler(SchedulerConfig.from_engine_config(config), facts), executor)
    return twin


def _windows(llm: LLM) -> Iterator[tuple[int, ...]]:
    """Prompts of 128 tokens that share no page: one repeated prompt would be served from the prefix cache, as traffic is not."""
    text = llm.encode(TEXT.read_text())
    return itertools.cycle(text[start : start + 128] for start in range(len(text) - 128))


def _run(llm: LLM, prompts: list[tuple[int, ...]], num_tokens: int, max_draft_length: int | None = None) -> list[Output]:
    return llm.generate(prompts, SamplingParams(num_tokens, temperature=0, ignore_eos=True), max_draft_length)


def _decode_s(llm: LLM, prompt: tuple[int, ...], num_tokens: int, max_draft_length: int | None = None) -> float:
    """Seconds from the first output token to the last."""
    return _run(llm, [prompt], num_tokens, max_draft_length)[0].stats.decode_ms / 1e3


def _speeds(paired: Paired, num_tokens: int) -> dict[str, object]:
    return {
        "a_tok_s": round(num_tokens / statistics.median(paired.a_s), 2),
        "b_tok_s": round(num_tokens / statistics.median(paired.b_s), 2),
    }


def _acceptance(outputs: list[Output]) -> dict[str, object]:
    """Pooled over all steps of all outputs."""
    drafts = [output.stats.draft for output in outputs]
    num_accepted = sum(draft.num_accepted_tokens for draft in drafts)
    return {
        "acceptance_length": round(1 + num_accepted / max(sum(draft.num_spec_steps for draft in drafts), 1), 3),
        "acceptance_rate": round(num_accepted / max(sum(draft.num_draft_tokens for draft in drafts), 1), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", nargs="*", help=f"which of {', '.join(ROWS)}")
    parser.add_argument("--pairs", type=int, default=20)
    arguments = parser.parse_args()
    names = arguments.rows or [name for name in ROWS if name != "qwen-draft"]
    if unknown := [name for name in names if name not in ROWS]:
        parser.error(f"unknown row {unknown[0]}; rows are {', '.join(ROWS)}")
    for name in names:
        paired, figures = ROWS[name](arguments.pairs)
        ratio, low, high = paired.ratio()
        row = {"row": name, "ratio": round(ratio, 3), "ci95": [round(low, 3), round(high, 3)], **figures}
        row |= {"num_pairs": arguments.pairs, "num_dropped": paired.num_dropped, **environment()}
        append_result(RESULTS, row)
        print(f"{name}: {ratio:.2f}x [{low:.2f}, {high:.2f}]  {figures}", flush=True)


if __name__ == "__main__":
    main()
