"""Beside llama.cpp on the same weights: `python benchmarks/decode_llama_cpp.py --llama-python P --gguf F [ROW ...] [--record]`.

llama.cpp runs in a process of its own, whose interpreter has llama-cpp-python, through its C API; logits are read where they lie. Both
sides get the same prompt tokens and as many threads, both take the likeliest tokens. They run in turn in blocks of `--block-s` seconds,
with a probe of the memory's speed before each; a block gives the median of its runs, and the ratio of the medians of blocks, above 1 where
Paceline is faster, has a bootstrap interval over pairs of blocks. `--record` appends to benchmarks/results/llama_cpp.jsonl.

    plain        decoding of one request, prompt 128, output 128
    prompt       a prompt of 512 tokens
    at-once      8 requests at once, prompts of 128 included, output 64: total tokens/s. llama-cpp-python's server takes one request at a
                 time, so llama.cpp's batches are filled here as its own server fills them: 8 sequences in one context
    lookup-quick, lookup-copy
                 best speculation of both: ngram drafts with `--speculation auto` against llama-cpp-python's prompt lookup; mean tokens/s of
                 a user over prompts of the speed-bench-like quick set, or over copying
    quick-mixed, copy-mixed
                 the same, Paceline speculative against llama.cpp plain
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from engines import ask, engine, quantization_of, quick_set, shipped_prompts, twin, window
from llama_peer import LlamaPeer, bytes_per_pass, llama_peer
from paired import Effort, Interval, Paired, append_result, blocks, environment, inverse, median_of, run_rounds, scaled

from paceline.llm import LLM
from paceline.speculative.drafters.none import NoDrafter

RESULTS = Path(__file__).parent / "results" / "llama_cpp.jsonl"
PROMPT, OUTPUT, LONG_PROMPT = 128, 128, 512
NUM_AT_ONCE, OUTPUT_AT_ONCE = 8, 64
ANSWER = 64
NUM_QUICK = 11  # of the quick set: one prompt of each category

Arm = Callable[[], float]
"""One run; its seconds per token."""


@dataclass(frozen=True)
class Sides:
    """Two arms. `reads_weights`: a token is one pass over the weights, so GB/s can be told."""

    ours: Arm
    theirs: Arm
    reads_weights: bool = False


def plain(llm: LLM, peer: LlamaPeer, options: argparse.Namespace) -> Sides:
    single, prompt = twin(llm, NoDrafter), window(llm, 0, PROMPT)
    count = options.output - 1
    return Sides(
        lambda: ask(single, [prompt], options.output)[0].stats.decode_ms / 1e3 / count,
        lambda: peer.run("plain", prompt=prompt, num_outputs=options.output)["decode_s"] / count,
        reads_weights=True,
    )


def prompt(llm: LLM, peer: LlamaPeer, _: argparse.Namespace) -> Sides:
    single, text = twin(llm, NoDrafter), window(llm, 0, LONG_PROMPT)
    return Sides(
        lambda: ask(single, [text], 1)[0].stats.prefill_ms / 1e3 / LONG_PROMPT,
        lambda: peer.run("plain", prompt=text, num_outputs=1)["prompt_s"] / LONG_PROMPT,
    )


def at_once(llm: LLM, peer: LlamaPeer, _: argparse.Namespace) -> Sides:
    single, prompts = twin(llm, NoDrafter), [window(llm, 8 * place, PROMPT) for place in range(NUM_AT_ONCE)]
    total = NUM_AT_ONCE * OUTPUT_AT_ONCE

    def ours() -> float:
        started_s = time.perf_counter()
        ask(single, prompts, OUTPUT_AT_ONCE)
        return (time.perf_counter() - started_s) / total

    return Sides(ours, lambda: peer.run("at_once", prompts=prompts, num_outputs=OUTPUT_AT_ONCE)["wall_s"] / total)


def lookup(prompts: Callable[[], Sequence[str]], is_theirs_plain: bool) -> Callable[[LLM, LlamaPeer, argparse.Namespace], Sides]:
    """One run asks all prompts, and gives the inverse of the mean rate."""

    def sides(llm: LLM, peer: LlamaPeer, options: argparse.Namespace) -> Sides:
        asked = [llm.encode(text) for text in prompts()]

        def over_all(decode_s: Callable[[tuple[int, ...]], float]) -> float:
            return 1 / statistics.mean((ANSWER - 1) / decode_s(token_ids) for token_ids in asked)

        def theirs(token_ids: tuple[int, ...]) -> float:
            if is_theirs_plain:
                return peer.run("plain", prompt=token_ids, num_outputs=ANSWER)["decode_s"]
            return peer.run("lookup", prompt=token_ids, num_outputs=ANSWER, num_drafts=options.lookup_drafts)["decode_s"]

        return Sides(lambda: over_all(lambda ids: ask(llm, [ids], ANSWER)[0].stats.decode_ms / 1e3), lambda: over_all(theirs))

    return sides


def quick() -> Sequence[str]:
    return quick_set()[:NUM_QUICK]


def copying() -> Sequence[str]:
    return shipped_prompts("copy")


ROWS: dict[str, Callable[[LLM, LlamaPeer, argparse.Namespace], Sides]] = {
    "plain": plain,
    "prompt": prompt,
    "at-once": at_once,
    "lookup-quick": lookup(quick, is_theirs_plain=False),
    "lookup-copy": lookup(copying, is_theirs_plain=False),
    "quick-mixed": lookup(quick, is_theirs_plain=True),
    "copy-mixed": lookup(copying, is_theirs_plain=True),
}


def measure(name: str, llm: LLM, options: argparse.Namespace) -> dict[str, object]:
    """A line of results, without the environment."""
    flags = ["--flash-attention"] if options.flash_attention else []
    flags += ["--sequences", str(NUM_AT_ONCE), "--context", "256"] if name == "at-once" else []
    flags += ["--unified"] if options.unified and name == "at-once" else []
    with llama_peer(options.llama_python, options.gguf, options.threads, flags) as peer:
        sides = ROWS[name](llm, peer, options)
        sides.ours(), sides.theirs()
        probes: list[float] = []
        arms = [blocks(arm, options.block_s, probes) for arm in (sides.ours, sides.theirs)]
        (ours_s, theirs_s), dropped = run_rounds(arms, Effort(options.pairs), peer.cpu_s)
        about = peer.about
    ratio = Paired(ours_s, theirs_s, dropped).ratio()
    line: dict[str, object] = {"row": f"llama.cpp {name}", "ratio": round(ratio[0], 3), "ci95": [round(end, 3) for end in ratio[1:]]}
    for side, times_s, num_bytes in (
        ("paceline", ours_s, llm.facts.target_weight_bytes),
        ("llama_cpp", theirs_s, bytes_per_pass(options.gguf)),
    ):
        rate = inverse(median_of(times_s))
        line |= {f"{side}_tok_s": rounded(rate)}
        line |= {f"{side}_gb_s": rounded(scaled(rate, num_bytes / 1e9))} if sides.reads_weights else {}
    line |= {"read_probe_gb_s": rounded(median_of(probes)), "num_pairs": len(ours_s), "num_dropped": dropped}
    line |= {"block_s": options.block_s, "lookup_drafts": options.lookup_drafts} if "lookup" in name else {"block_s": options.block_s}
    return line | {"llama_cpp": about["version"], "llama_cpp_build": about["system"]}


def rounded(interval: Interval) -> list[float]:
    """A value and its interval."""
    return [round(part, 2) for part in interval]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", default=["plain", "prompt"], help=f"which of {', '.join(ROWS)}")
    parser.add_argument("--llama-python", required=True, help="the interpreter of the environment that has llama-cpp-python")
    parser.add_argument("--gguf", required=True, type=Path, help="llama.cpp's model file")
    parser.add_argument("--model", help="Paceline's model, if it is another file or name for the same weights")
    parser.add_argument("--quantization", default="auto")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--flash-attention", action="store_true", help="llama.cpp's flash attention")
    parser.add_argument("--unified", action="store_true", help="at-once: one KV memory for all of llama.cpp's sequences")
    parser.add_argument("--lookup-drafts", type=int, default=10, help="llama-cpp-python's num_pred_tokens; 10 is its default")
    parser.add_argument("--output", type=int, default=OUTPUT, help="tokens that the row plain decodes")
    parser.add_argument("--pairs", type=int, default=10, help="pairs of blocks")
    parser.add_argument("--block-s", type=float, default=30.0)
    parser.add_argument("--record", type=Path, nargs="?", const=RESULTS, help="append the figures to this file")
    options = parser.parse_args()
    if unknown := [name for name in options.rows if name not in ROWS]:
        parser.error(f"unknown row {unknown[0]}; rows are {', '.join(ROWS)}")
    llm = engine(options.model or str(options.gguf), options.quantization, threads=options.threads)
    for name in options.rows:
        line = measure(name, llm, options)
        line |= {"model": options.model or options.gguf.name, "quantization": quantization_of(llm), "gguf": options.gguf.name}
        line |= {"flash_attention": options.flash_attention, **environment(), "threads": options.threads}
        print(json.dumps(line), flush=True)
        if options.record:
            append_result(options.record, line)


if __name__ == "__main__":
    main()
