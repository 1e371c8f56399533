"""What software an exported file starts, and whether the plan was predicted as that."""

from __future__ import annotations

from meshwright.cost.stacks import software_name
from meshwright.export.compare import Line
from meshwright.export.lost import lost_lines
from meshwright.export.peer import Peer
from meshwright.spec.job import JobSpec, Switch
from meshwright.spec.plan import Design

_STACKS = {
    Peer.TORCHTITAN: "torch-2025",
    Peer.MEGATRON_LM: "megatron-core",
    Peer.DEEPSPEED: "megatron-deepspeed",
}
_COMPILED = "torch-2025-compiled-fused-loss"  # compile.components of torchtitan v0.2.2: model and loss


def stack_of(peer: Peer, job: JobSpec) -> str:
    """The software that the file of `peer` for `job` starts, which of the three torchtitan alone compiles."""
    return _COMPILED if peer is Peer.TORCHTITAN and job.compile is Switch.ON else _STACKS[peer]


def priced(design: Design, peer: Peer) -> tuple[Line, ...]:
    """A line where the plan is predicted, and was chosen, as other software than the file of `peer` starts."""
    said, own = software_name(design.job, design.cluster), stack_of(peer, design.job)
    words = f"{own} runs it; plan --for {peer} predicts and chooses plans as that"
    return lost_lines([] if said == own else [("predicted as", said, words)])
