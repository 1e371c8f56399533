"""The laws of the house (docs/architecture.md), held by reading the source."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "meshwright"
FILES = sorted(SOURCE.rglob("*.py"))

LEVELS = {
    "spec": 0,
    "schedule": 1,
    "catalog": 1,
    "cost": 2,
    "search": 3,
    "replay": 3,
    "export": 3,
    "nn": 3,
    "parallel": 3,
    "data": 3,
    "lab": 3,
    "train": 4,
    "techniques": 5,
    "run": 6,
    "report": 6,
    "api": 7,
    "cli": 7,
}
ALLOWED_SIBLINGS = {("parallel", "nn"), ("cli", "api")}
OF_THE_PACKAGE = {"meshwright", "meshwright.__version__"}
WITHOUT_TORCH = {"spec", "schedule", "catalog", "cost", "search", "replay", "export", "report", "data", "lab"}
MAY_READ_ENVIRONMENT = {"run", "cli"}
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
MAX_LOOP_LINES = 60


def room(path: Path) -> str:
    """The folder of a file, "api" of api.py, and nothing of what starts the package."""
    parts = path.relative_to(SOURCE).parts
    return parts[0] if len(parts) > 1 else "api" if path.stem == "api" else ""


def imports(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """What is imported by its full name, what is read of the package itself too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "meshwright":
            yield f"meshwright.{node.attr}", node.lineno
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module, node.lineno
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)


@cache
def parsed() -> tuple[tuple[Path, ast.Module], ...]:
    return tuple((path, ast.parse(path.read_text())) for path in FILES)


def place(path: Path, line: int) -> str:
    return f"{path.relative_to(ROOT)}:{line}"


def test_every_room_is_known() -> None:
    assert {room(path) for path in FILES} - {""} <= set(LEVELS)


def import_faults(here: str, tree: ast.AST) -> Iterator[tuple[str, int]]:
    """What a file of the room `here` may not import, with its line. What users call is all of api.py."""
    for name, line in imports(tree):
        parts = name.split(".")
        if parts[0] != "meshwright" or name in OF_THE_PACKAGE:
            continue
        there = parts[1] if parts[1] in LEVELS else "api"
        if there == "techniques" != here:
            yield "techniques are reached through the registry by name", line
        if here == "techniques" and name.startswith("meshwright.train.loop"):
            yield "techniques import the events of train and never its loop", line
        if here and there != here and (here, there) not in ALLOWED_SIBLINGS and LEVELS[there] >= LEVELS[here]:
            yield f"{here} imports {there}", line


def test_import_law() -> None:
    broken = [
        f"{place(path, line)}: {fault}" for path, tree in parsed() for fault, line in import_faults(room(path), tree)
    ]
    assert not broken, "\n".join(broken)


@pytest.mark.parametrize(
    ("here", "text"),
    [
        ("cost", "from meshwright import search"),
        ("cost", "from meshwright.search.rules import check"),
        ("run", "from meshwright.api import design"),
        ("run", "from meshwright import design"),
        ("run", "import meshwright\nmeshwright.design()"),
        ("api", "from meshwright.cli import main"),
        ("api", "from meshwright.techniques import low_rank"),
        ("techniques", "from meshwright.train.loop import fit"),
        ("techniques", "from meshwright.train import loop"),
    ],
)
def test_the_import_law_sees_every_way_around_it(here: str, text: str) -> None:
    assert list(import_faults(here, ast.parse(text)))


def test_planning_never_imports_torch() -> None:
    broken = [
        place(path, line)
        for path, tree in parsed()
        if room(path) in WITHOUT_TORCH
        for name, line in imports(tree)
        if name.split(".")[0] == "torch"
    ]
    assert not broken, "\n".join(broken)


def test_modules_know_nothing_of_distribution() -> None:
    broken = [
        place(path, line)
        for path, tree in parsed()
        if room(path) == "nn"
        for name, line in imports(tree)
        if name.startswith("torch.distributed")
    ]
    assert not broken, "\n".join(broken)


def test_spec_needs_only_the_standard_library() -> None:
    broken = [
        f"{place(path, line)}: {name}"
        for path, tree in parsed()
        if room(path) == "spec"
        for name, line in imports(tree)
        if name.split(".")[0] not in sys.stdlib_module_names and not name.startswith("meshwright.spec")
    ]
    assert not broken, "\n".join(broken)


