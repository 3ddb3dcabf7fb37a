"""llama.cpp as a peer in measurements: starts `llama_child.py` with the interpreter that has llama-cpp-python, and hands it tasks."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from gguf import GGUFReader

_CHILD = Path(__file__).parent / "llama_child.py"


class LlamaPeer:
    """A running child. `about`: its version and what its build uses of the processor."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process
        self.about: dict[str, object] = self._answer()

    def run(self, task: str, **arguments: object) -> dict[str, float]:
        """One of the child's tasks; SystemExit if it has ended."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": task} | arguments) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def cpu_s(self) -> float:
        """CPU seconds that it used so far."""
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def _answer(self) -> dict[str, float]:
        assert self._process.stdout is not None
        answer = self._process.stdout.readline()
        if not answer:
            sys.exit("llama.cpp's process has ended; run `llama_child.py run FILE.gguf` with its interpreter to see why")
        return json.loads(answer)


@contextmanager
def llama_peer(interpreter: str, gguf: Path, threads: int, flags: Sequence[str] = ()) -> Iterator[LlamaPeer]:
    """A child with a model loaded; it ends with the context. What llama.cpp logs is dropped: run its command by hand to see it."""
    command = [interpreter, str(_CHILD), "run", str(gguf), "--threads", str(threads), *flags]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            yield LlamaPeer(process)
        finally:
            process.terminate()


def bytes_per_pass(gguf: Path) -> int:
    """Bytes of the weights that a pass of one token reads: all, but for a table of embeddings beside a head of its own."""
    tensors = {tensor.name: int(tensor.n_bytes) for tensor in GGUFReader(gguf).tensors}
    return sum(tensors.values()) - (tensors["token_embd.weight"] if "output.weight" in tensors else 0)
