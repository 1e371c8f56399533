"""Feed: which rows of a global batch this rank reads, and those rows as tensors on its device."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from meshwright.data import Batch, Corpus, Loader, Position
from meshwright.parallel.outer import Learners
from meshwright.spec.plan import Design


@dataclass(frozen=True, slots=True, kw_only=True)
class Feed:
    """Data rank `replica` of `replicas` reads `held` sequences of each global batch of `batch`, from the one at `first`
    on, so that the ranks together read each once whatever their number; each computes `rows` rows, of which the last
    one is empty on the last ranks where they do not divide the batch.

    Ranks that differ only along the pipeline or the tensor axis are the same data rank and read the same rows.
    """

    batch: int
    replica: int
    replicas: int
    device: torch.device
    document_mask: bool
    prefix_mask: bool = False

    @classmethod
    def of(cls, design: Design, learners: Learners, *, device: torch.device) -> Feed:
        """What this rank reads of the batches of `design`: each learner as many rows of each as the others."""
        plan, mesh = design.plan, learners.mesh
        return cls(
            batch=plan.sequences,
            replica=learners.index * mesh.data_size + mesh.data_coordinate,
            replicas=learners.count * mesh.data_size,
            device=device,
            document_mask=design.job.data.document_mask,
            prefix_mask=design.model.prefix > 0.0,
        )

    @property
    def rows(self) -> int:
        return -(-self.batch // self.replicas)

    @property
    def held(self) -> int:
        return self.rows - (self.replica >= self._whole)

    @property
    def first(self) -> int:
        return self.replica * self.rows - max(0, self.replica - self._whole)

    @property
    def _whole(self) -> int:
        """Data ranks whose rows all have a sequence; the others come after them."""
        return self.replicas - (self.rows * self.replicas - self.batch)

    def loader(self, corpus: Corpus, *, consumed: int) -> Loader:
        """These rows of one batch after another, from sequence `consumed` of the order on."""
        position = Position(consumed=consumed)
        return Loader(corpus.train, position=position, batch=self.batch, first=self.first, rows=self.held)

    def tensors(self, rows: Batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """Tokens and targets (rows, s) int64, with empty rows where this rank has fewer; documents (rows, s) int32,
        None where documents are not masked; and how many later tokens of its prompt each sees (rows, s) int32, None
        where the model has no prefix mask."""
        rows = rows if len(rows.tokens) == self.rows else rows.filled(self.rows)
        documents = torch.from_numpy(rows.documents).to(self.device) if self.document_mask else None
        ahead = torch.from_numpy(rows.ahead).to(self.device) if self.prefix_mask else None
        tokens, targets = torch.from_numpy(rows.tokens), torch.from_numpy(rows.targets)
        return tokens.to(self.device, non_blocking=True), targets.to(self.device, non_blocking=True), documents, ahead
