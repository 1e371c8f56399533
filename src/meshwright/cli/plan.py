"""`meshwright plan`: design the fastest training of a model on a cluster, and show why."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from meshwright.catalog import Origins
    from meshwright.cli.explanations import Asked
    from meshwright.export import Holder
    from meshwright.search import Decision, Question

Why = Annotated[list[str] | None, typer.Option("--why", help="Why not these settings: tp=4,pp=2. Repeatable.")]
Headroom = Annotated[bool, typer.Option("--headroom", help="What holds the plan back: each limit lifted in turn.")]
Sensitivity = Annotated[
    bool, typer.Option("--sensitivity", help="Each figure of the machines a quarter better: does the decision flip?")
]
Sweep = Annotated[
    list[str] | None, typer.Option("--sweep", help="What if: cluster.nodes=1,2,4. Given twice, the two are crossed.")
]

Synthesize = Annotated[
    bool,
    typer.Option("--synthesize", help="Make a schedule for the best pipeline's own stages, and take it if it pays."),
]

For = Annotated[
    str | None,
    typer.Option("--for", help="Only plans that torchtitan, megatron-lm (or megatron) or deepspeed has words for."),
]


def plan(
    model: Annotated[str, typer.Option("--model", "-m", help="A model's name (see models) or a config.json.")],
    cluster: Annotated[
        str,
        typer.Option("--cluster", "-c", help="A cluster's name (see clusters), 64xH100, 8xH100+8xA100, or a file."),
    ],
    job: Annotated[Path | None, typer.Option("--job", "-j", help="A job file; see docs/job.md.")] = None,
    sets: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            "-s",
            help="Set a field: batch_tokens=4Mi, or cluster.inter.bandwidth=50GB/s. Repeatable.",
        ),
    ] = None,
    top: Annotated[int, typer.Option("--top", "-n", min=1, help="How many plans to rank.")] = 10,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Write the design here, for train.")] = None,
    html: Annotated[Path | None, typer.Option("--html", help="Write a page that shows the decision.")] = None,
    trainer: For = None,
    synthesize: Synthesize = False,
    why: Why = None,
    headroom: Headroom = False,
    sensitivity: Sensitivity = False,
    sweep: Sweep = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the decision as one JSON document.")] = False,
) -> None:
    """Design the fastest training of a model on a cluster: a ranked table, memory by part, and why the best wins."""
    from meshwright import search
    from meshwright.cli import explanations
    from meshwright.cli.output import check_writable, console, print_json
    from meshwright.cli.waiting import told_while

    written = (*((out, search.decision_path(out)) if out else ()), *((html,) if html else ()))
    check_writable(*written)
    wanted = explanations.Asked(why=why or (), headroom=headroom, sensitivity=sensitivity, sweep=sweep or ())
    question, origins = _question(
        model, cluster, str(job) if job else None, sets=sets or (), trainer=trainer, wanted=wanted
    )
    with told_while(f"plans of {question.model.name} on {question.cluster.name} searched"):
        found = search.design(
            question.model,
            question.cluster,
            question.job,
            top=top,
            trainer=question.trainer,
            synthesize=synthesize,
            explained=as_json or bool(written) or not wanted.anything,  # else nobody reads why
        )
    decision = replace(found, asked=origins.asked, defaults=origins.defaults)
    _keep(decision, out=out, html=html)
    told = explanations.answers(wanted, question, decision) if wanted.anything else None
    if as_json:
        print_json(decision if told is None else {"decision": decision, **told})
    elif told is None:
        from meshwright.report import terminal

        console().print(terminal.decision(decision))
    else:
        for view in explanations.views(told, decision):
            console().print(view)


def _question(
    model: str, cluster: str, job: str | None, *, sets: Sequence[str], trainer: str | None, wanted: Asked
) -> tuple[Question, Origins]:
    """What is asked, and which fields of the job were said; warns of what train would refuse.

    Raises ConfigError with all that is wrong with every option.
    """
    from meshwright import catalog, search
    from meshwright.cli import explanations
    from meshwright.cli.output import warn_of_idle
    from meshwright.run.machine import cache_root
    from meshwright.search.fields import of_cluster, set_cluster
    from meshwright.search.job_rules import check_job
    from meshwright.spec.errors import Gathering
    from meshwright.spec.job import JobSpec

    machine_sets = of_cluster(sets)
    of_job = [entry for entry in sets if entry not in machine_sets]
    gathered = Gathering()
    spec = gathered.attempt(lambda: catalog.load_model(model))
    machines = gathered.attempt(lambda: catalog.load_cluster(cluster, cache=cache_root()))
    asked = gathered.attempt(lambda: catalog.load_job(job, sets=of_job))
    held = gathered.attempt(lambda: _trainer(trainer))
    question = None
    if machines is not None:
        # Fields of machines and jobs are told whatever the model, and defaults stand in for a job that is wrong.
        question = search.Question(
            model=spec or catalog.load_model("tiny"), cluster=machines, job=asked or JobSpec(), trainer=held
        )
        whole = question
        question = gathered.attempt(lambda: set_cluster(whole, machine_sets)) or whole
        if spec is not None and asked is not None:
            gathered.attempt(lambda: check_job(spec, question.cluster, asked, trainer=held))
    explanations.check(wanted, question, gathered)
    gathered.tell()
    assert question is not None
    assert asked is not None
    warn_of_idle(asked, job, sets=of_job)
    _warn(question)
    return question, catalog.job_origins(asked, job, sets=of_job)


def _trainer(name: str | None) -> Holder | None:
    if name is None:
        return None
    from meshwright.export import holder

    return holder(name, where="--for")


def _warn(question: Question) -> None:
    """Warns of what train would refuse on this machine whatever the plan, and of sequences longer than the model's
    positions."""
    from meshwright.cli.output import tell
    from meshwright.run.preflight import job_problems

    for problem in job_problems(question.job, model_vocab=question.model.vocab):
        tell(f"warning: train would refuse this job here: {problem}")
    if beyond := question.model.beyond_positions(question.job.sequence_length):
        tell(f"warning: {beyond}")


def _keep(decision: Decision, *, out: Path | None, html: Path | None) -> None:
    """Writes the design with the decision beside it, and the page, where they are asked for."""
    from meshwright.cli.output import note, write

    if out is not None:
        from meshwright import search
        from meshwright.spec.codec import encode

        kept = search.decision_path(out)
        write(out, decision.design.to_json())
        write(kept, json.dumps(encode(decision), indent=1))
        note(f"design {decision.design.plan.digest()} written to {out}, the plans it was chosen from to {kept}")
    if html is not None:
        from meshwright import report

        write(html, report.decision_page(decision))
        note(f"page written to {html}")
