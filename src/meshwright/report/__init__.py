"""What a plan or a run says, for people: words, tables, one HTML page, a trace. From reports, spans and run files."""

from meshwright.report.compare import Comparison, compare
from meshwright.report.diagnosis import Diagnosis, diagnose, incident_lines
from meshwright.report.explain import Explanation, explain
from meshwright.report.page import decision_page, dry_page, write_page
from meshwright.report.run_files import RunFiles, read_run
from meshwright.report.time_spent import goodput_lines
from meshwright.report.trace import write_trace
from meshwright.report.waterfall import Waterfall, waterfall

__all__ = [
    "Comparison",
    "Diagnosis",
    "Explanation",
    "RunFiles",
    "Waterfall",
    "compare",
    "decision_page",
    "diagnose",
    "dry_page",
    "explain",
    "goodput_lines",
    "incident_lines",
    "read_run",
    "waterfall",
    "write_page",
    "write_trace",
]
