"""`meshwright dryrun`: one step of a plan counted without its hardware, beside what is predicted of it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def dryrun(
    plan: Annotated[Path | None, typer.Argument(help="A design from `meshwright plan --out`, or a run.")] = None,
    model: Annotated[str | None, typer.Option("--model", "-m", help="Without a plan: a model's name or file.")] = None,
    cluster: Annotated[str | None, typer.Option("--cluster", "-c", help="Without a plan: the machines.")] = None,
    job: Annotated[Path | None, typer.Option("--job", "-j", help="A job file; see docs/job.md.")] = None,
    sets: Annotated[
        list[str] | None, typer.Option("--set", "-s", help="Set one field: job.batch_tokens=4Ki. Repeatable.")
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="Trace every layer and microbatch, for a check.")] = False,
    html: Annotated[Path | None, typer.Option("--html", help="Write a page that shows the comparison.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the dry run as one JSON document.")] = False,
) -> int:
    """Count one step of a plan at any scale on this machine: memory, FLOPs and collectives against the prediction."""
    from meshwright.cli.output import console, note, print_json, warn_of_idle, write
    from meshwright.run.children import prepare
    from meshwright.run.dry.worker import PRELOADED, hush

    hush()
    prepare(PRELOADED)
    from meshwright.run.choose import designed
    from meshwright.run.dry_run import dry_run
    from meshwright.search.fields import of_cluster
    from meshwright.spec.errors import ExitCode

    design = designed(plan, model=model, cluster=cluster, job=job, sets=sets or ())
    machine_sets = of_cluster(sets or ()) if plan is None else ()
    of_job = [each for each in sets or () if each not in machine_sets]
    warn_of_idle(design.job, str(job) if job else None, sets=of_job)
    found = dry_run(design, whole=full, say=note)
    if html is not None:
        from meshwright.report import dry_page

        write(html, dry_page(found.counted, found.gaps, plan=found.description, name=found.plan))
        note(f"page written to {html}")
    if as_json:
        print_json({"fits": found.fits, **{name: getattr(found, name) for name in found.__slots__}})
    else:
        from meshwright.report import terminal_dry

        view = terminal_dry.comparison(found.counted, found.gaps, plan=found.description)
        console().print(view)
        note(f"counted in {found.seconds:.1f} s")
    return int(ExitCode.OK if found.fits else ExitCode.NO_PLAN)
