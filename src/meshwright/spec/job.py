"""JobSpec: what is asked: data, lengths, batch and tokens, precision, optimizer, and what the user fixes or forbids."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Annotated, NoReturn

from meshwright.spec.cluster import Product
from meshwright.spec.codec import Named
from meshwright.spec.errors import ConfigError, Problem
from meshwright.spec.low_rank import Cuttlefish, Dense, LowRank, Pufferfish
from meshwright.spec.optimizer import Master, Optimizer, OptimizerSpec
from meshwright.spec.skip import SkipSpec
from meshwright.spec.synchronize import SynchronizeSpec
from meshwright.spec.units import NotRead


class Objective(StrEnum):
    TIME = "time"
    COST = "cost"
    MEMORY = "memory"


class Switch(StrEnum):
    """`auto` measures both and keeps the faster."""

    ON = "on"
    OFF = "off"
    AUTO = "auto"


class Decay(StrEnum):
    COSINE = "cosine"
    WSD = "wsd"
    CONSTANT = "constant"


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One corpus: a JSONL, text or xz file (or a folder of them) and its weight in the mixture.

    In JSONL a document is the text of `text_field`, after that of `prompt_field` where it names one: a prompt is read
    and nothing is learned from it.
    """

    path: str
    weight: float = 1.0
    text_field: str = "text"
    prompt_field: str = ""


LEAST_SHARE = 2.0**-17  # of a mixture's weight that its turns can keep


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSpec:
    """Text to train on. `tokenizer` is a file (`.json`, `.tiktoken`), `bytes`, or `train:8192` to train one.

    `document_mask` keeps attention inside each document of a packed sequence. `validation_fraction` of the
    tokens is held out: whole documents, or the last part of one where documents are too long for that.
    """

    sources: tuple[Source, ...] = ()
    tokenizer: Annotated[str, Named()] = "bytes"
    document_mask: bool = True
    validation_fraction: float = 0.02
    cache: str | None = None

    @property
    def faintest(self) -> str:
        """The source whose share is too small for a mixture to keep, in words; nothing where none is."""
        weights = [source.weight for source in self.sources]
        if not weights or not 0.0 < min(weights) < LEAST_SHARE * sum(weights):
            return ""
        faint = weights.index(min(weights))
        return f"source {faint} has less than a {1 / LEAST_SHARE:,.0f}th of all weight"

    @property
    def masks(self) -> bool:
        """Some targets may be masked, so that those of a batch have to be counted."""
        return any(source.prompt_field for source in self.sources)


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningRate:
    """Warm-up then cosine, or warm-up, stable, decay (WSD, 2404.06395). Fractions of all steps unless in steps."""

    decay: Decay = Decay.COSINE
    warmup_steps: int = 0
    warmup_fraction: float = 0.01
    decay_fraction: float = 0.2
    final_fraction: float = 0.1


class Interval(StrEnum):
    """Who says how many steps lie between checkpoints: the job, or what wastes least time on them and on failures."""

    STEPS = "steps"
    GOODPUT = "goodput"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSpec:
    """When the state is saved; `every_steps` 0 saves only at the end and on a signal, unless `interval` is `goodput`.
    `keep` newest stay, and of older ones those whose step is a multiple of `keep_every_steps`."""

    every_steps: int = 0
    interval: Interval = Interval.STEPS
    keep: int = 2
    keep_every_steps: int = 0
    asynchronous: bool = True

    @property
    def on_the_way(self) -> bool:
        """Whether anything is saved before the end."""
        return self.every_steps > 0 or self.interval is Interval.GOODPUT


class ElasticBackend(StrEnum):
    """Who says which ranks train together: `own` is this runtime, `torchft` a quorum of replicas by torchft."""

    OWN = "own"
    TORCHFT = "torchft"


@dataclass(frozen=True, slots=True, kw_only=True)
class ElasticSpec:
    """A run that loses ranks goes on with the others while there are `min_ranks`; with 0 it ends.

    Every `copies_every` steps each rank copies its part of the state into memory, and what no other rank has into that
    of its neighbour (Gemini, SOSP 2023). A worker that was lost is started again `replacements` times at most. With
    the backend torchft replicas copy nothing and vote in every step; `lighthouse` is where they find each other, by
    http://HOST:PORT, or empty for one that the run starts.
    """

    min_ranks: int = 0
    copies_every: int = 1
    replacements: int = 1
    backend: ElasticBackend = ElasticBackend.OWN
    lighthouse: str = ""

    @property
    def on(self) -> bool:
        return self.min_ranks > 0

    @property
    def by_torchft(self) -> bool:
        return self.on and self.backend is ElasticBackend.TORCHFT


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationSpec:
    """Validation loss every so many steps over `tokens` held-out tokens; 0 evaluates only at the end."""

    every_steps: int = 0
    tokens: int = 65536


