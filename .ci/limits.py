"""The size limits and naming rules of the code, checked by `make check`; prints the lines per folder.

A file has at most 400 lines (a GPU or C kernel 600), a function 60 lines and 7 parameters. No folder or module is called utils, helpers,
common or misc. `__init__.py` files below the package root import nothing, those of kernels excepted.
"""

import ast
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

FILE_LINES = 400
KERNEL_LINES = 600
FUNCTION_LINES = 60
PARAMETERS = 7
FOLDERS = ("src", "tests", "benchmarks", "deploy", "examples", "scripts", ".ci")
SUFFIXES = (".py", ".c", ".h", ".cpp", ".cu", ".cuh")
FORBIDDEN_NAMES = ("utils", "helpers", "common", "misc")
KERNEL_MODULES = ("triton", "cute", "cuda")

Function = ast.FunctionDef | ast.AsyncFunctionDef


def source_files(root: Path) -> Iterator[Path]:
    """The files under the limits, relative to `root`."""
    for folder in FOLDERS:
        for path in sorted((root / folder).rglob("*")):
            if path.suffix in SUFFIXES and path.is_file():
                yield path.relative_to(root)


def is_kernel(path: Path) -> bool:
    """Whether the longer limit holds: a CUDA, CuTe, Triton or C kernel."""
    return path.suffix != ".py" or ("kernels" in path.parts and path.stem in KERNEL_MODULES)


def findings(root: Path) -> Iterator[str]:
    """Every violation, as one line each."""
    for path in source_files(root):
        text = (root / path).read_text(encoding="utf-8")
        num_lines = text.count("\n")
        limit = KERNEL_LINES if is_kernel(path) else FILE_LINES
        if num_lines > limit:
            yield f"{path}: {num_lines} lines, limit {limit}; split it"
        for part in (*path.parent.parts, path.stem):
            if part.removeprefix("test_") in FORBIDDEN_NAMES:
                yield f"{path}: the name {part} says nothing; name what lives there"
        if path.suffix == ".py":
            yield from _python_findings(path, ast.parse(text))


def _python_findings(path: Path, tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, Function):
            yield from _function_findings(path, node)
    package = path.parts[:2] == ("src", "paceline")
    if package and path.name == "__init__.py" and len(path.parts) > 3 and path.parts[2] != "kernels":
        for node in ast.walk(tree):
            if isinstance(node, ast.Import | ast.ImportFrom):
                yield f"{path}:{node.lineno}: an __init__.py below the root imports nothing"


def _function_findings(path: Path, node: Function) -> Iterator[str]:
    num_lines = (node.end_lineno or node.lineno) - node.lineno + 1
    if num_lines > FUNCTION_LINES:
        yield f"{path}:{node.lineno}: {node.name} has {num_lines} lines, limit {FUNCTION_LINES}"
    names = [argument.arg for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
    num_parameters = len([name for name in names if name not in ("self", "cls")])
    if num_parameters > PARAMETERS:
        yield f"{path}:{node.lineno}: {node.name} has {num_parameters} parameters, limit {PARAMETERS}"


def lines_per_folder(root: Path) -> Counter[str]:
    """Lines of source by folder: one level below the package, the top folder elsewhere."""
    lines: Counter[str] = Counter()
    for path in source_files(root):
        package = path.parts[:2] == ("src", "paceline")
        depth = 2 + (len(path.parts) > 3) if package else 1 + (path.parts[0] == "tests" and len(path.parts) > 2)
        lines["/".join(path.parts[:depth])] += (root / path).read_text(encoding="utf-8").count("\n")
    return lines


def main(root: Path) -> int:
    lines = lines_per_folder(root)
    print("  ".join(f"{folder} {num}" for folder, num in sorted(lines.items())), f" total {lines.total()}")
    found = list(findings(root))
    print("\n".join(found) if found else "size limits and names: fine")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1] if len(sys.argv) > 1 else ".")))
