"""Loading: types as in the header, and a reason in one line where there is no usable library."""

import ctypes
import re
import subprocess
from pathlib import Path

import pytest

from paceline.native import library as native
from paceline.native.compile import FOLDER, compile_library, compile_objects, find_compiler
from paceline.native.library import Library, load

STRUCTURES = {
    "pl_matrix": native.Matrix,
    "pl_op": native.Op,
    "pl_shape": native.Shape,
    "pl_batch": native.Batch,
    "pl_kv": native.Kv,
}
HEADER = (FOLDER / "paceline_native.h").read_text()


def build(folder: Path, text: str, *flags: str) -> Path:
    (folder / "source.c").write_text(text)
    compiler = find_compiler()
    if compiler is None:
        pytest.skip("no C compiler")
    subprocess.run([*compiler, f"-I{FOLDER}", *flags, str(folder / "source.c"), "-o", str(folder / "built")], check=True)
    return folder / "built"


def test_structures_lie_as_in_c(tmp_path: Path) -> None:
    prints: list[str] = []
    expected: list[str] = []
    for name, structure in STRUCTURES.items():
        prints.append(f'printf("{name} %zu\\n", sizeof({name}));')
        expected.append(f"{name} {ctypes.sizeof(structure)}")
        for field, *_ in structure._fields_:
            prints.append(f'printf("{field} %zu\\n", offsetof({name}, {field}));')
            expected.append(f"{field} {getattr(structure, field).offset}")
    main = f"int main(void) {{ {' '.join(prints)} return 0; }}"
    built = build(tmp_path, f'#include <stddef.h>\n#include <stdio.h>\n#include "paceline_native.h"\n{main}\n')
    assert subprocess.check_output([built], text=True).split("\n")[:-1] == expected


def test_constants_are_the_headers() -> None:
    defined = dict(re.findall(r"#define (PL_\w+) +(\d+)", HEADER))
    assert defined == {"PL_ABI": str(native.ABI), "PL_TILE_ROWS": str(native.TILE_ROWS), "PL_GROUP": str(native.GROUP)}
    limits = dict(re.findall(r"#define (PL_\w+) +(\d+)", (FOLDER / "kernels.h").read_text()))
    assert (limits["PL_MAX_HEAD_DIM"], limits["PL_ATTEND_QUERIES"]) == (str(native.MAX_HEAD_DIM), str(native.ATTEND_QUERIES))
    kinds = re.search(r"enum pl_kind \{(.*?)\}", HEADER, re.DOTALL)
    assert kinds is not None
    assert len(re.findall(r"PL_\w+", kinds[1])) == native.NUM_OP_KINDS + 1
    assert [format.name for format in sorted(native.Format)] == ["W8", "W4"]
    assert "enum pl_format { PL_W8 = 0, PL_W4 = 1 };" in HEADER


def test_every_function_of_the_header_is_bound() -> None:
    functions = set(re.findall(r"\b(pl_\w+)\(", HEADER))
    assert functions == set(native._SIGNATURES)


def test_variants(library: Library) -> None:
    assert library.abi == native.ABI
    usual = library.variant
    assert usual in native.VARIANTS
    assert not library.force_variant("avx1024")
    assert library.variant == usual
    assert library.force_variant("portable")
    assert library.variant == "portable"
    assert library.force_variant(usual)


def test_without_a_library_there_is_a_reason(tmp_path: Path) -> None:
    assert load(tmp_path / "nothing.so") == "the native library was not built (no C compiler at installation)"
    (tmp_path / "text.so").write_text("not a library")
    reason = load(tmp_path / "text.so")
    assert isinstance(reason, str)
    assert reason.startswith("the native library cannot be used: ")
    assert "\n" not in reason


def test_another_abi_is_refused(tmp_path: Path) -> None:
    built = build(tmp_path, "int pl_abi(void) { return 99; }", "-shared", "-fPIC")
    assert load(built) == f"the native library has ABI 99, this paceline needs {native.ABI}; install paceline again"


def test_a_library_that_lacks_a_function_is_refused(tmp_path: Path) -> None:
    built = build(tmp_path, f"int pl_abi(void) {{ return {native.ABI}; }}", "-shared", "-fPIC")
    reason = load(built)
    assert isinstance(reason, str)
    assert "pl_variant" in reason


def test_compiling_without_a_compiler_or_with_a_failing_one_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = tmp_path / "built.so"
    monkeypatch.setenv("CC", "false")
    assert str(compile_library(output)).startswith("the C compiler failed with status 1")
    monkeypatch.setenv("CC", "no-such-compiler --fast")
    assert str(compile_library(output)).startswith("the C compiler could not be run: ")
    monkeypatch.delenv("CC")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert compile_library(output) == "no C compiler was found (cc, gcc or clang; or name one in CC)"
    assert list(tmp_path.iterdir()) == []


def test_a_mistake_in_the_sources_leaves_the_old_library(tmp_path: Path) -> None:
    if find_compiler() is None:
        pytest.skip("no C compiler")
    (tmp_path / "wrong.c").write_text("int pl_abi(void) { return }")
    output = tmp_path / "built.so"
    output.write_text("old")
    reason = compile_library(output, sources=tmp_path)
    assert reason is not None
    assert "error: expected expression" in reason
    assert output.read_text() == "old"


def test_a_folder_without_sources_leaves_the_old_library(tmp_path: Path) -> None:
    if find_compiler() is None:
        pytest.skip("no C compiler")
    output = tmp_path / "built.so"
    output.write_text("old")
    assert compile_library(output, sources=tmp_path) == f"there are no C sources in {tmp_path}"
    assert output.read_text() == "old"


@pytest.mark.parametrize("machine", ["aarch64-linux-gnu", "arm64-apple-darwin24"])
def test_both_names_of_a_processor_get_its_file(tmp_path: Path, machine: str) -> None:
    compiler = tmp_path / "compiler"
    compiler.write_text(f'#!/bin/sh\necho {machine}\necho "$@" >> {tmp_path}/calls\n')
    compiler.chmod(0o755)
    objects = compile_objects(tmp_path, [str(compiler)], (), FOLDER)
    assert "neon.o" in [path.name for path in objects]
    assert "-march=armv8.2-a+dotprod -c" in (tmp_path / "calls").read_text()
