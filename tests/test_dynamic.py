"""Dynamic shapes: what goes in the static case goes, no guard is added, nothing recompiles."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import families
import pytest
import standins
import torch
from standins import tag
from torch import Tensor, nn
from torch._dynamo.decorators import mark_unbacked
from torch._dynamo.eval_frame import _debug_get_cache_entry_list
from torch._dynamo.utils import counters

import qkvpass
from qkvpass import Options, StridedQKVPass

HEADS, HEAD_DIM = 2, 8
WIDTH = HEADS * HEAD_DIM
STRIDED = ((3 * WIDTH, HEAD_DIM, 1),) * 3
ALL_REMOVED = dict.fromkeys("qkv", "removed")


@pytest.fixture(autouse=True)
def _tagged() -> None:
    tag("aware")
    tag("aware_bwd", backward_of="standin::aware")


class Layer(nn.Module):
    """Packed projection, split, three copies, an op that reads strides."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        parts = (t.reshape(-1, HEADS, HEAD_DIM) for t in self.qkv(x).split(WIDTH, -1))
        return self.out(standins.aware(*(t.contiguous() for t in parts)).flatten(1))


# ---------------------------------------------------------------------------------------------
# The same copies go


def marked(*dims: int, by: Callable[..., Any]) -> Callable[[Tensor], None]:
    def mark(x: Tensor) -> None:
        for dim in dims:
            by(x, dim)

    return mark


MARKS: dict[str, tuple[Callable[[Tensor], None], bool | None]] = {
    "dynamic=True": (lambda x: None, True),
    "batch": (marked(0, by=torch._dynamo.mark_dynamic), None),
    "unbacked batch": (marked(0, by=mark_unbacked), None),
}


@pytest.mark.parametrize("how", MARKS)
@pytest.mark.parametrize("family", [families.F3, families.F4, families.F8, families.F12])
def test_decisions_are_those_of_the_static_graph(family: type[nn.Module], how: str) -> None:
    x = families.example_input(family)
    static = decisions(standins.trace(family(), x))
    mark, dynamic = MARKS[how]
    mark(x)
    gm = standins.trace(family(), x, dynamic=dynamic)
    env = shape_env(gm)
    guards = list(env.guards)
    assert decisions(gm) == static
    assert env.guards == guards


@pytest.mark.parametrize("how", ["dynamic=True", "batch"])
def test_a_symbolic_batch_cancels_out(how: str) -> None:
    """``nn.MultiheadAttention`` merges batch and heads: an extent of ``16 * s // s`` is 16."""
    x = families.example_input(families.F5)
    mark, dynamic = MARKS[how]
    mark(x)
    gm = standins.trace(families.F5(), x, dynamic=dynamic)
    after = standins.clone(gm)
    with qkvpass.capture() as reports:
        StridedQKVPass(Options(target="eager"))(after.graph)
    standins.verify(standins.Outcome(gm, after, reports[0]))
    assert [str(c.reason) for c in reports[0].copies if c.operand] == ["removed"]


def decisions(gm: torch.fx.GraphModule) -> list[tuple[str, str, str, bool]]:
    outcome = standins.apply_pass(gm)
    return [(c.kind, c.operand, str(c.reason), c.folded) for c in outcome.report.copies]


def shape_env(gm: torch.fx.GraphModule) -> Any:
    for node in gm.graph.find_nodes(op="placeholder"):
        value = node.meta["val"]
        if isinstance(value, torch.SymInt):
            return value.node.shape_env
        if isinstance(value, Tensor) and any(isinstance(n, torch.SymInt) for n in value.shape):
            return value.fake_mode.shape_env
    raise AssertionError("no symbol in the graph")


# ---------------------------------------------------------------------------------------------
# No guard, no recompile


@dataclass
class Compiles:
    """What a model was compiled into, over calls with several shapes."""

    outputs: list[list[Any]]
    strides: list[tuple[tuple[int, ...], ...]]  # that the op received, call by call
    graphs: int
    guards: list[list[str]]  # on shapes, of each compile
    reports: list[qkvpass.Report]


def compile_over(
    backend: Any,
    inputs: Sequence[Tensor],
    dynamic: bool | None = None,
    train: bool = False,
    model: Any = None,
) -> Compiles:
    torch._dynamo.reset()
    counters.clear()
    model = Layer() if model is None else model
    compiled = torch.compile(model, backend=backend, dynamic=dynamic)
    outputs = []
    with (
        qkvpass.capture() as reports,
        standins.recorded("aware") as calls,
        torch.set_grad_enabled(train),
    ):
        for x in inputs:
            out = compiled(x)
            outputs.append([out.detach()])
            if train:
                outputs[-1] += torch.autograd.grad((out**2).sum(), [x, *model.parameters()])
    code = model.forward.__code__ if isinstance(model, nn.Module) else model.__code__
    guards = [shape_guards(entry) for entry in _debug_get_cache_entry_list(code)]
    graphs = counters["stats"]["unique_graphs"]
    return Compiles(outputs, [call.strides for call in calls], graphs, guards, list(reports))


def shape_guards(entry: Any) -> list[str]:
    """The conditions on sizes and strides under which compiled code is used again."""
    lines = re.findall(r"_GUARD: (.*?)(?:  #|$)", str(entry.guard_manager), re.M)
    return sorted(line for line in lines if re.search(r"\b(size|stride)\(", line))


