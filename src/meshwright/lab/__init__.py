"""Several hosts on one machine, or several real ones: a cluster's links made real, so that what crosses them is
measured and not imagined. Nothing here knows of training."""

from meshwright.lab.hosts import Host, Outcome, Traffic
from meshwright.lab.lab import Lab
from meshwright.lab.topology import Topology, Uplink, topology

__all__ = ["Host", "Lab", "Outcome", "Topology", "Traffic", "Uplink", "topology"]
