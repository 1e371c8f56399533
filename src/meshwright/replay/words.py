"""What sources call the same thing: kinds of model, precisions, sharding, recompute and schedules."""

from __future__ import annotations

import re
from collections.abc import Mapping

KINDS = ("gpt", "llama", "moe", "moe-mla", "mla", "hybrid-mamba", "hybrid-mamba-moe", "t5", "bert")
_DENSE = ("dense", "decoder", "decoder-only", "transformer", "causal", "lm")  # gated as the column says
_ALIKE: Mapping[str, str] = {
    "gpt": "gpt gpt2 gpt3 gptj gptneox neox opt bloom mpt starcoder falcon megatron nemotron",
    "llama": "llama mistral qwen gemma palm phi olmo baichuan chatglm glm yi internlm granite minicpm",
    "moe": "moe mixtral mixtureofexperts sparse gshard moellama llamamoe gptmoe moegpt sparsemoe qwenmoe "
    "glam switch gptoss dbrx grok olmoe",
    "moe-mla": "moemla mlamoe deepseek deepseekv deepseekmoe kimik",
    "t5": "t5 t5v11 mt5 ul2 flant5 encoderdecoder encdec seq2seq bart",
    "bert": "bert roberta deberta distilbert electra encoder encoderonly transformerencoder vit deit",
    "linear": "linear linearattention hybridlinear hybridlinearattention deltanet gateddeltanet hybriddeltanet gdn "
    "hybridgdn kda hybridkda hybridkdamla kimilinear lightning hybridlightning minimax retnet gla qwennext",
    "mamba": "mamba ssm statespace",
    "jamba": "jamba",
    "hybrid-mamba": "hybrid hybridmamba mambahybrid mamba2hybrid mambatransformer nemotronh nemotronnano hybridssm "
    "hybridmambaattention hybridmambatransformer ssmhybrid ssmattention hybridstatespace",
}
_KIND_OF = {alias: kind for kind, aliases in _ALIKE.items() for alias in aliases.split()}
YES_OR_NO = ("gated", "sp", "flash", "compile")
_YES: Mapping[str, str] = {  # of all such cells, and of each
    "": "yes true 1 on",
    "compile": "compile torchcompile inductor",
    "gated": "gated swiglu geglu reglu glu",
}
# By any version, as `FlashAttention 2.5.8`, or by who made it; xformers takes FlashAttention where that runs.
_FLASH = re.compile(
    r"(?:fa|flash|flashattn|flashattention)v?\d*|cudnn\w*|(?:te|cudnn)?fused(?:attn|attention)?|sdpa"
    r"|(?=x|mem)(?:xformers\d*)?(?:mem(?:ory)?eff(?:icient)?)?(?:attn|attention)?"
)
_NO: Mapping[str, str] = {
    "": "no false 0 off",
    "compile": "eager",
    "gated": "gelu relu squaredrelu relusquared relu2",
}
_PRECISIONS: Mapping[str, str] = {
    **dict.fromkeys(("float32", "single", "fp32"), "fp32"),
    **dict.fromkeys(("float16", "half", "fp16mixed", "amp", "fp16amp", "16mixed", "fp16"), "fp16"),
    **dict.fromkeys(
        ("bfloat16", "bf16mixed", "bf16amp", "ampbf16", "bf16true", "purebf16", "bf16pure", "bf16"), "bf16"
    ),
    **dict.fromkeys(
        ("fp8delayed", "fp8delayedscaling", "fp8hybrid", "fp8tensorwise", "fp8e4m3", "e4m3", "float8"), "fp8"
    ),
    **dict.fromkeys(("fp8mixed", "fp8te", "te8", "bf16fp8", "fp8ds", "float8tensorwise"), "fp8"),
    **dict.fromkeys(("fp8rowwise", "float8rowwise", "fp8row"), "fp8-row"),
    **dict.fromkeys(("ampfp16", "fp16true", "16"), "fp16"),
    **dict.fromkeys(("fp4", "nvfp4"), "nvfp4"),
    **dict.fromkeys(("fp8currentscaling", "fp8cs"), "fp8-cs"),
    **dict.fromkeys(("fp8mx", "mxfp8"), "mxfp8"),
    **dict.fromkeys(("int8aqt", "aqtint8", "aqt"), "int8"),
    **dict.fromkeys(("fp8block", "fp8blockwise", "fp8blockwise128"), "fp8-blockwise128"),
}
_SHARDINGS: Mapping[str, str] = {
    **dict.fromkeys(("no", "none", "ddp", "stage0", "zero0", "noshard"), "0"),
    **dict.fromkeys(("zero1", "stage1", "distributedoptimizer", "distopt", "yes", "os", "optimizer", "z1"), "1"),
    **dict.fromkeys(("zero2", "stage2", "osg", "shardgradop", "gradop", "z2"), "2"),
    **dict.fromkeys(("zero3", "stage3", "fsdp", "fsdp1", "fsdp2", "fullshard", "zero++", "osgp", "full", "z3"), "3"),
    **dict.fromkeys(("hybrid", "hybridshard", "hsdp", "mics"), "hsdp"),
}
_RECOMPUTES: Mapping[str, str] = {
    **dict.fromkeys(("no", "off", "false"), "none"),
    **dict.fromkeys(("yes", "on", "true", "uniform", "all", "checkpointing", "checkpoint", "layer"), "full"),
    **dict.fromkeys(("block", "remat", "granular", "nothing_saveable", "full-uniform", "full-block"), "full"),
    **dict.fromkeys(("attention", "attn", "core_attn", "core-attn", "sac", "op", "per-op"), "selective"),
    **dict.fromkeys(("save_qkv_proj", "checkpoint_dots", "dots"), "selective"),
}
_KEEPS_PRODUCTS = ("minimal", "save_dot")  # as MaxText's policies begin that keep what all products give, or most
_CHECKPOINTING = re.compile(r"^(?:activation|gradient)[ _-]checkpointing\b\W*")
_OFFLOADS: Mapping[str, str] = {
    **dict.fromkeys(("no", "off", "false"), "none"),
    **dict.fromkeys(("cpu", "yes", "on", "zerooffload", "cpuadam", "cpuoffload", "os", "adam"), "optimizer"),
    **dict.fromkeys(("param", "params", "weights", "zeroinfinity", "infinity", "full", "all"), "parameters"),
}
_SCHEDULES: Mapping[str, str] = {
    **dict.fromkeys(("none", "no", "dapple", "pipedreamflush", "pipedream1f1b", "non-interleaved"), "1f1b"),
    **dict.fromkeys(("interleaved1f1b", "interleaved", "vpp", "virtualpipeline", "circular"), "interleaved-1f1b"),
    **dict.fromkeys(("1f1binterleaved", "1f1bi", "1f1bvpp", "megatroninterleaved"), "interleaved-1f1b"),
    **dict.fromkeys(("afab", "f-then-b", "fthenb", "allforwardallbackward"), "gpipe"),
    **dict.fromkeys(("loopedbfs", "bfs", "breadthfirst"), "breadth-first"),
    **dict.fromkeys(("zb1p", "zbh1", "zerobubble", "zb1", "zb"), "zb-1p"),
    **dict.fromkeys(("zb2p", "zbh2", "zb2"), "zb-2p"),
    **dict.fromkeys(("zbv", "zerobubblev"), "zbv"),
    **dict.fromkeys(("1f1bflush", "flush"), "1f1b"),
}


