"""The native library under sanitizers, on another processor, and inside the package: built with a compiler and without one."""

import os
import platform
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from paceline.native.compile import ARCHITECTURES, FLAGS, FOLDER, compile_library, compile_objects, find_compiler, run

pytestmark = pytest.mark.system

ROOT = Path(__file__).parents[2]
DRIVER = Path(__file__).parent / "native/agreement.c"
EMULATED = DRIVER.parent / "emulated"  # in the place of the compiler's headers
LIMIT_S = 900
CROSS_COMPILER, EMULATOR = "aarch64-linux-gnu-gcc", "qemu-aarch64-static"


def must(command: Sequence[str], environment: Mapping[str, str] = os.environ, expected: int = 0) -> str:
    done = subprocess.run(
        command, cwd=ROOT, env=environment, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=LIMIT_S
    )
    assert done.returncode == expected, done.stdout
    return done.stdout


def compiler_or_skip() -> list[str]:
    compiler = find_compiler()
    if compiler is None:
        pytest.skip("no C compiler")
    return compiler


def mutated(folder: Path, source: str, was: str, becomes: str) -> Path:
    """A copy of the C sources in `folder` with one change."""
    copy = folder / "native"
    shutil.copytree(FOLDER, copy, ignore=shutil.ignore_patterns("*.so", "__pycache__", ".compile-*"))
    text = (copy / source).read_text()
    assert was in text
    (copy / source).write_text(text.replace(was, becomes))
    return copy


def build_driver(folder: Path, compiler: Sequence[str], flags: Sequence[str], sources: Path = FOLDER) -> Path:
    """The program that compares instruction sets with each other."""
    folder.mkdir(exist_ok=True)
    objects = compile_objects(folder, compiler, flags, sources)
    built = folder / "agreement"
    run([*compiler, *FLAGS, *flags, f"-I{sources}", str(DRIVER), *map(str, objects), "-lm", "-o", str(built)])
    return built


def run_sanitized(folder: Path, sources: Path, tests: Sequence[str], expected: int = 0) -> str:
    """The native tests in a Python that has AddressSanitizer loaded, with a library that it and the one for undefined behaviour watch."""
    compiler = compiler_or_skip()
    library = folder / "sanitized.so"
    flags = ("-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined")
    assert compile_library(library, flags=flags, sources=sources) is None
    runtimes = [run([*compiler, f"-print-file-name={name}"]).strip() for name in ("libasan.so", "libubsan.so")]
    environment = {
        **os.environ,
        "LD_PRELOAD": " ".join(runtimes),
        "ASAN_OPTIONS": "detect_leaks=0",  # Python's own
        "PACELINE_TEST_NATIVE": str(library),
        "PYTHONMALLOC": "malloc",
    }
    # -s: what the sanitizers say as the process ends is not kept by pytest.
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-s", "-n0", "-p", "no:cacheprovider", *tests]
    return must(command, environment, expected)


def test_unit_tests_are_clean_under_sanitizers(tmp_path: Path) -> None:
    # Those that compile a library of their own are no tests of this one.
    passed = run_sanitized(tmp_path, FOLDER, ["tests/unit/native", "-k", "not mistake"])
    assert " passed" in passed


def test_the_sanitizers_notice_a_read_beyond_the_end(tmp_path: Path) -> None:
    sources = mutated(tmp_path, "pack.c", "first + row < rows", "first + row <= rows")
    assert "AddressSanitizer" in run_sanitized(tmp_path, sources, ["tests/unit/native/test_pack.py"], expected=1)


def test_threads_race_nowhere(tmp_path: Path) -> None:
    built = build_driver(tmp_path / "threads", compiler_or_skip(), ("-O1", "-g", "-fsanitize=thread"))
    assert "portable agrees" in must([str(built)])