def test_file_budget() -> None:
    ours = [
        path for folder in ("src", "tests", "benchmarks", "examples", "tools") for path in (ROOT / folder).rglob("*.py")
    ]
    long = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in ours}
    assert not {name: lines for name, lines in long.items() if lines > MAX_FILE_LINES}


def functions(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    yield from (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def test_function_budget() -> None:
    broken = []
    for path, tree in parsed():
        for function in functions(tree):
            lines = (function.end_lineno or 0) - function.lineno + 1
            if lines > MAX_FUNCTION_LINES:
                broken.append(f"{place(path, function.lineno)}: {function.name} has {lines} lines")
    assert not broken, "\n".join(broken)


def test_training_loop_budget() -> None:
    """Of the file as a whole: a loop is no shorter for being cut in pieces."""
    assert len((SOURCE / "train" / "loop.py").read_text().splitlines()) <= MAX_LOOP_LINES


def test_no_globals() -> None:
    broken = [
        place(path, node.lineno) for path, tree in parsed() for node in ast.walk(tree) if isinstance(node, ast.Global)
    ]
    assert not broken, "\n".join(broken)


def environment_reads(tree: ast.AST) -> Iterator[int]:
    """Lines that read the environment, or import what does."""
    words = ("environ", "environb", "getenv", "getenvb", "putenv")
    yield from (node.lineno for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr in words)
    yield from (line for name, line in imports(tree) if name.startswith("os.") and name.split(".")[1] in words)


def test_environment_is_read_at_the_edge() -> None:
    broken = [
        place(path, line)
        for path, tree in parsed()
        if room(path) not in MAY_READ_ENVIRONMENT
        for line in environment_reads(tree)
    ]
    assert not broken, "\n".join(broken)


@pytest.mark.parametrize("text", ["import os\nos.environ", "import os as o\no.getenv('A')", "from os import environ"])
def test_whatever_reads_the_environment_is_seen(text: str) -> None:
    assert list(environment_reads(ast.parse(text)))


RUNS_CODE = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib", "yaml", "code"}


def called(tree: ast.Module) -> Iterator[tuple[str, ast.Call]]:
    """Every call by the name that it is written with: `torch.load`, `eval`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node


def test_no_file_can_run_code() -> None:
    """Nothing is unpickled or evaluated, and libraries that would are told not to."""
    broken = []
    for path, tree in parsed():
        broken += [place(path, line) for name, line in imports(tree) if name.split(".")[0] in RUNS_CODE]
        for name, call in called(tree):
            told = {word.arg: ast.unparse(word.value) for word in call.keywords}
            runs = name in ("eval", "exec", "compile", "__import__", "torch.hub.load", "os.system", "os.popen")
            runs |= name == "torch.load" and told.get("weights_only") != "True"
            runs |= name.endswith("np.load") and told.get("allow_pickle") != "False"
            runs |= name.endswith(".from_pretrained") and told.get("trust_remote_code") != "False"
            runs |= told.get("shell") == "True" or "FileSystemReader" in name
            broken += [f"{place(path, call.lineno)}: {name}"] if runs else []
    assert not broken, "\n".join(broken)


def test_private_torch_is_in_one_file_a_room() -> None:
    """Names of torch that begin with an underscore may change; each room keeps them in a file named torch_compat."""
    broken = []
    for path, tree in parsed():
        if path.name == "torch_compat.py":
            continue
        for name, line in imports(tree):
            parts = name.split(".")
            if parts[0] == "torch" and any(part.startswith("_") and not part.startswith("__") for part in parts):
                broken.append(f"{place(path, line)}: {name}")
    assert not broken, "\n".join(broken)


def test_no_drawer_for_everything() -> None:
    assert not [path for path in FILES if path.stem in ("utils", "helpers", "common", "misc")]


def test_no_loose_ends() -> None:
    mark = re.compile(r"\b(TODO|FIXME|XXX)\b|NotImplementedError")
    broken = [
        place(path, number)
        for path in FILES
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if mark.search(line)
    ]
    assert not broken, "\n".join(broken)


@pytest.mark.parametrize("command", ["import meshwright", "from meshwright.cli import main; main(['--help'])"])
def test_starts_without_torch(command: str) -> None:
    check = f"""
import sys
try:
    {command}
except SystemExit:
    pass
assert 'torch' not in sys.modules and 'numpy' not in sys.modules, 'heavy import at start'
"""
    result = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
