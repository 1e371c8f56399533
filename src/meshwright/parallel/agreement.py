"""Data ranks of a user's module agree: on the order of its sharded blocks, and on which parameters a step used."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from meshwright.parallel.mesh import Mesh
from meshwright.parallel.torch_compat import watch_passes
from meshwright.spec.errors import ConfigError, Problem
from meshwright.spec.plan import AxisName

_FORWARD_ENDS, _BACKWARD_ENDS = "ends its forward", "ends its backward"
_VERBS = ("runs", "goes back through", "reduces gradients of")


class Peers:
    """The data ranks of this one, which meet over gloo: their hosts do, and no device waits. Making it is collective
    over them."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self._group = dist.new_group(
            list(ranks), backend="gloo", use_local_synchronization=True, group_desc="agreement"
        )
        here, size = self._group.rank(), self._group.size()
        self._before, self._behind = (here - 1) % size, (here + 1) % size

    @property
    def before(self) -> int:
        """The rank that this one hears of."""
        return dist.get_global_rank(self._group, self._before)

    def told(self, number: int) -> int:
        """What the rank before this one told when this one told `number`: where all ranks tell the same, they hear it.
        Collective."""
        own, other = torch.tensor([number]), torch.zeros(1, dtype=torch.int64)
        receiving = dist.irecv(other, group=self._group, group_src=self._before)
        sending = dist.isend(own, group=self._group, group_dst=self._behind)
        assert receiving is not None
        assert sending is not None
        receiving.wait()
        sending.wait()
        return int(other)

    def any(self, flags: Sequence[bool]) -> list[bool]:
        """Which of `flags` any rank has. Collective."""
        found = torch.tensor(flags, dtype=torch.int32)
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=self._group)
        return [bool(entry) for entry in found.tolist()]


def peers_of(mesh: Mesh) -> Peers | None:
    """The data ranks of this one; None where it is alone. Collective over them."""
    submesh = mesh.along(AxisName.REPLICATE, AxisName.SHARD)
    return None if submesh is None else Peers(submesh.mesh.flatten().tolist())


class Usage:
    """Which parameters got gradients in a step: those that no data rank used have none, as on one device."""

    def __init__(self, module: nn.Module, *, peers: Peers | None) -> None:
        self._peers = peers
        self._parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self._used: set[nn.Parameter] = set()
        self._empty: set[nn.Parameter] | None = None

    def follow_autograd(self) -> None:
        """Notes are made where autograd forms gradients; those of shards are not formed so."""
        for parameter in self._parameters if self._peers is not None else ():
            parameter.register_post_accumulate_grad_hook(self.note)

    def follow_outside(self, *, ranks: int) -> None:
        """What autograd forms of shards is of uses outside of any forward, a penalty for example. All `ranks` make the
        same of it, each of its own shards, so that nothing sums it."""
        for parameter in self._parameters:
            parameter.register_hook(partial(self._outside, parameter, ranks))

    def _outside(self, parameter: nn.Parameter, ranks: int, gradient: Tensor) -> Tensor:
        self.note(parameter)
        return gradient * ranks

    def note(self, parameter: nn.Parameter) -> None:
        """`parameter` got a gradient on this rank."""
        self._used.add(parameter)

    def before_backward(self) -> None:
        if self._empty is None:
            self._empty = {parameter for parameter in self._parameters if parameter.grad is None}

    def after_backward(self) -> None:
        """After the last backward of a step: what had no gradient before it, and got none on any rank, has none."""
        if self._peers is not None and self._parameters:
            used = self._peers.any([parameter in self._used for parameter in self._parameters])
            for parameter, is_used in zip(self._parameters, used, strict=True):
                if not is_used and self._empty is not None and parameter in self._empty:
                    parameter.grad = None
        self._used, self._empty = set(), None


class Order:
    """The passes of the sharded blocks of a module, which its data ranks have to make in one order: the collectives of
    one block would meet those of another.

    Each is compared with the rank before this one ahead of its collectives. Raises ConfigError where they differ.
    """

    def __init__(self, module: nn.Module, *, name: str, peers: Peers, usage: Usage) -> None:
        self._peers, self._where = peers, name
        self._acts = [_FORWARD_ENDS, _BACKWARD_ENDS]
        for path, unit in module.named_modules():
            if isinstance(unit, FSDPModule):
                acts = [f"{verb} {path or name}" for verb in _VERBS]
                self._acts += acts
                forward, backward, reduces = (partial(self._meet, act) for act in acts)
                watch_passes(unit, forward, partial(self._goes_back, backward), reduces, used=usage.note)
        self._numbers = {act: number for number, act in enumerate(self._acts)}
        module.register_forward_hook(self._forward_ends)

    def backward_ends(self) -> None:
        self._meet(_BACKWARD_ENDS)

    def _forward_ends(self, _module: nn.Module, _args: object, _output: object) -> None:
        self._meet(_FORWARD_ENDS)

    def _goes_back(self, meet: Callable[[], None]) -> None:
        if torch.is_grad_enabled():
            what = "gradients that have gradients (create_graph=True), and a backward frees what shards were gathered"
            raise ConfigError(Problem(what=what, where=self._where, fix="use replicate and tensor, and shard nothing"))
        meet()

    def _meet(self, act: str) -> None:
        other = self._acts[self._peers.told(self._numbers[act])]
        if other != act:
            what = f"this rank {act} where rank {self._peers.before} {other}"
            why = "what they gather or reduce would be of unlike blocks"
            fix = "let all data ranks run the same blocks in one order: draw alike which are left out, and call an "
            fix += "expert without tokens with none; or shard nothing"
            raise ConfigError(Problem(what=what, where=self._where, why=why, fix=fix))
