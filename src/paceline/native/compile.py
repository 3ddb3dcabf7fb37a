"""Compiles the C sources of this folder into one shared library: called by the build hook at installation, or `python -m` by hand.

Imports the standard library only, and nothing of the package: the hook runs where the package is not installed yet.
"""

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

LIBRARY_NAME = "libpaceline.so"
FOLDER = Path(__file__).resolve().parent
# No contraction: a fused multiply-add rounds once, and results would depend on the instruction set. gnu11: futex and affinity calls.
FLAGS = ("-std=gnu11", "-O3", "-ffp-contract=off", "-fno-math-errno", "-fPIC", "-fvisibility=hidden", "-pthread", "-Wall", "-Wextra")
# Files for one architecture, with what their instruction set needs; all others are compiled everywhere.
_AVX512 = ("-mavx2", "-mf16c", "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512vnni")
ARCHITECTURES: dict[str, dict[str, tuple[str, ...]]] = {
    "x86_64": {"avx2.c": ("-mavx2", "-mf16c"), "avx512vnni.c": _AVX512},
    "aarch64": {"neon.c": ("-march=armv8.2-a+dotprod",)},
}
_OTHER_NAMES = {"arm64": "aarch64"}  # what Apple's compilers call it
_TIMEOUT_S = 300


def find_compiler() -> list[str] | None:
    """$CC, or the first of cc, gcc and clang that is there; None without one."""
    named = shlex.split(os.environ.get("CC", ""))
    if named:
        return named
    found = next((path for path in map(shutil.which, ("cc", "gcc", "clang")) if path), None)
    return [found] if found else None


def compile_library(output: Path, compiler: Sequence[str] | None = None, flags: Sequence[str] = (), sources: Path = FOLDER) -> str | None:
    """Write the library to `output`, replacing what is there at once; None, or in one line why it could not be done.

    `compiler`: the command, `find_compiler()` if not given. `flags` come after the usual ones, for compiling and linking alike.
    """
    compiler = compiler or find_compiler()
    if compiler is None:
        return "no C compiler was found (cc, gcc or clang; or name one in CC)"
    output.parent.mkdir(parents=True, exist_ok=True)
    # A running process may have the old library mapped: the new one gets a file of its own, which then takes the name.
    with tempfile.TemporaryDirectory(dir=output.parent, prefix=".compile-") as folder:
        linked = Path(folder) / output.name
        try:
            objects = compile_objects(Path(folder), compiler, flags, sources)
            if not objects:  # else a library without a function would be linked
                return f"there are no C sources in {sources}"
            run([*compiler, "-shared", "-pthread", *flags, *map(str, objects), "-lm", "-o", str(linked)])
        except (OSError, subprocess.SubprocessError) as error:
            return _reason(error)
        os.replace(linked, output)
    return None


def compile_objects(folder: Path, compiler: Sequence[str], flags: Sequence[str], sources: Path) -> list[Path]:
    """Compile every file of `sources` for the compiler's target into `folder`. Raises OSError and subprocess.SubprocessError."""
    triple = run([*compiler, "-dumpmachine"]).strip()
    machine = triple.split("-")[0]
    own = ARCHITECTURES.get(_OTHER_NAMES.get(machine, machine), {})
    foreign = {name for files in ARCHITECTURES.values() for name in files} - own.keys()
    built = {source: folder / f"{source.stem}.o" for source in sorted(sources.glob("*.c")) if source.name not in foreign}
    commands = [
        [*compiler, *FLAGS, *own.get(source.name, ()), *flags, "-c", str(source), "-o", str(target)] for source, target in built.items()
    ]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(run, commands))
    return list(built.values())


def run(command: Sequence[str]) -> str:
    """The output of a compiler's command. Raises OSError and subprocess.SubprocessError."""
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=_TIMEOUT_S).stdout


def _reason(error: OSError | subprocess.SubprocessError) -> str:
    if isinstance(error, subprocess.CalledProcessError):
        said = (error.stderr or error.stdout or "").strip().splitlines()
        first = next((line for line in said if "error" in line), said[0] if said else "")
        return f"the C compiler failed with status {error.returncode}: {first}"
    return f"the C compiler could not be run: {error}"


if __name__ == "__main__":
    sys.exit(compile_library(FOLDER / LIBRARY_NAME))
