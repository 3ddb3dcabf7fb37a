"""llama.cpp in a process of its own, for `llama_peer.py`; runs with an interpreter that has llama-cpp-python.

`llama_child.py run FILE.gguf ...` takes a line of JSON for each task and answers with one. Only the C API is used, tokens are the likeliest
ones, and logits are read where they lie, never copied. `llama_child.py quantise FROM TO FORMAT` writes another format of the same weights.
"""

import argparse
import ctypes
import json
import sys
import time
from collections.abc import Callable

import llama_cpp
import numpy as np
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

BATCH = 512
FORMATS = {"q8_0": "LLAMA_FTYPE_MOSTLY_Q8_0", "q4_0": "LLAMA_FTYPE_MOSTLY_Q4_0", "q4_1": "LLAMA_FTYPE_MOSTLY_Q4_1"}


Entry = tuple[int, int, int, bool]
"""A token, its position, its sequence, and whether its logits are wanted."""
Task = dict[str, object]


class Peer:
    """A model and a context of some sequences."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        params = llama_cpp.llama_model_default_params()
        self.model = llama_cpp.llama_model_load_from_file(arguments.gguf.encode(), params)
        if not self.model:
            raise SystemExit(f"llama.cpp cannot load {arguments.gguf}")
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = arguments.context * arguments.sequences, BATCH, BATCH
        params.n_seq_max, params.kv_unified = arguments.sequences, arguments.unified
        params.n_threads = params.n_threads_batch = arguments.threads
        on, off = llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED, llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
        params.flash_attn_type = on if arguments.flash_attention else off
        self.context = llama_cpp.llama_init_from_model(self.model, params)
        if not self.context:
            raise SystemExit("llama.cpp cannot make a context")
        self.memory = llama_cpp.llama_get_memory(self.context)
        self.vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))
        self.batch = llama_cpp.llama_batch_init(BATCH, 0, 1)

    def pass_of(self, entries: list[Entry]) -> None:
        """Run at most BATCH tokens."""
        batch = self.batch
        batch.n_tokens = len(entries)
        for place, (token, position, sequence, is_wanted) in enumerate(entries):
            batch.token[place], batch.pos[place], batch.n_seq_id[place] = token, position, 1
            batch.seq_id[place][0], batch.logits[place] = sequence, is_wanted
        if status := llama_cpp.llama_decode(self.context, batch):
            raise SystemExit(f"llama_decode failed with {status}")

    def logits(self, place: int) -> np.ndarray:
        pointer = ctypes.cast(llama_cpp.llama_get_logits_ith(self.context, place), ctypes.POINTER(ctypes.c_float))
        return np.ctypeslib.as_array(pointer, (self.vocab_size,))

    def best(self, place: int) -> int:
        return int(self.logits(place).argmax())

    def prompt(self, token_ids: list[int]) -> int:
        """The first token behind a prompt, from an empty memory."""
        llama_cpp.llama_memory_clear(self.memory, True)
        for start in range(0, len(token_ids), BATCH):
            piece = token_ids[start : start + BATCH]
            entries = [(token, start + i, 0, start + i + 1 == len(token_ids)) for i, token in enumerate(piece)]
            self.pass_of(entries)
        return self.best(len(entries) - 1)


def plain(peer: Peer, task: Task) -> Task:
    started_s = time.perf_counter()
    token = peer.prompt(task["prompt"])
    first_s = time.perf_counter()
    for position in range(len(task["prompt"]), len(task["prompt"]) + task["num_outputs"] - 1):
        peer.pass_of([(token, position, 0, True)])
        token = peer.best(0)
    return {"prompt_s": first_s - started_s, "decode_s": time.perf_counter() - first_s}


def lookup(peer: Peer, task: Task) -> Task:
    """Prompt lookup as llama-cpp-python does it: a draft in every step where the text gives one, verified in one pass."""
    draft = LlamaPromptLookupDecoding(num_pred_tokens=task["num_drafts"])
    token_ids = list(task["prompt"])
    end = len(token_ids) + task["num_outputs"]
    token_ids.append(peer.prompt(token_ids))
    first_s, num_steps = time.perf_counter(), 0
    while len(token_ids) < end:
        drafted = [int(token) for token in draft(np.array(token_ids, dtype=np.intc))][: end - len(token_ids) - 1]
        position = len(token_ids) - 1
        peer.pass_of([(token, position + i, 0, True) for i, token in enumerate([token_ids[-1], *drafted])])
        for place in range(len(drafted) + 1):
            token_ids.append(peer.best(place))
            if place < len(drafted) and token_ids[-1] != drafted[place]:
                break
        llama_cpp.llama_memory_seq_rm(peer.memory, 0, len(token_ids) - 1, -1)
        num_steps += 1
    return {"decode_s": time.perf_counter() - first_s, "num_steps": num_steps}


def at_once(peer: Peer, task: Task) -> Task:
    """Several requests: prompts in passes of BATCH tokens, then all sequences in each pass, as llama.cpp's server batches them."""
    llama_cpp.llama_memory_clear(peer.memory, True)
    started_s = time.perf_counter()
    prompts = task["prompts"]
    waiting = [(token, i, sequence, i + 1 == len(prompt)) for sequence, prompt in enumerate(prompts) for i, token in enumerate(prompt)]
    tokens = {}
    for start in range(0, len(waiting), BATCH):
        entries = waiting[start : start + BATCH]
        peer.pass_of(entries)
        tokens |= {sequence: peer.best(place) for place, (_, _, sequence, is_last) in enumerate(entries) if is_last}
    for step in range(task["num_outputs"] - 1):
        entries = [(tokens[sequence], len(prompt) + step, sequence, True) for sequence, prompt in enumerate(prompts)]
        peer.pass_of(entries)
        tokens = {sequence: peer.best(sequence) for sequence in range(len(prompts))}
    return {"wall_s": time.perf_counter() - started_s}


