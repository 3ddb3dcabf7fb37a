"""Packed weights on disk, one file per checkpoint, scheme and layout, mapped by all processes that run the model.

A file that cannot be used is packed anew; a disk that cannot be written costs the packing at every start, and no more.
"""

import json
import logging
import mmap
import os
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from paceline.core.cache import cache_root
from paceline.native.library import ABI, DATA_ALIGNMENT

_log = logging.getLogger(__name__)

MAX_FILES = 8  # of models and schemes; the ones not used for longest go first
_FORMAT = 2  # of this file and of how weights are quantised: raise it when either changes
_MAGIC = b"PLPACK1\n"
_PAGE_BYTES = 4096  # the header is padded to whole pages
_SAMPLE_BYTES = 4096  # of each matrix's beginning and end that are summed at every start; all bytes would take as long as reading them
_STALE_S = 3600  # an unfinished file of a process that was killed

Key = Mapping[str, object]


def folder_identity(folder: Path, file_names: Iterable[str]) -> dict[str, object]:
    """What tells one state of a model folder from another, without reading its weights."""
    files: list[list[object]] = []
    for name in sorted(file_names):
        status = (folder / name).stat()
        files.append([name, status.st_size, status.st_mtime_ns])
    return {"folder": str(folder.resolve()), "files": files}


class PackedCache:
    """The file of one key. Reading and writing never fail: what goes wrong is logged."""

    def __init__(self, identity: Key, scheme: str, root: Path | None = None) -> None:
        self._key = json.dumps({"format": _FORMAT, "abi": ABI, "scheme": scheme, "source": identity}, sort_keys=True)
        self._folder = (cache_root() if root is None else root) / "packed"
        self.path = self._folder / f"{sha256(self._key.encode()).hexdigest()[:24]}.bin"

    def read(self, sizes: Sequence[int]) -> list[NDArray[np.uint8]] | None:
        """The matrices of these sizes in bytes, in order, mapped read-only and shared with other processes; None if they are not there."""
        try:
            with self.path.open("rb") as file:
                mapped = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_SHARED | _POPULATE, prot=mmap.PROT_READ)
            matrices = self._parsed(np.frombuffer(mapped, np.uint8), sizes)
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            _log.warning("weights are packed anew: %s cannot be used (%s)", self.path, error)
            return None
        with suppress(OSError):  # a cache that may only be read serves as well
            os.utime(self.path)  # used now: others are removed first
        return matrices

    def write(self, matrices: Iterable[NDArray[np.uint8]], sizes: Sequence[int]) -> bool:
        """Put the matrices in their place, all or none; then remove the files beyond MAX_FILES. False if that was not possible."""
        temporary: Path | None = None
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._remove_stale()
            descriptor, name = tempfile.mkstemp(dir=self._folder, prefix=f"{self.path.stem}.", suffix=".tmp")
            temporary = Path(name)
            with os.fdopen(descriptor, "wb") as file:
                with suppress(OSError):  # for whom the folder is; mkstemp's is the owner's alone
                    os.fchmod(descriptor, self._folder.stat().st_mode & 0o666)
                os.posix_fallocate(file.fileno(), 0, self._header_bytes(sizes) + sum(map(_padded, sizes)))  # no half a file on a full disk
                file.seek(self._header_bytes(sizes))
                sums: list[int] = []
                for matrix, size in zip(matrices, sizes, strict=True):
                    assert matrix.nbytes == size, f"a matrix of {matrix.nbytes} bytes instead of {size}"
                    file.write(matrix.data)
                    file.write(bytes(_padded(size) - size))
                    sums.append(_sample_sum(matrix))
                file.seek(0)
                file.write(self._header(sizes, sums))
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, self.path)
        except OSError as error:
            _log.warning("packed weights are not kept: %s cannot be written (%s)", self.path, error.strerror)
            return False
        finally:
            if temporary is not None:
                with suppress(OSError):
                    temporary.unlink()
        with suppress(OSError):  # the matrices are kept, whatever becomes of the other files
            self._remove_oldest()
        return True

    def _parsed(self, data: NDArray[np.uint8], sizes: Sequence[int]) -> list[NDArray[np.uint8]]:
        """Raises ValueError for anything but a whole file of this key."""
        start = self._header_bytes(sizes)
        if data.nbytes != start + sum(map(_padded, sizes)):
            raise ValueError(f"it has {data.nbytes:,} bytes instead of {start + sum(map(_padded, sizes)):,}")
        matrices: list[NDArray[np.uint8]] = []
        offset = start
        for size in sizes:
            matrices.append(data[offset : offset + size])
            offset += _padded(size)
        if data[:start].tobytes() != self._header(sizes, [_sample_sum(matrix) for matrix in matrices]):
            raise ValueError("its content is not what was written")
        return matrices

    def _header(self, sizes: Sequence[int], sums: Sequence[int]) -> bytes:
        """The key and, for each matrix, size and sum: a file is right if its header is the one that it would be given."""
        text = _MAGIC + self._key.encode() + b"\n" + np.array([*sizes, *sums], "<i8").tobytes()
        return text.ljust(self._header_bytes(sizes), b"\0")

    def _header_bytes(self, sizes: Sequence[int]) -> int:
        used = len(_MAGIC) + len(self._key.encode()) + 1 + 16 * len(sizes)
        return -(-used // _PAGE_BYTES) * _PAGE_BYTES

    def _remove_oldest(self) -> None:
        used: list[tuple[int, Path]] = []
        for path in self._folder.glob("*.bin"):
            with suppress(OSError):  # another process removes files too
                used.append((path.stat().st_mtime_ns, path))
        for _, path in sorted(used)[:-MAX_FILES]:  # whoever has it mapped keeps it
            with suppress(OSError):
                path.unlink()

    def _remove_stale(self) -> None:
        for path in self._folder.glob("*.tmp"):
            with suppress(OSError):
                if path.stat().st_mtime < time.time() - _STALE_S:
                    path.unlink()


_POPULATE = mmap.MAP_POPULATE if hasattr(mmap, "MAP_POPULATE") else 0  # else the first step would fault in page after page


def _padded(size: int) -> int:
    return -(-size // DATA_ALIGNMENT) * DATA_ALIGNMENT


def _sample_sum(matrix: NDArray[np.uint8]) -> int:
    return crc32(matrix[-_SAMPLE_BYTES:].tobytes(), crc32(matrix[:_SAMPLE_BYTES].tobytes()))
