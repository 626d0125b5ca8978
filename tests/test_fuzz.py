"""Random attention modules: whatever is drawn, no value and no layout that matters may change.

Most examples stop in front of Inductor's code generation: the graph that Inductor would lower is
interpreted, before the pass and behind it, and every node is compared. A few run all the way.
``QKVPASS_FUZZ_EXAMPLES=5000`` draws that many at random; without it a fixed 300 are drawn.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import programs
import pytest
import standins
import torch
import torch.utils._pytree as pytree
from hypothesis import HealthCheck, Phase, event, given, reject, settings
from hypothesis import strategies as st
from programs import Module, Program, Setting
from torch import Tensor
from torch._inductor.compile_fx import compile_fx
from torch._inductor.fx_passes.post_grad import view_to_reshape
from torch.fx import GraphModule, Interpreter, Node

import qkvpass
from qkvpass import edit as rewriting
from qkvpass import safety, tags
from qkvpass.layout import Layout, StrideContract

EXAMPLES = os.environ.get("QKVPASS_FUZZ_EXAMPLES")
SEEDS = (1, 2)


FAST = settings(
    max_examples=int(EXAMPLES or 300),
    derandomize=EXAMPLES is None,  # the same examples each time in CI
    database=None,
    deadline=None,
    phases=[Phase.generate, Phase.shrink],
    suppress_health_check=list(HealthCheck),
)
# Two compiles of C++ a program.
SLOW = settings(FAST, max_examples=max(1, FAST.max_examples // 20))
VIOLATION = StrideContract.violation  # as it is, whatever a test does to it


# ---------------------------------------------------------------------------------------------
# Graphs


@dataclass
class Traced:
    """A graph as Inductor would lower it, and what it was called with."""

    gm: GraphModule
    calls: list[list[Any]] = field(default_factory=list)


def trace(module: Module, inputs: Sequence[Sequence[Tensor]], dynamic: bool) -> list[Traced]:
    """The graphs behind the joint passes, for all of the inputs."""
    graphs: list[Traced] = []

    def interpret(gm: GraphModule, example_inputs: Sequence[Any], **_: Any) -> Any:
        traced = Traced(standins.clone(gm))
        graphs.append(traced)

        def run(args: list[Any]) -> Any:
            traced.calls.append(standins.fresh(args, 0))
            return Interpreter(gm).run(*args)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    def backend(gm: GraphModule, example_inputs: Sequence[Any]) -> Any:
        patches = {"force_disable_caches": True}
        return compile_fx(gm, example_inputs, inner_compile=interpret, config_patches=patches)

    torch._dynamo.reset()
    compiled = torch.compile(module, backend=backend, dynamic=dynamic)
    with torch.no_grad():
        for args in inputs:
            compiled(*args)
    return graphs


def rewrite(gm: GraphModule, setting: Setting) -> tuple[GraphModule, qkvpass.Report]:
    after = standins.clone(gm)
    options = qkvpass.Options(target=setting.target, numerics=setting.numerics)
    with qkvpass.capture() as reports:
        qkvpass.StridedQKVPass(options)(after.graph)
    after.graph.lint()
    after.recompile()
    (report,) = reports
    return after, report


def layouts_of(value: Any, number: Callable[[Any], int] = int) -> Any:
    """Layouts of the tensors of a tree, None for other leaves.

    Size-1 dims have stride 0: they address nothing, and fake views give them other strides than
    real ones do.
    """

    def one(t: Any) -> Layout | None:
        if not isinstance(t, Tensor):
            return None
        size = tuple(map(number, t.shape))
        stride = (0 if n == 1 else number(s) for n, s in zip(size, t.stride()))
        return Layout(size, tuple(stride), number(t.storage_offset()))

    return pytree.tree_map(one, value)


def bits(value: Any) -> list[Any]:
    """Values that are equal if every bit is."""
    return [
        x.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        if isinstance(x, Tensor)
        else x
        for x in pytree.tree_leaves(value)
    ]


def differences(a: Sequence[Any], b: Sequence[Any]) -> list[int]:
    """Positions at which two lists differ."""
    assert len(a) == len(b)
    return [i for i, (x, y) in enumerate(zip(a, b)) if x != y]


@dataclass
class Trail:
    """What one run of a graph did, by node."""

    outputs: list[Any] = field(default_factory=list)
    aliases: list[int] = field(default_factory=list)
    bits: dict[str, list[Any]] = field(default_factory=dict)
    layouts: dict[str, Any] = field(default_factory=dict)
    reads: dict[str, dict[str, Any]] = field(default_factory=dict)  # layouts by argument


class Watch(Interpreter):
    """Runs a graph and writes down every node's values and layouts."""

    def __init__(self, gm: GraphModule) -> None:
        super().__init__(gm)
        self.trail = Trail()

    def run_node(self, n: Node) -> Any:
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        if isinstance(n.target, torch._ops.OpOverload):
            names = [argument.name for argument in n.target._schema.arguments]
            self.trail.reads[n.name] = layouts_of(dict(zip(names, args)) | kwargs)
        elif n.op != "placeholder":
            self.trail.reads[n.name] = {"": layouts_of((args, kwargs))}
        result = super().run_node(n)
        if "empty" in str(n.target):
            result.fill_(7)  # the same garbage in every run
        self.trail.bits[n.name] = bits(result)
        self.trail.layouts[n.name] = layouts_of(result)
        return result


