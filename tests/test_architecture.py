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
    "cli": 7,
}
ALLOWED_SIBLINGS = {("parallel", "nn")}
WITHOUT_TORCH = {"spec", "schedule", "catalog", "cost", "search", "replay", "export", "report", "data", "lab"}
MAY_READ_ENVIRONMENT = {"run", "cli"}
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
MAX_LOOP_LINES = 60


def room(path: Path) -> str:
    parts = path.relative_to(SOURCE).parts
    return parts[0] if len(parts) > 1 else ""


def imports(tree: ast.AST) -> Iterator[tuple[str, int]]:
    for node in ast.walk(tree):
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


def test_import_law() -> None:
    broken = []
    for path, tree in parsed():
        here = room(path)
        if not here:
            continue
        for name, line in imports(tree):
            parts = name.split(".")
            if parts[0] != "meshwright" or len(parts) < 2 or parts[1] not in LEVELS or parts[1] == here:
                continue
            there = parts[1]
            if (here, there) not in ALLOWED_SIBLINGS and LEVELS[there] >= LEVELS[here]:
                broken.append(f"{place(path, line)}: {here} imports {there}")
            if there == "techniques":
                broken.append(f"{place(path, line)}: techniques are reached through the registry by name")
    assert not broken, "\n".join(broken)


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
    loop = SOURCE / "train" / "loop.py"
    longest = max((f.end_lineno or 0) - f.lineno + 1 for f in functions(ast.parse(loop.read_text())))
    assert longest <= MAX_LOOP_LINES


def test_no_globals() -> None:
    broken = [
        place(path, node.lineno) for path, tree in parsed() for node in ast.walk(tree) if isinstance(node, ast.Global)
    ]
    assert not broken, "\n".join(broken)


def test_environment_is_read_at_the_edge() -> None:
    broken = []
    for path, tree in parsed():
        if room(path) in MAY_READ_ENVIRONMENT:
            continue
        reads = (node for node in ast.walk(tree) if isinstance(node, ast.Attribute))
        broken += [place(path, node.lineno) for node in reads if node.attr in ("environ", "getenv", "putenv")]
    assert not broken, "\n".join(broken)


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
