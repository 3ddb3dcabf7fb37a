"""Decides whether a model's weights are quantised, and how: `--quantization` made concrete. Called by `load.py` for each model."""

import json
import logging
import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from paceline.config import EngineConfig, check_weights
from paceline.core.cache import cache_root
from paceline.core.program import Program
from paceline.errors import BadInputError, PacelineError
from paceline.forward import native
from paceline.forward.packed import Blocks, is_four_bit_checkpoint
from paceline.models.folder import read_json
from paceline.models.spec import tensor_shapes
from paceline.native.library import Library
from paceline.quant.scheme import SCHEMES

_log = logging.getLogger(__name__)

_MOST_MS = 20.0  # to read all weights once: beyond this, half the bytes are worth more than the last bit of quality
_INT8_BYTES = 1 + 2 / 32  # per weight, scales included


@dataclass(frozen=True, slots=True)
class Decision:
    """A name of SCHEMES, or None for floats, and why."""

    scheme: str | None
    reason: str


class Remembered:
    """What `auto` once chose for a checkpoint by measuring: the next start must not give other tokens because a neighbour is busy."""

    def __init__(self, identity: Mapping[str, object], root: Path | None = None) -> None:
        key = sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:24]
        self._path = (cache_root() if root is None else root) / "quantization" / f"{key}.json"

    def read(self) -> Decision | None:
        try:
            record = read_json(self._path) or {}
        except PacelineError:
            return None
        scheme, reason = record.get("scheme"), record.get("reason")
        return Decision(scheme, reason) if isinstance(scheme, str) and scheme in SCHEMES and isinstance(reason, str) else None

    def keep(self, decision: Decision) -> Decision:
        """Keep `decision`, unless another process was first; what stands there then is the choice of all.

        Where nothing can be kept it is int8 at every start: what is measured anew may come out otherwise.
        """
        text = json.dumps({"scheme": decision.scheme, "reason": decision.reason}) + "\n"
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=self._path.parent, prefix=".keep-", ignore_cleanup_errors=True) as folder:
                written = Path(folder) / self._path.name
                written.write_text(text, encoding="utf-8")
                try:
                    os.link(written, self._path)
                except FileExistsError:
                    if self.read() is None:  # damaged
                        os.replace(written, self._path)
        except OSError as error:
            _log.warning("the choice of quantisation is not kept: %s cannot be written (%s)", self._path, error.strerror)
        return self.read() or Decision("int8", "the cache cannot keep a choice by measurement; --quantization int4 asks for 4 bits")


def decide(
    config: EngineConfig,
    program: Program,
    blocks: Blocks,
    library: Library | str,
    bandwidth: Callable[[], float],
    remembered: Remembered | None = None,
) -> Decision:
    """What `config` means for a model. `library`: the native one or why there is none; `bandwidth`: bytes/s that this machine reads.

    Errors: BadInputError for a scheme that was asked for and cannot be.
    """
    asked = config.quantization
    if asked == "none":
        return Decision(None, "asked for")
    check_weights(config)
    if config.dtype != "auto":
        return Decision(None, f"--dtype {config.dtype} was asked for")
    refusal = library if isinstance(library, str) else native.supports(program)
    if refusal is not None:
        if asked == "auto":
            return Decision(None, refusal)
        raise BadInputError(f"--quantization {asked} cannot be: {refusal}; start with --quantization none", param="quantization")
    if asked != "auto":
        return Decision(asked, "asked for")
    if is_four_bit_checkpoint(program, blocks):
        return Decision("int4", "the checkpoint has 4 bits per weight")
    if blocks.kinds:  # to cut a Q5_0 model to 4 bits once more raised its perplexity by 5 %
        return Decision("int8", "most of the checkpoint's weights are not in 4-bit blocks that can be taken over")
    decision = None if remembered is None else remembered.read()
    if decision is None:
        decision = _by_bandwidth(program, bandwidth())
        if remembered is not None:
            decision = remembered.keep(decision)
    return decision


def _by_bandwidth(program: Program, bandwidth: float) -> Decision:
    num_bytes = _num_weights(program) * _INT8_BYTES
    ms = num_bytes / bandwidth * 1e3
    measured = f"{num_bytes / 1e6:,.0f} MB in 8 bits took {ms:.1f} ms to read when first measured"
    return Decision("int4", f"{measured}, above {_MOST_MS:g}") if ms > _MOST_MS else Decision("int8", measured)


def _num_weights(program: Program) -> int:
    """Of all matrices that a step reads."""
    shapes = tensor_shapes(program.spec)
    names = {name for op in program.ops for _, name in op.weights}
    return sum(shapes[name][0] * shapes[name][1] for name in names if len(shapes[name]) == 2)
