"""convert: weights of a Hugging Face folder into a run that trains and generates, and of a run into such a folder."""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright import catalog, data
from meshwright.catalog.huggingface.families import text_of
from meshwright.catalog.huggingface.folder import (
    CONFIG,
    READ_TYPES,
    Folder,
    Stored,
    check_tied,
    open_folder,
    read_config,
)
from meshwright.run.files import load_design, write_json
from meshwright.run.verify import Verified, check_verifiable, compare, transformers_logits
from meshwright.spec.cluster import Precision
from meshwright.spec.errors import FULL, ConfigError, EnvironmentUnfit, Problem
from meshwright.spec.job import DataSpec, JobSpec
from meshwright.spec.json_text import parse_json
from meshwright.spec.model import ModelSpec, language_model
from meshwright.spec.paths import expanded
from meshwright.spec.plan import Axis, AxisName, BlockGroup, Design, Plan, Schedule, ScheduleKind, Stage
from meshwright.spec.units import Measure, NotRead, format_bytes, parse_measure

if TYPE_CHECKING:
    from torch import dtype

    from meshwright.catalog.huggingface.tensors import Table
    from meshwright.train.checkpoint import Store

_COMPARED = "what is written there is whole, and was compared with nothing"
KEPT = "huggingface"  # in a run: the files of the folder that its weights came from, but the weights
BESIDE = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)
TYPES: Mapping[str, tuple[str, str]] = {
    "bf16": ("BF16", "bfloat16"),
    "fp16": ("F16", "float16"),
    "fp32": ("F32", "float32"),
}
SHARD_BYTES = 5 * 10**9


@dataclass(frozen=True, slots=True, kw_only=True)
class Converted:
    """What a conversion wrote: parameters and stored tensors, the bytes of these, and what verifying it found.

    `left_out` tensors of the folder hold what is not trained here: towers, indexers, layers for further tokens.
    `notes` are what else a person should know.
    """

    path: str
    direction: str
    parameters: int
    tensors: int
    bytes: float
    dtype: str
    left_out: int = 0
    verified: Verified | None = None
    notes: tuple[str, ...] = ()

    def lines(self) -> tuple[str, ...]:
        """What a person should know."""
        told = f"{self.parameters:,} parameters in {self.tensors:,} tensors, {format_bytes(self.bytes)} of {self.dtype}"
        head = [f"{self.path}: {told}", *self.notes]
        if self.left_out:
            back = "--rest brings them back when the run is converted"
            head.append(f"{self.left_out:,} tensors of towers, indexers or further layers are left out; {back}")
        return tuple(head) if self.verified is None else (*head, *self.verified.lines())


def shard_bytes_of(text: str) -> int:
    """The number of bytes that `text` says: 5GB. Raises ConfigError."""
    try:
        size = int(parse_measure(text, Measure.BYTES))
    except NotRead as error:
        fix = error.fix or "write for example 5GB"
        raise ConfigError(Problem(what=error.what, where="--shard-size", fix=fix)) from None
    if size < 1:
        raise ConfigError(Problem(what=f"{text} holds nothing", where="--shard-size", fix="write for example 5GB"))
    return size


def is_huggingface(path: Path) -> bool:
    """A folder with a config.json and no design.json: what is a run has one."""
    return (path / CONFIG).is_file() and not (path / "design.json").is_file()