class NonFinite(StrEnum):
    """What follows a loss or a gradient norm that is not a number: `stop` ends the run with its last good state saved,
    `skip` goes on without that batch, `roll_back` goes on from the last checkpoint, past that batch.
    """

    STOP = "stop"
    SKIP = "skip"
    ROLL_BACK = "roll_back"


@dataclass(frozen=True, slots=True, kw_only=True)
class NonFiniteSpec:
    """What is done about a non-finite step; after `most_in_a_row` of them, with no new step between, the run stops."""

    policy: NonFinite = NonFinite.STOP
    most_in_a_row: int = 10


class Spike(StrEnum):
    """What follows a step whose loss or gradient norm leaps: `ignore` takes it as any other, and the others are those
    of a non-finite one."""

    IGNORE = "ignore"
    STOP = "stop"
    SKIP = "skip"
    ROLL_BACK = "roll_back"


@dataclass(frozen=True, slots=True, kw_only=True)
class SpikeSpec:
    """A step leaps whose loss or gradient norm lies more than `deviations` standard deviations above the mean of the
    last `window` steps; half a window has to be known. OLMo 2 leaves out updates of such steps (2501.00656), PaLM went
    back and left their batches out (2204.02311). After `most_in_a_row` of them the run stops."""

    policy: Spike = Spike.IGNORE
    deviations: float = 6.0
    window: int = 128
    most_in_a_row: int = 10


class Unlike(StrEnum):
    """What follows ranks that should hold the same parameters and do not: `stop` ends the run and names them,
    `roll_back` goes on from the last checkpoint whose ranks held the same, with the batches that followed it, and names
    them when the steps are done again.
    """

    STOP = "stop"
    ROLL_BACK = "roll_back"


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifySpec:
    """Every `every_steps` steps, and at every checkpoint, ranks that hold the same parameters compare their bits; with
    0 they never do."""

    every_steps: int = 0
    policy: Unlike = Unlike.STOP


class Devices(StrEnum):
    """Whether a plan uses `all` devices or `any` number of them."""

    ALL = "all"
    ANY = "any"

    @classmethod
    def _missing_(cls, value: object) -> NoReturn:
        """Raises NotRead: numbers are asked for elsewhere."""
        raise NotRead(
            f"{value!r} is not a choice", "one of all, any; constraints.fix.devices asks for a number of them"
        )


class Order(StrEnum):
    """In which order mesh axes and unlike machines may lie."""

    ANY = "any"
    USUAL = "usual"


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraints:
    """What the user fixes (`fix.tensor = 8`) and forbids (`forbid = ["pipeline", "recompute=full"]`).

    Names are the columns of the plan table: tensor, pipeline, replicate, shard, zero, chunks, microbatch, recompute,
    schedule, precision, sync, devices. Those of OTHER_NAMES are kept as the columns they mean; ConfigError where two of
    `fix` mean one. `devices` bounds how many devices a plan may use: `all` of them or `any` number up to all. `order`
    is that of the mesh axes and of unlike machines under them: the `usual` one (pipeline, replicate, shard, context,
    tensor; machines as the cluster lists them), or `any` that is better. Where memory or cost is least, no step is to
    take longer than `slowdown` times that of the fastest plan.
    """

    fix: Mapping[str, int | str] = field(default_factory=dict)
    forbid: tuple[str, ...] = ()
    devices: Devices = Devices.ALL
    order: Order = Order.ANY
    slowdown: float = 2.0

    def __post_init__(self) -> None:
        columns = [full_name(name) for name in self.fix]
        twice = [column for column in dict.fromkeys(columns) if columns.count(column) > 1]
        if twice:
            where = f"constraints.fix.{twice[0]}"
            raise ConfigError(Problem(where=where, what=f"{twice[0]} is named twice", fix="name it once"))
        object.__setattr__(self, "fix", dict(zip(columns, self.fix.values(), strict=True)))
        object.__setattr__(self, "forbid", tuple(_full_text(text) for text in self.forbid))


