"""Laid: the stages of one rank under a plan, and one training step on them."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.nn import Decoder, token_losses
from meshwright.nn.loss import AS_WRITTEN, Vocabulary
from meshwright.parallel.balance import Balance
from meshwright.parallel.clip import clip_gradients, gradient_norm, is_first_copy, local_part, scale_gradients
from meshwright.parallel.collectives import exchange
from meshwright.parallel.compile import compile_layers, uncompile_layers
from meshwright.parallel.context import ContextShare
from meshwright.parallel.grid import TensorRanks
from meshwright.parallel.layered import LayeredExecutor
from meshwright.parallel.mesh import Mesh
from meshwright.parallel.pipeline import PipelineExecutor
from meshwright.parallel.precision import Dtypes
from meshwright.parallel.shards import sum_over
from meshwright.parallel.split import WeightGradients
from meshwright.parallel.synchronize import Synchronizer
from meshwright.spec.plan import AxisName, Design
from meshwright.spec.report import LineName
from meshwright.spec.span import Recorder
from meshwright.spec.targets import MASKED


@dataclass(frozen=True, slots=True, kw_only=True)
class Parted:
    """One local stage, how its gradients meet, which of them are summands over groups of tensor ranks, where split
    backwards put off those of its matrices, and what is kept of gradients that do not travel whole.
    """

    module: Decoder
    synchronizer: Synchronizer
    partial: Mapping[str, tuple[dist.ProcessGroup, ...]]
    weights: WeightGradients | None = None
    residuals: tuple[Tensor, ...] = ()


class Laid:
    """A model laid over the mesh, as this rank sees it. `parts` are its stages in model order.

    `num_targets` is how many targets the last batch had over all ranks, masked ones left out: an integer of a
    step where the job masks none and no row is empty, else a tensor of one.
    """

    def __init__(
        self,
        *,
        design: Design,
        mesh: Mesh,
        device: torch.device,
        dtypes: Dtypes,
        parts: tuple[Parted, ...],
        axis: TensorRanks | None,
        vocabulary: Vocabulary,
        recorder: Recorder,
        share: ContextShare | None = None,
    ) -> None:
        self._share = share
        self.design, self.mesh, self.device, self.dtypes = design, mesh, device, dtypes
        self.parts: tuple[nn.Module, ...] = tuple(part.module for part in parts)
        self.recorder = recorder
        self._parted, self._axis, self._vocabulary = parts, axis, vocabulary
        self._partial = [
            (parameter, part.partial[name])
            for part in parts
            for name, parameter in part.module.named_parameters()
            if name in part.partial
        ]
        self.num_targets: Tensor | int = design.plan.batch_tokens
        self._number, self._loss_scale = 0, 1.0
        self._loss_passes = AS_WRITTEN
        self._pipeline = self._executor() if len(design.plan.stages) > 1 else None
        self._balance = Balance(self.parts, model=design.model, group=mesh.everyone, device=device)

    def compile(self) -> None:
        """Layers and the loss compile at their next pass. Raises EnvironmentUnfit when there is no C++ compiler."""
        compile_layers(self.parts)
        self._loss_passes = AS_WRITTEN.compiled()

    def uncompile(self) -> None:
        """All runs again as it was written."""
        uncompile_layers(self.parts)
        self._loss_passes = AS_WRITTEN

    def step(
        self,
        tokens: Tensor,
        targets: Tensor,
        documents: Tensor | None = None,
        ahead: Tensor | None = None,
        *,
        number: int | None = None,
        loss_scale: float = 1.0,
    ) -> Tensor:
        """Every microbatch went forward and backward; gradients of the whole batch's mean loss are in place.

        All are (sequences, length) of this data rank, the same on each of its tensor, context and pipeline ranks;
        `ahead` is how many later tokens each sees under a prefix mask. Gradients of the step before are dropped.
        `number` is the step's in the run, by which gradients are compressed; one more than the last unless it is said.
        In fp16 losses go backward `loss_scale` times as large, and gradients are of the loss as it is in the end.
        Returns that mean, the same on every rank: of the targets that are not MASKED; where every one is, it and the
        gradients are 0.
        """
        for _, parameter in self.named_parameters():
            parameter.grad = None
        self._number = self._number + 1 if number is None else number
        self._scale_losses(loss_scale if self.dtypes.scales_losses else 1.0)
        for synchronizer in self.synchronizers:
            synchronizer.begin(step=self._number)
        some = self.design.job.data.masks or self.design.plan.empty_rows > 0
        self.num_targets = self._targets_everywhere(targets, masked=some)
        tokens, targets = self._own(tokens, targets, documents, ahead)
        self._balance.begin()
        if self._pipeline is not None:
            share = self._pipeline.step(tokens, targets, documents, ahead)
        else:
            share = self._accumulate(tokens, targets, documents, ahead)
        start = time.perf_counter()
        self._sum_partial()
        self._sum_tied()
        if self._loss_scale != 1.0:
            scale_gradients(self._copies(), 1.0 / self._loss_scale)
        self._balance.end()
        if self._partial or self._is_tied_end:
            self.recorder.record(LineName.GRADIENTS, start, time.perf_counter() - start)
        return self._everywhere(share) / self._loss_scale

    def evaluate(
        self, tokens: Tensor, targets: Tensor, documents: Tensor | None = None, ahead: Tensor | None = None
    ) -> Tensor:
        """Mean cross entropy of these targets over all data ranks, without z-loss, the same on every rank.

        No gradient is made. Every data rank gives as many sequences, of which any may have no target.
        """
        self.num_targets = self._targets_everywhere(targets, masked=True)
        tokens, targets = self._own(tokens, targets, documents, ahead)
        with torch.no_grad():
            if self._pipeline is not None:
                share = self._pipeline.evaluate(tokens, targets, documents, ahead)
            else:
                share = self._forward_only(tokens, targets, documents, ahead)
        return self._everywhere(share)

    def expert_load(self) -> Tensor | None:
        """In the last step, the most that an expert was chosen over the mean of its layer's, in the worst layer.

        None where the model has no experts. The same on every rank, and collective.
        """
        return self._balance.load()

    def clip(self, max_norm: float | None) -> Tensor:
        """The global norm of the gradients before clipping; above `max_norm` they are scaled down to it."""
        held = {f"{place}.{name}": p for place, part in enumerate(self._parted) for name, p in self._counted(part)}
        norm = gradient_norm(held, mesh=self.mesh, device=self.device)
        if max_norm is not None:
            clip_gradients(self._copies(), norm=norm, max_norm=max_norm)
        return norm

    def first_copies(self) -> list[nn.Parameter]:
        """Those of this rank whose elements it counts where each of the whole model is to count once."""
        held = [pair for part in self._parted for pair in self._counted(part)]
        return [parameter for name, parameter in held if is_first_copy(name, parameter, self.mesh)]

    def undo(self) -> None:
        """What the last step left besides gradients is as before it: biases of routers.

        What was kept of gradients that do not travel whole is dropped, for the step has spoilt it.
        """
        self._balance.undo()
        for left in (x for part in self._parted for x in part.residuals):
            left.zero_()

    def is_finite(self) -> bool:
        """Every parameter of the model is a finite number. The same on every rank, and collective."""
        values = [local_part(parameter.detach()) for _, parameter in self.named_parameters()]
        finite = torch.tensor(all(bool(torch.isfinite(x).all()) for x in values), device=self.device).int()
        if self.mesh.everyone is not None:
            dist.all_reduce(finite, op=dist.ReduceOp.MIN, group=self.mesh.everyone)
        return bool(finite)

    def named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Names as the whole model has them; a tied table held at both ends of one rank appears twice."""
        return [pair for part in self.parts for pair in part.named_parameters()]

    def residuals(self) -> dict[str, Tensor]:
        """What this rank has still to send of gradients that do not travel whole: of this plan and this rank alone."""
        own = f"{self.design.plan.digest()}.{self.mesh.rank}"
        left = [x for part in self._parted for x in part.residuals]
        return {f"{own}.{index}": x for index, x in enumerate(left)}

    def loss_share(self, logits: Tensor, targets: Tensor) -> Tensor:
        """What these tokens add to the mean loss of the whole batch; z-loss only where gradients are made."""
        z_loss = self.design.job.z_loss if torch.is_grad_enabled() else 0.0
        if self._axis is not None:
            targets = self._axis.own_tokens(targets)
        losses = token_losses(logits, targets, z_loss=z_loss, vocabulary=self._vocabulary, passes=self._loss_passes)
        count = self.num_targets
        share = losses.sum() / (count if isinstance(count, int) else count.clamp(min=1))
        return share * self._loss_scale if torch.is_grad_enabled() and self._loss_scale != 1.0 else share

    def _scale_losses(self, scale: float) -> None:
        """All that goes backward is `scale` times as large, and so is what is kept of gradients."""
        ratio, self._loss_scale = scale / self._loss_scale, scale
        if ratio != 1.0:
            self._balance.weigh(ratio)
            for left in (x for part in self._parted for x in part.residuals):
                left.mul_(ratio)

    def _copies(self) -> list[nn.Parameter]:
        """Parameters of this rank; a tied table that it holds at both ends is there twice."""
        return [parameter for _, parameter in self.named_parameters()]

    def _targets_everywhere(self, targets: Tensor, *, masked: bool) -> Tensor | int:
        """Targets of all data ranks that are not MASKED, on every rank; collective where there may be `masked` ones."""
        if not masked:
            return targets.numel() * self.mesh.data_size
        count = (targets != MASKED).sum()
        if self.mesh.everyone is None:
            return count
        dist.all_reduce(count, group=self.mesh.everyone)
        return count // (self.design.plan.world_size // self.mesh.data_size)

    def _own(
        self, tokens: Tensor, targets: Tensor, documents: Tensor | None, ahead: Tensor | None
    ) -> tuple[Tensor, ...]:
        """What the context axis leaves this rank of every sequence."""
        if self._share is None:
            return tokens, targets
        return self._share.cut((tokens, targets), documents, ahead)

    @property
    def synchronizers(self) -> tuple[Synchronizer, ...]:
        """How the gradients of each of `parts` meet."""
        return tuple(part.synchronizer for part in self._parted)

    def _accumulate(self, tokens: Tensor, targets: Tensor, documents: Tensor | None, ahead: Tensor | None) -> Tensor:
        part, synchronizer = self._parted[0].module, self._parted[0].synchronizer
        size = self.design.plan.microbatch
        count = -(-len(tokens) // size)
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for index in range(count):
            rows = slice(index * size, (index + 1) * size)
            start = time.perf_counter()
            logits = part(tokens[rows], documents=_some(documents, rows), ahead=_some(ahead, rows))
            share = self.loss_share(logits, targets[rows])
            del logits
            middle = time.perf_counter()
            synchronizer.before_backward(last=index == count - 1)
            share.backward()
            total += share.detach()
            stop = time.perf_counter()
            self.recorder.record(LineName.FORWARD, start, middle - start, stage=0, microbatch=index)
            self.recorder.record(LineName.BACKWARD, middle, stop - middle, stage=0, microbatch=index)
        start = time.perf_counter()
        synchronizer.after_backward()
        self.recorder.record(LineName.GRADIENTS, start, time.perf_counter() - start, stage=0)
        return total

    def _forward_only(self, tokens: Tensor, targets: Tensor, documents: Tensor | None, ahead: Tensor | None) -> Tensor:
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        size = self.design.plan.microbatch
        for index in range(0, len(tokens), size):
            rows = slice(index, index + size)
            logits = self.parts[0](tokens[rows], documents=_some(documents, rows), ahead=_some(ahead, rows))
            total += self.loss_share(logits, targets[rows])
        self._parted[0].synchronizer.after_evaluation()
        return total

    def _everywhere(self, share: Tensor) -> Tensor:
        """The sum of the data and context ranks' shares, each counted on one tensor rank of the last stage; on a grid
        of tensor ranks, on one of those that know the losses of the same tokens."""
        if self.mesh.everyone is None:
            return share
        counts = self.parts[-1].has_head and (self._axis is None or self._axis.counts_losses)
        total = share.detach().to(torch.float64) * (1.0 if counts else 0.0)
        dist.all_reduce(total, group=self.mesh.everyone)
        return total

    def _sum_partial(self) -> None:
        """Gradients that are summands over tensor ranks are whole."""
        sum_over(
            [(local_part(p.grad), groups) for p, groups in self._partial if p.grad is not None], device=self.device
        )

    @property
    def _is_tied_end(self) -> bool:
        """This rank holds one of the two copies of a tied table."""
        return any(part.module.copied_table for part in self._parted) and 0 not in self.design.plan.frozen_blocks

    def _sum_tied(self) -> None:
        """Both copies of a tied table, on the first and the last pipeline rank, hold the sum of their gradients."""
        if not self._is_tied_end:
            return
        tables = [part.module.embedding.tokens.weight for part in self._parted if part.module.embedding is not None]
        gradients = [local_part(table.grad) for table in tables if table.grad is not None]
        if len(gradients) == 2:
            gradients[0].add_(gradients[1])
            gradients[1].copy_(gradients[0])
            return
        group = self.mesh.group(AxisName.PIPELINE)
        assert group is not None
        last = self.design.plan.stages[-1].rank
        peer = last if self._parted[0].module.embeds else 0
        other = exchange(gradients[0].contiguous().to(self.device), group=group, peer=peer)
        gradients[0].add_(other.to(gradients[0].device))

    def _counted(self, part: Parted) -> list[tuple[str, nn.Parameter]]:
        """Parameters of a stage without the second copy of a tied table."""
        copy = part.module.tied and not part.module.embeds
        return [pair for pair in part.module.named_parameters() if not (copy and pair[0].startswith("embedding."))]

    def _executor(self) -> PipelineExecutor | LayeredExecutor:
        plan, group = self.design.plan, self.mesh.group(AxisName.PIPELINE)
        synchronizers = [part.synchronizer for part in self._parted]
        if group is None:
            return LayeredExecutor(
                parts=self.parts,
                synchronizers=synchronizers,
                plan=plan,
                loss_function=self.loss_share,
                recorder=self.recorder,
            )
        shape = (
            plan.microbatch,
            plan.sequence_length // (plan.context * plan.schedule.slices),
            self.design.model.width,
        )
        if self._axis is not None:
            shape = self._axis.hidden(*shape)
        return PipelineExecutor(
            parts=self.parts,
            synchronizers=synchronizers,
            weights=[part.weights for part in self._parted],
            plan=plan,
            group=group,
            device=self.device,
            hidden=torch.empty(shape, dtype=self.dtypes.compute, device="meta"),
            loss_function=self.loss_share,
            recorder=self.recorder,
        )


def _some(x: Tensor | None, rows: slice) -> Tensor | None:
    return None if x is None else x[rows]
