"""A user's Triton kernel: constants follow the layout, or the copy stays.

The launch is emulated on the CPU by what such a kernel does: it reads each operand by the
stride arguments alone, so that a stale constant gives wrong numbers. The real kernel runs
in ``test_gpu.py``.
"""

from __future__ import annotations

import operator

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Interpreter

import qkvpass
from qkvpass import Reason, triton_tags
from qkvpass.graph_pass import Options, run

triton = pytest.importorskip("triton")
wrap = pytest.importorskip("torch._higher_order_ops.triton_kernel_wrap")
aten = torch.ops.aten
T, H, D = 6, 2, 8
WIDTH = H * D


@triton.jit
def kernel(Q, K, V, Out, stride_qt, stride_qh, stride_kt, stride_kh, stride_vt, stride_vh):
    """Never run here; the launch is emulated."""


STRIDES = {
    "Q": ("stride_qt", "stride_qh"),
    "K": ("stride_kt", "stride_kh"),
    "V": ("stride_vt", "stride_vh"),
}


@pytest.fixture
def tagged():
    for name, (token, head) in STRIDES.items():
        qkvpass.register_triton_stride_tag(kernel, operand=name, strides={0: token, 1: head})
    yield
    for name in STRIDES:
        qkvpass.unregister_triton_stride_tag(kernel, operand=name)


def launch_graph(written=("Out",), constants=None, again=(), in_line=False):
    """mm → slices → three clones → launch; ``again`` operands are also returned.

    ``in_line``: the strides are arguments of the node, as where a ``triton_op`` was opened up.
    """
    graph, mode = Graph(), FakeTensorMode()

    def call(op, *args, **kwargs):
        node = graph.call_function(op, args, kwargs)
        values = torch.fx.node.map_arg((args, kwargs), lambda n: n.meta["val"])
        with mode:
            node.meta["val"] = op(*values[0], **values[1])
        return node

    given = []
    for name, shape in (("x", (T, WIDTH)), ("w", (WIDTH, 3 * WIDTH))):
        given.append(graph.placeholder(name))
        with mode:
            given[-1].meta["val"] = torch.empty(shape)
    packed = call(aten.mm.default, *given)
    clones = {}
    for i, name in enumerate("QKV"):
        part = call(aten.slice.Tensor, packed, 1, i * WIDTH, (i + 1) * WIDTH)
        part = call(aten.view.default, part, [T, H, D])
        clones[name] = call(aten.clone.default, part, memory_format=torch.contiguous_format)
    out = call(aten.empty.memory_format, [T, H, D])
    constants = {s: WIDTH if s.endswith("t") else D for pair in STRIDES.values() for s in pair} | (
        constants or {}
    )
    arguments = {
        "kernel_idx": wrap.kernel_side_table.add_kernel(kernel),
        "constant_args_idx": wrap.kernel_side_table.add_constant_args({} if in_line else constants),
        "grid": [(1, 1, 1)],
        "tma_descriptor_metadata": {},
        "kwargs": {**clones, "Out": out, **(constants if in_line else {})},
        "tensors_to_clone": list(written),
    }
    node = graph.call_function(wrap.triton_kernel_wrapper_functional, (), arguments)
    with mode:
        node.meta["val"] = {name: torch.empty(T, H, D) for name in written}
    recorded = torch.fx.node.map_aggregate(
        arguments, lambda a: a.meta["val"] if isinstance(a, torch.fx.Node) else None
    )
    node.meta["eager_input_vals"] = ((), recorded)
    result = graph.call_function(operator.getitem, (node, "Out"))
    result.meta["val"] = node.meta["val"]["Out"]
    graph.output((result, *(clones[name] for name in again)))
    return graph


class Launched(Interpreter):
    """Runs the launch as the kernel would: by pointer and stride arguments, nothing else."""

    def __init__(self, graph):
        super().__init__(GraphModule({}, graph))
        self.strides = {}

    def call_function(self, target, args, kwargs):
        if target is not wrap.triton_kernel_wrapper_functional:
            return super().call_function(target, args, kwargs)
        constants = wrap.kernel_side_table.get_constant_args(kwargs["constant_args_idx"])
        constants = {**constants, **kwargs["kwargs"]}
        read = {}
        for name, arguments in STRIDES.items():
            tensor = kwargs["kwargs"][name]
            self.strides[name] = tensor.stride()
            stride = (*(constants[a] for a in arguments), 1)
            read[name] = torch.as_strided(tensor, (T, H, D), stride, tensor.storage_offset())
        scores = torch.einsum("thd,shd->hts", read["Q"], read["K"]).softmax(-1)
        return {"Out": torch.einsum("hts,shd->thd", scores, read["V"])}


