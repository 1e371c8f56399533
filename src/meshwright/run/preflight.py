"""What must hold before any worker starts: legal, room in memory and on disk, devices, and the same run on resume."""

from __future__ import annotations

import importlib
import os
import shutil
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path

import psutil

from meshwright import search
from meshwright.catalog.huggingface.folder import check_tied, open_folder
from meshwright.data import Corpus, load_tokenizer
from meshwright.data.documents import files_of
from meshwright.data.train_tokenizer import parse_vocab
from meshwright.run.files import load_design, read_json
from meshwright.run.machine import this_machine
from meshwright.run.torchft import present
from meshwright.spec.cluster import DeviceKind
from meshwright.spec.errors import ConfigError, EnvironmentUnfit, Gathering, MeshwrightError, NoPlanFits, Problem
from meshwright.spec.job import JobSpec
from meshwright.spec.optimizer import Optimizer
from meshwright.spec.paths import expanded
from meshwright.spec.plan import Design
from meshwright.spec.report import Report
from meshwright.spec.units import format_bytes
from meshwright.train.observe import trackers

# FP32 master weights and two moments of AdamW, which a checkpoint keeps of every parameter.
CHECKPOINT_BYTES_PER_PARAMETER = 12


def check_job(job: JobSpec) -> None:
    """What needs no design: techniques, trackers, text and tokenizer are there.

    Raises ConfigError or EnvironmentUnfit.
    """
    check_named(job)
    trackers.check(job.trackers)
    present.check(job)
    for source in job.data.sources:
        files_of(source)
    tokenizer_vocab(job.data.tokenizer)


def check_named(job: JobSpec) -> None:
    """What can be told on any machine: techniques are known, and some text is named. Raises ConfigError."""
    _check_techniques(job)
    if not job.data.sources:
        fix = "--data names a JSONL, text or xz file"
        raise ConfigError(Problem(what="no text is given", where="job.data.sources", fix=fix))


def _check_techniques(job: JobSpec) -> None:
    importlib.import_module("meshwright.techniques").check(job.techniques)


def tokenizer_vocab(name: str) -> int:
    """How many tokens the tokenizer `name` has, or is to be trained to. Raises ConfigError when there is none."""
    return parse_vocab(name) if name.startswith("train:") else load_tokenizer(name).vocab


def job_problems(job: JobSpec, *, model_vocab: int) -> tuple[Problem, ...]:
    """Everything for which `train` would refuse the job here, whatever its plan; text that is not named yet is none.

    Another machine may have the files that this one lacks.
    """

    def check_tokenizer() -> None:
        tokens = tokenizer_vocab(job.data.tokenizer)
        if tokens > model_vocab:
            raise ConfigError(_too_many_tokens(tokens, model_vocab))

    checks: list[Callable[[], object]] = [
        lambda: _check_techniques(job),
        lambda: trackers.check(job.trackers),
        lambda: present.check(job),
        *(partial(files_of, source) for source in job.data.sources),
        check_tokenizer,
    ]
    found: list[Problem] = []
    for check in checks:
        try:
            check()
        except MeshwrightError as error:
            found += error.problems
    return tuple(found)


def check_design(design: Design) -> None:
    """The design is legal, this runtime can train it, and its job is fit.

    Raises ConfigError with every broken rule, NoPlanFits when only memory is short, EnvironmentUnfit when a
    tracker's package is missing.
    """
    check_plan(design)
    check_job(design.job)
    check_start(design)


def check_rules(design: Design) -> None:
    """The design breaks no rule of plans, of its job or of this runtime, and its techniques are known.

    Raises ConfigError with every broken rule. That memory is short breaks none.
    """
    plans, runtime = frozenset({search.Scope.PLAN}), frozenset({search.Scope.RUNTIME})
    gathered = Gathering()
    gathered.problems += search.check_answer(design, scopes=plans) or search.check(design, scopes=runtime)
    gathered.attempt(lambda: _check_techniques(design.job))
    gathered.tell()


