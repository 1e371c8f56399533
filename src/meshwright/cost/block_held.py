"""What one block adds to what the stage that has it holds: bytes of a pass, which a slice may be, and parameters."""

from __future__ import annotations

import numpy as np

from meshwright.cost.block_bytes import AMOUNTS, Holds
from meshwright.cost.layouts import Backward, Kind
from meshwright.cost.states import experts_apart, experts_units, state_bytes
from meshwright.cost.table import PlanTable
from meshwright.cost.thin import closing_elements, thin_matrices
from meshwright.cost.vocabulary import table_elements
from meshwright.cost.work import FloatArray
from meshwright.spec.model import Attention, Embedding, LatentAttention, Layer, Mixer, Mixture, ModelSpec


def of_one(kind: Kind, priced: Holds, table: PlanTable, *, model: ModelSpec) -> dict[str, FloatArray]:
    """What one block of `kind` adds to StageHeld, shape (rows,)."""
    block, trains = kind.block, kind.backward is Backward.WHOLE
    held = {name: getattr(priced.bytes, name) / table.slices for name in AMOUNTS}
    if isinstance(block, Layer):
        sparse = isinstance(block.transform, Mixture)
        tensor = table.tensor.astype(np.float64)
        slices = np.where(sparse & table.on_grid, table.expert * table.expert_tensor, tensor)
        thin = closing_elements(block, tensor)
        closing = _closing(block) / slices if thin is None else thin
        compute = state_bytes(table).compute
        gathered = priced.parameters - np.where(experts_apart(kind.rows(table)), priced.expert_parameters, 0.0)
        apart = experts_units(kind.rows(table))
        unit, kept = np.where(apart, priced.expert_parameters, 0.0), np.where(apart, held["kept"], 0.0)
        at_core = held["mixing"] + compute * (_before_core(block, priced, tensor) - unit) * trains
        at_first = held["opening"] + compute * (priced.parameters - unit) * trains
        of_unit = {name: held[name] + kept for name in ("giving", "given")}
        of_unit |= {"gathering": held["gathering"], "unit": unit}
        return {
            **({name: np.where(apart, values, 0.0) for name, values in of_unit.items()} if apart.any() else {}),
            "working": held["working"],
            "half": held["half"],
            "ending": held["ending"],
            "making": held["making"],
            "inside": held["inside"],
            "mixing": np.where(table.sharding > 0, np.maximum(at_core, at_first) + kept, 0.0),
            "largest": gathered,
            "largest_made": gathered * trains,
            "largest_kept": held["kept"],
            "largest_waits": held["waits"],
            "closing": closing * trains,
            "formed": 0.0 * slices if sparse else closing * trains,
        }
    if isinstance(block, Embedding):
        return {"working": held["working"], "embedding": priced.parameters * trains}
    tied = table_elements(model.head, table) * float(model.head.tied)
    head = np.maximum(priced.parameters, tied)
    return {
        "head": head,
        "head_made": head * trains,
        "tied": tied * trains,
        "head_own": priced.parameters,
        "head_kept": held["kept"],
        "head_waits": held["waits"],
        "head_working": held["working"],
        "one_logits": held["logits"],
        "loss_logits": held["logits"] / (1.0 if block.softcap is None else 2.0),
    }


def _before_core(block: Layer, priced: Holds, tensor: FloatArray) -> FloatArray:
    """Parameters of a layer's transforms and of its mixer's last product, whose gradients are there when backward comes
    to the mixer's core."""
    parts = {place: part for place, part in block.places.items() if place != "mixer"}
    whole = sum((float(part.matrix_parameters) for part in parts.values()), 0.0) + _last_of(block.mixer)
    thin = [(place, each) for place in block.places for each in thin_matrices(block, place, tensor)]
    less = sum(each.parameters for place, each in thin if place != "mixer" or each.name == "output")
    return np.asarray(priced.expert_parameters + (whole - _experts(block)) / tensor + less, dtype=np.float64)


def _experts(block: Layer) -> float:
    """Parameters of all experts of a layer, whose gradients come one by one before they are one tensor."""
    part = block.transform
    return (
        float(part.width * part.hidden * part.experts * (3 if part.gated else 2)) if isinstance(part, Mixture) else 0.0
    )


def _closing(block: Layer) -> float:
    """Parameters of the last product of a layer, whose gradient comes first."""
    if block.transform is not None:
        experts = block.transform.experts if isinstance(block.transform, Mixture) else 1
        return float(block.transform.width * block.transform.hidden * experts)
    return _last_of(block.mixer)


def _last_of(mixer: Mixer | None) -> float:
    """Parameters of a mixer's last product."""
    if isinstance(mixer, (Attention, LatentAttention)):
        value = mixer.head_dim if isinstance(mixer, Attention) else mixer.value_dim
        return float(mixer.width * mixer.heads * value)
    return 0.0 if mixer is None else float(mixer.width * mixer.inner)
