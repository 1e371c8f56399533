"""Write, read back, compare: over what the search lists, and over designs whose every choice is drawn."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from meshwright.export import NotExpressible, NotTheSame, Peer, Verdict, check, export, meaning, peers, read
from meshwright.export.peers import nearest
from meshwright.spec.plan import Design, Offload, ScheduleKind, Sharding
from tests.export.plans import MODELS, anything, design, listed
from tests.support import designs, models

ROOM = Path(peers.__file__).parent


def exported_or_refused(given_design: Design, peer: Peer) -> bool:
    """Whether `peer` can say it; what is written comes back equal, and what is refused says where and what."""
    refused = ()
    try:
        found = export(given_design, to=peer)
    except NotExpressible as error:
        refused = error.problems
    if refused:
        assert all(problem.where and "cannot say" in problem.what for problem in refused)
        return False
    assert all(line.verdict is not Verdict.DIFFERS for line in found.lines)
    assert read(found.text, to=peer) == nearest(given_design, to=peer)
    return True


@pytest.mark.parametrize("peer", Peer)
@pytest.mark.parametrize("model", MODELS)
def test_every_plan_of_the_search_comes_back_or_is_refused_by_name(model: str, peer: Peer) -> None:
    said = Counter(exported_or_refused(entry, peer) for entry in listed(model))
    unknown = {("gpt-39b", Peer.TORCHTITAN), ("mixtral-8x7b", Peer.TORCHTITAN)}
    unknown |= {("qwen3-30b-a3b", Peer.DEEPSPEED), ("deepseek-v3", Peer.DEEPSPEED)}
    assert (said[True] > 0) == ((model, peer) not in unknown), said


@pytest.mark.parametrize("model", ["llama-3.1-8b", "gpt-39b"])
def test_megatron_says_all_it_should(model: str) -> None:
    """Refused are exactly other schedules, gradients or parameters divided under a pipeline, and gathers within."""
    for entry in listed(model):
        plan, said = entry.plan, meaning(entry)
        deep = said.sharding in (Sharding.GRADIENTS, Sharding.PARAMETERS) and plan.pipeline > 1
        within = " in gather " in said.exchange
        moved = any(offload is not Offload.NONE for offload in said.offload)
        known = said.schedule in (ScheduleKind.ONE_F_ONE_B, ScheduleKind.INTERLEAVED)
        if not moved:
            assert exported_or_refused(entry, Peer.MEGATRON_LM) == (known and not deep and not within), plan.describe()


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(anything())
def test_designs_of_any_choices_come_back_or_are_refused_by_name(choices: dict[str, Any]) -> None:
    for peer in Peer:
        exported_or_refused(design(**choices), peer)


@pytest.mark.parametrize("peer", Peer)
def test_a_wrong_writer_is_caught(peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer that mistakes one size is stopped by the reader, whichever the peer."""
    writer: ModuleType = getattr(peers, f"write_{peer.value.removesuffix('-lm')}")
    honest = writer.write
    swapped = {"data_parallel_shard_degree = 8": "data_parallel_shard_degree = 4", "--nnodes 1": "--nnodes 1"}
    swapped |= {"nproc_per_node 8": "nproc_per_node 4", "nproc-per-node 8": "nproc-per-node 4"}
    swapped |= {"--num_gpus 8": "--num_gpus 4", "batch_size = 64": "batch_size = 32"}
    swapped |= {"global-batch-size 64": "global-batch-size 32", '"train_batch_size": 64': '"train_batch_size": 32'}

    def mistaken(entry: Design) -> str:
        text: str = honest(entry)
        for right, wrong in swapped.items():
            text = text.replace(right, wrong)
        return text

    monkeypatch.setattr(writer, "write", mistaken)
    with pytest.raises(NotTheSame, match="devices"):
        export(design(sharding=Sharding.GRADIENTS), to=peer)


@pytest.mark.parametrize("peer", Peer)
def test_check_names_what_differs(peer: Peer) -> None:
    text = export(design(sharding=Sharding.GRADIENTS), to=peer).text
    lines = check(design(sharding=Sharding.GRADIENTS, microbatch=2, microbatches=4), text, to=peer)
    assert {line.name for line in lines if line.verdict is Verdict.DIFFERS} == {"microbatch", "microbatches"}


def test_readers_know_nothing_of_writers() -> None:
    readers = list(ROOM.glob("read_*.py"))
    assert {path.stem for path in readers} >= {"read_deepspeed", "read_megatron", "read_torchtitan"}
    for path in readers:
        names = {node.module for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)}
        assert not [name for name in names if name and ".write_" in name], path.name


@pytest.mark.parametrize("peer", [Peer.MEGATRON_LM, Peer.DEEPSPEED])
def test_a_vocabulary_that_tensor_ranks_do_not_divide_is_refused_by_name(peer: Peer) -> None:
    for vocab, refused in ((models.VOCAB, False), (models.VOCAB - 1, True)):
        entry = designs.design(models.with_vocab(models.model(), vocab), designs.Layout(tensor=2, batch=4))
        with pytest.raises(NotExpressible) as told:  # of other things too, as fp64
            export(entry, to=peer)
        assert any("unequally many" in problem.what for problem in told.value.problems) is refused


@pytest.mark.parametrize("peer", [Peer.MEGATRON_LM, Peer.DEEPSPEED, Peer.TORCHTITAN])
def test_copies_of_key_value_heads_are_refused_by_name(peer: Peer) -> None:
    for tensor, refused in ((2, False), (4, True)):
        entry = designs.design(models.model(), designs.Layout(tensor=tensor, batch=4))
        with pytest.raises(NotExpressible) as told:  # of other things too, as fp64
            export(entry, to=peer)
        assert any("copies of 2 key-value heads" in problem.what for problem in told.value.problems) is refused
