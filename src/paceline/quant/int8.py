"""Eight bits, symmetric, groups of 32 with one half-precision scale. Torch-free; called through `scheme.py`."""

import numpy as np
from numpy.typing import NDArray

from paceline.native.library import GROUP
from paceline.quant.scheme import QuantisedRows

_MOST = 127  # -128 is left out: its negative would not fit


def quantise(rows: NDArray[np.float32]) -> QuantisedRows:
    """`[N, K]` f32: each group's largest magnitude becomes 127, the others the nearest multiple of its scale."""
    groups = rows.reshape(rows.shape[0], -1, GROUP)
    exact = np.maximum(groups.max(axis=2), -groups.min(axis=2)) / np.float32(_MOST)
    scales: NDArray[np.float16] = exact.astype(np.float16)
    # Rounded up, so that nothing is cut off: near the smallest half-precision numbers that would be a large part.
    above: NDArray[np.float16] = np.nextafter(scales, np.float16(np.inf))
    scales = np.where(scales.astype(np.float32) < exact, above, scales)
    inverse = _inverse(scales.astype(np.float32))
    scaled = groups * inverse[:, :, None]
    elements = np.clip(np.rint(scaled, out=scaled), -_MOST, _MOST, out=scaled).astype(np.int8)
    return QuantisedRows(elements.reshape(rows.shape).view(np.uint8), scales, None)


def _inverse(scales: NDArray[np.float32]) -> NDArray[np.float32]:
    return np.divide(1.0, scales, out=np.zeros_like(scales), where=scales > 0)
