"""The build hook of the package: compiles the native library, and builds without it where that cannot be done.

An editable installation gets the library beside its sources, a wheel gets it inside and is then bound to this platform.
"""

import importlib.util
import sysconfig
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

NATIVE = Path("src/paceline/native")


class CompileNative(BuildHookInterface[Any]):
    """Called by hatchling around the build of the wheel, editable or not."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile the library and add it to the wheel; one line and a wheel without it if that fails."""
        if self.target_name != "wheel":
            return
        compiling = _load(Path(self.root) / NATIVE / "compile.py")
        library = Path(self.root) / NATIVE / compiling.LIBRARY_NAME
        reason = compiling.compile_library(library)
        if reason is not None:
            library.unlink(missing_ok=True)  # of an earlier build: it may not fit the sources
            self.app.display_warning(f"paceline is built without its native CPU path: {reason}")
            return
        if version != "editable":
            build_data["force_include"][str(library)] = f"paceline/native/{library.name}"
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"


def _load(path: Path) -> ModuleType:
    """A module by its path: the package itself is not installed while it is built."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