def run(gm: GraphModule, inputs: Sequence[Any]) -> Trail:
    watch = Watch(gm)
    with torch.no_grad():
        outputs = pytree.tree_leaves(watch.run(*inputs))
    trail = watch.trail
    trail.outputs = [*outputs, *inputs]
    storages = [
        x.untyped_storage()._cdata if isinstance(x, Tensor) else None for x in (*inputs, *outputs)
    ]
    trail.aliases = [storages.index(s) for s in storages]
    return trail


# ---------------------------------------------------------------------------------------------
# Properties


def rounds_otherwise(report: qkvpass.Report) -> bool:
    """Whether a rewrite was made that says so of itself."""
    return any("rounded once" in n or "another order" in n or "two dims" in n for n in report.notes)


def check(
    stock: GraphModule, after: GraphModule, calls: Sequence[list[Any]], exact: bool = True
) -> None:
    """The rewritten graph computes the same, and shows the same to whom it matters."""
    for args in calls:
        for seed in SEEDS:
            old = run(stock, standins.fresh(args, seed))
            new = run(after, standins.fresh(args, seed))
            check_values(old, new, exact)
            check_consumers(after, old, new)
            check_metas(stock, after, args, old, new)


def check_values(old: Trail, new: Trail, exact: bool = True) -> None:
    if exact:
        differing = differences(bits(new.outputs), bits(old.outputs))
    else:
        differing = [i for i, (n, o) in enumerate(zip(new.outputs, old.outputs)) if not near(n, o)]
    assert not differing, f"other values in outputs or inputs {differing}"
    assert layouts_of(new.outputs) == layouts_of(old.outputs), "an output has other strides"
    assert new.aliases == old.aliases, "outputs share other memory than before"
    for name in (old.bits.keys() & new.bits.keys()) if exact else ():
        assert not differences(old.bits[name], new.bits[name]), f"other values in {name}"


def near(new: Any, old: Any) -> bool:
    """Equal but for rounding, by the largest element: steps behind may well amplify it."""
    if not isinstance(old, Tensor) or not old.is_floating_point() or not old.numel():
        return bits(new) == bits(old)
    scale = old.float().nan_to_num().abs().max().item()
    tolerance = (scale + 1) * (1e-4 if old.dtype == torch.float32 else 0.2)
    return torch.allclose(new.float(), old.float(), rtol=0, atol=tolerance, equal_nan=True)


def is_bound(node: Node) -> bool:
    """Whether the node must see the layouts that it saw, judged without the pass's own lists."""
    if node.op == "output" or isinstance(node.target, torch._ops.HigherOrderOperator):
        return True
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    return node.target.namespace not in ("aten", "prims") or "mm" in str(node.target)


def check_consumers(after: GraphModule, old: Trail, new: Trail) -> None:
    for node in after.graph.nodes:
        if (before := old.reads.get(node.name)) == (now := new.reads.get(node.name)):
            continue
        if node.name not in old.reads:
            continue  # a view that the pass made
        tag = tags.lookup(node.target)
        if tag is not None and tag.status.capable:
            check_contract(node, tag, before, now)
        else:
            assert not is_bound(node), f"{node.format_node()} read {before}, and reads {now}"


