"""One replica under torchft, which the benchmark of a lost rank runs beside ours: the same model and share of a batch.

Every replica is a group of one rank with a store of its own. What is committed goes into RUN/metrics.jsonl, by the one
replica that `--tells`, with the replicas that took part.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

from meshwright.nn.decoder import Decoder
from meshwright.run.files import load_design

HOST = "127.0.0.1"
_FAR_SECONDS = 60.0  # for a quorum and to connect: beyond what forming groups and healing takes
_DEVIATION = 0.02


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--replica", type=int, required=True)
    parser.add_argument("--lighthouse", required=True)
    parser.add_argument("--patience", type=float, required=True, help="seconds that a collective may take")
    parser.add_argument("--tells", action="store_true")
    options = parser.parse_args()
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    torch.manual_seed(0)
    design = load_design(options.run / "design.json")
    model = Decoder(design.model)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=_DEVIATION)
    adam = torch.optim.AdamW(model.parameters(), lr=1e-5)
    store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        adam.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=options.patience)),
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": adam.state_dict()},
        min_replica_size=1,
        timeout=timedelta(seconds=options.patience),
        quorum_timeout=timedelta(seconds=_FAR_SECONDS),
        connect_timeout=timedelta(seconds=_FAR_SECONDS),
        rank=0,
        world_size=1,
        store_addr=HOST,
        store_port=store.port,
        lighthouse_addr=options.lighthouse,
        replica_id=f"replica_{options.replica}",
        hostname=HOST,
    )
    train(options.run, DistributedDataParallel(manager, model), Optimizer(manager, adam), manager, options, design)


def train(
    run: Path, model: torch.nn.Module, optimizer: Optimizer, manager: Manager, options: argparse.Namespace, design: Any
) -> None:
    """Until the process is ended."""
    rows, length = design.plan.batch // design.plan.data, design.plan.sequence_length
    draw = torch.Generator().manual_seed(options.replica)
    while True:
        tokens = torch.randint(design.model.vocab, (rows, length + 1), generator=draw)
        optimizer.zero_grad()
        logits = model(tokens[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        loss.backward()
        before = manager.current_step()
        optimizer.step()
        if options.tells and manager.current_step() > before:
            row = {"step": before + 1, "loss": loss.item(), "ranks": manager.num_participants(), "at": time.time()}
            with (run / "metrics.jsonl").open("a") as file:
                file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
