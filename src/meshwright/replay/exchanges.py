"""How context ranks of a published run met each other's keys and values, by words of `extra`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NoReturn

from meshwright.replay.models import InexpressibleError
from meshwright.replay.runs import Run
from meshwright.spec.exchange import Exchange, ExchangeKind
from meshwright.spec.model import Attention, LatentAttention, Mixture, ModelSpec, Recurrence

_TRADE, _RING, _GATHER = "all-to-all", "ring", "gather"
_SETTING = re.compile(r"(?:exchange|(?:cp|context)[ _-]?(?:comm|exchange)(?:[ _-]?(?:type|kind))?)\s*[=:]\s*(.+)")
_WAYS = re.compile(
    r"(?<!\w)(?:(?P<trade>(?:deepspeed[ -]?)?ulysses|usp|all[ _-]?to[ _-]?all|a2a)"
    r"|(?P<ring>ring(?:[ _-]?attention)?|p2p)|(?P<gather>all[ _-]?gather|gather))"
    r"(?:[ _-]?(?:degree|size|ranks))?(?:\s*[=:]?\s*(?P<ranks>\d+))?(?![\w-])"
)
_OF_CONTEXT = re.compile(r"ulysses|\busp\b|ring[ _-]?attention")  # what nothing else does
_NOT = re.compile(r"\b(?:no|not|without|off|disabled)\b|=\s*(?:0|false|none)\b")
_BESIDE = re.compile(
    r"(?:attention|context|sequence|parallel(?:ism)?|cp(?:\s*=?\s*\d+)?|kv|keys|values|in|and|with|of|by|over)\b"
    r"|[+&x×_ -]"
)


@dataclass(slots=True)
class _Said:
    """The ways that a run names, each with its ranks, 0 where it does not say how many."""

    ways: dict[str, int] = field(default_factory=dict)
    surely: bool = False  # of context ranks, and not of experts or gradients
    levels: bool = False  # two ways, as unified sequence parallelism has

    def add(self, text: str) -> None:
        for found in _WAYS.finditer(text):
            way = _TRADE if found["trade"] else _RING if found["ring"] else _GATHER
            self.ways[way] = max(int(found["ranks"] or 0), self.ways.get(way, 0))
            self.levels |= found[0].startswith("usp")


def exchange_of(run: Run, model: ModelSpec, *, context: int, tensor: int, assumed: list[str]) -> Exchange:
    """The exchange that `run` names over `context` ranks; a ring, and told as `assumed`, where it names none.

    Raises InexpressibleError where such ranks cannot have met so.
    """
    said = _said(run, mixed=any(isinstance(layer.transform, Mixture) for layer in model.layers))
    if context == 1:
        if said.surely and any(ranks != 1 for ranks in said.ways.values()):
            _refuse(f"{' and '.join(said.ways)} of context ranks, and cp is 1 or not printed")
        return Exchange()
    if {_RING, _GATHER} <= said.ways.keys():
        _refuse("keys and values that are both passed around a ring and gathered")
    inner = _inner(said, model, context=context, tensor=tensor, assumed=assumed)
    kind = ExchangeKind.GATHER if _GATHER in said.ways else ExchangeKind.RING
    if inner < context and not {_RING, _GATHER} & said.ways.keys():
        assumed.append("keys and values of context ranks passed around a ring")
    return Exchange(kind=kind, inner=inner)


def _said(run: Run, *, mixed: bool) -> _Said:
    """What remarks in `extra` say: settings, words of context ranks alone, and other ways where a remark says no more.

    All-to-all without a word of context is of experts where there are any.
    """
    said = _Said()
    for remark in re.split(r"[;,()]", run.text("extra").lower()):
        setting = _SETTING.fullmatch(remark.strip())
        text = setting[1] if setting else remark
        alone = not _BESIDE.sub("", _WAYS.sub("", text)).strip()
        if not _WAYS.search(text) or _NOT.search(text) or not (alone or setting or _OF_CONTEXT.search(text)):
            continue
        surely = bool(setting or _OF_CONTEXT.search(text) or re.search(r"\bcp\b|context", text))
        if surely or not mixed:
            said.add(text)
            said.surely |= surely
    return said


def _inner(said: _Said, model: ModelSpec, *, context: int, tensor: int, assumed: list[str]) -> int:
    """Neighbouring ranks that trade tokens for heads."""
    if _TRADE not in said.ways:
        return 1
    inner, outer = said.ways[_TRADE], next((said.ways[way] for way in (_RING, _GATHER) if said.ways.get(way)), 0)
    able = tuple(_able(model, context=context, tensor=tensor))
    if outer and context % outer == 0:
        inner = inner or context // outer
    if not inner and (said.levels or {_RING, _GATHER} & said.ways.keys()):
        inner = able[-1]
        assumed.append(f"heads traded by {inner} of {context} context ranks, as many as divide them")
    inner = inner or context
    if context % inner or (outer and inner * outer != context):
        _refuse(f"all-to-all over {inner} ranks{f' in {outer}' if outer else ''} is not a context axis of {context}")
    if inner not in able:
        _refuse(f"{inner} context ranks do not divide the heads of a tensor rank; choose {' or '.join(map(str, able))}")
    return inner


def _able(model: ModelSpec, *, context: int, tensor: int) -> Iterator[int]:
    """Numbers of ranks that divide the context axis and the heads that the tensor axis leaves, ascending."""
    mixers = (layer.mixer for layer in model.layers)
    heads = {mixer.heads // tensor for mixer in mixers if isinstance(mixer, (Attention, LatentAttention, Recurrence))}
    yield from (size for size in range(1, context + 1) if context % size == 0 and not any(n % size for n in heads))


def _refuse(reason: str) -> NoReturn:
    raise InexpressibleError(reason)
