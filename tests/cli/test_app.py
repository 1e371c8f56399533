"""The one error boundary: exit codes, one JSON document, no traceback for a person's mistake."""

from __future__ import annotations

import errno
import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

import meshwright
from meshwright.cli import app, main, version
from meshwright.spec.errors import ConfigError, EnvironmentUnfit, ExitCode, NoPlanFits, Problem, WorkerFailed


def run(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    code = main(arguments)
    out, err = capsys.readouterr()
    return code, out, err


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError(Problem(where="job.toml:3 pipelin", what="unknown key", fix="did you mean 'pipeline'?")), 2),
        (NoPlanFits("nothing fits"), 3),
        (EnvironmentUnfit("no compiler"), 4),
        (WorkerFailed("rank 1 failed"), 5),
        (KeyboardInterrupt(), 130),
        (MemoryError("Unable to allocate 7 TiB"), 4),
        (RuntimeError("broken"), 1),
    ],
)
def test_every_failure_has_its_exit_code(
    error: BaseException, code: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise error

    monkeypatch.setattr(version, "version", fail)
    got, out, err = run(["version"], capsys)
    assert got == code
    assert out == ""
    assert "error: " in err
    assert ("Traceback" in err) == (code == 1)
    assert ("this is a fault of meshwright" in err) == (code == 1)


def test_a_stop_that_was_asked_for_is_no_error(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop() -> None:
        stopped = WorkerFailed("it was asked to stop")
        stopped.exit_code = ExitCode.SAVED
        raise stopped

    monkeypatch.setattr(version, "version", stop)
    assert run(["version"], capsys) == (75, "", "it was asked to stop\n")


def test_the_version_is_an_option_too(capsys: pytest.CaptureFixture[str]) -> None:
    for option in ("--version", "-V"):
        assert run([option], capsys) == (0, f"meshwright {meshwright.__version__}\n", "")
    assert "--version" in run(["--help"], capsys)[1]
    assert "--version" not in run(["plan", "--help"], capsys)[1]


def test_the_package_runs_as_a_module() -> None:
    made = subprocess.run([sys.executable, "-m", "meshwright", "--version"], capture_output=True, text=True, timeout=60)
    assert (made.returncode, made.stdout) == (0, f"meshwright {meshwright.__version__}\n")
    made = subprocess.run([sys.executable, "-m", "meshwright", "plann"], capture_output=True, text=True, timeout=60)
    assert made.returncode == 2


def test_all_problems_are_told_each_on_its_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise ConfigError([Problem(where="a", what="is wrong"), Problem(where="b", what="is wrong too")])

    monkeypatch.setattr(version, "version", fail)
    _, _, err = run(["version"], capsys)
    assert err.splitlines() == ["error: a: is wrong", "error: b: is wrong too"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["plann"], "Did you mean 'plan'"),
        (["plan", "--modle", "tiny"], "--model"),
        (["plan", "--model", "tiny"], "Missing option '--cluster'"),
        (["plan", "--model", "tiny", "--cluster", "local", "--top", "0"], "--top"),
        (["plan", "--model", "lama-7b", "--cluster", "8xH100"], "did you mean"),
        (["plan", "--model", "tiny", "--cluster", "8xH1000"], "did you mean"),
        (["plan", "--model", "tiny", "--cluster", "8xH100", "--set", "batch_tokns=1"], "did you mean 'batch_tokens'?"),
        (["models", "nothing-like-this"], "error: "),
        (["explain", "/nowhere"], "no such run or plan"),
    ],
)
def test_a_mistake_is_told_in_words_with_exit_code_2(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(arguments, capsys)
    assert code == 2
    assert says in err
    assert out == ""
    assert "Traceback" not in err


def test_an_error_is_one_json_document_when_asked(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(["plan", "--model", "lama-7b", "--cluster", "8xH100", "--json"], capsys)
    error = json.loads(out)["error"]
    assert code == error["exit_code"] == 2
    assert error["problems"][0]["what"]
    assert err.startswith("error: ")


def test_no_words_are_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run([], capsys)
    assert code == 0
    assert "plan" in out
    assert err == ""


def test_every_command_explains_itself_in_half_a_second() -> None:
    script = """
import contextlib, io, resource, sys
from meshwright.cli import app, main
names = sorted(command.name for command in app.build().registered_commands)
for name in [None, *names]:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert main([name, "--help"] if name else ["--help"]) == 0
    assert "Usage: meshwright" in out.getvalue()
    if name is None:
        print(resource.getrusage(resource.RUSAGE_SELF).ru_utime)
for heavy in ("torch", "numpy"):
    assert heavy not in sys.modules, heavy
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 0.5


def test_what_a_child_prints_stays_out_of_the_document() -> None:
    script = """
import subprocess, sys
from meshwright.cli import output
with output.one_document():
    subprocess.run([sys.executable, "-c", "print('from a child')"], check=True)
    output.print_json({"answer": 42})
print("after")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.stdout == '{\n "answer": 42\n}\nafter\n'
    assert done.stderr == "from a child\n"


def test_a_reader_that_leaves_is_no_error() -> None:
    command = f"{sys.executable} -c 'import sys; from meshwright.cli import main; sys.exit(main())' models --json"
    done = subprocess.run(["bash", "-c", f"set -o pipefail; {command} | head -1"], capture_output=True, text=True)
    assert done.stdout == "[\n"
    assert done.stderr == ""


def test_each_command_has_a_page_in_the_manual() -> None:
    manual = (Path(__file__).resolve().parent.parent.parent / "docs" / "commands.md").read_text()
    for command in app.build().registered_commands:
        assert f"## `meshwright {command.name}" in manual, command.name
    for code in (0, 1, 2, 3, 4, 5, 75, 130):
        assert f"| {code} |" in manual


def test_a_pipe_that_breaks_while_a_command_prints_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise BrokenPipeError(errno.EPIPE, "broken pipe")

    silenced: list[bool] = []
    monkeypatch.setattr(version, "version", fail)
    monkeypatch.setattr(app, "quiet_output", lambda: silenced.append(True))
    assert app.run(["version"]) == 0
    assert silenced == [True]


def test_half_of_a_character_is_printed_as_a_question_mark(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(version, "version", lambda: print("a\ud800b"))
    assert app.run(["version"]) == 0
    assert capsys.readouterr().out == "a?b\n"
    assert sys.stdout.errors == "strict"


COMMAND = f"{sys.executable} -c 'import sys; from meshwright.cli import main; sys.exit(main())'"


@pytest.mark.parametrize("arguments", ["models", "models --json", "version", "--help"])
@pytest.mark.parametrize(
    ("place", "says"), [("/dev/full", "cannot be written: No space left on device"), ("&-", "output is closed")]
)
def test_standard_output_that_takes_nothing_is_one_line_and_exit_code_4(arguments: str, place: str, says: str) -> None:
    done = subprocess.run(["bash", "-c", f"{COMMAND} {arguments} >{place}"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 4
    assert done.stderr.startswith("error: standard output ")
    assert says in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("place", ["/dev/full", "&-"])
def test_an_error_that_nobody_can_read_keeps_its_exit_code_and_the_document_its_place(place: str) -> None:
    command = f"{COMMAND} models nothing-like-this --json 2>{place}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert json.loads(done.stdout)["error"]["exit_code"] == 2


def test_quiet_silences_notes_and_neither_results_nor_what_is_wrong(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    plan = ["plan", "--model", "tiny", "--cluster", "1xH100", "--set", "batch_tokens=64Ki"]
    plan += ["--out", str(tmp_path / "plan.json")]
    loud = run(plan, capsys)
    assert "written to" in loud[2]
    for words in (["-q", *plan], [*plan, "--quiet"]):
        code, out, err = run(words, capsys)
        assert (code, err) == (0, "")
        assert "legal plans searched" in out
    assert "warning: " in run(["-q", *plan, "--set", "data.tokenizer=nowhere.json"], capsys)[2]
    assert run(["-q", "models", "nothing-like-this"], capsys)[2].startswith("error: ")
    assert "written to" in run(plan, capsys)[2], "it does not outlive its command"


def test_verbose_shows_where_an_error_was_raised_and_is_not_quiet(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(["models", "nothing-like-this", "-v"], capsys)
    assert code == 2
    assert "Traceback" in err
    code, _, err = run(["-q", "version", "-v"], capsys)
    assert code == 2
    assert "quiet and verbose at once" in err


@pytest.mark.parametrize(
    ("words", "setting", "coloured"), [((), "", True), (("--no-color",), "", False), ((), "1", False)]
)
def test_colours_are_for_terminals_that_want_them(words: tuple[str, ...], setting: str, coloured: bool) -> None:
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "NO_COLOR": setting, "COLUMNS": "140"}
    entry = [sys.executable, "-c", "import sys; from meshwright.cli import main; sys.exit(main())"]
    command = [*entry, "plan", "--model", "tiny", "--cluster", "1xH100", "--top", "1", *words]
    child = subprocess.Popen(command, stdout=theirs, stderr=subprocess.PIPE, env=environment)
    os.close(theirs)
    shown = b""
    try:
        while part := os.read(ours, 65536):
            shown += part
    except OSError:
        pass  # the system's way to say that the other end of a terminal is closed
    assert child.wait(timeout=60) == 0
    os.close(ours)
    assert b"legal plans" in shown
    assert bool(re.search(rb"\x1b\[[0-9;]*3[0-7]m", shown)) == coloured


@pytest.mark.parametrize(
    "words",
    [
        ["explain", "{}"],
        ["train", "{}"],
        ["compare", "{}", "{}"],
        ["convert", "{}", "out"],
        ["generate", "{}", "--prompt", "a"],
        ["train", "--resume", "--run", "{}"],
        ["plan", "--model", "tiny", "--cluster", "local:1", "--job", "{}"],
    ],
    ids=lambda words: " ".join(words),
)
@pytest.mark.parametrize("name", ["x" * 5000, "~nobody/of/that/name"], ids=["long", "home of nobody"])
def test_a_path_that_no_system_takes_is_told(words: list[str], name: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run([word.format(name) for word in words], capsys)
    assert code == 2
    assert err.startswith("error: ")
    assert "Traceback" not in err
    assert len(err.splitlines()[0]) < 6000


def test_a_disk_that_is_full_is_no_fault(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def full() -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "/full/plan.json")

    monkeypatch.setattr(version, "version", full)
    code, _, err = run(["version"], capsys)
    assert (code, err) == (4, "error: /full/plan.json: cannot be read or written: No space left on device\n")
