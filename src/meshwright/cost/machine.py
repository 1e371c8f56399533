"""One node group's prices: seconds of every block kind and the collectives around it, for every row of a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from meshwright.cost.kinds import BlockSeconds, combine, price_block
from meshwright.cost.layouts import Kind
from meshwright.cost.links import Links, RoundLinks, copy_links, lay_links
from meshwright.cost.network import Linear, collective, send, send_inside
from meshwright.cost.optimizers import UpdateRates, update_rates
from meshwright.cost.overlap import Contention
from meshwright.cost.placement import distinct, ring, site_links, strides
from meshwright.cost.processor import Sharing, share
from meshwright.cost.software import Software
from meshwright.cost.states import StateBytes, state_bytes
from meshwright.cost.synchronize import DataLinks, SyncSeconds, synchronize, turns
from meshwright.cost.table import PlanTable
from meshwright.cost.work import FloatArray
from meshwright.spec.cluster import ClusterSpec, Collective, DeviceKind, NodeGroup
from meshwright.spec.job import JobSpec
from meshwright.spec.model import ModelSpec
from meshwright.spec.plan import AxisName


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What a step costs on nodes like those of `group`, block kind by block kind.

    `contention` is between work and what travels between data parallel ranks; None where nothing runs beside work.
    `rounds` is what learners meet by, None where no row has some. Tensor ranks sum gradients by `halves`, those that
    hold the same one of so many key-value heads by `copies`, the first and the last pipeline rank by `ends`.
    """

    group: NodeGroup
    software: Software
    contention: Contention | None
    sharing: Sharing
    sizes: StateBytes
    blocks: list[BlockSeconds]
    syncs: list[SyncSeconds]
    data: Mapping[int | None, DataLinks]
    expert_data: DataLinks
    agree: FloatArray
    action: FloatArray
    update: UpdateRates | None
    rounds: RoundLinks | None
    halves: Linear
    copies: Mapping[int, Linear]
    ends: Linear


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """What every block kind costs on nodes like those of a group, apart from what its data parallel ranks exchange;
    `sharing` and `contention` as in Machine."""

    links: Links
    sharing: Sharing
    contention: Contention | None
    blocks: list[BlockSeconds]


def price_blocks(
    group: NodeGroup,
    table: PlanTable,
    kinds: Sequence[Kind],
    *,
    cluster: ClusterSpec,
    job: JobSpec,
    software: Software,
) -> Blocks:
    """The blocks of `table`'s rows on `group`; raises ConfigError where its device lacks a figure they need."""
    sharing = share(group, world=table.world.astype(np.float64), pipeline=table.pipeline.astype(np.float64))
    links = lay_links(table, group=group, cluster=cluster, software=software)
    combination = combine(table, device=group.device, job=job, software=software)
    priced = partial(
        price_block, group=group, software=software, links=links.layer, slow=sharing.lockstep, speed=sharing.speed
    )
    return Blocks(
        links=links,
        sharing=sharing,
        contention=links.layer.contention if software.overlap and group.device.kind is not DeviceKind.CPU else None,
        blocks=[priced(kind, kind.rows(table), combination) for kind in kinds],
    )


def machine(
    group: NodeGroup,
    table: PlanTable,
    kinds: Sequence[Kind],
    *,
    cluster: ClusterSpec,
    job: JobSpec,
    software: Software,
) -> Machine:
    """The prices of `table`'s rows on `group`; raises ConfigError where its device lacks a figure they need."""
    found = price_blocks(group, table, kinds, cluster=cluster, job=job, software=software)
    links, sharing = found.links, found.sharing
    sizes, shared = state_bytes(table, narrow=software.narrow_parameters), turns(table)
    tables = [kind.rows(table) for kind in kinds]
    over: dict[int | None, DataLinks] = {None: links.data}
    for kind, rows in zip(kinds, tables, strict=True):
        if kind.shards not in over:
            over[kind.shards] = lay_links(rows, group=group, cluster=cluster, software=software).data
    syncs = [
        synchronize(
            block,
            rows,
            sizes=sizes,
            links=over[kind.shards],
            experts=links.expert_data,
            contention=found.contention,
            software=software,
            device=group.device,
            turns=shared,
            backward=kind.backward,
        )
        for kind, rows, block in zip(kinds, tables, found.blocks, strict=True)
    ]
    return Machine(
        group=group,
        software=software,
        contention=found.contention,
        sharing=sharing,
        sizes=sizes,
        blocks=found.blocks,
        syncs=syncs,
        data=over,
        expert_data=links.expert_data,
        agree=links.everyone.seconds(4.0) if job.optimizer.clip_norm is not None else np.zeros(len(table)),
        action=np.where(table.pipeline > 1, group.device.action_seconds, 0.0) * sharing.lockstep,
        update=update_rates(table, group=group, cluster=cluster, job=job, software=software),
        rounds=links.rounds,
        halves=links.layer.tensor.reduce,
        copies=copy_links(table, kinds, group=group, cluster=cluster, software=software),
        ends=links.ends,
    )


def hops(
    table: PlanTable, *, group: NodeGroup, cluster: ClusterSpec, model: ModelSpec, job: JobSpec, software: Software
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Seconds to send a microbatch's hidden features to the next stage: in a node or rack, beyond, to another site."""
    size = state_bytes(table).compute * table.microbatch * job.sequence_length / table.context * model.width
    split = np.where(software.scatters_transfers, table.tensor, table.residual_parts)
    apart = strides(table)[AxisName.PIPELINE]
    senders = np.minimum(float(group.devices_per_node), apart)
    near = send_inside(group, senders=senders)
    far = send(group.nic, senders=senders, adapters=float(group.nics))
    gather = np.zeros(len(table))
    if software.scatters_transfers:
        alike, inverse = distinct(table)
        around = ring(alike, (AxisName.TENSOR,), group=group, cluster=cluster)
        joined = collective(Collective.ALL_GATHER, around, group=group, cluster=cluster).take(inverse).seconds(size)
        gather = np.where(table.sequence_parallel, 0.0, joined)
    wide = far.seconds(size / split) + gather
    if between := [link for link in site_links(cluster) if link is not None]:
        slowest = min(between, key=lambda link: link.achieved)
        beyond = replace(slowest, latency_seconds=max(link.latency_seconds for link in between))
        over = send(beyond, senders=apart.astype(np.float64), adapters=1.0)
        wide = over.seconds(size / split) + gather
    return near.seconds(size / split) + gather, far.seconds(size / split) + gather, wide