def test_arm_gives_the_same_bits(tmp_path: Path) -> None:
    for program, package in ((CROSS_COMPILER, "gcc-aarch64-linux-gnu"), (EMULATOR, "qemu-user-static")):
        if shutil.which(program) is None:
            pytest.skip(f"no {program}: apt install {package}")
    here = must([str(build_driver(tmp_path / "here", compiler_or_skip(), ()))]).splitlines()
    arm = must([EMULATOR, str(build_driver(tmp_path / "arm", [CROSS_COMPILER], ("-static",)))]).splitlines()
    assert [line.split()[:2] for line in arm] == [["portable", "agrees"], ["neon", "agrees"]]
    assert here[0] == arm[0], "the portable kernels differ between processors"
    assert len({line.split()[2] for line in here + arm}) == 1

    sources = mutated(tmp_path, "neon.c", "vshrq_n_u8(both, 4)", "vshrq_n_u8(both, 3)")
    mutant = build_driver(tmp_path / "mutant", [CROSS_COMPILER], ("-static",), sources)
    assert "neon differs" in must([EMULATOR, str(mutant)], expected=1)


def test_avx512_gives_the_same_bits_in_emulation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Few machines that run this have the instructions, and most that serve do. SIMDe states each of them in portable C.
    if platform.machine() != "x86_64" or "avx2" not in Path("/proc/cpuinfo").read_text().split():
        pytest.skip("the emulated kernels are linked beside those of x86-64 with AVX2")
    if not Path("/usr/include/simde").is_dir():
        pytest.skip("no SIMDe: apt install libsimde-dev")
    compiler = compiler_or_skip()
    # -O0: optimising thousands of emulated instructions takes minutes, running them does not.
    emulated = ("-O0", "-w", "-D__AVX512F__=1", "-D__F16C__=1", "-DSIMDE_NO_NATIVE", f"-I{EMULATED}")
    monkeypatch.setitem(ARCHITECTURES["x86_64"], "avx512vnni.c", emulated)
    anywhere = mutated(tmp_path, "variant.c", "if (table == &pl_avx512vnni)", "if (table == &pl_avx512vnni) return 1; if (0)")
    lines = must([str(build_driver(tmp_path / "built", compiler, (), anywhere))]).splitlines()
    assert [line.split()[:2] for line in lines] == [["portable", "agrees"], ["avx2", "agrees"], ["avx512vnni", "agrees"]]
    assert len({line.split()[2] for line in lines}) == 1

    library = tmp_path / "emulated.so"
    assert compile_library(library, sources=anywhere) is None
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-n0",
        "-p",
        "no:cacheprovider",
        "tests/unit/native/test_products.py",
        "-k",
        "avx512vnni",
    ]
    assert " passed" in must(command, {**os.environ, "PACELINE_TEST_NATIVE": str(library)})

    text = (anywhere / "avx512vnni.c").read_text()
    (anywhere / "avx512vnni.c").write_text(text.replace("_mm512_set1_epi8((char)0x80)", "_mm512_set1_epi8((char)0x40)"))
    assert "avx512vnni differs" in must([str(build_driver(tmp_path / "mutant", compiler, (), anywhere))], expected=1)


def test_wheels_with_and_without_a_compiler(tmp_path: Path) -> None:
    compiler_or_skip()
    shutil.copytree(
        ROOT, tmp_path / "tree", ignore=shutil.ignore_patterns(".git", ".venv", ".cache", "*.so", "__pycache__", "data", ".hypothesis")
    )

    def contents(folder: str, **environment: str) -> tuple[str, list[str]]:
        command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(tmp_path / folder), str(tmp_path / "tree")]
        must(command, {**os.environ, **environment})
        (wheel,) = (tmp_path / folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            return wheel.name, [name for name in archive.namelist() if name.startswith("paceline/native/")]

    name, files = contents("with")
    assert "-py3-none-linux_" in name
    assert "paceline/native/libpaceline.so" in files
    assert not [file for file in files if file.endswith((".c", ".h"))]
    name, files = contents("without", CC="false")
    assert name.endswith("-py3-none-any.whl")
    assert "paceline/native/library.py" in files
    assert not [file for file in files if file.endswith((".c", ".h", ".so"))]