def to_run(
    source: Path | str,
    target: Path | str,
    *,
    plan: Path | str | None = None,
    check: bool = False,
    progress: data.Progress | None = None,
) -> Converted:
    """`target` is a run at step 0 with the weights of the Hugging Face folder `source`.

    Its design is the one in `plan`, of the same model, or a plan for one device. Its tokenizer is the folder's where
    it can be read. No more than a box of one parameter is in memory at a time. Raises ConfigError with everything
    that is wrong with either, before anything is written, and EnvironmentUnfit when the disk fails.
    """
    path, run_dir = expanded(source), expanded(target)
    if check:
        check_verifiable()
    folder = open_folder(path)
    _check_built(folder.model)
    check_tied(folder)
    design, tokenizer = _design(folder, plan), _tokenizer(path)
    _check_free(run_dir)
    alone = "leave --verify out: converting needs no transformers"
    expected = transformers_logits(folder, fix=alone) if check else None

    from meshwright.parallel.precision import dtypes
    from meshwright.train.checkpoint import Store

    kind = dtypes(design.plan, master=design.job.master).master
    with _all_or_nothing(run_dir):
        store = Store(run_dir / "checkpoints", design=design)
        _begin(store, folder, dtype=kind, progress=progress)
        _copy_beside(path, run_dir / KEPT)
        shutil.copyfile(path / CONFIG, run_dir / KEPT / CONFIG)
        if tokenizer is not None:
            (run_dir / "tokenizer.json").write_text(tokenizer.to_json(), encoding="utf-8")
        write_json(run_dir / "design.json", design)
    found = compare(folder, expected, run_dir=run_dir) if expected else None
    return Converted(
        path=str(run_dir),
        direction="from_huggingface",
        parameters=design.model.parameters,
        tensors=len(folder.tensors),
        bytes=float(design.model.parameters * kind.itemsize),
        dtype=str(kind).removeprefix("torch."),
        left_out=len(folder.rest),
        verified=found,
        notes=_too_many_ids(tokenizer, design.model),
    )


def to_huggingface(
    source: Path | str,
    target: Path | str,
    *,
    config: Path | str | None = None,
    rest: Path | str | None = None,
    dtype: str | None = None,
    shard_bytes: int = SHARD_BYTES,
    check: bool = False,
    progress: data.Progress | None = None,
) -> Converted:
    """`target` is a Hugging Face folder with the weights of the newest complete checkpoint of the run `source`, where
    two thin matrices are one whole one.

    `config` is a config.json of the same model; without one, the one that the run's weights came with, else one
    that says the model. `rest` is a folder of the same model, from which what is not trained here is copied as it is
    stored; without it a model with towers is written as its language model. `dtype` is bf16, fp16 or fp32; that of the
    config, else bf16. The tensors of one stored tensor are in memory at a time. Raises ConfigError before anything is
    written.
    """
    run_dir, path = expanded(source), expanded(target)
    if check:
        check_verifiable()
    design = _run_design(run_dir)
    model = design.model.dense()
    _check_causal(model)
    others = open_folder(Path(rest).expanduser()) if rest is not None else None
    origin = others.path if others else _origin(run_dir, config, start=design.job.start)
    values = _config(model, origin, whole=others is not None)
    table = _table(values, model, where=str(origin / CONFIG) if origin else "model")
    copied = _copied(others) if others else {}
    kind = _kind(dtype, values)
    _check_free(path)

    from meshwright.parallel.stored import Reader
    from meshwright.train.huggingface.write import CheckpointParameters, write_folder

    parameters = CheckpointParameters(Reader(_checkpoint(run_dir, design)), table.ours)
    values["dtype" if "dtype" in values else "torch_dtype"] = TYPES[kind][1]
    with _all_or_nothing(path):
        files = write_folder(
            parameters, table, path, rest=copied, dtype=TYPES[kind][0], shard_bytes=shard_bytes, progress=progress
        )
        (path / CONFIG).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
        if origin:
            _copy_beside(origin, path)
        _copy_tokenizer(run_dir, path)
    written = open_folder(path)
    found = compare(written, transformers_logits(written, fix=_COMPARED), run_dir=None) if check else None
    return Converted(
        path=str(path),
        direction="to_huggingface",
        parameters=model.parameters,
        tensors=len(table.theirs) + len(copied),
        bytes=float(sum(file.stat().st_size for file in files)),
        dtype=TYPES[kind][1],
        verified=found,
    )


