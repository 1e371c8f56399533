"""The trial of torch.compile: the faster way stays, short runs are left alone, a missing compiler is told."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from torch import nn

from meshwright.parallel.compile import compile_layers, uncompile_layers
from meshwright.train.compile_trial import CompileTold, CompileTrial, LayerCompiler
from meshwright.train.events import Log, Started, StepDone


@dataclass
class Switchboard:
    reason: str = ""
    calls: list[str] = field(default_factory=list)

    def compile(self) -> str:
        self.calls.append("compile")
        return self.reason

    def undo(self) -> None:
        self.calls.append("undo")


def said(compiler: Switchboard, *, compiled: float, total: int = 1000) -> list[str]:
    trial = CompileTrial(compiler=compiler, total_steps=total)
    texts = []
    for step in range(1, 30):
        seconds = compiled if "compile" in compiler.calls and "undo" not in compiler.calls else 1.0
        seconds = 60.0 if step in (9, 10) else seconds
        event = StepDone(
            step=step, tokens=0, loss=1.0, grad_norm=1.0, learning_rate=0.1, seconds=seconds, memory_bytes=0.0
        )
        texts += [action.text for action in trial.react(event) if isinstance(action, Log)]
    return texts


def test_faster_stays() -> None:
    board = Switchboard()
    assert said(board, compiled=0.7)[-1].startswith("compile: on; 700 ms a step compiled, 1.00 s")
    assert board.calls == ["compile"]


def test_slower_is_undone() -> None:
    board = Switchboard()
    assert said(board, compiled=1.1)[-1].startswith("compile: off")
    assert board.calls == ["compile", "undo"]


def test_a_short_run_does_not_try() -> None:
    board = Switchboard()
    assert said(board, compiled=0.1, total=100) == ["compile: off; 92.0 s of training would not win it back"]
    assert board.calls == []


def test_a_run_that_compiles_says_why_it_begins_slowly() -> None:
    (action,) = CompileTold().react(Started(step=0, total_steps=10))
    assert isinstance(action, Log)
    assert action.text.startswith("compile: on; ")


def test_a_missing_compiler_is_one_line() -> None:
    board = Switchboard(reason="no C++ compiler is found")
    assert said(board, compiled=0.1) == ["compile: off; no C++ compiler is found"]
    assert board.calls == ["compile"]


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({"0": nn.Linear(2, 2)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers.values():
            x = layer(x)
        return x


@dataclass
class Laid:
    """One part, without a loss."""

    part: nn.Module

    def compile(self) -> None:
        compile_layers([self.part])

    def uncompile(self) -> None:
        uncompile_layers([self.part])


def test_layers_are_compiled_and_run_again_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    part, x = Part(), torch.ones(1, 2)
    before = part(x)
    monkeypatch.setattr(torch, "compile", lambda call: lambda x: call(x) + 1.0)
    monkeypatch.setattr("shutil.which", lambda _: "/usr/bin/c++")
    compiler = LayerCompiler(laid=Laid(part))
    assert compiler.compile() == ""
    assert torch.equal(part(x), before + 1.0)
    compiler.undo()
    assert torch.equal(part(x), before)


def test_without_a_compiler_the_reason_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda _: None)
    assert LayerCompiler(laid=Laid(Part())).compile() == "no C++ compiler is found"