def check_plan(design: Design) -> None:
    """The design is legal and this runtime can train it, wherever its data are.

    Raises as `check_rules` does, and NoPlanFits when only memory is short.
    """
    check_rules(design)
    problems = search.check(design, scopes=frozenset({search.Scope.MEMORY}))
    if problems:
        raise NoPlanFits(problems)


def check_start(design: Design) -> None:
    """The weights that the job starts from are there, whole, and of the design's model. Raises ConfigError.

    Files are read by their headers alone, but for a head that is stored twice, without torch.
    """
    if not design.job.start:
        return
    folder = open_folder(expanded(design.job.start))
    if replace(folder.model, name="", source="") != replace(design.model.causal(), name="", source=""):
        what = f"its config.json is not of {design.model.name}, which the design trains"
        fix = f"design the plan with --model {design.job.start}"
        raise ConfigError(Problem(what=what, where=f"job.start: {design.job.start}", fix=fix))
    check_tied(folder)


def check_machine(design: Design, *, predicted: Report, run_dir: Path) -> None:
    """This machine has the devices, the memory and the disk that the run needs. Raises EnvironmentUnfit."""
    problems = [*_device_problems(design), *_memory_problems(design, predicted), *_disk_problems(design, run_dir)]
    if problems:
        raise EnvironmentUnfit(problems)


def check_run_dir(design: Design, *, run_dir: Path, resume: bool) -> None:
    """`run_dir` is free for a new run, or holds the run that is to go on with the same data order and model.

    The plan, the cluster, the length of the run and how it is watched may change on resume; what decides the order
    of the data or the meaning of a step may not. Raises ConfigError with everything that differs.
    """
    path = run_dir / "design.json"
    place = next(parent for parent in (run_dir, *run_dir.absolute().parents) if parent.exists())
    if not place.is_dir():
        raise ConfigError(Problem(what="is a file, not a directory", where=str(place), fix="--run names another"))
    if not resume:
        if path.is_file():
            fix = "--resume goes on with it; --run names another directory"
            raise ConfigError(Problem(what="this directory holds a run already", where=str(run_dir), fix=fix))
        return
    if not path.is_file():
        fix = "--run names the run that is to go on; leave out --resume to begin one"
        raise ConfigError(Problem(what="there is no run to go on with", where=str(run_dir), fix=fix))
    differences = _differences(load_design(path), design)
    if differences:
        raise ConfigError(differences)


def check_corpus(design: Design, corpus: Corpus, *, run_dir: Path) -> None:
    """The model reads every token of the corpus, and a run that goes on reads the text it began with."""
    vocab, tokens = design.model.vocab, corpus.tokenizer.vocab
    if tokens > vocab:
        raise ConfigError(_too_many_tokens(tokens, vocab))
    known = run_dir / "corpus.json"
    if known.is_file() and _digest_in(known) != corpus.digest:
        why = "its text or tokenizer is not what the run began with, so its data order would not go on"
        fix = "give the same files, or start a new run"
        raise ConfigError(Problem(what="the corpus has changed", where="job.data", why=why, fix=fix))


def _digest_in(known: Path) -> str:
    """That of the text a run began with. Raises ConfigError where its record holds none."""
    record = read_json(known)
    digest = record.get("digest") if isinstance(record, dict) else None
    if not isinstance(digest, str):
        what, why = "the record of the text is damaged", "it holds no digest"
        fix = "put it back; where it is deleted nothing is held against the text that the run began with"
        raise ConfigError(Problem(what=what, where=str(known), why=why, fix=fix))
    return digest


def _too_many_tokens(tokens: int, vocab: int) -> Problem:
    return Problem(
        what=f"the tokenizer has {tokens:,} tokens and the model reads {vocab:,}",
        where="job.data.tokenizer",
        fix=f"train:{vocab} trains one that fits, or give a model with a larger vocabulary",
    )