def _checkpoint(run_dir: Path, design: Design) -> Path:
    """The newest complete one. Raises ConfigError."""
    from meshwright.train.checkpoint import Store

    store = Store(run_dir / "checkpoints", design=design)
    checkpoint = store.newest()
    if checkpoint is None:
        told = "; ".join(str(problem) for problem in store.skipped)
        raise ConfigError(Problem(what="the run has no complete checkpoint", where=str(run_dir), why=told))
    return checkpoint.path


def _check_built(model: ModelSpec) -> None:
    from meshwright.nn import unsupported

    problems = unsupported(model, start=0, stop=len(model.layers) + 2)
    if problems:
        raise ConfigError(problems)


def _check_causal(model: ModelSpec) -> None:
    if model.prefix:
        why = "no family there says a prefix mask, and the weights under a causal one are another model"
        raise ConfigError(Problem(what="this model has no Hugging Face form", where=model.name, why=why))


def _check_free(path: Path) -> None:
    """Nothing is written over: a run or a model that is there stays."""
    if path.is_file() or (path.is_dir() and any(path.iterdir())):
        raise ConfigError(Problem(what="is not an empty folder", where=str(path), fix="name another folder"))


def _begin(store: Store, folder: Folder, *, dtype: dtype, progress: data.Progress | None) -> None:
    """`store` has a checkpoint of step 0. Raises ConfigError for weights that are no numbers."""
    from meshwright.train.huggingface import Weights
    from meshwright.train.huggingface.begin import write_weights

    weights = Weights(folder)
    try:
        store.begin(lambda place: write_weights(weights, place, dtype=dtype, progress=progress))
    except EnvironmentUnfit:
        if weights.unfit:
            raise ConfigError(weights.unfit) from None
        raise


@contextmanager
def _all_or_nothing(path: Path) -> Iterator[None]:
    """What is written into `path`, a free folder, stays when all of it is; EnvironmentUnfit where the disk fails."""
    there = path.is_dir()
    path.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except BaseException as error:
        for entry in path.iterdir():
            shutil.rmtree(entry, ignore_errors=True) if entry.is_dir() else entry.unlink(missing_ok=True)
        if not there:
            path.rmdir()
        if isinstance(error, OSError):
            fix = "free space there" if error.errno in FULL else ""
            raise EnvironmentUnfit(Problem(what=error.strerror or str(error), where=str(path), fix=fix)) from error
        raise


def _design(folder: Folder, plan: Path | str | None) -> Design:
    if plan is None:
        return _alone(folder)
    from meshwright.train.checkpoint import model_digest

    design = catalog.load_design(plan)
    if model_digest(design.model) != model_digest(folder.model):
        what = f"is of {design.model.name}, another model than {folder.path} holds"
        fix = f"design it with meshwright plan --model {shlex.quote(str(folder.path))}"
        raise ConfigError(Problem(what=what, where=str(plan), fix=fix))
    return design


def _alone(folder: Folder) -> Design:
    """A plan for one device of this machine: enough to generate, and to say what the weights are of."""
    length = min(2048, folder.model.most_positions)
    job = JobSpec(sequence_length=length, batch_tokens=length, precision=Precision.FP32)
    tokenizer = folder.path / "tokenizer.json"
    if tokenizer.is_file():
        job = replace(job, data=DataSpec(tokenizer=str(tokenizer.absolute())))
    cluster = catalog.load_cluster("local:1")
    blocks = len(folder.model.layers) + 2
    plan = Plan(
        model=folder.model.name,
        cluster=cluster.name,
        axes=(Axis(name=AxisName.REPLICATE, size=1),),
        stages=(Stage(rank=0, groups=(BlockGroup(start=0, stop=blocks, precision=Precision.FP32),)),),
        schedule=Schedule(kind=ScheduleKind.GPIPE, microbatches=1),
        sequence_length=length,
        microbatch=1,
    )
    return Design(model=folder.model, cluster=cluster, job=job, plan=plan)


