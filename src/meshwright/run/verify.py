"""verify: the logits of converted weights beside those of transformers, which is needed for nothing else."""

from __future__ import annotations

import importlib.util
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from meshwright.catalog.huggingface.folder import Folder
from meshwright.spec.errors import ConfigError, EnvironmentUnfit, ExitCode, MeshwrightError, Problem

if TYPE_CHECKING:
    from torch import Tensor

    from meshwright.nn import Decoder

SEQUENCES, LENGTH, SEED = 2, 48, 0
# Two implementations in fp32 differ by the order of their sums; a wrong tensor, scale or norm by far more.
TOLERANCE = 2e-3


class LogitsDiffer(MeshwrightError):
    """Converted weights give other logits than transformers."""

    exit_code = ExitCode.NO_PLAN


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """The largest difference of logits, in fp32, where it is, and the largest logit of transformers."""

    largest_difference: float
    sequence: int
    position: int
    token: int
    ours: float
    theirs: float
    largest_logit: float
    tokens: int
    agreeing_tokens: int
    transformers: str

    @property
    def relative(self) -> float:
        return self.largest_difference / self.largest_logit

    def lines(self) -> tuple[str, ...]:
        """The figures as sentences."""
        where = f"sequence {self.sequence}, position {self.position}, token {self.token}"
        return (
            f"verified against transformers {self.transformers} on {self.tokens} tokens in fp32:",
            f"  largest difference of logits {self.largest_difference:.3e} at {where}: {self.ours:.6f} here, "
            f"{self.theirs:.6f} there; {self.relative:.1e} of the largest logit",
            f"  the likeliest next token is the same at {self.agreeing_tokens} of {self.tokens} positions",
        )


def check_verifiable() -> None:
    """transformers is installed. Raises EnvironmentUnfit."""
    if importlib.util.find_spec("transformers") is None:
        raise EnvironmentUnfit(
            Problem(
                what="transformers is not installed, so logits cannot be compared",
                where="--verify",
                fix="pip install 'meshwright[verify]', or leave --verify out: converting needs no transformers",
            )
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """Logits of transformers of some tokens, in fp32, and its version."""

    tokens: Tensor
    logits: Tensor
    transformers: str


def transformers_logits(folder: Folder, *, fix: str) -> Expected:
    """What transformers computes with `folder`, the model whole in memory. Raises ConfigError, with `fix`, where it
    cannot, or gives what are no numbers."""
    import torch

    generator = torch.Generator().manual_seed(SEED)
    tokens = torch.randint(folder.model.vocab, (SEQUENCES, _length(folder)), generator=generator)
    try:
        logits, version = _theirs(folder.path, tokens)
    except Exception as error:  # whatever transformers raises of a config or of weights that it does not take
        what = f"transformers cannot run this: {type(error).__name__}: {str(error).strip()}".splitlines()[0]
        raise ConfigError(Problem(what=what, where=str(folder.path), fix=fix)) from error
    if not logits.isfinite().all():
        what = f"the logits of transformers {version} hold nan or inf, so there is nothing to compare with"
        raise ConfigError(Problem(what=what, where=str(folder.path), fix=fix))
    return Expected(tokens=tokens, logits=logits, transformers=version)


def compare(folder: Folder, expected: Expected, *, run_dir: Path | None) -> Verified:
    """How far the logits of our model are from those that transformers computes with `folder`.

    Ours are of the newest checkpoint of the run `run_dir`, or of the folder's own weights where it is None; the model
    is in memory whole, in fp32. Raises LogitsDiffer beyond TOLERANCE of the largest logit.
    """
    import torch

    version = expected.transformers
    with torch.no_grad():
        ours = (_of_folder(folder) if run_dir is None else _of_run(run_dir)).float()(expected.tokens)
    found = _compare(ours, expected.logits, version=version)
    if not found.relative <= TOLERANCE:
        raise LogitsDiffer(
            Problem(
                what=f"logits differ by {found.largest_difference:.3e}, {found.relative:.1e} of the largest",
                where=f"{folder.path}: sequence {found.sequence}, position {found.position}, token {found.token}",
                why=f"{found.ours:.6f} here, {found.theirs:.6f} in transformers {version}; rounding is {TOLERANCE}",
                fix="do not use what was written; please report it with config.json",
            )
        )
    return found


def _length(folder: Folder) -> int:
    return min(LENGTH, folder.model.most_positions)


def _theirs(path: Path, tokens: Tensor) -> tuple[Tensor, str]:
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path,
        dtype=torch.float32,
        attn_implementation="eager",
        local_files_only=True,
        use_safetensors=True,
        trust_remote_code=False,
    ).eval()
    with torch.no_grad():
        return model(tokens).logits.float(), str(transformers.__version__)


def _of_run(run_dir: Path) -> Decoder:
    from meshwright.run.generate import load_model

    return load_model(run_dir).decoder


def _of_folder(folder: Folder) -> Decoder:
    from meshwright.nn import Decoder
    from meshwright.parallel.relocate import whole_of
    from meshwright.run.generate import Whole
    from meshwright.train.huggingface import load_weights

    decoder = Decoder(folder.model)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        load_weights(whole_of(Whole(parts=(decoder,))), folder, group=None)
    return decoder.eval()


def _compare(ours: Tensor, theirs: Tensor, *, version: str) -> Verified:
    difference = (ours - theirs).abs().nan_to_num(nan=float("inf"))
    sequence, rest = divmod(int(difference.argmax()), difference[0].numel())
    position, token = divmod(rest, difference.shape[-1])
    same = (ours.argmax(dim=-1) == theirs.argmax(dim=-1)).sum()
    return Verified(
        largest_difference=float(difference.max()),
        sequence=sequence,
        position=position,
        token=token,
        ours=float(ours[sequence, position, token]),
        theirs=float(theirs[sequence, position, token]),
        largest_logit=float(theirs.abs().max()),
        tokens=ours[..., 0].numel(),
        agreeing_tokens=int(same),
        transformers=version,
    )
