"""Search: the rules of legality, the space of legal plans, the best of them, and why."""

from meshwright.search.candidate import Candidate, Decision
from meshwright.search.check import RULES, check, check_answer
from meshwright.search.decide import design
from meshwright.search.fewer import Hosts, for_hosts, hosts_of, in_order, losses
from meshwright.search.headroom import Headroom, headroom
from meshwright.search.kept import decision_of, decision_path, is_decision, read_decision
from meshwright.search.product import Rejection
from meshwright.search.rules import Rule, Scope
from meshwright.search.sensitivity import Sensitivity, sensitivity
from meshwright.search.space import Space, enumerate_plans
from meshwright.search.sweep import Sweep, sweep
from meshwright.search.trainer import Trainer
from meshwright.search.vary import Question
from meshwright.search.why_not import WhyNot, why_not

__all__ = [
    "RULES",
    "Candidate",
    "Decision",
    "Headroom",
    "Hosts",
    "Question",
    "Rejection",
    "Rule",
    "Scope",
    "Sensitivity",
    "Space",
    "Sweep",
    "Trainer",
    "WhyNot",
    "check",
    "check_answer",
    "decision_of",
    "decision_path",
    "design",
    "enumerate_plans",
    "for_hosts",
    "headroom",
    "hosts_of",
    "in_order",
    "is_decision",
    "losses",
    "read_decision",
    "sensitivity",
    "sweep",
    "why_not",
]
