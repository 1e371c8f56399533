"""What one device gives, by plain autograd, and what each rank of a layout gives."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy
import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import functional

from meshwright.nn import Decoder, initialize
from meshwright.nn.context import Context
from meshwright.nn.mixture import MixtureOfExperts
from meshwright.parallel import Laid, build_optimizer, lay
from meshwright.parallel.optimizer import LocalOptimizer, block_of
from meshwright.parallel.shards import held_start
from meshwright.spec.job import DataSpec, Source
from meshwright.spec.model import ModelSpec
from meshwright.spec.optimizer import Optimizer
from meshwright.spec.plan import Design, Offload, Plan
from meshwright.spec.targets import MASKED
from meshwright.train.feed import Feed
from tests.parallel.offload_cases import copying
from tests.parallel.reference_optimizers import update
from tests.support.meshes import mesh_over

SEED = 5
TOLERANCE = 1e-9
# Microbatches of each data rank whose loss is asked for without gradient: a second one is all that more would show.
EVALUATED = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One training step: its loss, every gradient, their norm, the parameters after it, and with those the loss of
    every token without gradient, (count, length), nan where it is masked; and the step `before` it, where one was."""

    loss: float
    evaluation: numpy.ndarray
    norm: float
    gradients: dict[str, numpy.ndarray]
    parameters: dict[str, numpy.ndarray]
    before: Outcome | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What a rank holds of a tensor: `values`, which begin at `start` in the whole."""

    values: numpy.ndarray
    start: tuple[int, ...]

    def of(self, whole: numpy.ndarray) -> numpy.ndarray:
        """The same part of `whole`: a view."""
        place = zip(self.start, self.values.shape, strict=True)
        return whole[(*(slice(first, first + size) for first, size in place), ...)]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankOutcome:
    """One training step as one rank has it: its own part of every gradient and parameter of its stages, and after it
    the mean loss without gradient of the sequences that were `evaluated`; and the step `before` it, where one was."""

    loss: float
    evaluation: float
    evaluated: tuple[int, ...]
    norm: float
    gradients: dict[str, Part]
    parameters: dict[str, Part]
    before: RankOutcome | None = None


class Documents(StrEnum):
    """How sequences are packed: one document each, two of unlike lengths, or many of one to four tokens."""

    ONE = "one"
    TWO = "two"
    MANY = "many"


class Masks(StrEnum):
    """Which targets are masked: none, two of five, or all of the first half of the sequences (so all of some data
    ranks and microbatches) and of the first half of the others (so whole slices and parts of a context axis).
    """

    NONE = "none"
    SOME = "some"
    HALVES = "halves"


def data_of(masks: Masks) -> DataSpec:
    """What a job says of its data where targets are masked."""
    return DataSpec() if masks is Masks.NONE else DataSpec(sources=(Source(path="rows.jsonl", prompt_field="prompt"),))


def batch(
    count: int,
    length: int,
    vocab: int,
    *,
    packed: Documents = Documents.ONE,
    masks: Masks = Masks.NONE,
    step: int = 0,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Tokens, targets and documents (count, length) of a step of a test; no documents where each sequence is one."""
    generator = torch.Generator().manual_seed(11 + step)
    tokens = torch.randint(0, vocab, (count, length + 1), generator=generator)
    inputs, targets = tokens[:, :-1].clone(), tokens[:, 1:].clone()
    if masks is Masks.SOME:
        targets[torch.rand(targets.shape, generator=torch.Generator().manual_seed(3)) < 0.4] = MASKED
    if masks is Masks.HALVES:
        targets[: count // 2] = MASKED
        targets[:, : length // 2] = MASKED
    if packed is Documents.ONE:
        return inputs, targets, None
    if packed is Documents.TWO:
        cut = torch.randint(1, length, (count, 1), generator=generator)
        return inputs, targets, (torch.arange(length)[None] >= cut).int()
    begins = torch.randint(0, 3, (count, length), generator=generator) == 0
    return inputs, targets, begins.cumsum(dim=1).int()


def prompts(documents: Tensor | None, *, count: int, length: int) -> Tensor:
    """How many later tokens of its prompt each position has, (count, length), where the first 0 to 7 tokens of every
    document are its prompt."""
    generator = torch.Generator().manual_seed(7)
    ahead = torch.zeros(count, length, dtype=torch.int32)
    rows = torch.zeros(count, length) if documents is None else documents
    for row, numbers in zip(ahead, rows, strict=True):
        for number in numbers.unique():
            places = (numbers == number).nonzero().flatten()
            prompt = min(int(torch.randint(0, 8, (), generator=generator)), len(places))
            row[places[:prompt]] = torch.arange(prompt - 1, -1, -1, dtype=torch.int32)
    return ahead


def one_device(
    model: ModelSpec,
    *,
    count: int,
    length: int,
    z_loss: float,
    optimizer: Optimizer,
    packed: Documents,
    frozen: frozenset[int] = frozenset(),
    masks: Masks = Masks.NONE,
    along: Plan | None = None,
    steps: int = 1,
) -> Outcome:
    """The reference: a whole decoder, torch's own cross entropy and norm. Nothing of the parallel room. Microbatches
    learn on the paths of the plan `along`, where one is given. Every one of the `steps` has data of its own."""
    decoder = Decoder(model).double()
    initialize(decoder, seed=SEED)
    for name, parameter in decoder.named_parameters():
        parameter.requires_grad_(block_of(name, model) not in frozen)
    states: dict[str, dict[str, Tensor]] = {}
    outcome = None
    for step in range(steps):
        tokens, targets, parts = batch(count, length, model.vocab, packed=packed, masks=masks, step=step)
        ahead = prompts(parts, count=count, length=length) if model.prefix else None
        for mixture in mixtures_of(decoder):
            mixture.each, mixture.chosen = 1.0 / count, None
        decoder.zero_grad()
        logits = on_paths(decoder, along, tokens, parts) if along else decoder(tokens, documents=parts, ahead=ahead)
        plain = functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        loss = plain + z_loss * logits.logsumexp(-1)[targets != MASKED].square().mean()
        loss.backward()
        norm, gradients = _stepped(decoder, optimizer, states, step + 1)
        with torch.no_grad():
            after = token_losses(decoder(tokens, documents=parts, ahead=ahead), targets)
        kept = {**dict(decoder.named_parameters()), **dict(decoder.named_buffers())}
        outcome = Outcome(
            loss=float(loss.detach()),
            evaluation=after,
            norm=norm,
            gradients=gradients,
            parameters={name: value.detach().clone().numpy() for name, value in kept.items()},
            before=outcome,
        )
    assert outcome is not None
    return outcome


def mixtures_of(decoder: Decoder) -> list[MixtureOfExperts]:
    return [module for module in decoder.modules() if isinstance(module, MixtureOfExperts)]


def _stepped(
    decoder: Decoder, optimizer: Optimizer, states: dict[str, dict[str, Tensor]], step: int
) -> tuple[float, dict[str, numpy.ndarray]]:
    """The norm and the gradients before they were clipped; parameters and routers took step `step`, the first is 1."""
    named = {name: (p, p.grad) for name, p in decoder.named_parameters() if p.grad is not None}
    gradients = {name: gradient.clone().numpy() for name, (_, gradient) in named.items()}
    norm = torch.stack([gradient.square().sum() for _, gradient in named.values()]).sum().sqrt()
    clipped = optimizer.clip_norm is not None and norm > optimizer.clip_norm
    with torch.no_grad():
        for name, (parameter, gradient) in named.items():
            scaled = gradient * (optimizer.clip_norm / norm) if clipped else gradient
            update(name, parameter, scaled, optimizer, states.setdefault(name, {}), step)
    for mixture in mixtures_of(decoder):
        trained = any(parameter.requires_grad for parameter in mixture.parameters())
        if mixture.balance is not None and mixture.chosen is not None and trained:
            seldom = mixture.chosen.double().mean() - mixture.chosen
            mixture.balance += mixture.spec.routing.bias_rate * seldom.sign()
    return float(norm), gradients


def token_losses(logits: Tensor, targets: Tensor) -> numpy.ndarray:
    """Cross entropy of every target, shaped as they are; nan where it is masked."""
    losses = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view_as(targets)
    found: numpy.ndarray = losses.masked_fill(targets == MASKED, torch.nan).numpy()
    return found


def on_paths(decoder: Decoder, plan: Plan, tokens: Tensor, documents: Tensor | None) -> Tensor:
    """Logits of all sequences, those of each microbatch of each data rank after the stages of its path."""
    found = []
    for start in range(0, len(tokens), plan.microbatch):
        rows = slice(start, start + plan.microbatch)
        path = plan.schedule.paths[start // plan.microbatch % plan.schedule.microbatches]
        context = Context(documents=None if documents is None else documents[rows], known_angles={})
        x = decoder.embedding(tokens[rows], context)
        for stage in map(int, path.split()):
            for block in range(plan.stages[stage].start, plan.stages[stage].stop):
                x = decoder.layers[str(block - 1)](x, context) if str(block - 1) in decoder.layers else x
        found.append(decoder.head(x, decoder.embedding.tokens if decoder.tied else None))
    return torch.cat(found)


def one_rank(design: Design, packed: Documents, masks: Masks = Masks.NONE, steps: int = 1) -> RankOutcome:
    """The same steps laid out. What a plan offloads is copied there and back, as where the host's memory is another
    than the device's."""
    with ExitStack() as stack:
        if any(group.offload is not Offload.NONE for group in design.plan.groups):
            copying(stack)
        mesh = mesh_over(design)
        laid = lay(design, mesh, device="cpu", seed=SEED)
        optimizer = build_optimizer(laid, design.job.optimizer)
        outcome = None
        for step in range(steps):
            data = batch(
                design.plan.sequences,
                design.plan.sequence_length,
                design.model.vocab,
                packed=packed,
                masks=masks,
                step=step,
            )
            outcome = _one_step(laid, optimizer, data, replica=mesh.data_coordinate, before=outcome)
        assert outcome is not None
        return outcome


def _one_step(
    laid: Laid,
    optimizer: LocalOptimizer,
    data: tuple[Tensor, Tensor, Tensor | None],
    *,
    replica: int,
    before: RankOutcome | None,
) -> RankOutcome:
    """One step of data rank `replica`, and the loss after it of the last of what it read."""
    design, (tokens, targets, parts) = laid.design, data
    count, plan = design.plan.sequences, design.plan
    feed = Feed(
        batch=count,
        replica=replica,
        replicas=plan.data,
        device=laid.device,
        document_mask=parts is not None,
    )
    rows, more = slice(feed.first, feed.first + feed.held), (0, 0, 0, feed.rows - feed.held)
    ahead = prompts(parts, count=count, length=plan.sequence_length) if design.model.prefix else None
    beside = (None if x is None else functional.pad(x[rows], more) for x in (parts, ahead))
    mine = (functional.pad(tokens[rows], more), functional.pad(targets[rows], more, value=MASKED), *beside)
    loss = laid.step(*mine)
    gradients = parts_by_name([(name, p.grad) for name, p in laid.named_parameters() if p.grad is not None])
    norm = laid.clip(design.job.optimizer.clip_norm)
    optimizer.step()
    few = min(EVALUATED * plan.microbatch, feed.rows)
    evaluation = laid.evaluate(*(x if x is None else x[-few:] for x in mine))
    parameters = parts_by_name([(name, p.detach()) for name, p in laid.named_parameters()])
    parameters |= parts_by_name([pair for part in laid.parts for pair in part.named_buffers()])
    return RankOutcome(
        loss=float(loss),
        evaluation=float(evaluation),
        evaluated=last_sequences(feed, rows=few),
        norm=float(norm),
        gradients=gradients,
        parameters=parameters,
        before=before,
    )


def last_sequences(feed: Feed, *, rows: int) -> tuple[int, ...]:
    """What of the batch lies in the last rows of all data ranks."""
    feeds = [replace(feed, replica=replica) for replica in range(feed.replicas)]
    return tuple(one.first + row for one in feeds for row in range(one.rows - rows, one.held))


def parts_by_name(pairs: list[tuple[str, Tensor]]) -> dict[str, Part]:
    """What this rank holds of each; where that is both ends of a tied table, both copies are one."""
    found: dict[str, Part] = {}
    for name, value in pairs:
        held = part_of(value)
        first = found.setdefault(name, held)
        assert first.start == held.start, f"copies of {name} lie elsewhere"
        assert numpy.array_equal(first.values, held.values), f"copies of {name} differ"
    return found


def part_of(x: Tensor) -> Part:
    if not isinstance(x, DTensor):
        return Part(values=x.clone().numpy(), start=(0,) * x.dim())
    assert not any(placement.is_partial() for placement in x.placements), "a summand is no part"
    return Part(values=x.to_local().clone().numpy(), start=held_start(x))


def by_name(pairs: list[tuple[str, Tensor]]) -> dict[str, numpy.ndarray]:
    """Each gathered whole; where a rank holds both ends of a tied table, both copies are one."""
    found: dict[str, numpy.ndarray] = {}
    for name, value in pairs:
        held = whole(value)
        assert numpy.array_equal(found.setdefault(name, held), held), f"copies of {name} differ"
    return found


def whole(x: Tensor) -> numpy.ndarray:
    return (x.full_tensor() if isinstance(x, DTensor) else x).clone().numpy()


def compare(
    expected: Outcome, found: Sequence[RankOutcome], *, whats: tuple[str, ...] = ("gradients", "parameters")
) -> None:
    """Every rank's losses and norm, and its part of every gradient and parameter, are the reference's after every step,
    and nothing of the whole model is on no rank. Of the last step only `whats`, and what comes before them."""
    if expected.before is not None:
        compare(expected.before, [outcome.before for outcome in found if outcome.before is not None])
    for outcome in found:
        after = numpy.nanmean(expected.evaluation[list(outcome.evaluated)])
        ones = {"loss": expected.loss, "norm": expected.norm} | ({"evaluation": after} if "parameters" in whats else {})
        for what, wanted_one in ones.items():
            found_one = getattr(outcome, what)
            assert found_one == pytest.approx(wanted_one, rel=0, abs=TOLERANCE), f"{what} {found_one}, not {wanted_one}"
    for what in whats:
        wanted = getattr(expected, what)
        held = {name: numpy.zeros(value.shape, dtype=bool) for name, value in wanted.items()}
        for rank, outcome in enumerate(found):
            for name, part in getattr(outcome, what).items():
                close(part.values, part.of(wanted[name]), told=f"{what} of {name} on rank {rank}")
                part.of(held[name])[...] = True
        assert [name for name, places in held.items() if not places.all()] == []


def close(found: numpy.ndarray, wanted: numpy.ndarray, *, told: str) -> None:
    """Nowhere further than TOLERANCE from what is wanted; what is told of it is worked out only where it is."""
    if found.shape == wanted.shape and numpy.abs(found - wanted).max(initial=0.0) <= TOLERANCE:
        return
    numpy.testing.assert_allclose(found, wanted, rtol=0, atol=TOLERANCE, err_msg=told)


def compare_roughly(expected: Outcome, found: Sequence[RankOutcome], *, bound: float) -> None:
    """The loss, the norm and the whole gradient differ from the reference's by less than `bound` of them.

    A first step divides gradients by themselves: what rounding is of them decides the loss after it.
    """
    for outcome in found:
        assert outcome.loss == pytest.approx(expected.loss, rel=bound)
        assert numpy.isfinite(outcome.evaluation)
        assert outcome.norm == pytest.approx(expected.norm, rel=bound)
    gradients = {name: numpy.full(value.shape, numpy.nan) for name, value in expected.gradients.items()}
    for name, part in (pair for outcome in found for pair in outcome.gradients.items()):
        part.of(gradients[name])[...] = part.values
    far = sum(float(numpy.square(value - expected.gradients[name]).sum()) for name, value in gradients.items())
    assert far**0.5 <= bound * expected.norm
