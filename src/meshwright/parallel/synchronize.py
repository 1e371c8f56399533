"""How the gradients of a stage meet those of the other data parallel ranks, over the microbatches of a step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from torch import nn
from torch.distributed.fsdp import FSDPModule

from meshwright.parallel.torch_compat import backward_formed, gradients_formed
from meshwright.spec.plan import Sharding


class Synchronizer(Protocol):
    """Told of every backward of one stage; gradients add up over microbatches and data parallel ranks."""

    def begin(self, *, step: int) -> None:
        """Called before anything else of step `step`, the same number on every rank."""

    def after_forward(self, *, last: bool) -> None:
        """Called after each microbatch's forward; `last` says that no other follows in this step."""

    def before_backward(self, *, last: bool) -> None:
        """Called before each microbatch's backward; `last` says that no other follows in this step."""

    def before_input(self) -> None:
        """Called before the half of a split backward that gives the input's gradient."""

    def before_weights(self, *, last: bool) -> None:
        """Called before the half that gives the matrices'; `last` as in `before_backward`."""

    def unit_done(self, unit: nn.Module) -> None:
        """Called within that half when the gradients of `unit`, an embedding, a layer or a head, are formed."""

    def after_weights(self) -> None:
        """Called after that half."""

    def after_backward(self) -> None:
        """Called once a step, after the last microbatch's backward: gradients are then those of the whole batch."""

    def after_evaluation(self) -> None:
        """Called after forward passes that no backward follows."""


class ShardedGradients:
    """Gradients of a part under `fully_shard`, by what the sharding of each module in it divides (ZeRO, 1910.02054).

    ZeRO-1 keeps whole gradients and whole parameters until the step's last backward, and reduces once. ZeRO-2 reduces
    after every microbatch, so that only shards of gradients last. ZeRO-3 also frees parameters after every pass (after
    forward by `reshard_after_forward` of `fully_shard`). The replicate axis, where there is one, is reduced once in
    all three. Gradients are summed, never averaged.
    """

    def __init__(self, part: FSDPModule, *, shardings: Mapping[nn.Module, Sharding]) -> None:
        assert isinstance(part, nn.Module)
        self._part, self._goes_back = part, False
        self._modules = {module: shardings[module] for module in part.modules() if isinstance(module, FSDPModule)}
        assert Sharding.NONE not in self._modules.values(), "a part that is not sharded has BucketedGradients"
        for module in self._modules:
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)

    def begin(self, *, step: int) -> None:
        """Nothing: every step is alike."""

    def after_forward(self, *, last: bool) -> None:
        """Nothing: ZeRO-3 frees parameters in forward itself."""

    def before_backward(self, *, last: bool) -> None:
        self._goes_back = True
        for module, sharding in self._modules.items():
            module.set_requires_gradient_sync(last or sharding is not Sharding.OPTIMIZER, recurse=False)
            module.set_reshard_after_backward(last or sharding is Sharding.PARAMETERS, recurse=False)
        # The first of these says that replicas reduce every time too.
        self._part.set_requires_all_reduce(last)

    def before_input(self) -> None:
        """Nothing is reduced before the matrices' gradients are there too."""
        self._goes_back = True
        self._part.set_requires_gradient_sync(False)
        for module, sharding in self._modules.items():
            module.set_reshard_after_backward(sharding is Sharding.PARAMETERS, recurse=False)

    def before_weights(self, *, last: bool) -> None:
        self.before_backward(last=last)

    def unit_done(self, unit: nn.Module) -> None:
        inner = [module for module in unit.modules() if module is not unit]
        for module in (*inner, unit):
            if isinstance(module, FSDPModule):
                gradients_formed(module)

    def after_weights(self) -> None:
        gradients_formed(self._part)
        backward_formed(self._part)

    def after_backward(self) -> None:
        """The last backward reduced; where none came, parameters are freed as at its end."""
        if not self._goes_back:
            backward_formed(self._part)
        self._goes_back = False

    def after_evaluation(self) -> None:
        """Parameters are shards again: kept whole they would outlive the optimizer's next update."""
        for module in self._modules:
            module.reshard()


class SharedGradients(ShardedGradients):
    """As above where all microbatches pass a stage in a row, forward and backward (breadth-first, 2211.05953): they
    share one gather of its parameters each way, and one reduction of its gradients.
    """

    def __init__(self, part: FSDPModule, *, shardings: Mapping[nn.Module, Sharding]) -> None:
        super().__init__(part, shardings=shardings)
        part.set_reshard_after_forward(False)

    def after_forward(self, *, last: bool) -> None:
        for module, sharding in self._modules.items():
            if last and sharding is Sharding.PARAMETERS:
                module.reshard()

    def before_backward(self, *, last: bool) -> None:
        self._goes_back = True
        self._part.set_requires_gradient_sync(last)
        self._part.set_requires_all_reduce(last)
        self._part.set_reshard_after_backward(last)
