"""Feed: which rows of a global batch this rank reads, and those rows as tensors on its device."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from meshwright.data import Batch
from meshwright.parallel import Mesh
from meshwright.spec.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Feed:
    """Data rank `replica` of `replicas` reads `rows` rows of each global batch of `batch`, from row `first` on.

    Ranks that differ only along the pipeline or the tensor axis are the same data rank and read the same rows.
    """

    batch: int
    replica: int
    replicas: int
    device: torch.device
    document_mask: bool

    @classmethod
    def of(cls, plan: Plan, mesh: Mesh, *, device: torch.device, document_mask: bool) -> Feed:
        """What this rank of `mesh` reads of the batches of `plan`."""
        return cls(
            batch=plan.batch,
            replica=mesh.data_coordinate,
            replicas=mesh.data_size,
            device=device,
            document_mask=document_mask,
        )

    @property
    def rows(self) -> int:
        return self.batch // self.replicas

    @property
    def first(self) -> int:
        return self.replica * self.rows

    def tensors(self, rows: Batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Tokens and targets (rows, s) int64 and documents (rows, s) int32, None where documents are not masked."""
        documents = torch.from_numpy(rows.documents).to(self.device) if self.document_mask else None
        tokens, targets = torch.from_numpy(rows.tokens), torch.from_numpy(rows.targets)
        return tokens.to(self.device, non_blocking=True), targets.to(self.device, non_blocking=True), documents
