"""What a rank sends of a model's gradients in a step, by kind of compression: the table of docs/compression.md."""

from __future__ import annotations

import argparse
from dataclasses import replace

from meshwright import catalog, cost, search
from meshwright.spec.compression import AcpSgd, Compression, DeMo, OneBit, PowerSgd, TopK
from meshwright.spec.job import Constraints, JobSpec
from meshwright.spec.plan import Design
from meshwright.spec.synchronize import GradientSync

KINDS: tuple[Compression | None, ...] = (None, PowerSgd(rank=4), AcpSgd(rank=4), TopK(share=0.01), DeMo(), OneBit())


def sent_bytes(design: Design, *, ranks: int) -> float:
    """Bytes that one of `ranks` sends: an all-reduce of a tensor sends it twice but for a rank's own part."""
    # What is gathered is with other gathers, on the line of parameters; replicas gather none of those.
    turns = {"all_reduce": 2.0, "all_to_all": 1.0, "all_gather": 1.0}
    moved = cost.traffic(design, rank=0).bytes.items()
    of_gradients = [(name.split("|"), size) for name, size in moved if "replicate" in name]
    return sum(
        turns[operation] * size * (ranks - 1) / ranks
        for (line, operation, _), size in of_gradients
        if line.startswith(("gradient", "parameter"))
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="gpt2")
    parser.add_argument("--ranks", type=int, default=8)
    options = parser.parse_args()
    length, ranks = 512, options.ranks
    fixed = Constraints(fix={"replicate": ranks, "shard": 1})
    job = JobSpec(sequence_length=length, batch_tokens=ranks * length, constraints=fixed)
    made = search.design(catalog.load_model(options.model), catalog.load_cluster(f"{ranks}xA100-80GB"), job).design
    whole = 0.0
    for kind in KINDS:
        plan = replace(made.plan, gradients=GradientSync(compression=kind))
        sent = sent_bytes(replace(made, plan=plan), ranks=ranks)
        whole = whole or sent
        print(f"{kind.words if kind else 'fp32':<22}{sent / 1e6:8.1f} MB{whole / sent:8.1f}x")


if __name__ == "__main__":
    main()