_KEPT_AWAY = ("parameters", "optimizer", "activations")  # the first is taken of several
_OFFLOAD_STARTS = {"act": "activations", "opt": "optimizer", "cpuadam": "optimizer", "param": "parameters"}


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


def yes_or_no(name: str, text: str) -> bool | None:
    """What a cell of YES_OR_NO says, whether in those words or in what is used; None where it is blank or neither."""
    word = _plain(text)
    if name == "flash" and _FLASH.fullmatch(word):
        return True
    found = (
        told for told, words in ((True, _YES), (False, _NO)) for key in ("", name) if word in words.get(key, "").split()
    )
    return next(found, None)


def precision(text: str) -> str:
    return _PRECISIONS.get(_plain(text), text.lower())


def sharding(text: str) -> str:
    """0 to 3 or hsdp; a remark in brackets after it is not read."""
    bare = re.sub(r"\(.*\)|-?offload", "", text.lower()).strip()
    return _SHARDINGS.get(_plain(bare, keep="+"), bare)


def named_sharding(framework: str) -> str:
    """What the name of a framework says is sharded, in words of `sharding`; empty where it says nothing.

    FSDP divides parameters, gradients and optimizer state unless it is told to divide less: FULL_SHARD is its default
    strategy (2304.11277).
    """
    name = framework.lower()
    if level := re.search(r"\bzero[- ]?([123])\b", name):
        return level[1]
    if "hsdp" in name:
        return "hsdp"
    return "3" if re.search(r"fsdp|fully[- ]sharded", name) else ""


def recompute(text: str) -> str:
    """none, selective or full, by the first word; so many layers are layers computed again in full, and so is
    activation checkpointing of which no more is said."""
    plain = text.lower()
    if re.match(r"\d+ (?:of \d+ )?layers?", plain):
        return "full"
    rest = _CHECKPOINTING.sub("", plain)
    word = re.split(r"[ (),;:=+/]", rest)[0]
    known = "selective" if word.startswith(_KEEPS_PRODUCTS) else _RECOMPUTES.get(word, word)
    return "full" if rest != plain and known not in ("none", "selective") else known


def offloads(text: str) -> tuple[str, ...]:
    """What `text` says lies in the host's memory, in words of plans: what a plan says of it first, whatever the order,
    then what it cannot say beside. Parameters bring the optimizer's state; a first word that is not known stays first.
    """
    parts = (_plain(part) for part in re.split(r"[+,;&/()]|\band\b", text.lower()))
    found = list(dict.fromkeys(_offload(part) for part in parts if part and not part[0].isdigit()))
    idle = {"none"} | ({"optimizer"} if "parameters" in found else set())
    found = [kind for kind in found if kind not in idle]
    if found and found[0] in _KEPT_AWAY:
        found.sort(key=lambda kind: _KEPT_AWAY.index(kind) if kind in _KEPT_AWAY else len(_KEPT_AWAY))
    return tuple(found) or ("none",)


def _offload(word: str) -> str:
    first = next((kind for start, kind in _OFFLOAD_STARTS.items() if word.startswith(start)), word)
    return _OFFLOADS.get(word, first)


def pipeline_schedule(text: str) -> str:
    return _SCHEDULES.get(_plain(text), text.lower())


def _plain(text: str, *, keep: str = "") -> str:
    return re.sub(rf"[^a-z0-9{re.escape(keep)}]", "", text.lower())
