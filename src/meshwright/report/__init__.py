"""What a plan or a run says, for people: words, tables, one HTML page, a trace. From reports, spans and run files."""

from meshwright.report.explain import Explanation, explain
from meshwright.report.page import decision_page, write_page
from meshwright.report.run_files import RunFiles, read_run
from meshwright.report.trace import write_trace

__all__ = ["Explanation", "RunFiles", "decision_page", "explain", "read_run", "write_page", "write_trace"]