def _kinds(optimizer: Optimizer) -> tuple[object, ...]:
    """Which optimizer each parameter has."""
    return (optimizer.kind, *((group.names, group.kind) for group in optimizer.groups if group.kind is not None))


def _differences(before: Design, after: Design) -> list[Problem]:
    old, new = before.job, after.job
    pairs = [
        ("job.sequence_length", before.plan.sequence_length, after.plan.sequence_length),
        ("job.batch_tokens", before.plan.batch_tokens, after.plan.batch_tokens),
        ("job.seed", old.seed, new.seed),
        ("job.data.tokenizer", old.data.tokenizer, new.data.tokenizer),
        ("job.data.validation_fraction", old.data.validation_fraction, new.data.validation_fraction),
        ("job.data.document_mask", old.data.document_mask, new.data.document_mask),
        ("job.data.sources", [s.path for s in old.data.sources], [s.path for s in new.data.sources]),
        ("job.data.sources weights", [s.weight for s in old.data.sources], [s.weight for s in new.data.sources]),
    ]
    problems = [
        Problem(
            what=f"the run was begun with {ours!r} and would go on with {theirs!r}",
            where=where,
            why="its data order would change",
            fix=f"keep {ours!r}, or start a new run",
        )
        for where, ours, theirs in pairs
        if ours != theirs
    ]
    begun, asked = _kinds(old.optimizer), _kinds(new.optimizer)
    if begun != asked:
        problems.append(
            Problem(
                what=f"the run was begun with {old.optimizer.kind} and would go on with {new.optimizer.kind}",
                where="job.optimizer.kind" if old.optimizer.kind != new.optimizer.kind else "job.optimizer.groups",
                why="what its optimizer keeps of each parameter would be lost",
                fix="keep the optimizer, or start a new run",
            )
        )
    if before.model != after.model:
        problems.append(
            Problem(
                what=f"the run trains {before.model.name!r} and this is another model ({after.model.name!r})",
                where="model",
                fix="start a new run",
            )
        )
    return problems


def _device_problems(design: Design) -> Iterable[Problem]:
    wanted, kind = design.plan.world_size, design.cluster.groups[0].device.kind
    if kind is DeviceKind.CPU:
        return
    import torch

    seen = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if seen < wanted:
        yield Problem(
            what=f"the plan needs {wanted} {kind.value} devices and this machine has {seen}",
            where=f"cluster {design.cluster.name}",
            fix="start it on its machines: meshwright launch PLAN --on ssh, slurm or kubernetes",
        )


def _memory_problems(design: Design, predicted: Report) -> Iterable[Problem]:
    ranks = design.plan.world_size
    if design.cluster.groups[0].device.kind is DeviceKind.CPU:
        free = min(psutil.virtual_memory().available, this_machine().memory_bytes)
        need = sum(memory.total for memory in predicted.memory) * ranks / max(len(predicted.memory), 1)
    else:
        import torch

        if not torch.cuda.is_available():
            return
        free, need = torch.cuda.mem_get_info()[0], predicted.peak_bytes
    if need > free:
        yield Problem(
            what=f"the run is predicted to need {format_bytes(need)} and {format_bytes(free)} is free",
            where="memory",
            fix="end other programs, or take a plan that needs less (meshwright plan shows it by part)",
        )


def _disk_problems(design: Design, run_dir: Path) -> Iterable[Problem]:
    kept = max(design.job.checkpoint.keep, 1) + 1
    need = design.model.parameters * CHECKPOINT_BYTES_PER_PARAMETER * kept
    place = next(folder for folder in (run_dir, *run_dir.absolute().parents) if folder.exists())
    if not os.access(place, os.W_OK):
        yield Problem(what="this directory cannot be written", where=str(place), fix="--run names another directory")
    free = shutil.disk_usage(place).free
    if need > free:
        yield Problem(
            what=f"{kept} checkpoints need {format_bytes(need)} and {format_bytes(free)} is free",
            where=str(run_dir),
            fix="free some disk, keep fewer checkpoints (job.checkpoint.keep), or name another directory with --run",
        )