OTHER_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "tp": "tensor",
        "pp": "pipeline",
        "dp": "data",
        "cp": "context",
        "ep": "expert",
        "etp": "expert_tensor",
        "fsdp": "shard",
        "ddp": "replicate",
        "mbs": "microbatch",
        "vpp": "chunks",
        "sp": "sequence_parallel",
        "ac": "recompute",
        "gpus": "devices",
        "sharding": "zero",
        "zero_stage": "zero",
        "tensor_parallel": "tensor",
        "pipeline_parallel": "pipeline",
        "data_parallel": "data",
        "context_parallel": "context",
        "expert_parallel": "expert",
        "micro_batch_size": "microbatch",
        "virtual_pipeline": "chunks",
        "checkpointing": "recompute",
    }
)


def full_name(name: str) -> str:
    """The column that `name` means, whatever its case: `tensor` for `tp` and for `Tensor`."""
    return OTHER_NAMES.get(name.lower(), name.lower())


def _full_text(text: str) -> str:
    """`tensor=2` of `tp=2`."""
    name, equals, value = text.partition("=")
    return f"{full_name(name.strip())}{equals}{value}"


class Automatic(StrEnum):
    """What nobody says is chosen by the devices."""

    AUTO = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    """One training job. `batch_tokens` is the global batch of one optimizer step; `total_tokens` the whole run.

    A `precision` that is not said is what the devices are best at: bf16; fp32 where that is faster, as on processors
    that emulate sixteen bits; and fp16 or fp32 where they have no bf16. `other_precisions` may be taken in place of it
    where the plan is better for it; numerics change with them, as with other ways to `synchronize` replicas than in
    every step. `trackers` and `techniques` are names of the registries of train/observe and techniques. `start` is a
    Hugging Face folder whose weights a new run begins with; "" draws them from `seed`. With `low_rank` training ends on
    thin factors of matrices where that pays; `skip` allows microbatches that leave out stages of a pipeline. A rank
    that waits longer than `peer_timeout_seconds` for another one ends the run. `software` is what plans are priced as;
    where it is not said, what runs on the devices: this runtime, and XLA on TPUs; of plans made for another trainer
    what that runs.
    """

    name: str = "job"
    sequence_length: int = 2048
    batch_tokens: int = 4 * 2**20
    total_tokens: int = 10**12
    precision: Automatic | Product = Automatic.AUTO
    other_precisions: tuple[Product, ...] = ()
    data: DataSpec = DataSpec()
    optimizer: Optimizer = OptimizerSpec()
    learning_rate: LearningRate = LearningRate()
    z_loss: float = 0.0
    synchronize: SynchronizeSpec = SynchronizeSpec()
    low_rank: Dense | Pufferfish | Cuttlefish = Dense()
    skip: SkipSpec = SkipSpec()
    objective: Objective = Objective.TIME
    constraints: Constraints = Constraints()
    checkpoint: CheckpointSpec = CheckpointSpec()
    elastic: ElasticSpec = ElasticSpec()
    non_finite: NonFiniteSpec = NonFiniteSpec()
    spike: SpikeSpec = SpikeSpec()
    verify: VerifySpec = VerifySpec()
    evaluation: EvaluationSpec = EvaluationSpec()
    compile: Switch = Switch.OFF
    deterministic: bool = False
    peer_timeout_seconds: float = 300.0
    seed: int = 0
    trackers: tuple[Annotated[str, Named()], ...] = ()
    techniques: tuple[Annotated[str, Named()], ...] = ()
    start: str = ""
    software: Annotated[str, Named()] = Automatic.AUTO.value
    schema: int = 1

    @property
    def batch_sequences(self) -> int:
        return self.batch_tokens // self.sequence_length

    @property
    def master(self) -> Master:
        """What parameters that bf16 multiplies are kept in."""
        return self.optimizer.master if isinstance(self.optimizer, OptimizerSpec) else Master.FP32

    @property
    def factoring(self) -> LowRank | None:
        """How the model becomes low rank; None where it does not."""
        return None if isinstance(self.low_rank, Dense) else self.low_rank

    @property
    def all_techniques(self) -> tuple[str, ...]:
        """Those named, and those that the job has settings of."""
        return (*self.techniques, *(("low_rank",) if self.factoring is not None else ()))

    @property
    def total_steps(self) -> int:
        return -(-self.total_tokens // self.batch_tokens)