def check_contract(node: Node, tag: tags.StrideTag, before: Any, now: Any) -> None:
    moved = {name for name in now if now[name] != before[name]}
    assert moved <= set(tag.operands), f"{node}: {moved} are not tagged"
    itemsize = pytree.tree_leaves(node.meta["val"])[0].element_size()
    for name in moved:
        fault = VIOLATION(tag.contract, now[name], itemsize)
        assert fault is None, f"{node} operand {name}: {fault}"
    for group in tag.contract.together:
        if moved & set(group):
            alike = all(same_strides(now[a], now[b]) for a in group for b in group)
            assert alike or all(now[n].row_major for n in group), f"{node}: {now}"


def same_strides(a: Layout, b: Layout) -> bool:
    """Equal but in dims of one element, whose strides are masked here."""
    return all(s == t or 1 in (m, n) for m, n, s, t in zip(a.size, b.size, a.stride, b.stride))


def check_metas(
    stock: GraphModule, after: GraphModule, inputs: Sequence[Any], old: Trail, new: Trail
) -> None:
    """Metas are true wherever stock's were; recorded layouts are those of the arguments."""
    was_wrong = {name for name, *_ in wrong_metas(stock, inputs, old)}
    wrong = [found for found in wrong_metas(after, inputs, new) if found[0] not in was_wrong]
    assert not wrong, f"wrong metas: {wrong}"


def wrong_metas(gm: GraphModule, inputs: Sequence[Any], trail: Trail) -> list[tuple[str, Any, Any]]:
    number = numbers(gm, inputs)

    found = []
    for node in gm.graph.nodes:
        actual = trail.layouts[node.name]
        if isinstance(node.target, torch._ops.OpOverload):
            claim = layouts_of(node.meta["val"], number)
            if claim != actual:
                found.append((node.name, claim, actual))
        if "eager_input_vals" in node.meta:
            claim = pytree.tree_leaves(layouts_of(node.meta["eager_input_vals"], number))
            actual = pytree.tree_leaves(
                torch.fx.map_arg((node.args, dict(node.kwargs)), lambda n: trail.layouts[n.name])
            )
            if claim != actual:
                found.append((f"{node.name}, recorded", claim, actual))
    return found


def numbers(gm: GraphModule, inputs: Sequence[Any]) -> Callable[[Any], int]:
    """What the symbols of a graph stand for, given its inputs."""
    values: dict[Any, int] = {}
    for node, given_ in zip(gm.graph.find_nodes(op="placeholder"), inputs):
        val = node.meta["val"]
        pairs = [(val, given_)]
        if isinstance(val, Tensor):
            pairs = [*zip(val.shape, given_.shape), *zip(val.stride(), given_.stride())]
        for symbol, value in pairs:
            if isinstance(symbol, torch.SymInt) and symbol.node.expr.is_symbol:
                values[symbol.node.expr] = value
    return lambda n: n if isinstance(n, int) else int(n.node.expr.xreplace(values))


def check_report(stock: GraphModule, after: GraphModule, report: qkvpass.Report) -> None:
    assert not report.fault
    before = {node.name: node for node in stock.graph.nodes}
    left = {node.name: node for node in after.graph.nodes}
    for copy in report.copies:
        assert isinstance(copy.reason, qkvpass.Reason) and copy.detail, copy
        whole, _, part = copy.node.partition("[")
        assert whole in before, copy
        assert (whole not in left) if part else copy.removed == (whole not in left), copy
    assert bool(report.removed) == bool(report.diff())
    assert bool(report.removed) == (len(before.keys() - left.keys()) > 0)
    assert len(report.removed) + len(report.kept) == len(report.copies)
    assert str(report) and report.to_json()


@contextmanager
def tagged(module: Module, setting: Setting) -> Iterator[None]:
    saved = dict(tags._registry.user)
    setting.tag(module)
    try:
        yield
    finally:
        tags._registry.user = saved
        tags._registry.changed()


def inputs_of(program: Program) -> list[tuple[Tensor, ...]]:
    """One set of inputs; with dynamic shapes a second one that has more tokens."""
    torch.manual_seed(0)
    tokens = [program.tokens, program.tokens + 3] if program.dynamic else [program.tokens]
    return [program.inputs(n) for n in tokens]


@contextmanager
def rejecting() -> Iterator[None]:
    """Not every drawn program runs, and not every one that runs compiles: those are no examples."""
    try:
        yield
    except (RuntimeError, IndexError, ValueError):
        reject()


