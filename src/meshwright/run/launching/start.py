"""Start: what is shown before a plan is launched anywhere, the run directory that its nodes read, and the launch."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from meshwright import cost, search
from meshwright.run import preflight
from meshwright.run.launching import dstack, kubernetes, sbatch, skypilot, slurm, ssh
from meshwright.run.launching.ask import Ask, Place, check
from meshwright.run.launching.clouds import design_name
from meshwright.run.launching.grace import grace_seconds
from meshwright.run.launching.shares import Share, shares
from meshwright.run.resume import going_on, is_done, nothing_left
from meshwright.run.train import with_absolute_paths, write_design
from meshwright.spec.errors import ConfigError, Problem
from meshwright.spec.plan import Design
from meshwright.spec.units import format_seconds

Say = Callable[[str], None]
Show = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """What is shown: the text for a file that is called `name` unless somebody says otherwise, further files that lie
    beside it, `notes` on it, and what a person does with it. `grace` is in seconds, None where nobody waits for a save.
    """

    text: str
    name: str
    use: str
    beside: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    nodes: int
    grace: int | None


def document(design: Design, ask: Ask) -> Document:
    """The script, manifest or commands that start the design as asked. The same for the same question.

    Raises ConfigError with what is wrong with the question or the plan, NoPlanFits where its memory is short.
    """
    check(ask)
    preflight.check_plan(design)
    found = shares(design)
    _check_is_here(design, ask)
    if ask.place.is_far:
        _check_far_paths(design)
        _check_starts_all_again(design, ask)
    if ask.place in (Place.LOCAL, Place.SSH):
        return _by_hand(design, ask, found)
    if ask.place is Place.SKYPILOT:
        text = skypilot.task(ask, found=found)
        return _made(ask, found, text, suffix=".sky.yaml", use="sky jobs launch", design=design)
    predicted = cost.predict(design)
    grace = grace_seconds(ask, job=design.job, predicted=predicted)
    asked = "asked for" if ask.grace_seconds is not None else "predicted"
    notes: tuple[str, ...] = (f"{format_seconds(grace)} are kept to save in ({asked})",)
    if ask.place is Place.SLURM:
        text = slurm.script(design, ask, found=found, grace=grace)
        return _made(ask, found, text, suffix=".sbatch", use="sbatch", grace=grace, notes=notes)
    if ask.place is Place.KUBERNETES:
        text = kubernetes.manifest(design, ask, found=found, grace=grace)
        notes += kubernetes.notes(design, nodes=len(found))
        return _made(ask, found, text, suffix=".jobset.yaml", use="kubectl apply -f", grace=grace, notes=notes)
    text = dstack.task(ask, found=found, grace=grace)
    notes += dstack.volume_notes(ask, nodes=len(found))
    use = "dstack apply -f"
    return _made(ask, found, text, suffix=".dstack.yml", use=use, grace=grace, notes=notes, design=design)


def check_ready(design: Design, ask: Ask) -> None:
    """The run can be written, and started, as asked: what its nodes read is fit, as far as this machine can tell.

    Raises ConfigError where no text is named or, in places that see the files of this machine, where text or weights
    are not there, or the directory holds another run or one that is done; EnvironmentUnfit where this machine is to
    train it and cannot.
    """
    if ask.place.is_far:
        preflight.check_named(design.job)
        return
    design = with_absolute_paths(design)
    preflight.check_design(design)
    preflight.check_run_dir(design, run_dir=ask.run, resume=ask.resume)
    if ask.place is Place.LOCAL:
        preflight.check_machine(design, predicted=cost.predict(design), run_dir=ask.run)
    elif ask.resume and nothing_left(ask.run, design):
        raise ConfigError(is_done(ask.run, design))


def keep(design: Design, ask: Ask, *, decision: search.Decision | None, say: Say) -> None:
    """The run directory holds the design that the nodes read; what is changed of a run that goes on is said.

    Raises ConfigError where the run's checkpoints are not there.
    """
    design = with_absolute_paths(design)
    if ask.resume:
        for line in going_on(ask.run, design):
            say(line)
    write_design(design, ask.run, predicted=cost.predict(design), decision=decision)
    (ask.run / "logs").mkdir(exist_ok=True)


def submit(design: Design, ask: Ask, *, script: Path, say: Say, show: Show, follow: bool) -> int:
    """The exit code of the run over ssh, or of SLURM's job where that is followed; 0 once a job is queued.

    The run directory holds the design, and `script` is the document. Raises EnvironmentUnfit where hosts or SLURM
    refuse, WorkerFailed where a host is lost or the job was ended.
    """
    if ask.place is Place.SSH:
        from meshwright.run.launching import remote

        named = ssh.examined(design, ask, found=shares(design))
        say(f"{len(named)} hosts are fit for it; what they print is kept in {ask.run / 'logs'}")
        outlives = design.job.elastic.on
        return remote.run(
            named, run_dir=ask.run, say=say, show=lambda host, line: show(f"{host} | {line}"), outlives=outlives
        )
    number = sbatch.submit(script)
    output = slurm.output_of(ask.run)
    say(f"job {number}: squeue -j {number} tells how it is, {str(output).replace('%j', str(number))} what it says")
    return sbatch.follow(number, output=output, say=say, show=show) if follow else 0


def _by_hand(design: Design, ask: Ask, found: tuple[Share, ...]) -> Document:
    """What a shell runs here: one command of this machine, or one for each host."""
    if ask.place is Place.SSH:
        text = ssh.text(design, ask, found=found)
        notes = ("--submit asks every host first, and takes a port that is free on the first one",)
        return Document(text=text, name=f"{ask.name}.ssh.sh", use="sh", notes=notes, nodes=len(found), grace=None)
    words = ["meshwright", "train", ask.plan, "--run", str(ask.run)]
    words += [word for entry in ask.sets for word in ("--set", entry)]
    words += ["--resume"] if ask.resume else []
    words += ["--stop-after", f"{ask.time_seconds:g}"] if ask.time_seconds is not None else []
    return Document(text=f"{shlex.join(words)}\n", name=f"{ask.name}.sh", use="sh", nodes=1, grace=None)


def _made(
    ask: Ask,
    found: tuple[Share, ...],
    text: str,
    *,
    suffix: str,
    use: str,
    grace: int | None = None,
    notes: tuple[str, ...] = (),
    design: Design | None = None,
) -> Document:
    beside = {design_name(ask.name): design.to_json() + "\n"} if design is not None else {}
    return Document(
        text=text, name=f"{ask.name}{suffix}", use=use, beside=beside, notes=notes, nodes=len(found), grace=grace
    )


def _check_starts_all_again(design: Design, ask: Ask) -> None:
    """Raises ConfigError for an elastic run where the loss of one node ends all of them."""
    if design.job.elastic.on and len(shares(design)) > 1:
        what, where = f"--on {ask.place} starts all nodes again when one is lost", "job.elastic.min_ranks"
        fix = "leave it at 0, and what was saved is gone on from; or launch it --on ssh or --on slurm"
        raise ConfigError(Problem(what=what, where=where, fix=fix))


def _check_is_here(design: Design, ask: Ask) -> None:
    """Raises ConfigError for replicas under torchft, which `meshwright train` alone starts, elsewhere than here."""
    if design.job.elastic.by_torchft and ask.place is not Place.LOCAL:
        what, where = f"--on {ask.place} does not start replicas under torchft", "job.elastic.backend"
        fix = 'choose elastic.backend = "own", or run meshwright train on that host'
        raise ConfigError(Problem(what=what, where=where, fix=fix))


def _check_far_paths(design: Design) -> None:
    """Files of the job are named from the root. Raises ConfigError: what is meant here means nothing there."""
    data = design.job.data
    is_file = "/" in data.tokenizer or data.tokenizer.endswith((".json", ".tiktoken"))
    named = [(f"job.data.sources[{index}].path", source.path) for index, source in enumerate(data.sources)]
    named += [("job.start", design.job.start)] if design.job.start else []
    named += [("job.data.tokenizer", data.tokenizer)] if is_file else []
    problems = [
        Problem(what=f"{path!r} is not from the root", where=where, fix="name it with --set as the nodes see it")
        for where, path in named
        if not path.startswith("/")
    ]
    if problems:
        raise ConfigError(problems)
