"""What a quantisation scheme is, the table of schemes, and which format a matrix gets under one. Torch-free.

A scheme turns float rows into rows of small integers with a scale (and in 4 bits a minimum) for each group of inputs; formats and the
layout in memory are `native/`'s, which packs what comes from here.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import import_module
from typing import cast

import numpy as np
from numpy.typing import NDArray

from paceline.errors import BadInputError
from paceline.native.library import GROUP, Format

SCHEMES: dict[str, str] = {  # name -> "module:function", imported when used; the function is quantise(rows) -> QuantisedRows
    "int8": "paceline.quant.int8:quantise",
    "int4": "paceline.quant.int4:quantise",
}
_LIMIT = 65504.0  # of half precision, in which scales and minima are kept


SCHEME_OF = {Format.W8: "int8", Format.W4: "int4"}


@dataclass(frozen=True, slots=True)
class QuantisedRows:
    """Some rows of a matrix `[N, K]` in groups of GROUP inputs."""

    elements: NDArray[np.uint8]  # [N, K]: 0..15, or the bits of int8
    scales: NDArray[np.float16]  # [N, K / GROUP]
    minima: NDArray[np.float16] | None  # the same, W4 only

    def values(self) -> NDArray[np.float32]:
        """What the rows stand for, `[N, K]`: the product and the sum each rounded to float32."""
        num_rows, num_inputs = self.elements.shape
        signed = self.elements if self.minima is not None else self.elements.view(np.int8)
        groups = signed.reshape(num_rows, -1, GROUP).astype(np.float32) * self.scales.astype(np.float32)[:, :, None]
        if self.minima is not None:
            groups += self.minima.astype(np.float32)[:, :, None]
        return groups.reshape(num_rows, num_inputs)


def quantise(fmt: Format, rows: NDArray[np.float32]) -> QuantisedRows:
    """Float rows `[N, K]`, K a multiple of GROUP, in `fmt`. Errors: BadInputError for what half precision cannot scale, or NaN."""
    largest = float(np.abs(rows).max(initial=0.0))
    if not largest <= _LIMIT:  # NaN fails too
        raise BadInputError(
            f"a weight has the magnitude {largest:g}; quantised weights reach to {_LIMIT:g}: start with --quantization none, "
            "or fetch the model again if it is damaged"
        )
    module_name, _, function_name = SCHEMES[SCHEME_OF[fmt]].partition(":")
    function = cast(Callable[[NDArray[np.float32]], QuantisedRows], vars(import_module(module_name))[function_name])
    return function(rows)


def stack(parts: Iterable[QuantisedRows]) -> QuantisedRows:
    """The rows of several matrices of one format and width, one after the other."""
    held = list(parts)
    if len(held) == 1:
        return held[0]
    minima = [part.minima for part in held if part.minima is not None]
    assert len(minima) in (0, len(held)), "matrices of different formats have no common rows"
    return QuantisedRows(
        np.concatenate([part.elements for part in held]),
        np.concatenate([part.scales for part in held]),
        np.concatenate(minima) if minima else None,
    )
