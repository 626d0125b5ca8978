"""The pass at the levels where serving engines hook passes in, and on graphs cut around attention.

An engine as vLLM or SGLang adds passes to Inductor's post-grad slot, through a manager of its own,
compiles with auto-functionalization of either version, and may first split the graph at its
attention ops. That much is done here as they do it; the engines themselves are not run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import standins
import torch
from torch import Tensor, nn
from torch._guards import detect_fake_mode
from torch._inductor import config as inductor_config
from torch._inductor.compile_fx import compile_fx
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx import Graph, GraphModule, Interpreter
from torch.fx.passes.split_module import split_module
from torch.library import custom_op

import qkvpass

HEADS, HEAD_DIM, TOKENS = 4, 8, 16
WIDTH = HEADS * HEAD_DIM
DENSE, STRIDED = (WIDTH, HEAD_DIM, 1), (3 * WIDTH, HEAD_DIM, 1)


class Manager(CustomGraphPass):
    """Runs an engine's passes in the one slot."""

    def __init__(self, *passes: CustomGraphPass) -> None:
        self.passes = passes

    def __call__(self, graph: Graph) -> None:
        for one in self.passes:
            one(graph)

    def uuid(self) -> Any:
        return [repr(one.uuid()) for one in self.passes]


def post_grad(*passes: CustomGraphPass, **more: Any) -> dict[str, Any]:
    return {"post_grad_custom_post_pass": Manager(*passes), **more}


@custom_op("level::attend_into", mutates_args=("output",))
def attend_into(q: Tensor, k: Tensor, v: Tensor, output: Tensor) -> None:
    """An engine's attention op, which writes its result where it is told."""
    standins.note("attend_into", q, k, v)
    output.copy_(standins.attend(*(standins.by_stride(t) for t in (q, k, v))))


@attend_into.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, output: Tensor) -> None:
    return None


