"""`meshwright plan`: design the fastest training of a model on a cluster, and show why."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

Why = Annotated[list[str] | None, typer.Option("--why", help="Why not these settings: tp=4,pp=2. Repeatable.")]
Headroom = Annotated[bool, typer.Option("--headroom", help="What holds the plan back: each limit lifted in turn.")]
Sensitivity = Annotated[
    bool, typer.Option("--sensitivity", help="Each figure of the machines a quarter better: does the decision flip?")
]
Sweep = Annotated[
    list[str] | None, typer.Option("--sweep", help="What if: cluster.nodes=1,2,4. Given twice, the two are crossed.")
]

For = Annotated[
    str | None, typer.Option("--for", help="Only plans that torchtitan, megatron-lm or deepspeed has words for.")
]


def plan(
    model: Annotated[str, typer.Option("--model", "-m", help="A model's name (see models) or a config.json.")],
    cluster: Annotated[
        str, typer.Option("--cluster", "-c", help="A cluster's name (see clusters), 64xH100, or a file.")
    ],
    job: Annotated[Path | None, typer.Option("--job", "-j", help="A job file; see docs/job.md.")] = None,
    sets: Annotated[
        list[str] | None, typer.Option("--set", "-s", help="Set one field of the job: batch_tokens=4Mi. Repeatable.")
    ] = None,
    top: Annotated[int, typer.Option("--top", "-n", min=1, help="How many plans to rank.")] = 10,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Write the design here, for train.")] = None,
    html: Annotated[Path | None, typer.Option("--html", help="Write a page that shows the decision.")] = None,
    trainer: For = None,
    why: Why = None,
    headroom: Headroom = False,
    sensitivity: Sensitivity = False,
    sweep: Sweep = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the decision as one JSON document.")] = False,
) -> None:
    """Design the fastest training of a model on a cluster: a ranked table, memory by part, and why the best wins."""
    from meshwright import catalog, search
    from meshwright.cli import explanations
    from meshwright.cli.output import console, note, print_json, tell, write
    from meshwright.export import holder
    from meshwright.run.machine import cache_root
    from meshwright.run.preflight import job_problems
    from meshwright.spec.codec import encode

    spec, asked = catalog.load_model(model), catalog.load_job(str(job) if job else None, sets=sets or ())
    for problem in job_problems(asked, model_vocab=spec.vocab):
        tell(f"warning: train would refuse this job here: {problem}")
    machines = catalog.load_cluster(cluster, cache=cache_root())
    held = None if trainer is None else holder(trainer, where="--for")
    question = search.Question(model=spec, cluster=machines, job=asked, trainer=held)
    wanted = explanations.Asked(why=why or (), headroom=headroom, sensitivity=sensitivity, sweep=sweep or ())
    explanations.check(wanted, question)
    origins = catalog.job_origins(asked, str(job) if job else None, sets=sets or ())
    found = search.design(spec, machines, asked, top=top, trainer=held)
    decision = replace(found, asked=origins.asked, defaults=origins.defaults)
    if out is not None:
        kept = search.decision_path(out)
        write(out, decision.design.to_json())
        write(kept, json.dumps(encode(decision), indent=1))
        note(f"design {decision.design.plan.digest()} written to {out}, the plans it was chosen from to {kept}")
    if html is not None:
        from meshwright import report

        write(html, report.decision_page(decision))
        note(f"page written to {html}")
    told = explanations.answers(wanted, question, decision) if wanted.anything else None
    if as_json:
        print_json(decision if told is None else {"decision": decision, **told})
        return
    if told is not None:
        for view in explanations.views(told, decision):
            console().print(view)
        return
    from meshwright.report import terminal

    console().print(terminal.decision(decision))
