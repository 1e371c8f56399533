"""How many nodes of every rack a cluster has where it does not fill its racks."""

from __future__ import annotations

from dataclasses import replace

from meshwright.spec.cluster import DeviceKind, NodeGroup


def in_segments(group: NodeGroup) -> NodeGroup:
    """The group with as many nodes of each rack as the largest power of two in it, 16 of an NVL72's 18, where the
    nodes fill such segments and not whole racks; the group itself where not, or where one rack holds all of it.

    So batch systems give nodes out (SLURM's topology/block, `--segment 16` in NVIDIA's scripts for GB200), so that
    groups of 2^n ranks stay in a rack. Pods of TPUs are not racks of nodes: their slices come in many sizes.
    """
    racked = group.rack_nodes
    if not racked or group.device.kind is DeviceKind.TPU or group.num_nodes <= racked or group.num_nodes % racked == 0:
        return group
    segment = 2 ** (racked.bit_length() - 1)
    return group if group.num_nodes % segment else replace(group, rack_nodes=segment)
