"""`meshwright launch`: a plan on other machines than this one, by a script or manifest that is shown first."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from meshwright.run.launching.ask import Ask, Place
    from meshwright.run.launching.start import Document
    from meshwright.spec.plan import Design

Plan = Annotated[Path, typer.Argument(help="A design from `meshwright plan --out`, or a run.")]
On = Annotated[str, typer.Option("--on", help="local, ssh, slurm, kubernetes, skypilot or dstack.")]
Run = Annotated[Path | None, typer.Option("--run", "-r", help="The run directory, as the nodes see it.")]
Sets = Annotated[
    list[str] | None, typer.Option("--set", "-s", help="Set one field: job.checkpoint.every_steps=500. Repeatable.")
]
Resume = Annotated[bool, typer.Option("--resume", help="Go on with the run in --run.")]
Time = Annotated[str | None, typer.Option("--time", "-t", help="How long it may take: 20h. It is saved then.")]
Grace = Annotated[str | None, typer.Option("--grace", help="Time kept to save in. [default: predicted]")]
Hosts = Annotated[
    str | None, typer.Option("--hosts", help="ssh: one for each node, in the plan's order: ONE,TWO or ONE:8,TWO:8.")
]
Address = Annotated[str | None, typer.Option("--address", help="ssh: where the others reach the first host.")]
Partition = Annotated[str | None, typer.Option("--partition", "-p", help="slurm: the partition.")]
Account = Annotated[str | None, typer.Option("--account", help="slurm: the account.")]
Scheduler = Annotated[
    list[str] | None,
    typer.Option("--scheduler", help="slurm: a further option, constraint=h100; gres= leaves ours out. Repeatable."),
]
Image = Annotated[str | None, typer.Option("--image", help="kubernetes, skypilot, dstack: one that has meshwright.")]
Volume = Annotated[
    str | None, typer.Option("--volume", help="kubernetes, skypilot, dstack: NAME:/folder that the run is kept in.")
]
Namespace = Annotated[str | None, typer.Option("--namespace", help="kubernetes: the namespace.")]
Restarts = Annotated[
    int | None, typer.Option("--restarts", min=0, help="kubernetes, skypilot: after failures. [default: 3]")
]
Python = Annotated[str | None, typer.Option("--python", help="The nodes' python that has meshwright.")]
Out = Annotated[Path | None, typer.Option("--out", "-o", help="Write what is shown, and what the nodes read.")]
Submit = Annotated[bool, typer.Option("--submit", help="local, ssh, slurm: start it.")]
Follow = Annotated[bool, typer.Option("--follow", help="slurm, with --submit: stay until it has ended.")]
Json = Annotated[bool, typer.Option("--json", help="Print what is shown as one JSON document.")]


def launch(
    plan: Plan,
    on: On,
    run: Run = None,
    sets: Sets = None,
    resume: Resume = False,
    time: Time = None,
    grace: Grace = None,
    hosts: Hosts = None,
    address: Address = None,
    partition: Partition = None,
    account: Account = None,
    scheduler: Scheduler = None,
    image: Image = None,
    volume: Volume = None,
    namespace: Namespace = None,
    restarts: Restarts = None,
    python: Python = None,
    out: Out = None,
    submit: Submit = False,
    follow: Follow = False,
    as_json: Json = False,
) -> int:
    """Show the script or manifest that starts a plan over ssh, SLURM, Kubernetes, SkyPilot or dstack; submit it."""
    from meshwright import catalog
    from meshwright.cli.output import duration
    from meshwright.run.choose import run_dir_of
    from meshwright.run.launching.ask import Ask
    from meshwright.spec.paths import expanded

    place, design = _place(on), catalog.load_design(plan, sets=sets or ())
    folder = expanded(run_dir_of(design, run=run, given=plan, resume=resume))
    ask = Ask(
        place=place,
        run=folder if place.is_far else folder.absolute(),
        plan=str(plan),
        sets=tuple(sets or ()),
        resume=resume,
        time_seconds=duration(time, where="--time"),
        grace_seconds=duration(grace, where="--grace"),
        hosts=None if hosts is None else tuple(hosts.split(",")),
        address=address,
        partition=partition,
        account=account,
        extra=None if scheduler is None else tuple(scheduler),
        image=image,
        volume=volume,
        namespace=namespace,
        restarts=restarts,
        python=python,
    )
    return _launched(design, ask, out=out, submit=submit, follow=follow, as_json=as_json)


def _place(name: str) -> Place:
    from meshwright.run.launching.ask import Place
    from meshwright.spec.codec import nearest
    from meshwright.spec.errors import ConfigError, Problem

    known = [place.value for place in Place]
    if name not in known:
        raise ConfigError(Problem(what=f"{name!r} is no place to launch on", where="--on", fix=nearest(name, known)))
    return Place(name)


def _obstacles(design: Design, ask: Ask) -> list[str]:
    """Why what is shown could not be written or started now, a line each."""
    from meshwright.run.launching.start import check_ready
    from meshwright.spec.errors import MeshwrightError

    try:
        check_ready(design, ask)
    except MeshwrightError as error:
        return [f"it cannot start as it is: {problem}" for problem in error.problems]
    return []


def _launched(design: Design, ask: Ask, *, out: Path | None, submit: bool, follow: bool, as_json: bool) -> int:
    """What is asked is shown, then written and started where that is asked too; the exit code."""
    from dataclasses import replace

    from meshwright.cli.output import note, print_json
    from meshwright.run.launching.ask import check_start
    from meshwright.run.launching.start import document

    check_start(ask, submit=submit, follow=follow)
    shown = document(design, ask)
    if out is None and not submit:
        shown = replace(shown, notes=(*shown.notes, *_obstacles(design, ask)))
    if not as_json:
        print(shown.text, end="", flush=True)
    for line in shown.notes:
        note(line)
    written = _written(design, ask, shown, out=out, submit=submit)
    code = _started(design, ask, written, follow=follow, as_json=as_json) if submit else 0
    if as_json:
        told = {name: getattr(shown, name) for name in shown.__slots__}
        print_json({"place": ask.place, **told, "written": written, "exit_code": code if submit else None})
    return code


def _written(design: Design, ask: Ask, shown: Document, *, out: Path | None, submit: bool) -> list[str]:
    """The files of what is shown, the first of which is itself; none where it is only shown."""
    from meshwright import search
    from meshwright.cli.output import note, write
    from meshwright.run.launching.ask import Place
    from meshwright.run.launching.start import check_ready, keep

    starts = submit and ask.place is not Place.LOCAL
    if out is None and not starts:
        if not submit:
            note(f"nothing is written or started yet: --out FILE writes this, for `{shown.use} FILE`")
        return []
    check_ready(design, ask)
    if not ask.place.is_far and ask.place is not Place.LOCAL:
        decision = search.read_decision(Path(ask.plan), plan=design.plan)
        keep(design, ask, decision=decision, say=note)
        note(f"{ask.run} holds the design that the nodes read, and what is predicted of it")
    file = out or ask.run / shown.name
    files = {file: shown.text} | {file.parent / name: text for name, text in shown.beside.items()}
    for path, text in files.items():
        write(path, text)
    note(f"written to {file}" + ("" if submit else f"; start it: {shown.use} {file}"))
    return [str(path) for path in files]


def _started(design: Design, ask: Ask, written: list[str], *, follow: bool, as_json: bool) -> int:
    from meshwright.cli.output import note, tell
    from meshwright.cli.train import train_here
    from meshwright.run.launching.ask import Place
    from meshwright.run.launching.start import submit

    def show(line: str) -> None:
        if as_json:
            tell(line)
        else:
            print(line, flush=True)

    if ask.place is Place.LOCAL:
        return train_here(design, ask, show=show)
    return submit(design, ask, script=Path(written[0]), say=note, show=show, follow=follow)
