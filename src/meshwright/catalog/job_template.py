"""A job with every key, its default and what it means: what `meshwright` offers to start from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from meshwright.catalog.writer import dump_toml
from meshwright.spec.cluster import Precision
from meshwright.spec.job import JobSpec, Source
from meshwright.spec.synchronize import ROUND_PRECISIONS

_PRODUCTS = ", ".join(kind for kind in Precision if kind.multiplies)
COMMENTS: Mapping[str, str] = MappingProxyType(
    {
        "name": "A name for the run.",
        "sequence_length": "Tokens of one sequence.",
        "batch_tokens": 'Tokens of one optimizer step over all devices; may be written "4Mi".',
        "total_tokens": 'Tokens of the whole run; may be written "300G".',
        "precision": f"Of matrix products: auto (what devices are best at), {_PRODUCTS}. Master weights stay in fp32.",
        "other_precisions": "Others that the search may take instead where that is better; they change the numerics.",
        "z_loss": "Weight of the z-loss, which keeps logits small; 0 is none.",
        "synchronize": "How replicas may meet other than by their gradients in every step; the numerics change.",
        "synchronize.kinds": "Any of local, diloco, eager, co2, streaming that a plan may take; empty: none.",
        "synchronize.every": "Steps between meetings; 0: as few as hide the network.",
        "synchronize.most_every": "The most steps between meetings that are chosen.",
        "synchronize.precision": f"What replicas send then: {', '.join(ROUND_PRECISIONS)}.",
        "synchronize.quorum": "A round of local or diloco ends without the others when so many learners came; 0: all.",
        "synchronize.grace_seconds": "How long it then waits for the others, which come at the end of their step.",
        "synchronize.most_left_out": "Share of the sequences that a quorum which is chosen may leave out; 0: none is.",
        "synchronize.compressions": "How gradients may be compressed: tables of powersgd, acpsgd, topk, demo, one_bit.",
        "low_rank": "Two thin factors in the place of a matrix after a while, where that pays.",
        "low_rank.kind": "none, pufferfish or cuttlefish, each with fields of its own: see the page on low rank.",
        "skip": "Microbatches may leave out stages of a pipeline (SkipPipe); what is trained is another model then.",
        "skip.share": "The most of the layers that they leave out on the mean, up to a third; 0: none.",
        "skip.swap": "Whether two neighbouring stages may change places: none or neighbours.",
        "objective": "What the best plan has least of: time, cost or memory.",
        "compile": "torch.compile: on, off, or auto, which measures both and keeps the faster.",
        "deterministic": "The same bits every time, where that is slower too.",
        "peer_timeout_seconds": "A rank that waits longer than this for another one ends the run, which says for whom.",
        "seed": "Seed of weights and of the order of data.",
        "trackers": "Trackers beside metrics.jsonl: tensorboard, wandb.",
        "techniques": "Techniques by name.",
        "start": "A Hugging Face folder whose weights a new run begins with; empty: drawn by the seed.",
        "software": "What plans are priced as: auto (this runtime; xla on TPUs; --for's trainer), or a stack by name.",
        "schema": "Version of this form.",
        "data": "What to train on.",
        "data.sources": "One table a corpus: a JSONL, text or xz file, or a folder of them, and its weight.",
        "data.sources.prompt_field": "A field of JSONL whose text comes before and is no target; empty: there is none.",
        "data.tokenizer": "A .json or .tiktoken file, bytes, or train:8192 to train one of that size.",
        "data.document_mask": "Attention stays inside each document of a packed sequence.",
        "data.validation_fraction": "Share of the tokens held out.",
        "optimizer": "Norms, biases and embeddings do not decay.",
        "optimizer.kind": "adamw, muon, sgd or adafactor, each with fields of its own: see the page on training.",
        "optimizer.groups": "What is different for some parameters by name: tables of names and of what differs.",
        "optimizer.state": "What moments are kept in: fp32, bf16, dynamic8 or fp8.",
        "optimizer.master": "What parameters are kept in: fp32, or bf16_stochastic: bf16, rounded by chance.",
        "optimizer.clip_norm": 'Largest norm of the whole gradient; "none" is no limit.',
        "learning_rate": "Warm-up, then cosine, wsd (stable, then decay) or constant. Fractions are of all steps.",
        "learning_rate.warmup_steps": "Above 0 it replaces warmup_fraction.",
        "learning_rate.decay_fraction": "Share of the steps in which wsd decays.",
        "learning_rate.final_fraction": "The last learning rate over the highest.",
        "constraints": "What the plan must have and must not.",
        "constraints.forbid": 'Columns of the plan table, or one of their values: ["pipeline", "recompute=full"].',
        "constraints.devices": "all: all of the devices; any: as many of them as are best.",
        "constraints.order": "any order of mesh axes and unlike machines, or the usual one: as the cluster lists them.",
        "constraints.slowdown": "Of memory or cost the least among plans that take so many times the fastest, or less.",
        "constraints.fix": "Columns of the plan table at a value: tensor = 8.",
        "checkpoint": "When the state is saved.",
        "checkpoint.every_steps": "0 saves at the end and on a signal only.",
        "checkpoint.interval": "steps, as every_steps says, or goodput: as often as wastes least time.",
        "checkpoint.keep": "How many of the newest stay.",
        "checkpoint.keep_every_steps": "Of older ones those of every so many steps stay for good; 0: none.",
        "elastic": "A run that loses ranks goes on with the others, and takes in those that are started for them.",
        "elastic.min_ranks": "As long as so many are left; 0: the loss of a rank ends the run.",
        "elastic.copies_every": "Steps between the copies in memory that are gone on from.",
        "elastic.replacements": "How often a worker that was lost is started again.",
        "elastic.backend": "own, or torchft, where that is installed: replicas that vote in every step.",
        "elastic.lighthouse": "Where torchft's replicas find each other, http://HOST:PORT; empty: the run starts one.",
        "non_finite": "What follows a loss or a gradient norm that is not a finite number.",
        "non_finite.policy": "stop, skip (the batch), or roll_back (to the last checkpoint, and past the batch).",
        "non_finite.most_in_a_row": "After so many with no new step between them the run stops.",
        "spike": "What follows a step whose loss or gradient norm leaps above those of late.",
        "spike.policy": "ignore, stop, skip (the batch), or roll_back (to the last checkpoint, and past the batch).",
        "spike.deviations": "How many standard deviations above the mean a step leaps.",
        "spike.window": "Of how many steps before it.",
        "spike.most_in_a_row": "After so many with no new step between them the run stops.",
        "verify": "Ranks that hold the same parameters compare their bits.",
        "verify.every_steps": "Every so many steps and at every checkpoint; 0: never.",
        "verify.policy": "stop (and name the rank), or roll_back (to the last good checkpoint, and name it then).",
        "evaluation": "Validation loss over so many held-out tokens.",
        "evaluation.every_steps": "0 evaluates at the end only.",
    }
)


def job_template() -> str:
    """TOML of a job with every default and a comment where a name does not say it all; it loads as it is."""
    job = JobSpec()
    data = replace(job.data, sources=(Source(path="corpus.jsonl"),))
    return dump_toml(replace(job, data=data), comments=COMMENTS)
