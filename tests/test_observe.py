"""What a user sees of the pass while compiling: logs, trace, counters, bisector, limit."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import standins
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor import config as inductor_config
from torch._inductor.compiler_bisector import CompilerBisector

import qkvpass
from qkvpass import graph_pass, halving

HEADS, HEAD_DIM = 4, 8
WIDTH = HEADS * HEAD_DIM

# Two of three copies go: q is written in place between its copy and the attention op.
PROGRAM = """
import torch
import standins
import qkvpass

standins.tag("aware")


def model(x, w):
    q, k, v = (t.view(-1, 4, 8).contiguous() for t in (x @ w).split(32, -1))
    standins.norm_(q, q.new_ones(1, 8))
    return standins.aware(q, k, v)


with torch.no_grad():
    torch.compile(model, backend="inductor", options=qkvpass.inductor_options())(
        torch.randn(16, 8), torch.randn(8, 96)
    )
"""


# The kernels' own cache stays on: a C++ header is compiled once for all tests.
NO_GRAPH_CACHES = {"TORCHINDUCTOR_FX_GRAPH_CACHE": "0", "TORCHINDUCTOR_AUTOGRAD_CACHE": "0"}


def run_program(tmp_path: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    here = Path(__file__).parent
    paths = [str(here), str(here.parent), os.environ.get("PYTHONPATH", "")]
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("TORCH_", "QKVPASS_"))}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM],
        env=inherited | {"PYTHONPATH": os.pathsep.join(paths), **NO_GRAPH_CACHES} | environment,
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    return done


def test_silent_unless_asked(tmp_path):
    done = run_program(tmp_path)
    assert done.stdout == "" and "qkvpass" not in done.stderr


def test_logs_and_trace(tmp_path):
    """One line a decision on request; tlparse lists the report of the graph with its diff."""
    done = run_program(tmp_path, TORCH_LOGS="+qkvpass", TORCH_TRACE=str(tmp_path / "trace"))
    lines = [re.sub(r"^\w+ .*?\] (\[.*?\] )?", "", line) for line in done.stderr.splitlines()]
    decisions = [line for line in lines if " of standin::aware" in line]
    assert len(decisions) == 3
    kept = next(line for line in decisions if ", q of " in line)
    assert re.match(r"kept \(mutated\) clone\w* \(aten.clone\), q of standin::aware", kept)
    for operand in ("k", "v"):
        line = next(line for line in decisions if f", {operand} of " in line)
        assert re.match(r"removed clone_\d \(aten.clone\)", line)
        assert line.endswith(f"reads {operand} by stride")
    assert any(line.startswith("removed 2 of ") for line in lines)

    tlparse = shutil.which("tlparse") or shutil.which("tlparse", path=Path(sys.executable).parent)
    if tlparse is None:
        pytest.skip("tlparse is not installed")
    (trace,) = (tmp_path / "trace").iterdir()
    out = tmp_path / "out"
    parsed = subprocess.run(
        [tlparse, trace, "-o", out, "--no-browser", "--strict"], capture_output=True, text=True
    )
    assert parsed.returncode == 0, parsed.stderr
    (text,) = out.glob("-_0_0_0/qkvpass_[0-9]*.txt")
    (data,) = out.glob("-_0_0_0/qkvpass_report_*.json")
    for shown in (text, data):
        assert shown.name in (out / "index.html").read_text()
    assert "mutated" in text.read_text() and "\n-    clone_1:" in text.read_text()
    assert json.loads(data.read_text())["summary"]["removed"] == 2


def attention(x, w):
    q, k, v = (t.view(-1, HEADS, HEAD_DIM) for t in (x @ w).split(WIDTH, -1))
    k, v = k.contiguous(), v.contiguous()
    return standins.aware(q.contiguous(), k, v), k


def counted(fn, *inputs) -> dict[str, int]:
    counters["qkvpass"].clear()
    with torch.no_grad():
        torch.compile(fn, backend=qkvpass.backend)(*inputs)
    return dict(+counters["qkvpass"])


def test_counters():
    standins.tag("aware")
    inputs = torch.randn(16, 8), torch.randn(8, 3 * WIDTH)
    assert counted(attention, *inputs) == {"graphs": 1, "removed": 2, "kept: graph-output": 1}


def test_counters_of_faults(monkeypatch):
    monkeypatch.delenv("QKVPASS_STRICT")
    monkeypatch.setattr(graph_pass, "decide", lambda *args: 1 / 0)
    inputs = torch.randn(16, 8), torch.randn(8, 3 * WIDTH)
    assert counted(attention, *inputs) == {"graphs": 1, "faults": 1}


def test_counters_of_cached_graphs():
    counters["qkvpass"].clear()
    graph_pass.deliver(qkvpass.Report((), (), "", "", cached=True))
    assert dict(+counters["qkvpass"]) == {"graphs": 1, "cached": 1}


class Layer(nn.Module):
    def __init__(self, op) -> None:
        super().__init__()
        self.qkv, self.op = nn.Linear(WIDTH, 3 * WIDTH), op

    def forward(self, x):
        parts = self.qkv(x).split(WIDTH, -1)
        return self.op(*(t.view(-1, HEADS, HEAD_DIM).contiguous() for t in parts)).view(-1, WIDTH)


def test_the_bisector_finds_the_copy():
    """A wrongly tagged op among others: the search ends at its first copy, and names it."""
    standins.tag("aware")
    standins.tag("blind")
    model = nn.Sequential(Layer(standins.aware), Layer(standins.blind), Layer(standins.aware))
    x = torch.randn(16, WIDTH)
    reports = []

    def right() -> bool:
        torch._dynamo.reset()
        compiled = torch.compile(model, options=qkvpass.inductor_options())
        with torch.no_grad(), qkvpass.capture() as found:
            same = torch.allclose(compiled(x), model(x), atol=1e-4)
        reports.extend(found)
        return same

    # Caches are on, as a user has them: what was compiled in one step must not serve the next.
    with inductor_config.patch(fx_graph_cache=True):
        result = CompilerBisector.do_bisect(right)
    assert (result.backend, result.subsystem) == ("inductor", "joint_graph_passes")
    (blamed, *_) = [c for c in reports[0].copies if c.op == "standin::blind"]
    assert result.debug_info == f"qkvpass: {blamed.node}, q of blind"
    assert len({len(r.removed) for r in reports}) > 2


def test_the_bisector_keeps_the_backend_on_request():
    """torch.compile replaces a backend while it bisects, unless this setting says not to."""
    standins.tag("blind")
    model, x = Layer(standins.blind), torch.randn(16, WIDTH)

    def right() -> bool:
        torch._dynamo.reset()
        with torch.no_grad():
            compiled = torch.compile(model, backend=qkvpass.backend)
            return torch.allclose(compiled(x), model(x), atol=1e-4)

    assert CompilerBisector.do_bisect(right) is None
    with inductor_config.patch({"test_configs.bisect_keep_custom_backend_for_inductor": True}):
        assert CompilerBisector.do_bisect(right).debug_info == "qkvpass: clone, q of blind"


@pytest.mark.parametrize("limit", ["-1", "all", "1.5"])
def test_a_limit_that_is_no_number_leaves_the_graph_alone(monkeypatch, caplog, limit):
    monkeypatch.delenv("QKVPASS_STRICT")
    monkeypatch.setenv(halving.VARIABLE, limit)
    graph_pass.log_once.cache_clear()
    standins.tag("aware")
    gm = standins.trace(attention, torch.randn(16, 8), torch.randn(8, 3 * WIDTH))
    with caplog.at_level(logging.WARNING, "qkvpass"):
        outcome = standins.apply_pass(gm)
    assert not outcome.report.removed and repr(limit) in outcome.report.fault
    assert "give a whole number of copies, 0 or more" in caplog.text


def test_the_limit_is_part_of_the_identity(monkeypatch):
    ours = qkvpass.StridedQKVPass()
    found = {ours.uuid()}
    for limit in ("0", "1"):
        monkeypatch.setenv(halving.VARIABLE, limit)
        found.add(ours.uuid())
    assert len(found) == 3 and None not in found


def test_nothing_is_cached_during_a_search():
    with halving.at_most(1):
        assert qkvpass.StridedQKVPass().uuid() is None


def test_a_budget_is_shared_between_graphs():
    standins.tag("aware")
    inputs = torch.randn(16, 8), torch.randn(8, 3 * WIDTH)
    graphs = [standins.trace(attention, *inputs) for _ in range(3)]
    with halving.at_most(5) as budget:
        removed = [len(standins.apply_pass(gm).report.removed) for gm in graphs]
    # k comes first, is returned, and stays; it counts as tried.
    assert removed == [2, 1, 0] and budget.asked == 9
