"""Plain decoding beside llama.cpp on the same weights, in turn: `python benchmarks/decode_llama_cpp.py --llama-python P --gguf F`.

llama.cpp runs in a child with an interpreter of its own, which has llama-cpp-python; logits are read where they lie, never copied. Both
sides run the same prompt tokens with the same number of threads, greedy. Rows: decoding (prompt 128, output 128) and the prompt itself
(512 tokens). The ratio of medians with its 95 % interval goes to benchmarks/results/llama_cpp.jsonl, above 1 where Paceline is faster.
"""

import argparse
import ctypes
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

RESULTS = Path(__file__).parent / "results" / "llama_cpp.jsonl"
TEXT = Path(__file__).parent / "prompts" / "prose.txt"
PROMPT, OUTPUT, LONG_PROMPT = 128, 128, 512


def serve_llama(path: str, num_threads: int, is_flash: bool) -> None:
    """The child: a line with prompt tokens and a number of outputs in, a line with seconds of prompt and of decoding out."""
    import llama_cpp
    import numpy as np

    model = llama_cpp.Llama(
        path,
        n_ctx=2048,
        n_batch=512,
        n_threads=num_threads,
        n_threads_batch=num_threads,
        flash_attn=is_flash,
        logits_all=False,
        verbose=False,
    )
    context, vocab_size = model.ctx, model.n_vocab()

    def run(token_ids: list[int]) -> int:
        array = (llama_cpp.llama_token * len(token_ids))(*token_ids)
        if llama_cpp.llama_decode(context, llama_cpp.llama_batch_get_one(array, len(token_ids))):
            raise SystemExit("llama_decode failed")
        pointer = ctypes.cast(llama_cpp.llama_get_logits_ith(context, -1), ctypes.POINTER(ctypes.c_float))
        return int(np.ctypeslib.as_array(pointer, (vocab_size,)).argmax())

    for line in sys.stdin:
        request = json.loads(line)
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
        started_s = time.perf_counter()
        token = run(request["prompt"])
        first_s = time.perf_counter()
        for _ in range(request["num_outputs"] - 1):
            token = run([token])
        print(json.dumps({"prompt_s": first_s - started_s, "decode_s": time.perf_counter() - first_s}), flush=True)


class LlamaChild:
    """llama.cpp in its own process."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process

    def run(self, prompt: list[int], num_outputs: int) -> dict[str, float]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"prompt": prompt, "num_outputs": num_outputs}) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise SystemExit("llama.cpp's process has ended; its message stands above")
        return json.loads(answer)

    def cpu_s(self) -> float:
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def llama_child(arguments: argparse.Namespace) -> Iterator[LlamaChild]:
    command = [arguments.llama_python, __file__, "--child", "--gguf", arguments.gguf, "--threads", str(arguments.threads)]
    command += ["--flash-attention"] if arguments.flash_attention else []
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield LlamaChild(process)
        finally:
            process.terminate()


def compare(arguments: argparse.Namespace) -> None:
    from paired import append_result, environment, run_pairs

    from paceline.config import EngineConfig
    from paceline.core.request import SamplingParams
    from paceline.llm import LLM

    config = EngineConfig(
        model=arguments.model,
        quantization=arguments.quantization,
        draft="none",
        threads=arguments.threads,
        enable_prefix_caching=False,
        max_num_batched_tokens=LONG_PROMPT,
    )
    llm = LLM(config)
    text = llm.encode(TEXT.read_text())
    with llama_child(arguments) as child:

        def ours(num_prompt: int, num_outputs: int) -> float:
            output = llm.generate([text[:num_prompt]], SamplingParams(num_outputs, temperature=0, ignore_eos=True))[0]
            return (output.stats.decode_ms if num_outputs > 1 else output.stats.prefill_ms) / 1e3

        def theirs(num_prompt: int, num_outputs: int) -> float:
            times = child.run(list(text[:num_prompt]), num_outputs)
            return times["decode_s"] if num_outputs > 1 else times["prompt_s"]

        for row, num_prompt, num_outputs, num_tokens in (
            ("decode", PROMPT, OUTPUT, OUTPUT - 1),
            ("prompt", LONG_PROMPT, 1, LONG_PROMPT),
        ):
            shape = (num_prompt, num_outputs)
            paired = run_pairs(lambda shape=shape: ours(*shape), lambda shape=shape: theirs(*shape), arguments.pairs, child.cpu_s)
            ratio, low, high = paired.ratio()
            result = {
                "row": f"llama.cpp {row}",
                "ratio": round(ratio, 3),
                "ci95": [round(low, 3), round(high, 3)],
                "paceline_tok_s": round(num_tokens / sorted(paired.a_s)[len(paired.a_s) // 2], 1),
                "llama_cpp_tok_s": round(num_tokens / sorted(paired.b_s)[len(paired.b_s) // 2], 1),
                "model": arguments.model,
                "quantization": next((c.implementation for c in llm.facts.choices if c.name == "quantization"), llm.facts.dtype),
                "gguf": Path(arguments.gguf).name,
                "flash_attention": arguments.flash_attention,
                "num_pairs": arguments.pairs,
                "num_dropped": paired.num_dropped,
                **environment(),
                "threads": arguments.threads,
            }
            append_result(RESULTS, result)
            print(json.dumps(result), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gguf", required=True, help="llama.cpp's model file; for a fair row the one that Paceline's model was made from")
    parser.add_argument("--llama-python", help="the interpreter of the environment that has llama-cpp-python")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--quantization", default="auto")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--flash-attention", action="store_true")
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        serve_llama(arguments.gguf, arguments.threads, arguments.flash_attention)
    elif not arguments.llama_python:
        parser.error("--llama-python is needed")
    else:
        compare(arguments)


if __name__ == "__main__":
    main()