def into(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    output = torch.empty(q.shape)
    attend_into(q, k, v, output)
    return output


class Layer(nn.Module):
    """The packed projection, spelled with reshape; q and k normalised in place on request."""

    def __init__(self, attention: Callable[..., Tensor], in_place: bool) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.attention, self.in_place = attention, in_place

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(x).chunk(3, -1)
        q, k, v = (t.reshape(-1, HEADS, HEAD_DIM).contiguous() for t in parts)
        if self.in_place:
            standins.norm_(q, k)
        return x + self.out(self.attention(q, k, v).reshape(-1, WIDTH))


def compare(
    model: nn.Module, backend: Callable[[dict[str, Any]], Any], ours: dict[str, Any], op: str
) -> standins.Run:
    """Two runs with the pass, held against two with an empty manager, bit for bit."""
    x = torch.randn(TOKENS, WIDTH)
    with torch.no_grad():
        stock = standins.run(model, x, backend=backend({**ours, **post_grad(), IN_PROCESS: None}))
        found = standins.run(model, x, backend=backend(ours))
    for mine, expected in zip(found.outputs, stock.outputs):
        standins.assert_same(mine, expected)
    assert all(call.strides == (DENSE,) * 3 for call in stock.seen(op))
    return found


def inductor(patches: dict[str, Any]) -> Any:
    return lambda gm, inputs: compile_fx(gm, inputs, config_patches=patches)


VERSIONS = pytest.mark.parametrize("v2", [False, True], ids=["v1", "v2"])


@VERSIONS
@pytest.mark.parametrize("in_place", [False, True], ids=["plain", "in-place"])
def test_in_the_post_grad_slot(in_place: bool, v2: bool) -> None:
    """What a joint pass would do; what is normalised in place stays, and is dense for the norm."""
    standins.tag("aware")
    options = post_grad(qkvpass.StridedQKVPass(), enable_auto_functionalized_v2=v2)
    model = nn.Sequential(Layer(standins.aware, in_place), Layer(standins.aware, in_place))
    run = compare(model, inductor, options, "aware")
    expected = (DENSE, DENSE, STRIDED) if in_place else (STRIDED,) * 3
    assert [call.strides for call in run.seen("aware")] == [expected] * 4
    (report,) = run.reports
    assert "reshape" in report.before and ("auto_functionalized" in report.before) == in_place
    assert ("auto_functionalized_v2" in report.before) == (in_place and v2)
    kept = {(copy.operand, str(copy.reason)) for copy in report.kept if copy.operand}
    assert kept == ({("q, k", "mutated")} if in_place else set())
    if in_place:
        assert {call.strides for call in run.seen("norm_")} == {(DENSE, DENSE)}


@VERSIONS
def test_an_op_that_writes_its_output(v2: bool) -> None:
    """What an auto-functionalized op reads by its tag is strided in this slot, too."""
    qkvpass.register_stride_tag("level::attend_into", operands=("q", "k", "v"))
    options = post_grad(qkvpass.StridedQKVPass(), enable_auto_functionalized_v2=v2)
    run = compare(Layer(into, False), inductor, options, "attend_into")
    assert [call.strides for call in run.seen("attend_into")] == [(STRIDED,) * 3] * 2
    (report,) = run.reports
    assert len(report.removed) == 3


IN_PROCESS = "joint_custom_post_pass"  # set in the process, not handed to the compile


class Piecewise(Interpreter):
    """Compiles the pieces between splitting ops as their fake inputs become known."""

    def __init__(self, module: GraphModule, whole: set[str], patches: dict[str, Any]) -> None:
        super().__init__(module)
        self.whole, self.patches = whole, patches

    def call_module(self, target: str, args: Any, kwargs: Any) -> Any:
        output = super().call_module(target, args, kwargs)
        if target not in self.whole:
            piece = compile_fx(self.fetch_attr(target), list(args), config_patches=self.patches)
            self.module.__dict__[target] = piece
        return output


def split_at(*ops: Any) -> Callable[[dict[str, Any]], Any]:
    """A backend that cuts the graph around ``ops``, which then run as they are."""

    def backend(patches: dict[str, Any]) -> Any:
        def compiler(gm: GraphModule, inputs: list[Any]) -> Any:
            number, part, whole = 0, {}, set()
            for node in gm.graph.nodes:
                if node.op in ("placeholder", "output"):
                    continue
                splits = node.target in ops
                number += splits
                part[node] = number
                if splits:
                    whole.add(f"submod_{number}")
                number += splits
            pieces = split_module(gm, None, part.__getitem__, keep_original_order=True)
            mode = detect_fake_mode()
            fakes = [mode.from_tensor(x) for x in inputs]
            given = {name: value for name, value in patches.items() if name != IN_PROCESS}
            with mode, inductor_config.patch({IN_PROCESS: patches.get(IN_PROCESS)}):
                Piecewise(pieces, whole, given).run(*fakes)
            return pieces

        return compiler

    return backend


def test_split_around_the_attention_op() -> None:
    """The copies leave their piece, whose consumer nobody can see: they stay, and say so."""
    standins.tag("aware")
    options = post_grad(qkvpass.StridedQKVPass())
    model = nn.Sequential(Layer(standins.aware, False), Layer(standins.aware, False))
    backend = split_at(torch.ops.standin.aware.default)
    run = compare(model, backend, options, "aware")
    assert [call.strides for call in run.seen("aware")] == [(DENSE,) * 3] * 4
    assert len(run.reports) == 3  # before, between and behind the two attention ops
    reasons = [[str(copy.reason) for copy in report.copies] for report in run.reports]
    assert reasons == [["graph-output"] * 3, ["graph-output"] * 3, []]


@pytest.mark.parametrize("slot", ["post-grad", "joint, for the process"])
def test_split_elsewhere(slot: str) -> None:
    """An attention op that does not split the graph loses its copies, whatever else does."""
    standins.tag("aware")
    ours = qkvpass.StridedQKVPass()
    options = post_grad(ours) if slot == "post-grad" else {**post_grad(), IN_PROCESS: ours}
    model = nn.Sequential(Layer(standins.aware, False), Layer(standins.flexible, False))
    backend = split_at(torch.ops.standin.flexible.default)
    run = compare(model, backend, options, "aware")
    assert [call.strides for call in run.seen("aware")] == [(STRIDED,) * 3] * 2
    assert [call.strides for call in run.seen("flexible")] == [(DENSE,) * 3] * 2
    assert [len(report.removed) for report in run.reports] == [3, 0]