def pair(
    make: Callable[[], Sequence[Tensor]], guarded: bool = True, **options: Any
) -> tuple[Compiles, Compiles]:
    """(stock, ours) on equal inputs; equal in bits, strides, compiles and guards.

    ``guarded``: stock guards sizes, so that there is something to compare.
    """
    stock = compile_over("inductor", make(), **options)
    ours = compile_over(qkvpass.backend, make(), **options)
    for mine, theirs in zip(ours.outputs, stock.outputs):
        standins.assert_same(mine, theirs)
    assert stock.guards and any(stock.guards) >= guarded
    assert (ours.graphs, ours.guards) == (stock.graphs, stock.guards)
    return stock, ours


def tokens(*counts: int, mark: Callable[[Tensor], None] | None = None, train: bool = False) -> Any:
    """Makes inputs of so many tokens each; the first is marked."""

    def make() -> Iterator[Tensor]:
        for i, count in enumerate(counts):
            torch.manual_seed(i)
            x = torch.randn(count, WIDTH, requires_grad=train)
            if i == 0 and mark is not None:
                mark(x)
            yield x

    return lambda: list(make())


def test_automatic_dynamic_on_the_second_shape() -> None:
    """A static graph for the first shape, a dynamic one for all others."""
    stock, ours = pair(tokens(6, 9, 17, 33))
    assert ours.graphs == 2
    assert ours.strides == [STRIDED] * 4
    assert len(stock.strides) == 4 and STRIDED not in stock.strides
    static, dynamic = ours.reports
    assert [c.reason for c in static.copies] == [c.reason for c in dynamic.copies]
    assert all(isinstance(c.nbytes, int) for c in static.copies)
    assert all(isinstance(c.nbytes, str) for c in dynamic.copies)


@pytest.mark.parametrize("by", [torch._dynamo.mark_dynamic, mark_unbacked])
def test_marked_tokens_train_in_one_compile(by: Callable[..., Any]) -> None:
    _, ours = pair(tokens(6, 9, 17, mark=marked(0, by=by), train=True), train=True)
    assert ours.graphs == 1 and ours.strides == [STRIDED] * 3
    (report,) = ours.reports
    assert all(isinstance(c.nbytes, str) for c in report.copies)


def test_one_unbacked_compile_serves_zero_and_one_token() -> None:
    mark = marked(0, by=mark_unbacked)
    _, ours = pair(tokens(6, 1, 0, 9, mark=mark))
    assert ours.graphs == 1
    assert ours.strides == [STRIDED] * 4


def test_zero_and_one_token_of_a_dynamic_model() -> None:
    """Dynamo compiles 0 and 1 on their own, and there is nothing to copy there."""
    _, ours = pair(tokens(6, 1, 0, 9), dynamic=True)
    several, one, none = ours.reports
    assert len(several.removed) == 3 and ours.strides[0] == ours.strides[-1] == STRIDED
    assert not one.copies and not none.removed


def without_padding(x: Tensor) -> Tensor:
    """Only tokens that are no padding; how many those are, the data says."""
    kept = x[x[:, 0] > 0]
    parts = (t.reshape(-1, HEADS, HEAD_DIM) for t in (kept @ PROJECTION).split(WIDTH, -1))
    return standins.aware(*(t.contiguous() for t in parts))


PROJECTION = torch.randn(WIDTH, 3 * WIDTH)


def test_as_many_tokens_as_the_data_says() -> None:
    def make() -> list[Tensor]:
        inputs = tokens(6, 6, 6)()
        inputs[1][:, 0] = -1
        inputs[2][:, 0] = 1
        return inputs

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        _, ours = pair(make, guarded=False, model=without_padding)
    assert ours.graphs == 1
    assert [out[0].shape[0] for out in ours.outputs][1:] == [0, 6]
    assert ours.strides == [STRIDED] * 3
    (report,) = ours.reports
    assert {c.operand: str(c.reason) for c in report.copies} == ALL_REMOVED


def test_without_the_shape_guards_the_comparison_is_empty() -> None:
    """What ``pair`` compares is there, and follows what a model asks of its sizes."""

    def asks(x: Tensor) -> Tensor:
        return x * 2 if x.shape[0] > 4 else x

    stock = compile_over("inductor", tokens(6)(), dynamic=True, model=lambda x: x * 2)
    asking = compile_over("inductor", tokens(6)(), dynamic=True, model=asks)
    assert len(stock.guards) == len(asking.guards) == 1 and stock.guards != asking.guards


# ---------------------------------------------------------------------------------------------
# Symbolic bytes in the report


@pytest.mark.parametrize("how", ["dynamic", "unbacked"])
def test_bytes_are_expressions_in_the_symbols(how: str) -> None:
    x = tokens(6)()[0]
    mark = torch._dynamo.mark_dynamic if how == "dynamic" else mark_unbacked
    mark(x, 0)
    report = qkvpass.explain(Layer(), x)
    (nbytes,) = {c.nbytes for c in report.copies}
    assert isinstance(nbytes, str)
    (symbol,) = set(nbytes.split("*")) - {str(2 * 4 * WIDTH)}
    assert symbol[0] == ("s" if how == "dynamic" else "u") and symbol[1:].isdigit()
    assert f"{nbytes} B" in str(report)
    assert f"removed 3 of 3 copies, {3 * 2 * 4 * WIDTH}*{symbol} B of traffic" in str(report)
    plain = json.loads(report.to_json())
    assert [c["nbytes"] for c in plain["copies"]] == [nbytes] * 3
    assert plain["summary"]["removed_bytes"] == f"{3 * 2 * 4 * WIDTH}*{symbol}"
    assert qkvpass.Report.from_json(report.to_json()) == report
