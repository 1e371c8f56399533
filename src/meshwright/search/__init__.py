"""Search: the rules of legality, the space of legal plans, the best of them, and why."""

from meshwright.search.candidate import Candidate, Decision
from meshwright.search.check import RULES, check
from meshwright.search.decide import design
from meshwright.search.kept import decision_document, decision_path, read_decision
from meshwright.search.product import Rejection
from meshwright.search.rules import Rule, Scope
from meshwright.search.space import Space, enumerate_plans

__all__ = [
    "RULES",
    "Candidate",
    "Decision",
    "Rejection",
    "Rule",
    "Scope",
    "Space",
    "check",
    "decision_document",
    "decision_path",
    "design",
    "enumerate_plans",
    "read_decision",
]