def _run_design(run_dir: Path) -> Design:
    path = run_dir / "design.json"
    if not path.is_file():
        fix = "name a run directory, or a folder with config.json"
        raise ConfigError(Problem(what="neither a run nor a Hugging Face folder", where=str(run_dir), fix=fix))
    return load_design(path)


def _origin(run_dir: Path, config: Path | str | None, *, start: str) -> Path | None:
    """The folder whose config.json and tokenizer go with the weights."""
    if config is not None:
        named = expanded(config)
        return named.parent if named.name == CONFIG else named
    begun = [run_dir / KEPT, *([Path(start)] if start else [])]
    return next((folder for folder in begun if (folder / CONFIG).is_file()), None)


def _config(model: ModelSpec, origin: Path | None, *, whole: bool) -> dict[str, Any]:
    """That of `origin`, of its language model alone unless `whole`; where there is none, one that says the model."""
    if origin is None:
        from meshwright.catalog.huggingface.write import config_of

        return config_of(model)
    values = read_config(origin)
    return dict(values if whole else text_of(values))


def _table(values: Mapping[str, Any], model: ModelSpec, *, where: str) -> Table:
    from meshwright.catalog.huggingface import model_from_config
    from meshwright.catalog.huggingface.tensors import tensors
    from meshwright.train.checkpoint import model_digest

    told = language_model(model_from_config(values, name=model.name))
    if model_digest(told) != model_digest(model):
        what = f"says another model than the run's {model.name}"
        raise ConfigError(Problem(what=what, where=where, fix="--config names the config.json of the run's model"))
    return tensors(values, model)


def _copied(others: Folder) -> Mapping[str, Stored]:
    """What a folder stores of parts that are not trained here. Raises ConfigError where it cannot be read."""
    odd = [name for name, stored in others.rest.items() if stored.entry.dtype not in READ_TYPES]
    if odd:
        what = f"{odd[0]} and {len(odd) - 1:,} more" if odd[1:] else odd[0]
        fix = f"name a folder of {', '.join(READ_TYPES)}"
        raise ConfigError(Problem(what=f"{what}: of a type that is not read", where=str(others.path), fix=fix))
    return others.rest


def _kind(asked: str | None, values: Mapping[str, Any]) -> str:
    if asked is None:
        told = values.get("dtype", values.get("torch_dtype"))
        return next((name for name, (_, theirs) in TYPES.items() if theirs == told), "bf16")
    if asked not in TYPES:
        raise ConfigError(Problem(what=f"{asked!r} is unknown", where="--dtype", fix=f"one of {', '.join(TYPES)}"))
    return asked


def _copy_beside(source: Path, target: Path) -> None:
    """Tokenizer and generation settings go with the weights."""
    target.mkdir(parents=True, exist_ok=True)
    for name in BESIDE:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)


def _copy_tokenizer(run_dir: Path, target: Path) -> None:
    """A run's tokenizer goes with its weights where it is one that Hugging Face reads; forms of our own have a kind."""
    path = run_dir / "tokenizer.json"
    if path.is_file() and not (target / path.name).is_file() and "kind" not in parse_json(path.read_text("utf-8")):
        shutil.copyfile(path, target / path.name)


def _tokenizer(source: Path) -> data.Tokenizer | None:
    """The folder's tokenizer, None where it has none. Raises ConfigError where it cannot be read."""
    path = source / "tokenizer.json"
    return data.load_tokenizer(path) if path.is_file() else None


def _too_many_ids(tokenizer: data.Tokenizer | None, model: ModelSpec) -> tuple[str, ...]:
    if tokenizer is None or tokenizer.vocab <= model.vocab:
        return ()
    told = f"the tokenizer has ids up to {tokenizer.vocab - 1:,}, with that of the end of a document"
    return (f"{told}, and the model reads {model.vocab:,}: text with ids beyond is refused",)
