"""The house keeps its own rules: limits and contracts find what is planted against them, and pins agree with ranges."""

import ast
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


@pytest.fixture(scope="module")
def limits() -> ModuleType:
    spec = importlib.util.spec_from_file_location("limits", ROOT / ".ci/limits.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write(root: Path, name: str, text: str) -> None:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(text)


PARAMETERS = ", ".join("abcdefg")
LONG_FUNCTION = "def long():\n" + "    pass\n" * 60


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("src/paceline/engine/a.py", "x = 1\n" * 401, "401 lines, limit 400"),
        ("tests/unit/test_a.py", "x = 1\n" * 401, "401 lines"),
        ("src/paceline/kernels/norm/triton.py", "x = 1\n" * 601, "601 lines, limit 600"),
        ("src/paceline/native/step.c", ";\n" * 601, "601 lines, limit 600"),
        ("src/paceline/engine/a.py", LONG_FUNCTION, "long has 61 lines"),
        ("src/paceline/engine/a.py", f"class A:\n    def f(self, {PARAMETERS}, *, h): ...\n", "f has 8 parameters"),
        ("src/paceline/utils/a.py", "", "the name utils"),
        ("src/paceline/engine/helpers.py", "", "the name helpers"),
        ("src/paceline/engine/__init__.py", "import os\n", "imports nothing"),
    ],
)
def test_each_limit_finds_its_violation(limits: ModuleType, tmp_path: Path, name: str, text: str, words: str) -> None:
    write(tmp_path, name, text)
    (found,) = limits.findings(tmp_path)
    assert words in found
    assert name in found
    assert limits.main(tmp_path) == 1


def test_what_is_at_the_limits_passes(limits: ModuleType, tmp_path: Path) -> None:
    write(tmp_path, "src/paceline/__init__.py", "from paceline.errors import PacelineError\n")
    write(tmp_path, "src/paceline/engine/__init__.py", '"""The engine."""\n')
    write(tmp_path, "src/paceline/kernels/norm/__init__.py", "import os\n")
    write(tmp_path, "src/paceline/kernels/norm/triton.py", "x = 1\n" * 600)
    write(tmp_path, "src/paceline/engine/a.py", f"class A:\n    def f(self, {PARAMETERS}): ...\n" + "x = 1\n" * 398)
    write(tmp_path, "src/paceline/engine/b.py", LONG_FUNCTION.removesuffix("    pass\n"))
    assert list(limits.findings(tmp_path)) == []
    assert limits.main(tmp_path) == 0


def lint_imports(folder: Path) -> subprocess.CompletedProcess[str]:
    program = "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(no_cache=True, no_logo=True))"
    environment = {**os.environ, "PYTHONPATH": str(folder / "src"), "COLUMNS": "200"}
    return subprocess.run([sys.executable, "-c", program], cwd=folder, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture
def source_copy(tmp_path: Path) -> Path:
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def test_the_import_contracts_hold(source_copy: Path) -> None:
    done = lint_imports(source_copy)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("module", "line", "contract"),
    [
        ("scheduler/planted.py", "import torch", "host modules"),
        ("core/request.py", "def lazy():\n    import torch", "host modules"),
        ("server/planted.py", "from paceline import llm", "layers"),
        ("core/planted.py", "from paceline.engine import wire", "layers"),
        ("unplaced/__init__.py", "", "layers"),
        ("forward/planted.py", "import triton", "GPU languages"),
        ("speculative/drafters/planted.py", "from paceline.speculative.drafters import ngram", "drafters"),
        ("executor/planted.py", "import fastapi", "HTTP packages"),
    ],
)
def test_each_import_contract_finds_its_violation(source_copy: Path, module: str, line: str, contract: str) -> None:
    path = source_copy / "src/paceline" / module
    path.parent.mkdir(parents=True, exist_ok=True)
    text = path.read_text() if path.exists() else ""
    path.write_text(f"{text}\n{line}\n")
    done = lint_imports(source_copy)
    assert done.returncode == 1, done.stdout + done.stderr
    assert re.search(rf"{contract}.* BROKEN", done.stdout), done.stdout


def pins() -> dict[str, Version]:
    lines = [line.partition("#")[0].strip() for line in (ROOT / "constraints.txt").read_text().splitlines()]
    return {normal(name): Version(version) for name, version in (line.split("==") for line in lines if line)}


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_every_dependency_is_pinned_inside_its_range() -> None:
    project = PYPROJECT["project"]
    pinned = pins()
    extras = [text for texts in project["optional-dependencies"].values() for text in texts if not text.startswith("paceline[")]
    for text in (*project["dependencies"], *extras):
        requirement = Requirement(text)
        assert normal(requirement.name) in pinned, f"{requirement.name} has no exact version in constraints.txt"
        assert pinned[normal(requirement.name)] in requirement.specifier, text


def test_every_dependency_says_why_it_is_there() -> None:
    block = (ROOT / "pyproject.toml").read_text().split("dependencies = [", 1)[1].split("\n]", 1)[0]
    lines = [line for line in block.splitlines() if line.strip().startswith('"')]
    assert len(lines) == len(PYPROJECT["project"]["dependencies"])
    assert all(re.search(r'",\s+# \S', line) for line in lines)


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md"])
def test_the_pages_name_only_make_targets_that_exist(page: str) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"\bmake ([a-z][a-z-]*)", (ROOT / page).read_text()))
    assert {"check", "test"} <= named if page == "CONTRIBUTING.md" else {"serve", "test"} <= named
    assert named <= targets | {"sure"}


def test_the_architecture_page_names_every_folder() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    folders = [path.parent.name for path in (ROOT / "src/paceline").glob("*/__init__.py")]
    assert folders
    missing = [name for name in folders if f"`{name}/`" not in text]
    assert missing == []


def defined_tests(path: Path) -> set[str]:
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    return {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, functions) and node.name.startswith("test_")}


def case_rows() -> list[list[str]]:
    """The cells of every row of docs/cases.md, without the heads of its tables."""
    lines = [line for line in (ROOT / "docs/cases.md").read_text().splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [row for row in rows if row[0] != "seen in" and set(row[0]) != {"-"}]


def test_the_page_of_cases_names_tests_that_exist() -> None:
    rows = case_rows()
    named = [row[4].split(", ") for row in rows if len(row) == 5]
    assert len(named) > 30
    assert {len(row) for row in rows} == {3, 5}, "a case has a test, or stands among those out of reach with the reason"
    for test in (test for tests in named for test in tests):
        path, _, name = test.partition("::")
        assert name in defined_tests(ROOT / path), test


def test_every_case_has_a_public_reference() -> None:
    for row in case_rows():
        assert re.search(r"[\w.-]+#\d+|^the same|^\(", row[0]), row
        assert all(row), row


def test_the_referees_wheel_asks_for_what_the_whole_project_asks_for() -> None:
    referee = tomllib.loads((ROOT / "packaging/paceline-prove/pyproject.toml").read_text())["project"]
    project = PYPROJECT["project"]
    ours = {Requirement(text).name: text for text in (*project["dependencies"], *project["optional-dependencies"]["prove"])}
    assert {Requirement(text).name: text for text in referee["dependencies"]}.items() <= ours.items()
    assert {Requirement(text).name for text in project["optional-dependencies"]["prove"]} <= {
        Requirement(text).name for text in referee["dependencies"]
    }
