"""Where a report goes besides to whoever captures it: counters, the log and torch's trace."""

from __future__ import annotations

import logging

from .compat import counters, trace_artifact, tracing
from .report import CopyDecision, Report

log = logging.getLogger("qkvpass")


def tell(report: Report) -> None:
    """Count a report, log it, and put it into torch's structured trace where one is written.

    ``torch._dynamo.utils.counters["qkvpass"]`` holds, for all graphs so far, those of
    ``explain`` too: ``graphs``, ``cached`` and ``faults`` among them, ``removed``, and for the
    copies that stayed one ``kept: REASON`` each. ``TORCH_LOGS="qkvpass"`` logs each report,
    ``"+qkvpass"`` each decision too. ``TORCH_TRACE`` gets two artifacts a graph: ``qkvpass``
    (the report and the graph's diff, as text) and ``qkvpass_report`` (JSON).
    """
    _count(report)
    log.info("%s", report)
    if log.isEnabledFor(logging.DEBUG):
        for copy in report.copies:
            log.debug("%s", _line(copy))
    if tracing():
        trace_artifact("qkvpass", "string", f"{report}\n\n{report.diff()}\n")
        trace_artifact("qkvpass_report", "json", report.to_json())


def text_wanted() -> bool:
    """Whether a report's graphs will be read as text."""
    return tracing()


def _count(report: Report) -> None:
    counted = counters()
    counted["graphs"] += 1
    counted["cached"] += report.cached
    counted["faults"] += bool(report.fault)
    counted["removed"] += len(report.removed)
    for copy in report.kept:
        counted[f"kept: {copy.reason}"] += 1


def _line(copy: CopyDecision) -> str:
    """One decision: ``"removed clone_1 (aten.clone), k of mylib::attn, model.py:42: why"``."""
    outcome = copy.reason.value if copy.removed else f"kept ({copy.reason})"
    operand = f", {copy.operand or 'behind it'} of {copy.op}" if copy.op else ""
    source = f", {copy.source}" if copy.source else ""
    return f"{outcome} {copy.node} ({copy.kind}){operand}{source}: {copy.detail}"
