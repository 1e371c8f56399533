"""A run directory, or a plan file, read into one value: whatever is there, and nothing that is half-written."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.catalog import load_design
from meshwright.spec import codec
from meshwright.spec.errors import ConfigError, Problem
from meshwright.spec.goodput import Goodput
from meshwright.spec.incident import Incident
from meshwright.spec.json_text import parse_json
from meshwright.spec.paths import expanded, near_names
from meshwright.spec.plan import Design
from meshwright.spec.report import Report
from meshwright.spec.span import Span
from meshwright.spec.written import unwritten, write_whole
from meshwright.train.observe.incidents import incidents_of
from meshwright.train.observe.timekeeper import goodput_of

if TYPE_CHECKING:
    from meshwright.search import Decision

Row = Mapping[str, Any]
MOST_SECONDS = 1e12  # since 1970, of which a double still tells a tenth of a millisecond
_SPAN_FIELDS = frozenset(field.name for field in fields(Span))


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFiles:
    """What a run directory (or a plan file, `is_plan`) says; None or empty where it does not.

    `predicted` is what the run was told beforehand; for a plan file it is computed now.
    """

    name: str
    path: Path
    is_plan: bool
    design: Design
    predicted: Report | None
    measured: Report | None = None
    decision: Decision | None = None
    environment: Row | None = None
    steps: tuple[Row, ...] = ()
    evaluations: tuple[Row, ...] = ()
    spans: tuple[Span, ...] = ()
    sample: str | None = None
    goodput: Goodput | None = None
    incidents: tuple[Incident, ...] = ()
    round_changes: tuple[Row, ...] = ()

    @property
    def round_steps(self) -> int | None:
        """Steps of the rounds that learners meet in where the run made them longer or shorter than the plan's."""
        gradients = self.design.plan.gradients
        if not self.round_changes or not gradients.kind.has_learners:
            return None
        every = int(self.round_changes[-1]["round_steps"])
        return None if every == gradients.rounds.every else every

    @property
    def rounds(self) -> str:
        """The rounds that learners meet in where the run made them longer or shorter than the plan's; else nothing."""
        newest, planned, every = self.round_changes[-1:], self.design.plan.gradients.rounds.every, self.round_steps
        if every is None or not newest:
            return ""
        told = f"learners meet every {every:,} steps, not every {planned:,} as planned"
        return f"from step {newest[0]['step']:,} on {told}: so long takes what they send"


def read_run(path: Path | str) -> RunFiles:
    """The run directory or the plan file at `path`.

    The last line of a growing file may be half-written and is then left out; anything else that cannot be read is a
    ConfigError with file and line. A path that does not exist is one too, with the nearest names.
    """
    place = expanded(path)
    if place.is_file():
        return _read_plan(place)
    if not place.is_dir():
        raise ConfigError(Problem(what="no such run or plan", where=str(path), fix=_near_runs(place)))
    if not (place / "design.json").is_file():
        fix = _runs_inside(place)
        raise ConfigError(Problem(what="not a run directory", where=str(path), why="it has no design.json", fix=fix))
    design = load_design(place / "design.json")
    rows = tuple(_json_lines(place / "metrics.jsonl"))
    return RunFiles(
        name=place.resolve().name,
        path=place,
        is_plan=False,
        design=design,
        predicted=_value_or_none(Report, place / "predicted.json"),
        measured=_value_or_none(Report, place / "measured.json"),
        decision=_kept(place / "decision.json"),
        environment=_table_or_none(place / "environment.json"),
        steps=tuple(row for row in rows if _is_of_step(row, "loss")),
        evaluations=tuple(row for row in rows if _is_of_step(row, "validation_loss")),
        spans=tuple(_spans(place / "spans")),
        sample=_text_or_none(place / "sample.txt"),
        goodput=goodput_of(place),
        incidents=incidents_of(place),
        round_changes=tuple(
            row for row in rows if type(row.get("round_steps")) is int and type(row.get("step")) is int
        ),
    )


def write_file(path: Path | str, text: str, *, fix: str) -> Path:
    """Writes `text` to `path`, making its folder. Raises what `unwritten` makes of a failure, with `fix`."""
    place = expanded(path)
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        write_whole(place, text)
    except OSError as error:
        raise unwritten(error, where=path, fix=fix) from error
    return place


