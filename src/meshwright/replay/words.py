"""What sources call the same thing: kinds of model, precisions, sharding, recompute and schedules."""

from __future__ import annotations

import re
from collections.abc import Mapping

KINDS = ("gpt", "llama", "moe", "moe-mla", "mla", "hybrid-mamba", "hybrid-mamba-moe", "t5", "bert")
_DENSE = ("dense", "decoder", "decoder-only", "transformer", "causal", "lm")  # gated as the column says
_ALIKE: Mapping[str, str] = {
    "gpt": "gpt gpt2 gpt3 gptj gptneox neox opt bloom mpt starcoder falcon megatron nemotron",
    "llama": "llama mistral qwen gemma palm phi olmo baichuan chatglm glm yi internlm granite minicpm",
    "moe": "moe mixtral moellama llamamoe gptmoe moegpt sparsemoe qwenmoe glam switch gptoss dbrx grok olmoe",
    "moe-mla": "moemla mlamoe deepseek deepseekv deepseekmoe kimik",
    "t5": "t5 mt5 ul2 flant5 encoderdecoder encdec seq2seq bart",
    "bert": "bert roberta deberta distilbert electra encoder encoderonly vit deit",
    "linear": "linear linearattention hybridlinear hybridlinearattention deltanet gateddeltanet hybriddeltanet gdn "
    "hybridgdn kda hybridkda hybridkdamla kimilinear lightning hybridlightning minimax retnet gla qwennext",
    "mamba": "mamba ssm",
    "jamba": "jamba",
    "hybrid-mamba": "hybrid hybridmamba mambahybrid mamba2hybrid mambatransformer nemotronh nemotronnano hybridssm",
}
_KIND_OF = {alias: kind for kind, aliases in _ALIKE.items() for alias in aliases.split()}
_PRECISIONS: Mapping[str, str] = {
    **dict.fromkeys(("float32", "single", "fp32"), "fp32"),
    **dict.fromkeys(("float16", "half", "fp16mixed", "amp", "fp16amp", "16mixed", "fp16"), "fp16"),
    **dict.fromkeys(("bfloat16", "bf16mixed", "bf16amp", "bf16"), "bf16"),
    **dict.fromkeys(("fp8delayed", "fp8delayedscaling", "fp8hybrid", "fp8tensorwise", "fp8e4m3", "float8"), "fp8"),
    **dict.fromkeys(("fp8currentscaling", "fp8cs"), "fp8-cs"),
    **dict.fromkeys(("fp8mx", "mxfp8"), "mxfp8"),
    **dict.fromkeys(("fp8block", "fp8blockwise", "fp8blockwise128"), "fp8-blockwise128"),
}
_SHARDINGS: Mapping[str, str] = {
    **dict.fromkeys(("no", "none", "ddp", "stage0", "zero0"), "0"),
    **dict.fromkeys(("zero1", "stage1", "distributedoptimizer", "distopt", "yes", "os"), "1"),
    **dict.fromkeys(("zero2", "stage2", "osg"), "2"),
    **dict.fromkeys(("zero3", "stage3", "fsdp", "fsdp1", "fsdp2", "fullshard", "zero++", "osgp"), "3"),
    **dict.fromkeys(("hybrid", "hybridshard", "hsdp"), "hsdp"),
}
_RECOMPUTES: Mapping[str, str] = {
    **dict.fromkeys(("no", "off"), "none"),
    **dict.fromkeys(("yes", "on", "uniform", "all", "checkpointing", "layer"), "full"),
    **dict.fromkeys(("attention", "attn", "core_attn", "core-attn"), "selective"),
}
_SCHEDULES: Mapping[str, str] = {
    **dict.fromkeys(("none", "no", "dapple", "pipedreamflush", "pipedream1f1b", "non-interleaved"), "1f1b"),
    **dict.fromkeys(("interleaved1f1b", "interleaved", "vpp", "virtualpipeline"), "interleaved-1f1b"),
    **dict.fromkeys(("afab", "f-then-b", "fthenb", "allforwardallbackward"), "gpipe"),
    **dict.fromkeys(("loopedbfs", "bfs", "breadthfirst"), "breadth-first"),
    **dict.fromkeys(("zb1p",), "zb-1p"),
    **dict.fromkeys(("zb2p",), "zb-2p"),
}


def model_kind(text: str, *, gated: bool | None = None, experts: bool = False) -> str | None:
    """The kind of model that `text` names: of KINDS, `mamba`, `jamba` or `linear`, with `-moe` where it has experts.

    Blank is a decoder; None where no such kind is known.
    """
    if text.lower() in KINDS:
        return text.lower()
    word = _plain(text)
    mixed = experts or word.endswith("moe") or word.startswith("moe")
    bare = word.removesuffix("moe")
    bare = bare or word
    words = (word, bare, bare.removeprefix("moe"))
    forms = [form for each in words for form in (each, re.sub(r"\d+$", "", each), re.sub(r"\d", "", each))]
    found = next((_KIND_OF[form] for form in forms if form in _KIND_OF), None)
    if not word or text.lower() in _DENSE:
        found = "llama" if gated else "gpt"
    if found in ("hybrid-mamba", "linear", "jamba"):
        return f"{found}-moe" if mixed else found
    return "moe" if mixed and found in ("gpt", "llama") else found


def precision(text: str) -> str:
    return _PRECISIONS.get(_plain(text), text.lower())


def sharding(text: str) -> str:
    return _SHARDINGS.get(_plain(text, keep="+"), text.lower())


def recompute(text: str) -> str:
    word = text.lower().split(" ")[0].split("(")[0]
    return _RECOMPUTES.get(word, word)


def pipeline_schedule(text: str) -> str:
    return _SCHEDULES.get(_plain(text), text.lower())


def _plain(text: str, *, keep: str = "") -> str:
    return re.sub(rf"[^a-z0-9{re.escape(keep)}]", "", text.lower())
