"""The build hook of the wheel `paceline-prove`: takes its part of `src/paceline` and names it `paceline_prove`.

The other name keeps the two wheels apart: both can be installed, and removing one leaves the other whole. Every import is absolute, so
renaming is a matter of one word.
"""

import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SOURCE = Path(__file__).resolve().parents[2]
PARTS = (
    "__init__.py",
    "errors.py",
    "py.typed",
    "cli/__init__.py",
    "cli/outcome.py",
    "cli/prove.py",
    "cli/prove_main.py",
    "prove",
)
# The package's name as Python sees it: in imports and in strings that name modules, not in prose, commands or file names.
_NAME = re.compile(r"(?<=\bfrom )paceline(?= import|\.)|(?<=\bimport )paceline(?=\.|\s)|(?<=\")paceline(?=\.(?:prove|cli|engine)\b)")


class RenamePackage(BuildHookInterface[Any]):
    """Called by hatchling around the build of the wheel."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Put the renamed tree into the wheel."""
        self.folder = Path(tempfile.mkdtemp(prefix="paceline-prove-"))
        write_package(SOURCE / "src/paceline", self.folder)
        build_data["force_include"][str(self.folder)] = "paceline_prove"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


def write_package(source: Path, target: Path) -> None:
    """Copy the parts from the package `source` to the folder `target`, renamed."""
    for part in PARTS:
        found = [source / part] if (source / part).is_file() else sorted((source / part).rglob("*"))
        for path in found:
            if path.is_file() and "__pycache__" not in path.parts:
                copy = target / path.relative_to(source)
                copy.parent.mkdir(parents=True, exist_ok=True)
                if path.suffix == ".py":
                    copy.write_text(renamed(path.read_text(encoding="utf-8")), encoding="utf-8")
                else:
                    shutil.copyfile(path, copy)


def renamed(text: str) -> str:
    """Source code with `paceline` as a module's name replaced."""
    return _NAME.sub("paceline_prove", text)
