"""generate: text from the newest complete checkpoint of a run, in this process alone."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from meshwright.catalog.ranges import MOST_SEEDS
from meshwright.data import tokenizer_from_json
from meshwright.run.files import design_of_run
from meshwright.spec.errors import ConfigError, Problem
from meshwright.spec.paths import expanded

if TYPE_CHECKING:
    from meshwright.nn import Decoder


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Text that the model of a run wrote, the step of the checkpoint it is from, newer ones that are unfit, and why the
    run could not keep the text."""

    text: str
    step: int
    passed_over: tuple[Problem, ...] = ()
    unkept: Problem | None = None

    def lines(self) -> tuple[str, ...]:
        """What a person should know: a line for each checkpoint that was passed over, and one for text not kept."""
        newer = (
            f"the checkpoint of step {self.step} is read; a newer one is passed over: {problem}"
            for problem in self.passed_over
        )
        return (*newer, *((f"warning: {self.unkept}",) if self.unkept else ()))


def generate(
    run_dir: Path | str,
    prompt: str = "",
    *,
    tokens: int = 200,
    temperature: float = 0.8,
    top_k: int | None = 50,
    seed: int = 0,
) -> Sample:
    """The prompt and up to `tokens` tokens that the model writes after it; it ends where the model ends a document.

    The run keeps the text as `sample.txt`; where it cannot be written the sample says so.

    `temperature` 0 takes the likeliest token, `top_k` None chooses among all. Raises ConfigError when the run has
    no complete checkpoint or an option is out of range.
    """
    folder = expanded(run_dir)
    _check(prompt, tokens=tokens, temperature=temperature, top_k=top_k, seed=seed)
    loaded = load_model(folder)
    _check_finite(loaded.decoder, where=f"{folder}: step {loaded.step}")
    path = folder / "tokenizer.json"
    if not path.is_file():
        fix = "put there the tokenizer.json that the model was trained with"
        raise ConfigError(Problem(what="the run has no tokenizer", where=str(path), fix=fix))
    tokenizer = tokenizer_from_json(path.read_text(encoding="utf-8"))

    from meshwright.nn import Sampling
    from meshwright.nn import generate as write

    read = [int(token) for token in tokenizer.encode_batch([prompt])[0]] if prompt else [tokenizer.end]
    _check_ids(read, vocab=loaded.decoder.model.vocab, prompt=prompt, where=str(path))
    written: list[int] = []
    sampling = Sampling(temperature=temperature, top_k=top_k, seed=seed)
    for token in write(loaded.decoder, read, count=tokens, sampling=sampling):
        if token == tokenizer.end:
            break
        written.append(token)
    text = prompt + tokenizer.decode(written)
    return Sample(
        text=text, step=loaded.step, passed_over=loaded.passed_over, unkept=_keep(text, folder / "sample.txt")
    )


def _keep(text: str, path: Path) -> Problem | None:
    """The file holds the text for the run's page, or why it does not."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        what = f"the text is not kept for the run's page: {error.strerror}"
        return Problem(what=what, where=str(path))
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A model with the weights of the checkpoint of `step`, and the newer checkpoints that could not be read."""

    decoder: Decoder
    step: int
    passed_over: tuple[Problem, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Whole:
    """A model that is all in this process, as checkpoints see it."""

    parts: tuple[Decoder, ...]


def load_model(run_dir: Path) -> Loaded:
    """The whole model of a run with the weights of its newest complete checkpoint, in their own precision."""
    design = design_of_run(run_dir)

    from meshwright.nn import Decoder
    from meshwright.parallel.precision import dtypes
    from meshwright.parallel.relocate import whole_of
    from meshwright.train.checkpoint import Checkpoint, Store, of_checkpoint

    store, dtype = Store(run_dir / "checkpoints", design=design), dtypes(design.plan, master=design.job.master).master
    decoders = []

    def load(checkpoint: Checkpoint) -> None:
        decoder = Decoder(of_checkpoint(design, checkpoint).model).to(dtype)
        store.load(checkpoint, whole_of(Whole(parts=(decoder,))))
        decoders.append(decoder)

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        checkpoint = store.newest(load)
    if checkpoint is None:
        fix = "let it train until it saves; " + "; ".join(str(problem) for problem in store.skipped)
        raise ConfigError(Problem(what="the run has no complete checkpoint", where=str(run_dir), fix=fix.rstrip("; ")))
    return Loaded(decoder=decoders[-1].eval(), step=checkpoint.step, passed_over=store.skipped)


def _check_finite(decoder: Decoder, *, where: str) -> None:
    """Raises ConfigError with the first parameter that holds what is no number: nothing it writes would be text."""
    for name, x in decoder.named_parameters():
        if not x.isfinite().all():
            fix = "take an earlier checkpoint, or weights that are finite"
            raise ConfigError(Problem(what=f"{name} holds nan or inf", where=where, fix=fix))


def _check_ids(read: list[int], *, vocab: int, prompt: str, where: str) -> None:
    """The model reads every token of the prompt, or the one that ends a document where there is none."""
    if max(read) < vocab:
        return
    told = "the prompt has" if prompt else "a document ends with"
    fix = "write another prompt" if prompt else "give a --prompt"
    what = f"{told} token {max(read):,} and the model reads ids below {vocab:,}"
    raise ConfigError(Problem(what=what, where=where, why="its tokenizer is larger than its vocabulary", fix=fix))


def _check(prompt: str, *, tokens: int, temperature: float, top_k: int | None, seed: int) -> None:
    problems = []
    if any("\ud800" <= letter <= "\udfff" for letter in prompt):
        problems.append(Problem(what="the prompt is not UTF-8 text", where="--prompt", fix="set LC_ALL=C.UTF-8"))
    if tokens < 1:
        problems.append(Problem(what=f"{tokens} tokens", where="--tokens", fix="ask for at least one"))
    if not math.isfinite(temperature):
        problems.append(Problem(what=f"{temperature} is no number", where="--temperature", fix="1 is the model's own"))
    elif temperature < 0:
        problems.append(Problem(what=f"{temperature} is below 0", where="--temperature", fix="0 takes the likeliest"))
    if top_k is not None and top_k < 1:
        problems.append(Problem(what=f"{top_k} is below 1", where="--top-k", fix="1 takes the likeliest"))
    if not 0 <= seed < MOST_SEEDS:
        problems.append(Problem(what=f"{seed} is not from 0 to below 2^63", where="--seed", fix="choose another seed"))
    if problems:
        raise ConfigError(problems)
