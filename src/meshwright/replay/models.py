"""The model of a published run, rebuilt from its columns, with what had to be assumed."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from functools import cache
from typing import NoReturn, TypeVar

from meshwright import catalog
from meshwright.catalog.decoders.shapes import GptStyle, LlamaStyle
from meshwright.catalog.encoders import encoder, encoder_decoder
from meshwright.replay.feed_forwards import gated_width, gates, plain_width
from meshwright.replay.hybrids import hybrid, known_hybrid
from meshwright.replay.runs import Run
from meshwright.replay.words import model_kind
from meshwright.spec.blocks import Activation, Attention, FeedForward, LatentAttention, Mixture, Norm
from meshwright.spec.errors import ConfigError
from meshwright.spec.model import ModelSpec

MEGATRON_VOCAB = 51200  # GPT-2's 50,257 tokens, padded as Megatron pads them
_CAPACITY = re.compile(r"capacity[ _]factor\s*[=:]?\s*(\d+(?:\.\d+)?)", re.IGNORECASE)
_LATENTS = re.compile(r"\b(q|kv)_lora_rank\s*=\s*(\d{1,6})\b")
_PREDICTIONS = re.compile(r"max_predictions(?:_per_seq)?\s*[=:]\s*([1-9]\d{0,6})", re.IGNORECASE)
_GATHERS, _MASKED = ("tensorflow", "apex", "fairseq", "transformer kernel"), 0.15
_SEES_ALL = ("vit", "deit", "electra")  # classes of every patch, and whether each token is the true one (2003.10555)
_WIDE = 2560  # from here on heads of GPT-3 (2005.14165, table 2.1) are of 80 to 128 features
T = TypeVar("T")


class InexpressibleError(Exception):
    """No Design says what the run was; the message says why."""


def model_of(run: Run, *, assumed: list[str]) -> ModelSpec:
    """The model of `run`; what its source left open is added to `assumed`. Raises InexpressibleError.

    A preset of the same name and shape comes before the columns, which cannot say all that a mixture or a latent
    attention is made of, and where no shape is printed it is all there is.
    """
    return _with_next_token(_with_capacity(_Reader(run, assumed).model(), run), run, assumed)


@cache
def _named(name: str) -> ModelSpec | None:
    """The preset called `name`, if any."""
    try:
        return catalog.load_model(name)
    except ConfigError:
        return None


class _Reader:
    def __init__(self, run: Run, assumed: list[str]) -> None:
        self.run = run
        self.assumed = assumed

    def model(self) -> ModelSpec:
        kind = self._kind()
        if kind != "t5" and len(self.run.numbers("seq")) > 1:
            _refuse("several lengths of a sequence, and no encoder beside a decoder")
        chosen, experts = self.run.whole("topk"), self.run.whole("n_experts")
        if chosen and experts and chosen > experts:
            _refuse(f"topk {chosen} is more than the {experts} experts there are")
        preset = self._preset()
        if preset is not None and (kind not in ("gpt", "llama") or not self.run.whole("layers")):
            vocab = self.run.whole("vocab")
            return catalog.with_vocab(preset, vocab=vocab) if vocab else preset
        if kind in ("bert", "t5"):
            whole = self._llama() if gates(self.run) else self._gpt()
            return self._masked(encoder(whole)) if kind == "bert" else self._encoder_decoder(whole)
        if kind == "gpt" and not gates(self.run):
            return self._gpt()
        if kind == "llama" and not gates(self.run):
            if self.run.text("arch").lower() == "llama":
                _refuse("a llama whose feed-forward is not gated")
            return self._gpt()
        if kind == "mamba":
            bare = _Reader(self.run, [])._llama()
            return hybrid(self.run, bare, kind=kind, attends=_attention(bare), mixture=None, assumed=self.assumed)
        model = self._llama() if gates(self.run) or kind != "moe" else self._gpt()
        family = kind.removesuffix("-moe")
        if family in ("hybrid-mamba", "jamba", "linear"):
            return self._hybrid(model, family=family, mixed=kind.endswith("-moe"))
        if "mla" in kind:
            model = self._latent(model)
        return self._mixed(model) if kind.startswith("moe") else model

    def _kind(self) -> str:
        text = self.run.text("arch")
        found = model_kind(text, gated=self.run.is_yes("gated"), experts=bool(self.run.whole("n_experts")))
        if found is None:
            _refuse(f"models of the kind {text} are not rebuilt from these columns")
        return found if text else self._assume("a decoder: the kind of model is not printed", found)

    def _preset(self) -> ModelSpec | None:
        """The preset of the run's name; None where there is none or what is printed contradicts it."""
        found = _named(self.run.text("model"))
        if found is None:
            return None
        printed = self.run.whole("layers"), self.run.whole("hidden")
        told = len(found.layers), found.width
        return found if all(said in (None, own) for said, own in zip(printed, told, strict=True)) else None

    def _gpt(self) -> ModelSpec:
        width = self._need("hidden")
        return GptStyle(
            name=self._name(),
            layers=self._need("layers"),
            width=width,
            heads=self._heads(width),
            kv_heads=self.run.whole("kv_heads"),
            head_dim=self.run.whole("head_dim"),
            hidden=self.run.whole("ffn") or self._assume("a feed-forward of four times the width", plain_width(width)),
            vocab=self._vocab(),
            positions=self._length(),
        ).build()

    def _llama(self) -> ModelSpec:
        width = self._need("hidden")
        hidden = self.run.whole("ffn") or self.run.whole("expert_ffn")
        return LlamaStyle(
            name=self._name(),
            layers=self._need("layers"),
            width=width,
            heads=self._heads(width),
            kv_heads=self.run.whole("kv_heads"),
            head_dim=self.run.whole("head_dim"),
            hidden=hidden or self._assume("a gated feed-forward of 8/3 of the width", gated_width(width)),
            vocab=self._vocab(),
            max_positions=self._length(),
        ).build()

    def _masked(self, model: ModelSpec) -> ModelSpec:
        """With a head over the tokens that are to be guessed, where they are gathered before it.

        TensorFlow's BERT does so (gather_indexes in google-research/bert, run_pretraining.py), NVIDIA's of PyTorch on
        apex (modeling.py), fairseq (masked_tokens of its RoBERTa) and DeepSpeed with its transformer
        kernels (masked_token_indexes in training/bing_bert of DeepSpeedExamples); Megatron's and Hugging Face's give
        all to it.
        """
        told, length = _PREDICTIONS.search(self.run.text("extra")), self.run.lengths.encoder
        framework = self.run.text("framework").lower()
        if told and length:
            return replace(model, head=replace(model.head, tokens=min(int(told[1]) / length, 1.0)))
        named = f"{self.run.text('arch')} {self.run.text('model')}".lower()
        if any(name in named for name in _SEES_ALL) or not any(name in framework for name in _GATHERS):
            return model
        share = self._assume(f"a head over {_MASKED:.0%} of the tokens, those to be guessed (1810.04805)", _MASKED)
        return replace(model, head=replace(model.head, tokens=share))

    def _encoder_decoder(self, model: ModelSpec) -> ModelSpec:
        """An encoder and a decoder over tokens of their own, the printed layers in each or in both together."""
        lengths = self.run.lengths
        if lengths.decoder is None:
            self.assumed.append("as many tokens of the decoder as of the encoder")
        share = (lengths.decoder or lengths.encoder) / lengths.encoder
        count = len(model.layers)
        printed = self.run.number("params_b")
        found = [
            encoder_decoder(model, encoders=each, decoders=each, share=share) for each in (count, count // 2) if each
        ]
        if printed is None:
            return self._assume("as many layers in the decoder as in the encoder", found[0])
        return min(found, key=lambda one: abs(math.log(one.parameters / (printed * 1e9))))

    def _latent(self, model: ModelSpec) -> ModelSpec:
        """The latents that `extra` tells, or DeepSeek-V2's and V3's (2405.04434, 2412.19437), which no column holds."""
        said = {of: int(rank) for of, rank in _LATENTS.findall(self.run.text("extra").lower())}
        if said.keys() != {"q", "kv"}:
            self.assumed.append("latents of DeepSeek-V3: 1,536 and 512, heads of 128 and 64 features")
        mixer = LatentAttention(
            width=model.width,
            heads=self._heads(model.width),
            query_rank=said.get("q", 1536) or None,
            kv_rank=said.get("kv", 512),
            nope_dim=128,
            rope_dim=64,
            value_dim=128,
            norm=Norm(width=model.width),
        )
        return replace(model, layers=tuple(replace(layer, mixer=mixer) for layer in model.layers))

    def _mixed(self, model: ModelSpec) -> ModelSpec:
        """The model with a mixture in every layer but the first dense ones."""
        mixture = self._mixture(model.width)
        told = re.search(r"(\d+) dense layer", self.run.text("extra"))
        dense = int(told[1]) if told else 0
        every = self._mixed_every()
        layers = tuple(
            layer if index < dense or index % every != every - 1 else replace(layer, transform=mixture)
            for index, layer in enumerate(model.layers)
        )
        return replace(model, layers=layers)

    def _mixed_every(self) -> int:
        """One layer in so many is a mixture: `moe every 2 layers`, `moe_every=2`, `moe every other layer`; else all."""
        told = re.search(r"moe[ _](?:every|freq|interval)[ =]*([1-9]\d*|other)", self.run.text("extra"), re.IGNORECASE)
        return 1 if told is None else 2 if told[1] == "other" else int(told[1])

    def _mixture(self, width: int) -> Mixture:
        hidden = self.run.whole("expert_ffn")
        if hidden is None:
            wide = self.run.whole("ffn") or _refuse("expert_ffn is not printed")
            hidden = self._assume("experts as wide as a feed-forward is", wide)
        gated = gates(self.run)
        squared = self._kind_is_parted() and not gated
        activation = Activation.RELU_SQUARED if squared else Activation.SILU
        norm, shared = Norm(width=width), self._shared()
        beside = FeedForward(width=width, hidden=shared * hidden, norm=None, gated=gated, activation=activation)
        return Mixture(
            width=width,
            hidden=hidden,
            experts=self._need("n_experts"),
            top_k=self._need("topk"),
            norm=norm,
            gated=gated,
            activation=activation,
            shared=beside if shared else None,
        )

    def _kind_is_parted(self) -> bool:
        """Layers of one part each, whose feed-forwards have two matrices and a squared ReLU (2504.03624)."""
        return (model_kind(self.run.text("arch"), experts=True) or "").startswith("hybrid-mamba")

    def _shared(self) -> int:
        """Experts that every token meets, in widths of those that it chooses."""
        known = known_hybrid(self.run)
        if self.run.whole("n_shared") is None and known is not None and known.shared:
            return self._assume(f"shared experts as wide as {known.shared}, as published", known.shared)
        return self.run.whole("n_shared") or 0

    def _hybrid(self, model: ModelSpec, *, family: str, mixed: bool) -> ModelSpec:
        whole = self._latent(model) if "mla" in self.run.text("arch").lower() else model
        attends = whole.layers[0].mixer
        assert attends is not None
        mixture = self._mixture(model.width) if mixed else None
        return hybrid(self.run, model, kind=family, attends=attends, mixture=mixture, assumed=self.assumed)

    def _heads(self, width: int) -> int:
        head_dim = self.run.whole("head_dim")
        heads = self.run.whole("heads") or self._unsaid_heads(width, head_dim)
        if width % heads and head_dim is None:
            _refuse(f"{heads} heads do not divide a width of {width}")
        return heads

    def _unsaid_heads(self, width: int, head_dim: int | None) -> int:
        """Of 64 features, as GPT-3's and Llama's, and of 128 in wide models; or nearly so where that divides the width
        and suits the tensor ranks."""
        usual = head_dim or (64 if width < _WIDE else 128)
        tensor = self.run.whole("tp") or 1
        able = [count for count in range(tensor, width // 8 + 1, tensor) if width % count == 0]
        able = [count for count in able if width // count % 8 == 0] or [max(width // usual, 1)]
        heads = width // usual if head_dim else min(able, key=lambda count: abs(math.log(width / count / usual)))
        return self._assume(f"heads of {width // heads} features", heads)

    def _vocab(self) -> int:
        if self.run.text("arch").lower() in ("vit", "deit") and not self.run.whole("vocab"):
            return self._assume("patches as tokens, and a head of 1,000 classes over each", 1000)
        known = known_hybrid(self.run)
        if not self.run.whole("vocab") and known is not None and known.vocab:
            return self._assume(f"a vocabulary of {known.vocab}, as published", known.vocab)
        return self.run.whole("vocab") or self._assume(f"a vocabulary of {MEGATRON_VOCAB}", MEGATRON_VOCAB)

    def _name(self) -> str:
        return self.run.text("model") or self.run.id

    def _length(self) -> int:
        return self.run.lengths.encoder or _refuse("seq is not printed")

    def _need(self, name: str) -> int:
        return self.run.whole(name) or _refuse(f"{name} is not printed")

    def _assume(self, what: str, value: T) -> T:
        self.assumed.append(what)
        return value


def predicts_two(run: Run) -> bool:
    """Whether a module beside the head predicts the token after the next (multi-token prediction, 2412.19437)."""
    return "with mtp" in run.text("extra").lower()


def _with_next_token(model: ModelSpec, run: Run, assumed: list[str]) -> ModelSpec:
    """With that module, which is a layer and the head once more; what joins embedding and features is left out."""
    if not predicts_two(run):
        return model
    assumed.append("the module of multi-token prediction as one more layer and the head twice")
    return replace(model, layers=(*model.layers, model.layers[-1]), head=replace(model.head, tokens=2.0))


def _with_capacity(model: ModelSpec, run: Run) -> ModelSpec:
    """With places at every expert for so many times its part of the choices; one time is what even choices fill."""
    told = _CAPACITY.search(run.text("extra"))
    capacity = float(told[1]) if told else 1.0
    if capacity == 1.0:
        return model
    if capacity <= 0.0:
        raise InexpressibleError("a capacity factor of 0 leaves experts no token")
    layers = tuple(
        replace(layer, transform=replace(part, routing=replace(part.routing, capacity=capacity)))
        if isinstance(part := layer.transform, Mixture)
        else layer
        for layer in model.layers
    )
    return replace(model, layers=layers)


def _attention(model: ModelSpec) -> Attention:
    mixer = model.layers[0].mixer
    assert isinstance(mixer, Attention)
    return mixer


def _refuse(reason: str) -> NoReturn:
    raise InexpressibleError(reason)
