"""Negative controls: with a piece of the pass switched off, the checks fail. So they can.

Each check here is about what happened at run time. None reads the graph, which claims success
in every one of these cases.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import probe
import pytest
import standins
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.library import custom_op

import qkvpass
from qkvpass import edit, policy, safety

HEADS, HEAD_DIM, TOKENS = 4, 16, 64
WIDTH = HEADS * HEAD_DIM
PACKED = TOKENS * 3 * WIDTH * 4  # bytes of the projection


@custom_op("control::attention", mutates_args=())
def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    probe.receive(q=q, k=k, v=v)
    return standins.attend(*(standins.by_stride(t) for t in (q, k, v)))


@attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return q.new_empty(q.shape)


class Layer(nn.Module):
    """Projection, perhaps a pointwise op on it, split, three copies, attention."""

    def __init__(self, pointwise: Callable[[Tensor], Tensor] = lambda packed: packed) -> None:
        super().__init__()
        self.qkv, self.pointwise = nn.Linear(WIDTH, 3 * WIDTH), pointwise

    def forward(self, x: Tensor) -> Tensor:
        parts = self.pointwise(self.qkv(x)).split(WIDTH, -1)
        return attention(*(t.view(-1, HEADS, HEAD_DIM).contiguous() for t in parts))


class Outcome(NamedTuple):
    """What stock Inductor and the pass made of a layer: runs, and what the op received."""

    stock: standins.Run
    ours: standins.Run
    stock_received: list[probe.Received]
    received: list[probe.Received]


def compiled(layer: Layer) -> Outcome:
    qkvpass.register_stride_tag("control::attention", operands=("q", "k", "v"))
    probe.taken()
    x = torch.randn(TOKENS, WIDTH)
    stock = standins.run(layer, x)
    stock_received = probe.taken()
    ours = standins.run(layer, x, backend=qkvpass.backend)
    for mine, expected in zip(ours.outputs, stock.outputs):
        standins.assert_same(mine, expected)
    return Outcome(stock, ours, stock_received, probe.taken())


def removed(outcome: Outcome) -> list[str]:
    """Operands whose copies the report says are gone."""
    (report,) = outcome.ours.reports
    return [copy.operand for copy in report.removed]


# What is claimed of removed copies, and checked where the op runs


def check_strides(outcome: Outcome) -> None:
    for call in outcome.received:
        assert all(call[name].seen.stride == (3 * WIDTH, HEAD_DIM, 1) for name in removed(outcome))


def check_storage(outcome: Outcome) -> None:
    for call in outcome.received:
        assert probe.storages(call, removed(outcome)) <= 1


def check_room(outcome: Outcome) -> None:
    """No more bytes lie behind the operands than the packed buffer has."""
    for call in outcome.received:
        assert probe.room(call) <= PACKED


def check_kernels(outcome: Outcome) -> None:
    if removed(outcome):
        assert outcome.ours.kernels < outcome.stock.kernels
    else:
        assert outcome.ours.kernels == outcome.stock.kernels


CHECKS = (check_strides, check_storage, check_room, check_kernels)


def fails(check: Callable[[Outcome], None], outcome: Outcome) -> bool:
    try:
        check(outcome)
    except AssertionError:
        return True
    return False


def test_unpatched() -> None:
    """All checks hold, and were about something."""
    outcome = compiled(Layer())
    assert removed(outcome) == ["q", "k", "v"]
    for check in CHECKS:
        check(outcome)
    assert [probe.storages(call, "qkv") for call in outcome.stock_received] == [3, 3]


def test_without_the_recorded_layouts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lowering makes the copies again, to honour the layouts of the eager trace."""
    monkeypatch.setattr(edit, "_record_layouts", lambda journal, node: None)
    outcome = compiled(Layer())
    assert removed(outcome) == ["q", "k", "v"], "the report is none the wiser"
    with pytest.raises(AssertionError):
        check_strides(outcome)
    assert [check for check in CHECKS if not fails(check, outcome)] == [check_room]


def test_pointwise_producer_unpatched() -> None:
    outcome = compiled(Layer(F.relu))
    (report,) = outcome.ours.reports
    assert {str(copy.reason) for copy in report.copies} == {"producer-fused"}
    for check in CHECKS:
        check(outcome)


def test_with_a_pointwise_producer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The op gets the strides that were promised, and three buffers of the packed one's size."""
    monkeypatch.setattr(policy, "producer_verdict", lambda candidate, facts: None)
    monkeypatch.setattr(policy, "is_rewritten_anyway", lambda candidate, facts: False)
    outcome = compiled(Layer(F.relu))
    assert removed(outcome) == ["q", "k", "v"]
    check_strides(outcome)
    for check in (check_storage, check_room, check_kernels):
        with pytest.raises(AssertionError):
            check(outcome)
    assert all(probe.room(call) > 2 * PACKED for call in outcome.received)


def blind_layer(x: Tensor, weight: Tensor) -> Tensor:
    parts = (x @ weight).split(WIDTH, -1)
    return standins.blind(*(t.reshape(-1, HEADS, HEAD_DIM).contiguous() for t in parts))


def test_rule_unpatched() -> None:
    """An op that nobody vouches for keeps its copies, and its numbers."""
    outcome = standins.decide(blind_layer, torch.randn(TOKENS, 8), torch.randn(8, 3 * WIDTH))
    assert outcome.reasons == ["untagged-op"] * 3


def test_without_the_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no consumer may refuse, an op that takes its operands for dense is wrong."""

    def lax(call: safety.Call) -> Any:
        bound = call.changed and call.node.op != "output"
        return safety.rerun(call) if bound else call.node.meta.get("val")

    monkeypatch.setattr(safety, "consume", lax)
    monkeypatch.setattr(edit, "consume", lax)
    gm = standins.trace(blind_layer, torch.randn(TOKENS, 8), torch.randn(8, 3 * WIDTH))
    outcome = standins.apply_pass(gm)
    assert [str(copy.reason) for copy in outcome.report.copies] == ["removed"] * 3
    inputs = standins.fresh(gm.meta["inputs"], 1)
    (right,), (wrong,) = (standins.run_graph(g, inputs) for g in (outcome.before, outcome.after))
    assert not torch.allclose(right, wrong, atol=0.1)
    with pytest.raises(AssertionError):
        standins.verify(outcome)
