"""One self-contained HTML page of a run, of several runs compared, of a plan, or of a decision."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from meshwright.report.figure import Figure
from meshwright.report.run_files import RunFiles, predicted_spans, read_run, write_file
from meshwright.report.view import page_view
from meshwright.spec.errors import ConfigError, Problem, controls_spelt
from meshwright.spec.report import Gap, Report
from meshwright.spec.span import Span

_UNIT = re.compile(r"(\d) (?=(?:%|us|ms|s|min|h|d|[KMGTP]?i?B)\b|%)")

if TYPE_CHECKING:
    from jinja2 import Environment
    from markupsafe import Markup

    from meshwright.search import Decision


def write_page(paths: Sequence[Path | str], out: Path | str) -> Path:
    """Writes the page of the runs or plans at `paths` to `out` and returns its path. Raises ConfigError.

    One plan with the decision that chose it has the decision's page.
    """
    runs = [read_run(path) for path in paths]
    decision = runs[0].decision if len(runs) == 1 and runs[0].is_plan else None
    return write_file(out, decision_page(decision) if decision else render(runs), fix="--out names another page")


def decision_page(decision: Decision) -> str:
    """The page of a decision of the search: its plan, and the plans it was chosen from, any of which can be picked."""
    from meshwright.report.decision_view import decision_view

    return _page("decision.html", page=decision_view(decision))


def dry_page(counted: Report, gaps: Sequence[Gap], *, plan: str, name: str) -> str:
    """The page of a dry run of the plan with the digest `name`, which `plan` describes."""
    from meshwright.report.dry import dry_view

    view = dry_view(counted, gaps, plan=plan)
    return _page("dry.html", view=view, name=name)


def render(runs: Sequence[RunFiles], *, timelines: Sequence[Sequence[Span]] | None = None) -> str:
    """The page as text. `timelines` are the predicted spans of each run; None computes them from the designs."""
    if not runs:
        raise ConfigError(Problem(what="no run is named", fix="name a run directory or a plan file"))
    if timelines is None:
        timelines = [predicted_spans(files) for files in runs]
    return _page("page.html", page=page_view(runs, timelines=timelines))


def _page(template: str, **shown: object) -> str:
    """The page as text; what it shows is escaped, and control characters in it, from strangers' files for example, are
    spelt out."""
    return controls_spelt(_environment().get_template(template).render(**shown))


def _environment() -> Environment:
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("meshwright.report"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters["drawing"] = _drawing
    environment.filters["kept"] = _kept
    environment.globals["asset"] = partial(_asset, environment)
    return environment


def _drawing(figure: Figure) -> Markup:
    """The drawing itself: text inside was escaped where it was drawn."""
    from markupsafe import Markup

    return Markup(figure.body)


def _kept(text: str) -> str:
    """The text with its numbers kept on one line with their units."""
    return _UNIT.sub("\\1\N{NO-BREAK SPACE}", text)


def _asset(environment: Environment, name: str) -> Markup:
    """A file beside the template, put into the page as it is."""
    from markupsafe import Markup

    assert environment.loader is not None
    source, _, _ = environment.loader.get_source(environment, name)
    return Markup(source)
