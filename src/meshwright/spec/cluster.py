"""ClusterSpec: groups of nodes joined by tiers of links, uneven by construction; every number says where it is from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Annotated, TypeAlias

from meshwright.spec.codec import Among
from meshwright.spec.report import Origin

MOST_DEVICES = 10_000_000


class Precision(StrEnum):
    """Arithmetic of matrix products; int8 and int4 are of numbers on their way alone.

    fp8 has one scale a tensor, fp8-row one for each row of an operand along what a product sums over, fp8-block one for
    128 by 128 elements, mxfp8 one for 32 and nvfp4 one for 16.
    """

    FP64 = "fp64"
    FP32 = "fp32"
    TF32 = "tf32"
    FP16 = "fp16"
    BF16 = "bf16"
    FP8 = "fp8"
    FP8_ROW = "fp8-row"
    FP8_BLOCK = "fp8-block"
    MXFP8 = "mxfp8"
    NVFP4 = "nvfp4"
    INT8 = "int8"
    INT4 = "int4"

    @property
    def bytes(self) -> int:
        """Bytes of an element that a product reads; two elements of nvfp4 or int4 share one."""
        return {"fp64": 8, "fp32": 4, "tf32": 4, "fp16": 2, "bf16": 2}.get(self.value, 1)

    @property
    def operand_bytes(self) -> float:
        """Bytes of an element that a product reads, scales of blocks apart."""
        return 0.5 if self in (Precision.NVFP4, Precision.INT4) else float(self.bytes)

    @property
    def stored_bytes(self) -> float:
        """Bytes of an element laid by, the scales of blocks with it: of 128 elements one of 4 bytes (fp8-block), of 32
        (mxfp8) or 16 (nvfp4) one of 1 byte. Those of whole rows are too few to count."""
        scales = {Precision.FP8_BLOCK: 4.0 / 128, Precision.MXFP8: 1.0 / 32, Precision.NVFP4: 1.0 / 16}
        return self.operand_bytes + scales.get(self, 0.0)

    @property
    def multiplies(self) -> bool:
        """Products are made in it."""
        return self not in (Precision.INT8, Precision.INT4)

    @property
    def quantized(self) -> bool:
        """Operands are quantised before each product, and everything between products stays in bf16."""
        return self in (Precision.FP8, Precision.FP8_ROW, Precision.FP8_BLOCK, Precision.MXFP8, Precision.NVFP4)


# The arithmetic that a model is trained in.
Product: TypeAlias = Annotated[Precision, Among(tuple(kind for kind in Precision if kind.multiplies))]


class DeviceKind(StrEnum):
    CUDA = "cuda"
    ROCM = "rocm"
    TPU = "tpu"
    CPU = "cpu"


class Collective(StrEnum):
    """`send` is one message between two ranks; in a `pass` every rank of a ring sends one to the next at once."""

    ALL_REDUCE = "all_reduce"
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_TO_ALL = "all_to_all"
    SEND = "send"
    PASS = "pass"


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixCurve:
    """Time of a product (m, k) x (k, n): saturating in every dim, never under the memory floor.

    seconds = 2mnk / (peak * fraction * m/(m+half_m) * n/(n+half_n) * k/(k+half_k)) + launch
    """

    fraction: float
    half_m: float
    half_n: float
    half_k: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixTiles:
    """How kernels of products cut their results: tiles of (rows, columns), each made by one of `units` at a time.

    A tile of x rows and y columns takes as long as (x + `load`) (y + `load`) - `load`^2 elements of its result would
    without loads, for k + `depth` steps of its inner dim in multiples of `step`; a curve's fraction is reached by the
    first tile. A last wave that does not fill the units idles the share `tail` of what it leaves free (1: whole
    waves; 0: work is split evenly), and the share `store` of the time to write results is not hidden. Of several
    products that share the units, the share `cold` of the time to read what each multiplies is not hidden either.
    Where the rows that a kernel loads are no multiples of 16 bytes, but of 8, of 4 or of 2, it reaches the shares
    `misaligned` of its rate.
    """

    units: int
    sizes: tuple[tuple[int, int], ...]
    load: float
    depth: float
    step: int
    tail: float
    store: float
    cold: float = 0.0
    misaligned: tuple[float, float, float] = (1.0, 1.0, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionRate:
    """Measured attention at one sequence length: FLOP/s forward and backward that wide heads come near to.

    FLOPs are those of the keys that the mask shows, forward; backward has 2.5 times as many. A head of d features
    reaches d / (d + half_dim) of the rate: the softmax costs the same whatever the head's width.
    """

    precision: Precision
    length: int
    forward_flops: float
    backward_flops: float
    half_dim: float = 0.0


class AttentionKernel(StrEnum):
    """Generations of fused attention: FlashAttention (2205.14135), its second version (2307.08691), kernels written for
    the matrix units of the device at hand (2407.08608, cuDNN, AITER), and those that PyTorch brings for AMD's devices,
    compiled from Triton (AOTriton)."""

    FLASH_1 = "flash-1"
    FLASH_2 = "flash-2"
    NATIVE = "native"
    TRITON = "triton"


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShare:
    """Shares of the peak that the scores' part reaches, forward and backward, counted as in DeviceSpec.

    With a `block` of rows and columns, those are the shares of many blocks that no mask cuts; `forward_half` and
    `backward_half` blocks in all reach half of them. They are of heads of 128 features: narrower ones of d reach
    d / (d + `half_dim`) of what all would, for the softmax costs the same whatever a head's width.
    """

    forward: float
    backward: float
    forward_half: float = 0.0
    backward_half: float = 0.0
    block: int = 0
    half_dim: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSpec:
    """One accelerator, or one worker's share of a processor.

    `peak_flops` FLOP/s by precision, dense; `memory_bandwidth` bytes/s; `launch_seconds` host time to start one
    kernel; `layer_seconds` host time per layer and pass that no kernel explains (framework overhead);
    `reserved_bytes` what the context and libraries hold; `scaling` speed of one device that uses n cores relative
    to one, for processors (index 0 is one core); None peak means MFU is not known.

    `attention_fraction` of the peak is reached by the scores' part forward, over the FLOPs of the keys that the mask
    shows; `attention_backward_fraction` backward, over 2.5 times as many (five products instead of two).
    `attention_kernels` says the same of a kernel by name; `attention_rates`, where measured, come before both.
    `tiles` take the place of the halves of `matrix` where they are known. `spread` is how much times of products
    deviate among equal devices, of their mean: the slowest of all that wait for each other decides.
    `optimizer_bandwidth` is bytes/s of the optimizer's step at 28 bytes a parameter (AdamW). Host time beside
    `layer_seconds`: `tensor_layer_seconds` more per layer and pass when tensor parallel, `context_layer_seconds` more
    when sequences are divided, `shard_layer_seconds` more when sharded, `action_seconds` per forward or backward of a
    pipeline stage, `step_overhead_seconds` once a step.
    """

    name: str
    kind: DeviceKind
    memory_bytes: float
    memory_bandwidth: float
    peak_flops: Mapping[Precision, float]
    matrix: Mapping[Precision, MatrixCurve]
    tiles: MatrixTiles | None = None
    spread: float = 0.0
    memory_fraction: float = 0.8
    attention_fraction: float = 0.5
    attention_backward_fraction: float = 0.4
    attention_kernels: Mapping[AttentionKernel, AttentionShare] = field(default_factory=dict)
    attention_rates: tuple[AttentionRate, ...] = ()
    launch_seconds: float = 4e-6
    layer_seconds: float = 0.0
    tensor_layer_seconds: float = 0.0
    context_layer_seconds: float = 0.0
    shard_layer_seconds: float = 0.0
    action_seconds: float = 0.0
    step_overhead_seconds: float = 0.0
    reserved_bytes: float = 0.0
    usable_fraction: float = 0.94
    optimizer_bandwidth: float | None = None
    scaling: tuple[float, ...] = (1.0,)
    price_per_hour: float | None = None
    hours_between_failures: float | None = None
    watts: float | None = None
    sources: Mapping[str, str] = field(default_factory=dict)

    @property
    def has_flash(self) -> bool:
        """FlashAttention-2 runs on it: nvidia's have that from Ampere on, the first that multiplies in bf16."""
        return self.kind is not DeviceKind.CUDA or Precision.BF16 in self.peak_flops


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveFit:
    """Measured time of a collective among `ranks`: latency + bytes / bandwidth, bytes being the whole tensor.

    The whole tensor is the input of an all-reduce, reduce-scatter or all-to-all, the output of an all-gather and
    the message of a send or of one rank's pass.
    """

    operation: Collective
    ranks: int
    latency_seconds: float
    bytes_per_second: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A tier of the network as one end sees it: bytes/s each way, seconds one way, achieved share, times measured.

    `oversubscription` divides the bandwidth when all nodes below this tier talk across it at once. `sums` is the
    share of the achieved bandwidth left to an all-reduce that the switch itself adds (NVLink SHARP); None where no
    switch does. `staged` says that libraries meet over this tier in stages: among the devices below it first, then
    over every adapter at once, then below again; otherwise one ring or tree passes all tiers (NCCL). Without a
    switch each of `peers` others has a link of its own: the bandwidth is that to all of them together, and a group of
    n has (n - 1) / peers of it, all at most; where some have two, `peers` counts links. None where any two have all of
    it. `across_sockets` is what joins the first half of a node's devices to the second each way, shared by all that
    goes from one to the other; None where nothing is slower there. On a torus of so many dims (`torus`) the bandwidth
    is that of all links of a device together, and a group has those of the sides it lies along; ends of sides of
    `wraps` devices and more are joined, None where none are.
    """

    bandwidth: float
    latency_seconds: float
    efficiency: float = 0.8
    oversubscription: float = 1.0
    sums: float | None = None
    staged: bool = False
    peers: int | None = None
    across_sockets: float | None = None
    torus: int | None = None
    wraps: int | None = None
    fits: tuple[CollectiveFit, ...] = ()
    sources: Mapping[str, str] = field(default_factory=dict)

    @property
    def achieved(self) -> float:
        """Bytes/s each way that are reached where all below the tier talk across it at once."""
        return self.bandwidth * self.efficiency / self.oversubscription


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeGroup:
    """Equal nodes: devices joined inside by `inside` (per device), reaching out through `nics` adapters each of `nic`.

    `host` joins each device to the host's memory, of which a node has `host_bytes`, read and written by its processors
    at `host_bandwidth` bytes/s; None where that is not known.
    `cores` is how many processor cores the devices of one node share; None for accelerators. `together` is the speed
    of n one-core devices of a node that compute at once, all of them added, relative to one alone (index 0 is one;
    the last value holds beyond it); empty means min(n, cores). `rack_nodes` nodes share a faster tier when the
    cluster has one. `site` names the place for wide-area tiers.
    """

    name: str
    device: DeviceSpec
    num_nodes: int
    devices_per_node: int
    inside: Link
    nic: Link
    nics: int = 1
    host: Link | None = None
    host_bytes: float | None = None
    host_bandwidth: float | None = None
    cores: int | None = None
    together: tuple[float, ...] = ()
    rack_nodes: int | None = None
    rack: Link | None = None
    site: str = "site"

    @property
    def num_devices(self) -> int:
        return self.num_nodes * self.devices_per_node


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSpec:
    """Machines in order: device 0 is the first device of the first node of the first group.

    `wide_area` joins sites, as one site sees it; a site in `uplinks` has that link in its place, and two sites meet at
    the rate of the slower one, half of each latency apart. `origin` is calibrated where the figures were measured on
    these very machines. `step_error` is the root mean square of log(predicted / measured) over whole steps on these
    machines that the figures were not moved to explain; None where no step was compared. `storage_bandwidth` is the
    bytes/s at which checkpoints of all devices together are written; None where nobody says it.
    """

    name: str
    groups: tuple[NodeGroup, ...]
    wide_area: Link | None = None
    uplinks: Mapping[str, Link] = field(default_factory=dict)
    origin: Origin = Origin.ANALYTIC
    step_error: float | None = None
    storage_bandwidth: float | None = None
    source: str = ""
    schema: int = 1

    @property
    def num_devices(self) -> int:
        return sum(group.num_devices for group in self.groups)

    @property
    def joined(self) -> ClusterSpec:
        """The same machines with neighbouring groups of equal nodes as one."""
        groups = list(self.groups[:1])
        for group in self.groups[1:]:
            last = groups[-1]
            whole_racks = last.rack is None or last.num_nodes % (last.rack_nodes or 1) == 0
            if whole_racks and replace(group, name=last.name, num_nodes=last.num_nodes) == last:
                groups[-1] = replace(last, num_nodes=last.num_nodes + group.num_nodes)
            else:
                groups.append(group)
        return self if len(groups) == len(self.groups) else replace(self, groups=tuple(groups))

    @property
    def sites(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(group.site for group in self.groups))

    def uplink(self, site: str) -> Link | None:
        """What joins `site` to the others."""
        return self.uplinks.get(site, self.wide_area)

    def between(self, site: str, other: str) -> Link | None:
        """What two sites meet over; None where one of them has no uplink."""
        one, two = self.uplink(site), self.uplink(other)
        if one is None or two is None:
            return None
        slower = one if one.achieved <= two.achieved else two
        return replace(slower, latency_seconds=0.5 * (one.latency_seconds + two.latency_seconds))

    def with_uplinks(self, change: Callable[[Link], Link]) -> ClusterSpec:
        """The same machines with every link between sites changed."""
        wide = None if self.wide_area is None else change(self.wide_area)
        return replace(self, wide_area=wide, uplinks={site: change(link) for site, link in self.uplinks.items()})

    @property
    def has_uplinks(self) -> bool:
        """Something is between its sites."""
        return self.wide_area is not None or bool(self.uplinks)

    @property
    def without_uplinks(self) -> ClusterSpec:
        """The same machines, as if what is between sites took no time."""
        return replace(self, wide_area=None, uplinks={})

    @property
    def price_per_hour(self) -> float | None:
        """Price of the whole cluster in dollars an hour; None when any device has none."""
        prices = [group.device.price_per_hour for group in self.groups]
        known = [price for price in prices if price is not None]
        if len(known) < len(prices):
            return None
        return sum(price * group.num_devices for price, group in zip(known, self.groups, strict=True))
