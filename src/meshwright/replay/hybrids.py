"""Layers of published hybrids: which attend and which are recurrent, from a pattern, from counts or from the family."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from meshwright.catalog.hybrids import single
from meshwright.catalog.names import normal
from meshwright.replay.runs import Run
from meshwright.spec.blocks import Activation, FeedForward, Layer, Mixer, Mixture, Norm, Recurrence, Transform
from meshwright.spec.model import ModelSpec

_SPREAD = "M-M-M-M*" + "-M-M-M-M-M*" * 3 + "-M-M-M-M-M-"
_SPREAD_56 = "M-M-M-M*" + "-M-M-M-M-M*" * 9 + "-M-M-M-M-M-"
_SPREAD_12 = "M-M-M-M*" + "-M-M-M-M*" * 5 + "-M-M-M-M-"
_NANO_3 = "MEMEM*E" + "MEMEM*E" * 4 + "MEMEMEM*EMEMEMEME"
_NANO_9 = "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-"
_SPREAD_47 = "M-M-M-M-M-M-M-M-M*-M-M-M-M-M-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-M-M---MM---M-M*-M-M-M-M-M-"
_ATTENDS_IN = {"jamba": 8, "linear": 4}  # 2403.19887; Qwen3-Next, Kimi Linear (2510.26692)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sizes:
    """Of a recurrence: `heads` of `head_dim` features, `state` features in each, shared by `groups` of heads."""

    heads: int
    head_dim: int
    state: int
    groups: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """What a published model's configuration says and a row may leave open; blank `pattern` is the family's.

    Experts that every token meets are as wide as `shared` of those that it chooses.
    """

    sizes: _Sizes
    pattern: str = ""
    shared: int = 0
    vocab: int | None = None


def _mamba2(pattern: str, *, heads: int, head_dim: int = 64, state: int = 128, shared: int = 0) -> Known:
    sizes = _Sizes(heads=heads, head_dim=head_dim, state=state, groups=8)
    return Known(pattern=pattern, sizes=sizes, shared=shared, vocab=131072)


def _delta_net(*, heads: int, vocab: int) -> Known:
    """Gated DeltaNets of Qwen: 16 heads of keys for so many of values, and one shared expert."""
    return Known(sizes=_Sizes(heads=heads, head_dim=128, state=128, groups=16), shared=1, vocab=vocab)


# Megatron-Bridge's providers of Nemotron-H and Nemotron Nano v2, and config.json of Nemotron 3 Nano, Qwen3-Next and
# Qwen3.5 with experts.
_KNOWN: Mapping[str, Known] = MappingProxyType(
    {
        "nemotronh4b": _mamba2(_SPREAD, heads=112),
        "nemotronh8b": _mamba2(_SPREAD, heads=128),
        "nemotronh47b": _mamba2(_SPREAD_47, heads=256, state=256),
        "nemotronh56b": _mamba2(_SPREAD_56, heads=256, state=256),
        "nemotronnano9bv2": _mamba2(_NANO_9, heads=128, head_dim=80),
        "nemotronnano12bv2": _mamba2(_SPREAD_12, heads=128, head_dim=80),
        "nemotron3nano": _mamba2(_NANO_3, heads=64, shared=2),
        "qwen3next": _delta_net(heads=32, vocab=151936),
        "qwen3.5397b": _delta_net(heads=64, vocab=248320),
        "qwen3.5122b": _delta_net(heads=64, vocab=248320),
        "qwen3.535b": _delta_net(heads=32, vocab=248320),
    }
)


def known_hybrid(run: Run) -> Known | None:
    """What is known of the hybrid that `run` names, if it is one whose configuration was read."""
    name = normal(run.text("model"))
    return next((known for start, known in _KNOWN.items() if name.startswith(start)), None)


def hybrid(
    run: Run, base: ModelSpec, *, kind: str, attends: Mixer, mixture: Mixture | None, assumed: list[str]
) -> ModelSpec:
    """`base` with the layers of a hybrid of `kind`: `hybrid-mamba`, `jamba`, `linear` or `mamba`.

    What no column says is added to `assumed`.
    """
    builder = _Builder(run, base, attends=attends, mixture=mixture, assumed=assumed)
    return replace(base, layers=builder.layers(kind))


class _Builder:
    def __init__(
        self, run: Run, base: ModelSpec, *, attends: Mixer, mixture: Mixture | None, assumed: list[str]
    ) -> None:
        self._run = run
        self._extra = run.text("extra")
        self._base = base
        self._attends = attends
        self._mixture = mixture
        self._assumed = assumed
        self._known = known_hybrid(run)

    @property
    def _minimax(self) -> bool:
        """Lightning attention (2501.08313), whose states decay and are not corrected."""
        return normal(self._run.text("model")).startswith("minimax")

    def layers(self, kind: str) -> tuple[Layer, ...]:
        count = len(self._base.layers)
        if kind == "mamba":
            return (single(self._recurrence(linear=False)),) * count
        if pattern := self._pattern(count):
            return tuple(self._part(letter) for letter in pattern)
        if kind == "hybrid-mamba":
            return self._parted(count)
        return self._whole(count, kind=kind)

    def _pattern(self, count: int) -> str:
        """One letter a layer, as Megatron's pattern has them, where the row or its model says so."""
        said = re.search(r"pattern\s*[=:]\s*([ME*|LD-]+)", self._extra)
        pattern = said[1].replace("|", "") if said else (self._known.pattern if self._known else "")
        if pattern and len(pattern) != count:
            self._assumed.append(f"the pattern of {len(pattern)} layers is not that of {count}")
            return ""
        if pattern and not said:
            self._assumed.append(f"layers as in {self._run.text('model')}'s published configuration: {pattern}")
        return pattern

    def _part(self, letter: str) -> Layer:
        """A layer of one part: attention, recurrent, mixture or feed-forward."""
        if letter == "*":
            return single(self._attends)
        if letter in "MLD":
            return single(self._recurrence(linear=letter != "M"))
        return single(self._mixture if letter == "E" and self._mixture is not None else self._squared())

    def _parted(self, count: int) -> tuple[Layer, ...]:
        """Layers of one part each as in Nemotron-H (2504.03624): few attend, the others are Mamba-2 or feed-forward."""
        said = re.search(r"attention_layers\s*=\s*([1-9]\d*)|\b([1-9]\d*) attention layers", self._extra)
        attending = int(said[1] or said[2]) if said else 0
        if not said:
            self._assumed.append("one layer in ten attends, the others are Mamba-2 and feed-forwards in turn")
        every = count / attending if attending else 10.0
        places = {int((index + 0.5) * every) for index in range(attending or (count + 4) // 10)}
        turn = "ME" if self._mixture else "M-"
        return tuple(self._part("*" if index in places else turn[index % 2]) for index in range(count))

    def _whole(self, count: int, *, kind: str) -> tuple[Layer, ...]:
        """Layers of a mixer and a feed-forward, one in so many of which attends."""
        every = self._attends_in(kind)
        recurrent = self._recurrence(linear=kind == "linear")
        mixed = 2 if kind == "jamba" else 1
        return tuple(
            Layer(
                mixer=self._attends if index % every == every - 1 else recurrent,
                transform=self._transform(mixed=index % mixed == mixed - 1),
            )
            for index in range(count)
        )

    def _attends_in(self, kind: str) -> int:
        """Of how many layers one attends: `1:7`, `3:1`, `1 in 8`, `attention every 4`, else as the family has it."""
        if said := re.search(r"\b1\s*:\s*([1-9]\d*)|\b([1-9]\d*)\s*:\s*1\b", self._extra):
            return int(said[1] or said[2]) + 1
        every = r"\b1 (?:[a-z]+ )*in ([1-9]\d*)|(?:attention|attn)[ _]?(?:every|interval)[ =]*([1-9]\d*)"
        if said := re.search(every, self._extra):
            return int(said[1] or said[2])
        usual = 8 if self._minimax else _ATTENDS_IN[kind]
        self._assumed.append(f"one layer in {usual} attends")
        return usual

    def _transform(self, *, mixed: bool) -> Transform | None:
        return self._mixture if mixed and self._mixture is not None else self._base.layers[0].transform

    def _squared(self) -> Transform:
        """The feed-forward of Nemotron-H: two matrices and a squared ReLU, but where the row says gated."""
        transform = self._base.layers[0].transform
        assert isinstance(transform, FeedForward)
        gated = self._run.is_yes("gated") is True
        return transform if gated else replace(transform, gated=False, activation=Activation.RELU_SQUARED)

    def _recurrence(self, *, linear: bool) -> Recurrence:
        sizes = self._sizes(linear=linear)
        width = self._base.width
        return Recurrence(
            width=width,
            inner=sizes.heads * sizes.head_dim,
            heads=sizes.heads,
            state=sizes.state,
            groups=sizes.groups,
            convolution=4,
            norm=Norm(width=width),
            delta=linear and not self._minimax,
        )

    def _sizes(self, *, linear: bool) -> _Sizes:
        """As the row, its model's configuration or the family has them."""
        if self._known is not None:
            usual = self._known.sizes
        elif linear:
            heads = self._run.whole("heads") or max(1, self._base.width // 128)
            features = self._run.whole("head_dim") or max(1, self._base.width // heads)
            usual = _Sizes(heads=heads, head_dim=features, state=features, groups=heads)
        else:
            usual = _Sizes(heads=max(1, 2 * self._base.width // 64), head_dim=64, state=128, groups=8)
        names = ("heads", "head_dim", "state", "groups")
        said = {name: value for name in names if (value := self._said(name, linear=linear))}
        if self._known is None and not said:
            plain = f"{usual.heads} heads of {usual.head_dim} features, state {usual.state}"
            told = f"recurrent layers of {plain}"
            self._assumed += [told] if told not in self._assumed else []
        return replace(usual, **said)

    def _said(self, name: str, *, linear: bool) -> int | None:
        """`mamba_heads=128`, `mamba_state=128`; `linear_heads=32`, `linear_groups=16` of linear attention."""
        found = re.search(rf"{'linear' if linear else 'mamba'}_{name}\s*=\s*([1-9]\d*)", self._extra)
        return int(found[1]) if found else None
