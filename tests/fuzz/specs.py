"""Models, clusters, jobs, designs and decisions that something is wrong with."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

from meshwright import catalog
from meshwright.catalog.documents import read
from meshwright.export import Peer
from meshwright.export import read as read_script
from meshwright.lab import topology
from meshwright.report.run_files import read_run
from meshwright.search import decision_of
from meshwright.search import design as search
from meshwright.search.settings import read_settings
from meshwright.spec import codec
from meshwright.spec.cluster import Precision
from meshwright.spec.faults import FaultKind, read_fault
from meshwright.spec.plan import Design
from tests.export.test_readers import DEEPSPEED, MEGATRON, TITAN
from tests.fuzz.kind import Files, Kind, of_file
from tests.fuzz.mutate import NUMBERS, WORDS, break_lines, break_text, break_value, json_text, once_in
from tests.support.designs import Layout, design, with_speed
from tests.support.models import all_models

ROOT = Path(__file__).resolve().parent.parent.parent
CONFIGS = ROOT / "src" / "meshwright" / "catalog" / "configs"
SHORT_FORMS = (
    'kind = "llama"\nwidth = 256\nlayers = 4\nheads = 4\nkv_heads = 2\nhidden = 512\nvocab = 1000\ntheta = 1e4\n',
    'kind = "gpt"\nwidth = 256\nlayers = 4\nheads = 4\nvocab = 1000\npositions = 1024\nprefix = 0.5\n',
)
CLUSTERS = ("2x8xH100", "8xA100-80GB", "2x8xH200", "4x8xB200", "1x4xL40S")
SETS = (
    *("batch_tokens=4Mi", "job.seed=1", "optimizer.kind=muon", "optimizer.learning_rate=1e-3", "precision=bf16"),
    *("data.sources.0.path=text", "constraints.fix.tensor=2", "low_rank.at_step=10", "elastic.min_ranks=1"),
    *("data.sources=[{path='a'}]", "checkpoint.every_steps=5", "spike.policy=skip", "techniques=[]", "skip.share=0.25"),
)
SETTINGS = ("tp=4,pp=2", "microbatch=2", "recompute=none", "schedule=1f1b", "precision=bf16", "zero=3", "cp=2,ep=1")
FAULTS = {
    FaultKind.KILL: "rank=2@step=40",
    FaultKind.HANG: "rank=1,seconds=5@step=40",
    FaultKind.SLOW: "rank=1,factor=1.5,steps=20@step=40",
    FaultKind.CORRUPT: "part=tensors@step=40",
    FaultKind.DISK_FULL: "@save",
    FaultKind.PARTITION: "seconds=5@step=40",
    FaultKind.PREEMPT: "@seconds=30",
}


@cache
def configs() -> list[Any]:
    return [json.loads(path.read_text()) for path in sorted(CONFIGS.glob("*.json"))]


@cache
def whole_models() -> list[Any]:
    return [codec.encode(model) for model in all_models().values()]


@cache
def clusters() -> list[Any]:
    return [codec.encode(catalog.load_cluster(name)) for name in CLUSTERS]


@cache
def job_text() -> str:
    return "\n".join(line for line in catalog.job_template().splitlines() if not line.startswith("#"))


@cache
def designs() -> list[Any]:
    layouts = (Layout(), Layout(pipeline=2, tensor=2, precision=Precision.FP32), Layout(shard=2, replicate=2))
    models = all_models()
    made = [with_speed(design(models[name], each), each.precision) for name in ("tiny",) for each in layouts]
    return [codec.encode(replace(each, job=replace(each.job, seed=1))) for each in made]


def model_config(rng: Random) -> Files:
    return {"config.json": json_text(rng, break_value(rng, rng.choice(configs())))}


def whole_model(rng: Random) -> Files:
    return {"model.json": json_text(rng, break_value(rng, rng.choice(whole_models())))}


def short_model(rng: Random) -> Files:
    return {"model.toml": break_lines(rng, rng.choice(SHORT_FORMS))}


def cluster(rng: Random) -> Files:
    return {"c.json": json_text(rng, break_value(rng, rng.choice(clusters())))}


def cluster_name(rng: Random) -> str:
    return break_text(rng, rng.choice(CLUSTERS))[:200]


def job(rng: Random) -> Files:
    return {"job.toml": break_lines(rng, job_text())}


def sets(rng: Random) -> list[str]:
    chosen = [rng.choice(SETS) for _ in range(rng.choice((1, 1, 2, 3)))]
    at = rng.randrange(len(chosen))
    key, _, _ = chosen[at].partition("=")
    value = str(rng.choice((rng.choice(NUMBERS), rng.choice(WORDS))))
    chosen[at] = rng.choice((f"{key}={value}", break_text(rng, chosen[at]), ".".join([key] * rng.choice((2, 200)))))
    return chosen


def saved_design(rng: Random) -> Files:
    return {"design.json": json_text(rng, break_value(rng, rng.choice(designs())))}


def plan_file(rng: Random) -> Files:
    """A design whose plan alone is other than it was: more of them are read, checked against the rules and priced."""
    told = dict(rng.choice(designs()))
    section = rng.choice(("plan", "plan", "job", "model", "cluster"))
    return {"plan.json": json.dumps({**told, section: break_value(rng, told[section])})}


@cache
def decision_text() -> str:
    found = codec.decode(Design, designs()[0])
    return json.dumps(codec.encode(search(found.model, found.cluster, found.job, top=2)))


def decision(rng: Random) -> Files:
    return {"x.decision.json": json_text(rng, break_value(rng, json.loads(decision_text())))}


def script(rng: Random) -> tuple[str, Peer]:
    text, peer = rng.choice(((MEGATRON, Peer.MEGATRON_LM), (TITAN, Peer.TORCHTITAN), (DEEPSPEED, Peer.DEEPSPEED)))
    words = text.split(" ")
    if once_in(2, rng):
        words[rng.randrange(len(words))] = str(rng.choice((rng.choice(NUMBERS), rng.choice(WORDS))))
        return " ".join(words), peer
    return break_text(rng, text), peer


def settings(rng: Random) -> str:
    text = break_text(rng, rng.choice(SETTINGS))
    return rng.choice((text, f"{text}={rng.choice(WORDS)}", f"tp={rng.choice(NUMBERS)}"))


def fault(rng: Random) -> tuple[FaultKind, str]:
    kind = rng.choice(tuple(FAULTS))
    text = FAULTS[kind]
    broken: Callable[[], str] = rng.choice(
        (
            lambda: break_text(rng, text),
            lambda: text.replace(rng.choice("0123456789") or "0", str(rng.choice(NUMBERS))),
            lambda: f"{text},{rng.choice(WORDS)}={rng.choice(NUMBERS)}",
        )
    )
    return kind, broken()


KINDS = (
    Kind(name="model config", make=model_config, read=of_file("config.json", catalog.load_model), share=1.5),
    Kind(name="model", make=whole_model, read=of_file("model.json", catalog.load_model)),
    Kind(name="short model", make=short_model, read=of_file("model.toml", catalog.load_model), share=2),
    Kind(name="cluster", make=cluster, read=of_file("c.json", lambda path: topology(catalog.load_cluster(str(path))))),
    Kind(name="cluster name", make=cluster_name, read=lambda name, _: catalog.load_cluster(name), share=2),
    Kind(name="job", make=job, read=of_file("job.toml", catalog.load_job)),
    Kind(name="sets", make=sets, read=lambda chosen, _: catalog.load_job(None, sets=chosen), share=3),
    Kind(name="design", make=saved_design, read=of_file("design.json", catalog.load_design), share=0.5),
    Kind(name="plan file", make=plan_file, read=of_file("plan.json", read_run), share=0.05, quick=16),
    Kind(
        name="decision",
        make=decision,
        read=of_file("x.decision.json", lambda path: decision_of(read(path))),
        share=0.02,
        quick=46,
    ),
    Kind(
        name="script of another trainer",
        make=script,
        read=lambda made, _: read_script(made[0], to=made[1]),
        share=2,
    ),
    Kind(name="settings", make=settings, read=lambda text, _: read_settings(text), share=3),
    Kind(name="fault", make=fault, read=lambda made, _: read_fault(*made), share=4),
)