def outcome(graph):
    inputs = torch.randn(T, WIDTH), torch.randn(WIDTH, 3 * WIDTH)
    expected = Launched(graph).run(*inputs)[0]
    report = run(graph, Options())
    after = Launched(graph)
    got = after.run(*inputs)[0]
    return report, after.strides, torch.equal(got, expected)


@pytest.mark.parametrize("in_line", [False, True])
def test_all_three_copies_go_and_the_constants_follow(tagged, in_line):
    report, strides, same = outcome(launch_graph(in_line=in_line))
    assert [str(c.reason) for c in report.copies] == ["removed"] * 3
    assert [c.operand for c in report.copies] == ["Q", "K", "V"]
    assert set(strides.values()) == {(3 * WIDTH, D, 1)} and same


def test_with_the_rewriting_of_constants_switched_off_the_numbers_are_wrong(tagged, monkeypatch):
    monkeypatch.setattr(triton_tags, "restated", lambda node: {})
    report, _, same = outcome(launch_graph())
    assert len(report.removed) == 3 and not same


def test_the_finished_graph_is_checked_for_stale_constants(tagged, monkeypatch):
    graph = launch_graph()
    monkeypatch.setattr("qkvpass.edit.Journal.set_kwarg", lambda *args: None)
    before = str(graph)
    with pytest.raises(qkvpass.edit.RewriteFault, match="constants"):
        run(graph, Options())
    assert str(graph) == before


def test_an_untagged_kernel_is_layout_bound():
    report, strides, same = outcome(launch_graph())
    assert set(strides.values()) == {(WIDTH, D, 1)} and same and not report.removed
    # nobody knows that it is attention, so its operands are no candidates either
    assert {c.reason for c in report.copies} == {Reason.NO_ATTENTION_CONSUMER}


def test_an_operand_that_the_kernel_writes_keeps_its_copy(tagged):
    report, strides, same = outcome(launch_graph(written=("Out", "Q")))
    assert strides["Q"] == (WIDTH, D, 1) and strides["V"] == (3 * WIDTH, D, 1) and same
    assert [c.operand for c in report.removed] == ["K", "V"]


def test_a_tag_that_does_not_fit_the_launch_keeps_the_copy(tagged):
    report, strides, _ = outcome(launch_graph(constants={"stride_kt": 7}))
    kept = {c.operand: c for c in report.kept}
    assert kept["K"].reason is Reason.OPAQUE_CONSUMER and "stride_kt is 7" in kept["K"].detail
    assert strides["K"] == (WIDTH, D, 1) and strides["Q"] == (3 * WIDTH, D, 1)


def test_a_stride_that_no_argument_holds_keeps_the_copy(tagged):
    qkvpass.register_triton_stride_tag(kernel, operand="K", strides={1: "stride_kh"})
    report, _, same = outcome(launch_graph())
    kept = {c.operand: c for c in report.kept}
    assert "no argument holds the stride of dim 0" in kept["K"].detail and same


def test_one_argument_for_two_strides_asks_for_one_layout(tagged):
    """K and V read by one stride: both go, or none does."""
    qkvpass.register_triton_stride_tag(
        kernel, operand="V", strides={0: "stride_kt", 1: "stride_kh"}
    )
    graph = launch_graph(again=("V",))  # V must stay dense: it is returned
    report = run(graph, Options())
    reasons = {c.operand: c.reason for c in report.copies}
    assert reasons["V"] is reasons["K"] is Reason.GRAPH_OUTPUT
    assert reasons["Q"] is Reason.REMOVED


def test_registration_names_what_is_wrong():
    with pytest.raises(ValueError, match="no argument 'stride_x'"):
        qkvpass.register_triton_stride_tag(kernel, operand="Q", strides={0: "stride_x"})
    with pytest.raises(KeyError):
        qkvpass.unregister_triton_stride_tag(kernel, operand="Q")
