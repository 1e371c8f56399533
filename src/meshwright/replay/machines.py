"""The cluster that a published run names: its devices and nodes by name, its network where a number is printed."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from meshwright.catalog.device_names import known_device
from meshwright.catalog.devices import devices
from meshwright.catalog.nodes import group_of
from meshwright.catalog.other_sheets import INT8_PEAKS
from meshwright.catalog.racks import in_segments
from meshwright.replay.names import Named, named_devices
from meshwright.replay.networks import Islands, between_sites, islands, joined, network_assumed
from meshwright.replay.runs import Run
from meshwright.spec.cluster import ClusterSpec, DeviceKind, DeviceSpec, NodeGroup, Precision
from meshwright.spec.codec import nearest

_MEMORY_DIFFERS = 0.15
_SLICES = re.compile(r"\b(\d+)\s*slices?\b|\bslices?\s*=\s*(\d+)", re.IGNORECASE)
_TWO_DIES = {"MI250X-GCD": 128.0, "MI250-GCD": 128.0}  # GB of a board that holds two devices
_SIZED = re.compile(r"-\d+GB\b")  # devices that come with more memory or less
_DIES = re.compile(r"gcd|\bdies?\b", re.IGNORECASE)  # a name that says so counts devices, and no boards


@dataclass(frozen=True, slots=True, kw_only=True)
class Machines:
    """The cluster of a run and how many of its devices the run used, the first ones."""

    spec: ClusterSpec
    devices: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kind:
    """`count` devices of one kind, `per_node` in a node; None is the usual node."""

    name: str
    device: DeviceSpec
    count: int
    per_node: int | None
    memory_gb: float | None


def machines_of(run: Run, *, assumed: list[str]) -> Machines | str:
    """The machines of `run`, kinds in the order in which they are named; why not, where a device is not known.

    What the source left open is added to `assumed`.
    """
    named = named_devices(run.text("gpu"))
    unknown = next((entry.name for entry in named if entry.device is None), None)
    if unknown is not None:
        return f"no figures of the device {unknown}; {nearest(unknown, devices())}" if unknown else "gpu is blank"
    counts = _counts(run, named)
    if isinstance(counts, str):
        return counts
    kinds = [
        _kind(run, entry, index=index, count=count, assumed=assumed)
        for index, (entry, count) in enumerate(zip(named, counts, strict=True))
    ]
    if len(kinds) > 1:
        assumed.append("stages lie on the machines in the order in which they are named, with equal batches")
    apart = islands(run.text("inter_link"))
    groups = [_group(kind, index=index, alone=len(kinds) == 1, assumed=assumed) for index, kind in enumerate(kinds)]
    groups = [_in_segments(_in_slices(run, group), assumed=assumed) for group in groups]
    if len(groups) == 1 and len(apart.each) > 1:
        groups = _divided(groups[0], parts=len(apart.each))
    return Machines(spec=_joined(run, groups, apart, assumed=assumed), devices=sum(kind.count for kind in kinds))


def multiplying_int8(machines: Machines, *, assumed: list[str]) -> Machines | str:
    """The same devices with their peak of int8 as that of fp8-row, whose bytes and scales are the same; why not, where
    one has none.

    So MaxText's AQT multiplies forward and backward, all but the head, with a scale for each row of an operand along
    what a product sums over (layers/quantizations.py).
    """
    groups = []
    for group in machines.spec.groups:
        peak = INT8_PEAKS.get(group.device.name)
        if peak is None:
            return f"no peak of int8 is known for {group.device.name}"
        device = replace(group.device, peak_flops={**group.device.peak_flops, Precision.FP8_ROW: peak})
        groups.append(replace(group, device=device))
    assumed.append("int8 taken as fp8-row at the device's peak of int8")
    return replace(machines, spec=replace(machines.spec, groups=tuple(groups)))


def _counts(run: Run, named: tuple[Named, ...]) -> list[int] | str:
    """Devices of every kind; why not, where what is said of them does not agree."""
    printed, said = run.numbers("n_gpus"), [entry.count for entry in named]
    if len(printed) == len(named) and (len(named) > 1 or said == [None]):
        return [int(count) for count in printed]
    total, known = int(sum(printed)) or _ranks(run), [count for count in said if count]
    if len(known) == len(named):
        whole = total or sum(known)
        if whole % sum(known):
            return f"{run.text('gpu')} are not {total} devices"
        return [count * (whole // sum(known)) for count in known]
    if not total:
        return "the number of devices is not printed"
    if known or total % len(named):
        return f"how many of {total} devices are of which kind is not printed"
    return [total // len(named)] * len(named)


def _ranks(run: Run) -> int:
    """Devices by the printed degrees of the plan; 0 where its data parallel degree is not printed."""
    return (run.whole("tp") or 1) * (run.whole("pp") or 1) * (run.whole("cp") or 1) * (run.whole("dp") or 0)


def _kind(run: Run, named: Named, *, index: int, count: int, assumed: list[str]) -> _Kind:
    """A kind of device with what the columns say of it; the two devices of one board each for itself."""
    each, sizes = run.numbers("gpus_per_node"), run.numbers("gpu_mem_gb")
    memory = _entry(sizes, index) or named.memory_gb
    device = known_device(named.name, memory_gb=_entry(sizes, index))
    assert device is not None
    if memory is None and _SIZED.search(device.name):
        assumed.append(f"{device.name}, for no memory is told")
    per_node = named.per_node or (int(_entry(each, index) or 0) or None)
    board = _TWO_DIES.get(device.name)
    said = _DIES.search(named.name) is not None
    if board and not said and _counts_boards(run, memory=memory, board=board, per_node=per_node):
        assumed.append(f"{count} boards of {named.name}, of two devices each")
        return _Kind(name=named.name, device=device, count=2 * count, per_node=2 * (per_node or 4), memory_gb=None)
    return _Kind(name=named.name, device=device, count=count, per_node=per_node, memory_gb=memory)


def _counts_boards(run: Run, *, memory: float | None, board: float, per_node: int | None) -> bool:
    """Whether `n_gpus` are boards of two devices, by their memory or four a node, and no printed plan denies it."""
    if _ranks(run) and _ranks(run) == run.whole("n_gpus"):
        return False
    return per_node == 4 or (memory is not None and abs(memory / board - 1.0) < _MEMORY_DIFFERS)


def _entry(values: tuple[float, ...], index: int) -> float | None:
    """The value of one kind of device: its own, or the only one."""
    if not values:
        return None
    return values[index] if index < len(values) else values[-1]


def _group(kind: _Kind, *, index: int, alone: bool, assumed: list[str]) -> NodeGroup:
    """The nodes of `kind`; beside other kinds they are full, as many devices in each as divide the count."""
    name = "" if alone else f"{index}-{kind.device.name.lower()}"
    usual = group_of(kind.device.name, nodes_count=1, per_node=kind.per_node, name=name)
    room = usual.devices_per_node
    if kind.count % room and not alone:
        room = max(size for size in range(1, room + 1) if kind.count % size == 0)
        usual = group_of(kind.device.name, nodes_count=1, per_node=room, name=name)
    return replace(usual, num_nodes=-(-kind.count // room), device=_memory(kind, assumed=assumed))


def slices_said(run: Run) -> int:
    """Slices of TPUs that the row says: `2 slices` in `inter_link`, `slices=2`; 0 where it says none."""
    said = _SLICES.search(f"{run.text('inter_link')}; {run.text('extra')}")
    device = named_devices(run.text("gpu"))[0].device
    return int(said[1] or said[2]) if said and device is not None and device.kind is DeviceKind.TPU else 0


def _in_slices(run: Run, group: NodeGroup) -> NodeGroup:
    """TPUs in as many slices as the row says, each a torus of its own."""
    count = slices_said(run)
    if not count or group.num_nodes % count:
        return group
    return replace(group, rack_nodes=group.num_nodes // count)


def _in_segments(group: NodeGroup, *, assumed: list[str]) -> NodeGroup:
    """Where racks would be left in part, segments of them; of pods of TPUs, whose slices come in any size, as many
    nodes of each."""
    racked, found = group.rack_nodes, in_segments(group)
    if group.device.kind is DeviceKind.TPU and racked and group.num_nodes > racked and group.num_nodes % racked:
        slices = group.num_nodes // -(-group.num_nodes // racked)
        found = group if group.num_nodes % slices else replace(group, rack_nodes=slices)
    if found.rack_nodes != racked:
        assumed.append(f"{found.rack_nodes} of the {racked} nodes of every rack")
    return found


def _memory(kind: _Kind, *, assumed: list[str]) -> DeviceSpec:
    """The device with the printed memory where that is plainly another size, of one device and not of its board.

    One that is sold with no such memory is another device, of which the rates of this one are taken by analogy.
    """
    printed, device = kind.memory_gb, kind.device
    share = printed * 2**30 / device.memory_bytes if printed else 1.0
    if abs(share - 1.0) < _MEMORY_DIFFERS or share > 1.9:
        return device
    assumed.append(f"the rates of {device.name}, which has other memory than {printed:g} GB")
    matrix = f"by analogy with {device.name}: memory of another size"
    return replace(device, memory_bytes=share * device.memory_bytes, sources={**device.sources, "matrix": matrix})


def _divided(group: NodeGroup, *, parts: int) -> list[NodeGroup]:
    """The nodes of `group` in as many islands, as equal as can be."""
    counts = [group.num_nodes // parts + (index < group.num_nodes % parts) for index in range(parts)]
    return [
        replace(group, name=f"{group.name}-{index}", num_nodes=count) for index, count in enumerate(counts) if count
    ]


def _joined(run: Run, groups: list[NodeGroup], apart: Islands, *, assumed: list[str]) -> ClusterSpec:
    """The cluster of `groups` on the networks that the source names, and what is between them."""
    printed, wide = run.numbers("inter_gbit_per_node"), None
    several = len(apart.each) == len(groups) > 1
    made = [
        joined(run, group, link=apart.each[index if several else 0], gigabits=_entry(printed, index))
        for index, group in enumerate(groups)
    ]
    for index, group in enumerate(made):
        link = apart.each[index if several else 0]
        open_left = network_assumed(group, link=link, gigabits=_entry(printed, index))
        assumed += [open_left] if open_left and open_left not in assumed else []
    if several and apart.between:
        wide = between_sites(apart.between, nodes=min(group.num_nodes for group in made))
        if wide is None:
            assumed.append("islands are joined by the slower of their networks: what is between them has no rate")
        else:
            made = [replace(group, site=f"island {index}") for index, group in enumerate(made)]
    return ClusterSpec(name=run.text("gpu"), groups=tuple(made), wide_area=wide, source=run.source)
