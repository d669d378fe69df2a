"""Every read of the service, in one place."""

from fp8_safeguard.server.auditview import alerts, audit, decisions, plan
from fp8_safeguard.server.clientreports import coverage
from fp8_safeguard.server.compare import compare
from fp8_safeguard.server.heatmap import heatmap
from fp8_safeguard.server.layerview import alerted_layers, layers
from fp8_safeguard.server.readiness import readiness
from fp8_safeguard.server.runview import attempts_of, list_runs, run_detail
from fp8_safeguard.server.series import series

__all__ = [
    "alerted_layers",
    "alerts",
    "attempts_of",
    "audit",
    "compare",
    "coverage",
    "decisions",
    "heatmap",
    "layers",
    "list_runs",
    "plan",
    "readiness",
    "run_detail",
    "series",
]
