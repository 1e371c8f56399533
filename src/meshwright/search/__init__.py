"""Search: the rules of legality, the space of legal plans, the best of them, and why."""

from meshwright.search.candidate import Candidate, Decision
from meshwright.search.check import RULES, check
from meshwright.search.decide import design
from meshwright.search.headroom import Headroom, headroom
from meshwright.search.kept import decision_document, decision_path, read_decision
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
    "decision_document",
    "decision_path",
    "design",
    "enumerate_plans",
    "headroom",
    "read_decision",
    "sensitivity",
    "sweep",
    "why_not",
]