def check_program(program: Program, setups: Sequence[Setting]) -> int:
    """All properties of the fast path; how many copies went."""
    module = Module(program)
    removed = 0
    with rejecting():
        with torch.no_grad():
            for args in inputs_of(program):
                module(*standins.fresh(args, 0))
        graphs = trace(module, inputs_of(program), program.dynamic)
    for traced in graphs:
        for setting in setups:
            stock = standins.clone(traced.gm)
            if setting.post_grad:
                view_to_reshape(stock)
            with tagged(module, setting):
                after, report = rewrite(stock, setting)
                check_report(stock, after, report)
                again, more = rewrite(after, setting)
                exact = not rounds_otherwise(report)
                check(stock, after, traced.calls, exact)
                check(stock, again, traced.calls, exact and not rounds_otherwise(more))
            for copy in report.copies:
                event(str(copy.reason))
            for text in report.notes:
                event(re.sub(r"\w*_\d+|_default\w*", "", text)[:60])
            removed += len(report.removed)
    return removed


@FAST
@given(programs.programs, st.lists(programs.settings_of_the_pass, min_size=1, max_size=2))
def test_random_programs(program: Program, setups: list[Setting]) -> None:
    check_program(program, setups)


# ---------------------------------------------------------------------------------------------
# Through Inductor


def compiled_run(module: Module, backend: Any) -> tuple[list[list[Any]], list[list[standins.Call]]]:
    """Outputs and inputs, and what the kernels saw, for each set of data."""
    torch._dynamo.reset()
    compiled = torch.compile(module, backend=backend, dynamic=module.program.dynamic)
    results, calls = [], []
    for args in inputs_of(module.program):
        for seed in SEEDS:
            given_ = standins.fresh(args, seed)
            with standins.recorded() as seen, torch.no_grad():
                results.append([*compiled(*given_), *given_])
            calls.append(seen)
    return results, calls


def bound_reads(calls: Sequence[standins.Call]) -> list[Any]:
    """Layouts that kernels saw which are not tagged, in any order: Inductor may move calls."""
    trusted = {tag.op for tag in qkvpass.stride_tags() if tag.status.capable}
    layouts = [
        (call.op, [layout_as_seen(seen) for seen in call.tensors])
        for call in calls
        if f"standin::{call.op}" not in trusted and call.op != "flexible"
    ]
    return sorted(layouts, key=str)


def layout_as_seen(seen: standins.Seen) -> tuple[Any, ...]:
    strides = tuple(0 if n == 1 else s for n, s in zip(seen.shape, seen.stride))
    return seen.shape, strides, seen.offset


def check_compiled(program: Program, setting: Setting) -> None:
    module = Module(program)
    with rejecting():
        stock, stock_calls = compiled_run(module, "inductor")
    with tagged(module, setting):
        ours, our_calls = compiled_run(module, qkvpass.configured(numerics="bitwise"))
        for now, before in zip(our_calls, stock_calls):
            assert bound_reads(now) == bound_reads(before)
    for now, before in zip(ours, stock):
        assert not differences(bits(now), bits(before)), "other values"
        assert layouts_of(now) == layouts_of(before)


@pytest.mark.slow
@SLOW
@given(programs.programs, programs.settings_of_the_pass)
def test_random_programs_through_inductor(program: Program, setting: Setting) -> None:
    check_compiled(program, setting)


# ---------------------------------------------------------------------------------------------
# The fuzzer can fail


def no_rule(call: safety.Call) -> Any:
    """:func:`safety.consume` without its refusals."""
    if not call.changed or call.node.op == "output":
        return call.node.meta.get("val")
    try:
        return safety.rerun(call)
    except safety.Refused:
        return call.node.meta.get("val")


SABOTAGE = {
    "rule": ([(safety, "consume"), (rewriting, "consume")], no_rule, "other values"),
    "contract": ([(StrideContract, "violation")], lambda *_: None, "not a multiple|operand .*:"),
    "record": ([(rewriting, "_record_layouts")], lambda *_: None, "wrong metas.*recorded"),
}


@pytest.mark.parametrize("name", SABOTAGE)
def test_fuzzer_finds_a_broken_pass(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a check taken out of the pass, the properties fail within 100 programs."""
    places, broken, message = SABOTAGE[name]
    for place in places:
        monkeypatch.setattr(*place, broken)

    @settings(FAST, max_examples=100, derandomize=True, phases=[Phase.generate])
    @given(programs.programs, programs.settings_of_the_pass)
    def hunt(program: Program, setting: Setting) -> None:
        check_program(program, [setting])

    with pytest.raises(Exception, match=message):
        hunt()