def predicted_spans(files: RunFiles) -> tuple[Span, ...]:
    """The predicted timeline of one step of the run's plan; () for a machine that cannot be priced."""
    from meshwright.cost import timeline

    try:
        return timeline(files.design)
    except ConfigError:
        return ()


def _read_plan(place: Path) -> RunFiles:
    """A legal plan with its model, cluster and job, as `meshwright plan --out` writes it, or a decision."""
    from meshwright.catalog.documents import read
    from meshwright.cost import predict
    from meshwright.search import check_answer, decision_of, is_decision, read_decision

    document, decision = read(place), None
    if is_decision(document):
        decision = decision_of(document)
        design = decision.design
    else:
        design = load_design(place)
        if problems := check_answer(design):
            raise ConfigError(problems)
        decision = read_decision(place, plan=design.plan)
    return RunFiles(
        name=place.stem,
        path=place,
        is_plan=True,
        design=design,
        predicted=predict(design),
        decision=decision,
    )


def _kept(path: Path) -> Decision | None:
    """The decision that a run keeps."""
    from meshwright.catalog.documents import read
    from meshwright.search import decision_of

    return decision_of(read(path)) if path.is_file() else None


def _json(path: Path) -> Any:
    try:
        return parse_json(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise ConfigError(Problem(what="cannot be read as JSON", where=str(path), why=str(error))) from error


def _table_or_none(path: Path) -> Row | None:
    if not path.is_file():
        return None
    value = _json(path)
    if not isinstance(value, dict):
        raise ConfigError(Problem(what="expected a table of keys", where=str(path)))
    return value


def _text_or_none(path: Path) -> str | None:
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else None


def _value(kind: type[Any], path: Path) -> Any:
    return codec.decode(kind, _json(path), str(path))


def _value_or_none(kind: type[Any], path: Path) -> Any:
    return _value(kind, path) if path.is_file() else None


def _json_lines(path: Path) -> Iterator[Row]:
    """Objects of a JSONL file; a last line that a writer did not finish is left out."""
    if not path.is_file():
        return
    lines = path.read_bytes().splitlines(keepends=True)
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = parse_json(line)
            if not isinstance(row, dict):
                raise ValueError("the line is not an object")
        except ValueError as error:
            if number == len(lines):
                return
            raise ConfigError(Problem(what="not JSON", where=f"{path}:{number}", why=str(error))) from error
        yield row


def _is_of_step(row: Row, name: str) -> bool:
    """The row says `name` of a step: a number, or null for one that is not finite."""
    return name in row and isinstance(row[name], int | float | None) and type(row.get("step")) is int


def _is_plain(value: object) -> bool:
    return isinstance(value, int | float) and abs(value) < MOST_SECONDS


def _spans(folder: Path) -> Iterator[Span]:
    for path in sorted(folder.glob("rank-*.jsonl")):
        for row in _json_lines(path):
            try:
                span = Span(**{name: value for name, value in row.items() if name in _SPAN_FIELDS})
                numbers = (span.rank, span.start, span.seconds, span.stage, span.microbatch, span.step)
                if not isinstance(span.name, str) or not all(_is_plain(each) for each in numbers):
                    raise TypeError("a name is not a word, or a number is none that a clock has")
                yield span
            except TypeError as error:
                raise ConfigError(Problem(what="not a span", where=str(path), why=str(error))) from error


def _near_runs(path: Path) -> str:
    folder = path.parent
    if not folder.is_dir():
        return f"the folder {folder} does not exist either"
    names = [entry.name for entry in folder.iterdir() if _is_run(entry) or entry.suffix == ".json"]
    close = near_names(path.name, names)
    if close:
        return f"did you mean {' or '.join(str(folder / name) for name in close)}?"
    return f"{folder} holds {_listed(names)}" if names else f"{folder} holds no run"


def _runs_inside(folder: Path) -> str:
    names = [str(entry) for entry in sorted(folder.iterdir()) if _is_run(entry)]
    return f"it holds runs: {_listed(names)}" if names else "name the folder that a run wrote"


def _is_run(path: Path) -> bool:
    return path.is_dir() and (path / "design.json").is_file()


def _listed(names: list[str]) -> str:
    shown = ", ".join(sorted(names)[:5])
    return f"{shown} and {len(names) - 5} more" if len(names) > 5 else shown