def judge(peer: Peer, task: Task) -> Task:
    """Of a window: minus the logarithm of each token's probability from the second on, and the likeliest token there."""
    window, piece = task["window"], task["piece"]
    llama_cpp.llama_memory_clear(peer.memory, True)
    losses, likeliest = [], []
    for start in range(0, len(window), piece):
        entries = [(token, start + i, 0, True) for i, token in enumerate(window[start : start + piece])]
        peer.pass_of(entries)
        for place, following in enumerate(window[start + 1 : start + piece + 1]):
            logits = peer.logits(place).astype(np.float64)
            most = logits.max()
            losses.append(float(np.log(np.exp(logits - most).sum()) + most - logits[following]))
            likeliest.append(int(logits.argmax()))
    return {"losses": losses, "likeliest": likeliest}


TASKS: dict[str, Callable[[Peer, Task], Task]] = {"plain": plain, "lookup": lookup, "at_once": at_once, "judge": judge}


def quantise(arguments: argparse.Namespace) -> None:
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype, params.allow_requantize = vars(llama_cpp)[FORMATS[arguments.format]], True
    params.nthread, params.pure = arguments.threads, arguments.pure
    if llama_cpp.llama_model_quantize(arguments.source.encode(), arguments.target.encode(), ctypes.byref(params)):
        raise SystemExit(f"{arguments.source} could not be written as {arguments.format}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, dest="command")
    run = commands.add_parser("run")
    run.add_argument("gguf")
    run.add_argument("--threads", type=int, default=2)
    run.add_argument("--context", type=int, default=2048, help="tokens of each sequence")
    run.add_argument("--sequences", type=int, default=1)
    run.add_argument("--unified", action="store_true", help="one KV memory for all sequences")
    run.add_argument("--flash-attention", action="store_true")
    change = commands.add_parser("quantise")
    change.add_argument("source")
    change.add_argument("target")
    change.add_argument("format", choices=FORMATS)
    change.add_argument("--threads", type=int, default=2)
    change.add_argument("--pure", action="store_true", help="all matrices in this format, the head too")
    arguments = parser.parse_args()
    if arguments.command == "quantise":
        quantise(arguments)
        return
    peer = Peer(arguments)
    print(json.dumps({"version": llama_cpp.__version__, "system": llama_cpp.llama_print_system_info().decode()}), flush=True)
    for line in sys.stdin:
        task = json.loads(line)
        print(json.dumps(TASKS[task["do"]](peer, task)), flush=True)


if __name__ == "__main__":
    main()
