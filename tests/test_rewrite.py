"""Edits are transactional, faults are never fatal, and what is recorded is what is there."""

from __future__ import annotations

import logging
import operator

import pytest
import scaling
import torch
from torch.fx import GraphModule

import qkvpass
from qkvpass import edit, graph_pass, safety
from qkvpass.graph_pass import Options, StridedQKVPass, run
from qkvpass.layout import Layout

aten = torch.ops.aten


def snapshot(graph):
    """Text, arguments and metas of a graph: all that an edit could leave behind."""
    return [
        (node.name, node.op, node.target, str(node.args), str(node.kwargs), _metas(node))
        for node in graph.nodes
    ]


def _metas(node):
    return {key: (id(value), str(value)) for key, value in node.meta.items()}


STEPS = ["set_meta", "replace", "insert_before", "retarget", "replace_input"]


@pytest.mark.parametrize("call", [1, 2, 5, 9])
@pytest.mark.parametrize("step", STEPS)
def test_a_fault_at_any_step_leaves_graph_and_metas_as_they_were(monkeypatch, step, call):
    graph = scaling.layered_graph(2)
    before = snapshot(graph)
    honest, count = getattr(edit.Journal, step), 0

    def faulty(self, *args, **kwargs):
        nonlocal count
        count += 1
        if count == call:
            raise RuntimeError("injected")
        return honest(self, *args, **kwargs)

    monkeypatch.setattr(edit.Journal, step, faulty)
    try:
        run(graph, Options())
    except RuntimeError as fault:
        assert str(fault) == "injected"
        assert snapshot(graph) == before
        graph.lint()
    else:
        assert count < call  # the step is not taken so often


def test_the_audit_finds_a_wrong_edit_and_takes_it_back(monkeypatch):
    """A meta that its inputs do not give: the finished graph is checked, not believed."""
    graph = scaling.layered_graph(1)
    before = snapshot(graph)
    honest = edit._set_value

    def wrong(journal, node, value):
        if node.target is operator.getitem:
            value = node.meta["val"]
        honest(journal, node, value)

    monkeypatch.setattr(edit, "_set_value", wrong)
    with pytest.raises(edit.RewriteFault, match="recorded in a layout"):
        run(graph, Options())
    assert snapshot(graph) == before


def test_a_fault_is_logged_once_and_the_compile_goes_on(monkeypatch, caplog):
    monkeypatch.delenv("QKVPASS_STRICT")
    graph_pass.log_once.cache_clear()
    monkeypatch.setattr(graph_pass, "decide", lambda *args: 1 / 0)
    graphs = [scaling.layered_graph(1) for _ in range(2)]
    before = [snapshot(graph) for graph in graphs]
    with caplog.at_level(logging.WARNING, "qkvpass"), qkvpass.capture() as reports:
        for graph in graphs:
            StridedQKVPass()(graph)
    assert [snapshot(graph) for graph in graphs] == before
    assert len(caplog.records) == 1 and "division by zero" in caplog.text
    assert ["ZeroDivisionError" in report.fault for report in reports] == [True, True]


def test_strict_raises(monkeypatch):
    monkeypatch.setattr(graph_pass, "decide", lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        StridedQKVPass()(scaling.layered_graph(1))


@pytest.mark.parametrize("off", ["environment", "option"])
def test_off_is_off(monkeypatch, off):
    graph = scaling.layered_graph(1)
    before = snapshot(graph)
    if off == "environment":
        monkeypatch.setenv("QKVPASS_DISABLE", "1")
    with qkvpass.capture() as reports:
        StridedQKVPass(Options(enabled=off != "option"))(graph)
    assert snapshot(graph) == before and reports == []


def test_a_built_in_tag_can_be_taken_away():
    qkvpass.unregister_stride_tag("aten::_scaled_dot_product_flash_attention_for_cpu")
    report = run(scaling.layered_graph(1), Options())
    assert {str(copy.reason) for copy in report.kept} >= {"untagged-op"} and not report.removed


def test_a_limit_halves_down_to_a_culprit(monkeypatch):
    monkeypatch.setenv("QKVPASS_MAX_REWRITES", "4")
    report = run(scaling.layered_graph(2), Options())
    assert all("limit" in copy.detail for copy in report.kept if copy.operand)
    assert [copy.node for copy in report.removed if copy.operand] == [
        "clone_default",
        "clone_default_1",
        "clone_default_2",
        "clone_default_4",
    ]


def test_metas_of_the_finished_graph_are_the_strides_at_run_time():
    graph = scaling.layered_graph(2)
    inputs = [torch.randn(n.meta["val"].shape) for n in graph.nodes if n.op == "placeholder"]
    expected = GraphModule({}, graph)(*inputs)[0]
    run(graph, Options())

    class Checked(torch.fx.Interpreter):
        def run_node(self, node):
            value = super().run_node(node)
            if isinstance(value, torch.Tensor) and isinstance(node.meta.get("val"), torch.Tensor):
                assert Layout.of(node.meta["val"]) == Layout.of(value), node
            return value

    assert torch.equal(Checked(GraphModule({}, graph)).run(*inputs)[0], expected)
    assert not graph.find_nodes(op="call_function", target=aten.clone.default)


def test_nothing_is_erased_but_the_copies_and_what_led_only_to_them():
    graph = scaling.layered_graph(1)
    names = {node.name for node in graph.nodes}
    run(graph, Options())
    assert names - {n.name for n in graph.nodes} == {
        f"clone_default{i}" for i in ("", "_1", "_2", "_3")
    }


def test_a_graph_without_values_is_left_alone():
    graph = scaling.layered_graph(1)
    for node in graph.nodes:
        node.meta.clear()
    before = snapshot(graph)
    StridedQKVPass()(graph)
    assert snapshot(graph) == before


def test_running_twice_changes_nothing_more():
    graph = scaling.layered_graph(2)
    run(graph, Options())
    before = snapshot(graph)
    assert not run(graph, Options()).removed
    assert snapshot(graph) == before


def test_an_unsorted_graph_is_sorted_first():
    graph = scaling.layered_graph(1)
    moved = graph.find_nodes(op="call_function", target=aten.mm.default)[0]
    graph.find_nodes(op="output")[0].prepend(moved)
    report = run(graph, Options())
    graph.lint()
    assert len(report.removed) == 4


def test_every_layout_bound_consumer_keeps_its_layout(monkeypatch):
    """The rule is asked for each consumer of what moved, once to decide and once at the end."""
    asked = []
    honest = safety.consume

    def listening(call):
        asked.append(call.node.name)
        return honest(call)

    monkeypatch.setattr(safety, "consume", listening)
    monkeypatch.setattr(edit, "consume", listening)
    run(scaling.layered_graph(1), Options())
    attention = "_scaled_dot_product_flash_attention_for_cpu_default"
    assert asked.count(attention) == 3  # the group, all decisions together, the finished graph
