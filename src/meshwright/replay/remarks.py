"""What a table says and nothing reads: columns and settings of no known name, words that name no link, ids twice."""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache

from meshwright.replay.columns import NUMBERS, WORDS
from meshwright.replay.machines import machines_of, slices_said
from meshwright.replay.networks import says_network, says_nvlink, unbridged, unread
from meshwright.replay.runs import Run
from meshwright.replay.words import model_kind

COLUMNS = (
    *("id", "group", "rank_kind", "source_id", "source_ref", "table", "confidence", "derived", "notes"),
    *("model", "arch", "gpu", "intra_link", "inter_link", "peak_tflops", "framework", "schedule", "zero"),
    *("recompute", "precision", "offload", "extra", "mfu_pct", "hfu_pct", "mem_kind", "flop_conv"),
    *NUMBERS,
    *WORDS,
)
SETTINGS = (
    *("stage_layers", "pp_layers", "layer boundaries", "zero1 group", "fsdp", "dcn_fsdp", "slices", "decoder_seq"),
    *("recompute_modules", "cuda_graph", "dispatcher", "norm kernel", "cuda_launch_blocking", "moe_every"),
    *("pattern", "attention_layers", "mamba_heads", "mamba_head_dim", "mamba_state", "mamba_groups"),
    *("linear_heads", "linear_head_dim", "linear_groups", "task", "max_predictions", "max_predictions_per_seq"),
    *("exchange", "cp_comm_type", "ulysses", "usp ulysses", "grad_reduce_in_fp32", "grad_reduce_in_bf16"),
)
_ALIKE = 0.75  # share of letters in common from which a name is taken to be misspelt, and not another remark
_SETTING = re.compile(r"(?:^|[;,])\s*([A-Za-z][\w ]*?)\s*=(?!=)")
_INSIDE = re.compile(r"nv-?link|nvl\d|nv-?switch|pci|xgmi|infinity|\bici\b|torus|\bif\b|\bupi\b|c2c", re.IGNORECASE)


def remarks(runs: Sequence[Run]) -> Mapping[str, int]:
    """Each in words, with how many rows it is of; what is of most rows first."""
    found = Counter(_headers(runs))
    for run in runs:
        found.update(set(_of(run)))
    ids = Counter(run.id for run in runs if run.id)
    found.update({f"the id {name!r} is of {count} rows": count for name, count in ids.items() if count > 1})
    return dict(found.most_common())


def _headers(runs: Sequence[Run]) -> dict[str, int]:
    """Columns that are not of the table, with the rows where something stands in them."""
    names = {name for run in runs for name in run.columns if name and name not in COLUMNS}
    return {
        f"the column {name!r} is not read{_meant(name, COLUMNS)}": sum(bool(run.text(name)) for run in runs)
        for name in sorted(names)
    }


def _of(run: Run) -> Iterator[str]:
    link, inside = run.text("inter_link"), run.text("intra_link")
    if link and not says_network(link) and not slices_said(run):
        yield f"inter_link {link!r} names no network: the usual one of such machines is taken"
    elif link and not run.numbers("inter_gbit_per_node") and (numbers := unread(link)):
        yield f"inter_link {link!r}: {' and '.join(numbers)} is read as no rate and no count of adapters"
    if inside and not _INSIDE.search(inside):
        yield f"intra_link {inside!r} names no link: the usual one of such machines is taken"
    machines = machines_of(run, assumed=[]) if says_nvlink(inside) else ""
    for why in () if isinstance(machines, str) else {unbridged(run, group) for group in machines.spec.groups} - {""}:
        yield f"intra_link {inside!r} is not read: {why}"
    if not _has_experts(run):
        unread_there = ("n_shared", "topk", *(("expert_ffn",) if run.whole("ffn") else ()))
        for name in (name for name in unread_there if run.whole(name)):
            yield f"{name} is not read where n_experts is blank and arch names no mixture"
    for name in _SETTING.findall(run.text("extra")):
        meant = _meant(name, SETTINGS)
        if meant and name.lower() not in SETTINGS:
            yield f"{name!r} in extra is not read{meant}"


def _has_experts(run: Run) -> bool:
    """Whether its model may have experts: by its columns, by its kind, or as a preset where no layers are printed."""
    mixed = "moe" in (model_kind(run.text("arch")) or "")
    return mixed or bool(run.whole("n_experts")) or not run.whole("layers")


@lru_cache(maxsize=4096)
def _meant(name: str, known: tuple[str, ...]) -> str:
    near = difflib.get_close_matches(name.lower(), known, n=1, cutoff=_ALIKE)
    return f": did you mean {near[0]!r}?" if near else ""
