"""A plan as the launch flags of torchtitan, Megatron-LM and DeepSpeed, read back to see that they mean the same."""

from meshwright.export.compare import Line, Verdict
from meshwright.export.holder import Holder, holder
from meshwright.export.meaning import Meaning, meaning
from meshwright.export.peer import Peer, peer_named
from meshwright.export.peers import Exported, check, export, read, version_of
from meshwright.export.refuse import NotExpressible, NotTheSame

__all__ = [
    "Exported",
    "Holder",
    "Line",
    "Meaning",
    "NotExpressible",
    "NotTheSame",
    "Peer",
    "Verdict",
    "check",
    "export",
    "holder",
    "meaning",
    "peer_named",
    "read",
    "version_of",
]
