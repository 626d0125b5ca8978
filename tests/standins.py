"""Stand-in attention kernels that a CPU can run, and the means to compare two graphs with them.

The kernels differ in how they read memory, which is all that matters here. Each writes down
what it was given when it ran: strides on a graph's metas are a claim, these are the fact.

- ``aware`` reads real strides. ``aware_untagged_bwd`` does too, but its backward does not.
- ``blind`` takes its operands for dense, so a copy that is wrongly gone gives a wrong number.
- ``aligned`` raises where an offset or a stride is no multiple of ``modulo`` elements, or the last
  stride is not 1.
- ``offset_reader`` is wrong by the storage offsets of its operands.
- ``first_call_only`` makes its operands dense on its first call, and is blind later.
- ``like_q`` returns the layout of q, as its fake says; ``liar`` says so and returns dense.
- ``flexible``, ``fixed``, ``exact`` and ``contiguous`` carry PyTorch's own layout tags.
- ``norm_`` writes q and k in place. ``rope``, ``rotary`` and ``rms_norm`` are opaque and blind;
  ``rms_norm_strided`` is what ``rms_norm`` became once it had learnt strides.

Attention here runs over the last two dims, whatever they are called: (T, H, D), (B, S, H, D)
and (B, H, S, D) all work, and k and v may have other heads than q in the first of them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch._inductor import metrics
from torch._inductor.compile_fx import compile_fx
from torch._inductor.pattern_matcher import stable_topological_sort
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Interpreter, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.library import custom_op

import qkvpass

# ---------------------------------------------------------------------------------------------
# What the kernels saw


class Seen(NamedTuple):
    """One tensor as a kernel received it; ``storage`` is the address of its memory."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    storage: int

    @property
    def dense(self) -> bool:
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.stride)):
            if size != 1 and stride != expected:
                return False
            expected *= size
        return True


class Call(NamedTuple):
    op: str
    tensors: tuple[Seen, ...]

    @property
    def strides(self) -> tuple[tuple[int, ...], ...]:
        return tuple(seen.stride for seen in self.tensors)

    @property
    def one_storage(self) -> bool:
        """Whether every tensor lies in the same memory."""
        return len({seen.storage for seen in self.tensors}) == 1


CALLS: list[Call] = []


def reset() -> None:
    CALLS.clear()
    _first_call_done.clear()


@contextmanager
def recorded(op: str | None = None) -> Iterator[list[Call]]:
    """The calls of all stand-ins, or of one, made inside; the list is filled on leaving."""
    start = len(CALLS)
    calls: list[Call] = []
    try:
        yield calls
    finally:
        calls.extend(call for call in CALLS[start:] if op in (None, call.op))


def note(op: str, *tensors: Tensor) -> None:
    """Write down what ``op`` was given."""
    seen = (
        Seen(tuple(t.shape), t.stride(), t.storage_offset(), t.untyped_storage().data_ptr())
        for t in tensors
    )
    CALLS.append(Call(op, tuple(seen)))


# ---------------------------------------------------------------------------------------------
# The ways to read an operand


def by_stride(t: Tensor) -> Tensor:
    # Always a new buffer, so that the maths behind meets the same alignment every time.
    return t.clone(memory_format=torch.contiguous_format)


def as_dense(t: Tensor) -> Tensor:
    """The elements that a kernel finds which takes ``t`` for dense from its data pointer on.

    Addresses wrap at the end of the storage: a real kernel would read foreign memory there.
    """
    size = t.untyped_storage().nbytes() // t.element_size()
    if t.numel() == 0 or size == 0:
        return by_stride(t)
    flat = torch.as_strided(t, (size,), (1,), 0)
    return flat[(t.storage_offset() + torch.arange(t.numel())) % size].view(t.shape)


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention over the last two dims, in fp32, into a dense result."""
    return (_weights(q, k) @ v.float()).to(q.dtype)


def _weights(q: Tensor, k: Tensor) -> Tensor:
    return torch.softmax(q.float() @ k.float().mT * q.shape[-1] ** -0.5, -1)


def attend_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    weights = _weights(q, k)
    dweights = grad.float() @ v.float().mT
    dscores = weights * (dweights - (dweights * weights).sum(-1, keepdim=True))
    dscores = dscores * q.shape[-1] ** -0.5
    dq, dk = dscores @ k.float(), dscores.mT @ q.float()
    dv = weights.mT @ grad.float()
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def normed(t: Tensor) -> Tensor:
    return torch.nn.functional.rms_norm(t, (t.shape[-1],))


# ---------------------------------------------------------------------------------------------
# The kernels


def _dense_fake(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
    return q.new_empty(q.shape)


def _attention(name: str, read: Callable[[Tensor], Tensor], **options: Any) -> Any:
    """A kernel that reads q, k and v by ``read`` and returns a dense result."""

    def kernel(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        note(name, q, k, v)
        return attend(read(q), read(k), read(v))

    op = custom_op(f"standin::{name}", kernel, mutates_args=(), **options)
    op.register_fake(_dense_fake)
    return op


aware = _attention("aware", by_stride)
aware_untagged_bwd = _attention("aware_untagged_bwd", by_stride)
blind = _attention("blind", as_dense)
flexible = _attention("flexible", by_stride, tags=[torch.Tag.flexible_layout])
fixed = _attention("fixed", by_stride, tags=[torch.Tag.needs_fixed_stride_order])
exact = _attention("exact", by_stride, tags=[torch.Tag.needs_exact_strides])
contiguous = _attention("contiguous", by_stride, tags=[torch.Tag.needs_contiguous_strides])

_first_call_done: list[bool] = []


def _dense_once(t: Tensor) -> Tensor:
    return as_dense(t) if _first_call_done else by_stride(t)


@custom_op("standin::first_call_only", mutates_args=())
def first_call_only(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    note("first_call_only", q, k, v)
    out = attend(_dense_once(q), _dense_once(k), _dense_once(v))
    _first_call_done.append(True)
    return out


first_call_only.register_fake(_dense_fake)


@custom_op("standin::aligned", mutates_args=())
def aligned(q: Tensor, k: Tensor, v: Tensor, modulo: int) -> Tensor:
    note("aligned", q, k, v)
    for name, t in zip("qkv", (q, k, v)):
        if t.stride(-1) != 1 and t.shape[-1] > 1:
            raise RuntimeError(f"{name} has a last stride of {t.stride(-1)}")
        if bad := [n for n in (t.storage_offset(), *t.stride()[:-1]) if n % modulo]:
            raise RuntimeError(
                f"{name} has an offset or stride of {bad[0]}, no multiple of {modulo}"
            )
    return attend(by_stride(q), by_stride(k), by_stride(v))


aligned.register_fake(_dense_fake)


@custom_op("standin::offset_reader", mutates_args=())
def offset_reader(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    note("offset_reader", q, k, v)
    wrong = sum(t.storage_offset() for t in (q, k, v))
    return attend(by_stride(q), by_stride(k), by_stride(v)) + wrong


offset_reader.register_fake(_dense_fake)


@custom_op("standin::like_q", mutates_args=())
def like_q(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    note("like_q", q, k, v)
    return torch.empty_like(q).copy_(attend(by_stride(q), by_stride(k), by_stride(v)))


@like_q.register_fake
def _(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.empty_like(q)


@custom_op("standin::liar", mutates_args=())
def liar(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    note("liar", q, k, v)
    return attend(by_stride(q), by_stride(k), by_stride(v))


@liar.register_fake
def _(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.empty_like(q)


def _backward(name: str, read: Callable[[Tensor], Tensor], forward: Any) -> Any:
    """A backward kernel that reads q, k and v by ``read``, as the gradient of ``forward``."""

    def kernel(grad: Tensor, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        note(name, q, k, v)
        return attend_backward(by_stride(grad), read(q), read(k), read(v))

    def fake(grad: Tensor, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)

    op = custom_op(f"standin::{name}", kernel, mutates_args=())
    op.register_fake(fake)
    forward.register_autograd(
        lambda ctx, grad: op(grad, *ctx.saved_tensors),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    )
    return op


aware_bwd = _backward("aware_bwd", by_stride, aware)
untagged_bwd = _backward("untagged_bwd", as_dense, aware_untagged_bwd)


@custom_op("standin::norm_", mutates_args=("q", "k"))
def norm_(q: Tensor, k: Tensor) -> None:
    note("norm_", q, k)
    for t in (q, k):
        t.copy_(normed(t))


@norm_.register_fake
def _(q: Tensor, k: Tensor) -> None:
    return None


@custom_op("standin::rope", mutates_args=())
def rope(q: Tensor, k: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    note("rope", q, k)
    return as_dense(q) * c, as_dense(k) * c


@rope.register_fake
def _(q: Tensor, k: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape)


def _unary(name: str, kernel: Callable[[Tensor], Tensor]) -> Any:
    def run_kernel(x: Tensor) -> Tensor:
        note(name, x)
        return kernel(x)

    op = custom_op(f"standin::{name}", run_kernel, mutates_args=())
    op.register_fake(lambda x: x.new_empty(x.shape))
    return op


rms_norm = _unary("rms_norm", lambda x: normed(as_dense(x)))
rms_norm_strided = _unary("rms_norm_strided", lambda x: normed(by_stride(x)))
rotary = _unary("rotary", lambda x: as_dense(x).roll(1, -1))


def tag(op: str, *operands: str, **options: Any) -> None:
    """Tag a stand-in for q, k and v, or for the operands given."""
    qkvpass.register_stride_tag(f"standin::{op}", operands=operands or ("q", "k", "v"), **options)


# ---------------------------------------------------------------------------------------------
# Graphs, as the pass meets them


def trace(
    fn: Callable[..., Any],
    *inputs: Any,
    dynamic: bool | None = False,
    train: bool = False,
    slot: str = "joint_custom_post_pass",
) -> GraphModule:
    """The graph that stock Inductor hands to ``slot``, parameters lifted, nothing lowered.

    ``meta["inputs"]`` holds values to run it with. In training that is the joint graph, sorted,
    since Inductor leaves it out of order.
    """
    graphs: list[GraphModule] = []
    received: list[list[Any]] = []

    def keep(graph: Graph) -> None:
        stable_topological_sort(graph)
        graphs.append(clone(graph.owning_module))

    def interpret(gm: GraphModule, example_inputs: Sequence[Any], **_: Any) -> Any:
        def run(args: list[Any]) -> Any:
            received.append(list(args))
            return Interpreter(gm).run(*args)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    def backend(gm: GraphModule, example_inputs: Sequence[Any]) -> Any:
        patches = {slot: keep, "force_disable_caches": True}
        return compile_fx(gm, example_inputs, inner_compile=interpret, config_patches=patches)

    if train:
        inputs = tuple(leaf(x) for x in inputs)
    torch._dynamo.reset()
    with torch.set_grad_enabled(train):
        torch.compile(fn, backend=backend, dynamic=dynamic, fullgraph=True)(*inputs)
    (gm,) = graphs
    given = [x.detach() if isinstance(x, Tensor) else x for x in received[0]]
    tangents = gm.graph.find_nodes(op="placeholder")[len(given) :]
    gm.meta["inputs"] = given + [_like_meta(node.meta["val"]) for node in tangents]
    return gm


def leaf(x: Any) -> Any:
    """``x`` as a fresh leaf that wants a gradient, where it can have one."""
    if not (isinstance(x, Tensor) and x.is_floating_point()):
        return x
    return _same_layout(x, x.detach()).requires_grad_()


def trace_fake(
    fn: Callable[..., Any], *specs: tuple[tuple[int, ...], str, torch.dtype]
) -> GraphModule:
    """The ATen graph of ``fn`` on fake tensors of (shape, device, dtype): nothing is allocated,
    and no such device needs to be there."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        inputs = [torch.empty(shape, device=dev, dtype=dtype) for shape, dev, dtype in specs]
        gm = make_fx(fn)(*inputs)
    return gm


def clone(gm: GraphModule) -> GraphModule:
    """A copy whose nodes, and their metas, may be changed."""
    graph = Graph()
    result = graph.graph_copy(gm.graph, {})
    output = graph.output(result)
    output.meta = copy.copy(gm.graph.find_nodes(op="output")[0].meta)
    twin = GraphModule(gm, graph)
    twin.meta = dict(gm.meta)
    return twin


def _like_meta(val: Any) -> Tensor:
    """A random tensor with the layout of a fake one; hints stand for its symbols."""

    def number(n: Any) -> int:
        return n if isinstance(n, int) else n.node.hint

    shape, stride = [number(n) for n in val.shape], [number(n) for n in val.stride()]
    return torch.empty_strided(shape, stride, dtype=val.dtype).normal_()


def _same_layout(like: Tensor, values: Tensor) -> Tensor:
    extent = 1 + sum((s - 1) * t for s, t in zip(like.shape, like.stride())) if like.numel() else 0
    storage = torch.zeros(like.storage_offset() + extent, dtype=like.dtype, device=like.device)
    return storage.as_strided(like.shape, like.stride(), like.storage_offset()).copy_(values)


def fresh(inputs: Sequence[Any], seed: int) -> list[Any]:
    """Inputs of the same layouts with new values; what is no float tensor stays as it is."""
    generator = torch.Generator().manual_seed(seed)

    def one(x: Any) -> Any:
        if not (isinstance(x, Tensor) and x.is_floating_point()):
            return x
        values = torch.randn(x.shape, generator=generator).to(x.dtype)
        return _same_layout(x, values).requires_grad_(x.requires_grad)

    return [one(x) for x in inputs]


# ---------------------------------------------------------------------------------------------
# The pass on one graph


@dataclass
class Outcome:
    """A graph before and after the pass, and the report on it."""

    before: GraphModule
    after: GraphModule
    report: qkvpass.Report
    calls: list[Call] = field(default_factory=list)  # of the rewritten graph

    @property
    def verdicts(self) -> dict[str, str]:
        """Reason by operand, with aten's ``query`` called ``q`` too, and a copy that several
        operands share under each of them; ``""`` stands for copies that reach none, such as one
        behind the attention. Reasons that differ are joined by ``+``."""
        found: dict[str, set[str]] = {}
        for decision in self.report.copies:
            for operand in _short(decision.operand):
                found.setdefault(operand, set()).add(str(decision.reason))
        return {operand: "+".join(sorted(reasons)) for operand, reasons in found.items()}

    @property
    def reasons(self) -> list[str]:
        return sorted(str(copy.reason) for copy in self.report.copies)

    def only(self, op: str) -> list[Call]:
        return [call for call in self.calls if call.op == op]

    def detail(self, operand: str) -> str:
        return next(c.detail for c in self.report.copies if operand in _short(c.operand))


def _short(operands: str) -> list[str]:
    names = {"query": "q", "key": "k", "value": "v"}
    return [names.get(name, name) for name in operands.split(", ")]


def apply_pass(gm: GraphModule, **options: Any) -> Outcome:
    """Run the pass on a copy of ``gm``, with :class:`qkvpass.Options`."""
    after = clone(gm)
    with qkvpass.capture() as reports:
        qkvpass.StridedQKVPass(qkvpass.Options(**options))(after.graph)
    after.graph.lint()
    after.recompile()
    (report,) = reports
    return Outcome(gm, after, report)


def decide(fn: Callable[..., Any], *inputs: Any, **options: Any) -> Outcome:
    """Trace, run the pass, and hold the rewritten graph against the original.

    Both run on two sets of data. Outputs must agree in every bit and stride, untagged kernels
    must see what they saw, and the metas must tell the truth.
    """
    outcome = apply_pass(trace(fn, *inputs, **options))
    verify(outcome)
    return outcome


def verify(outcome: Outcome, bitwise: bool = True) -> None:
    """Hold a rewritten graph against the original; unless ``bitwise``, values may be rounded."""
    inputs = outcome.before.meta["inputs"]
    for seed in (1, 2):
        reset_between = not outcome.calls
        with recorded() as before:
            expected = run_graph(outcome.before, fresh(inputs, seed))
        if reset_between:
            _first_call_done.clear()
        with recorded() as after:
            actual = run_graph(outcome.after, fresh(inputs, seed))
        outcome.calls.extend(after)
        (assert_same if bitwise else assert_close)(actual, expected)
        assert _layouts_seen(after) == _layouts_seen(before)
    wrong_before = {name for name, _ in wrong_metas(outcome.before, inputs)}
    wrong_after = [(name, why) for name, why in wrong_metas(outcome.after, inputs)]
    assert not [item for item in wrong_after if item[0] not in wrong_before]


def run_graph(gm: GraphModule, inputs: Sequence[Any]) -> tuple[Any, ...]:
    with torch.no_grad():
        return tuple(pytree.tree_leaves(gm(*inputs)))


def assert_same(actual: Sequence[Any], expected: Sequence[Any]) -> None:
    """Equal bits and equal strides, output by output."""
    assert len(actual) == len(expected)
    for a, e in zip(actual, expected):
        if isinstance(e, Tensor):
            torch.testing.assert_close(a, e, rtol=0, atol=0, equal_nan=True)
            assert a.stride() == e.stride()
        else:
            assert a == e


def assert_close(actual: Sequence[Any], expected: Sequence[Any]) -> None:
    """Equal but for rounding, and equal strides, output by output."""
    assert len(actual) == len(expected)
    for a, e in zip(actual, expected):
        if isinstance(e, Tensor):
            torch.testing.assert_close(a, e, equal_nan=True)
            assert a.stride() == e.stride()
        else:
            assert a == e


def _layouts_seen(calls: Sequence[Call]) -> list[tuple[str, tuple[tuple[Any, ...], ...]]]:
    """What kernels that nobody vouched for were given; addresses aside."""
    trusted = {tag.op for tag in qkvpass.stride_tags() if tag.status.capable}
    return [
        (call.op, tuple(seen[:3] for seen in call.tensors))
        for call in calls
        if f"standin::{call.op}" not in trusted and call.op != "flexible"
    ]


def wrong_metas(gm: GraphModule, inputs: Sequence[Any]) -> list[tuple[str, str]]:
    """Nodes whose ``val`` does not have the layout that the node has when it runs, and ops
    whose ``eager_input_vals`` do not agree with their inputs."""
    wrong: list[tuple[str, str]] = []

    class Watch(Interpreter):
        def run_node(self, n: Node) -> Any:
            result = super().run_node(n)
            val = n.meta.get("val")
            if isinstance(val, Tensor) and isinstance(result, Tensor) and n.op != "placeholder":
                claimed = (*val.shape, *val.stride(), val.storage_offset())
                actual = (*result.shape, *result.stride(), result.storage_offset())
                if all(isinstance(c, int) for c in claimed) and claimed != actual:
                    wrong.append((n.name, f"claims {claimed}, has {actual}"))
            return result

    with torch.no_grad():
        Watch(gm).run(*fresh(inputs, 0))
    for node in gm.graph.nodes:
        if "eager_input_vals" in node.meta:
            args, kwargs = node.meta["eager_input_vals"]
            claimed = pytree.tree_leaves((args, kwargs))
            actual = pytree.tree_leaves((node.args, node.kwargs))
            for c, a in zip(claimed, actual):
                if not (isinstance(c, Tensor) and isinstance(a, Node)):
                    continue
                if tuple(map(str, c.stride())) != tuple(map(str, a.meta["val"].stride())):
                    wrong.append((node.name, f"recorded {c.stride()} for {a}"))
    return wrong


def nodes_of(gm: GraphModule, target: Any) -> list[Node]:
    return gm.graph.find_nodes(op="call_function", target=target)


def copies_in(gm: GraphModule) -> int:
    """Clones left in a graph."""
    return len(nodes_of(gm, torch.ops.aten.clone.default))


# ---------------------------------------------------------------------------------------------
# The whole compiler, with and without the pass


@dataclass
class Run:
    """A model compiled by one backend and run on two sets of data."""

    outputs: list[tuple[Any, ...]]
    calls: list[list[Call]]
    kernels: int
    reports: list[qkvpass.Report]

    def seen(self, op: str) -> list[Call]:
        """The calls of one stand-in in both runs; there must be some."""
        found = [call for calls in self.calls for call in calls if call.op == op]
        assert found, f"{op} never ran"
        return found


class Pair(NamedTuple):
    stock: Run
    ours: Run


def run(
    model: Callable[..., Any],
    *inputs: Any,
    backend: Any = "inductor",
    dynamic: bool | None = None,
    train: bool = False,
) -> Run:
    """Compile ``model`` from nothing and run it twice, each time with new data.

    In training the outputs are followed by the gradients of every input and parameter.
    """
    torch._dynamo.reset()
    metrics.reset()
    _first_call_done.clear()
    compiled = torch.compile(model, backend=backend, dynamic=dynamic)
    outputs, calls = [], []
    with qkvpass.capture() as reports:
        for seed in (1, 2):
            given = fresh(inputs, seed)
            if train:
                given = [leaf(x) for x in given]
            with recorded() as seen, torch.set_grad_enabled(train):
                result = pytree.tree_leaves(compiled(*given))
                if train:
                    result = [*result, *_gradients(model, result, given)]
            outputs.append(tuple(x.detach() if isinstance(x, Tensor) else x for x in result))
            calls.append(seen)
    return Run(outputs, calls, metrics.generated_kernel_count, list(reports))


def _gradients(model: Any, outputs: Sequence[Any], inputs: Sequence[Any]) -> list[Tensor | None]:
    leaves = [x for x in inputs if isinstance(x, Tensor) and x.requires_grad]
    leaves += list(model.parameters()) if isinstance(model, nn.Module) else []
    total = sum(
        ((x.float() ** 2).sum() for x in outputs if isinstance(x, Tensor) and x.requires_grad),
        torch.zeros(()),
    )
    return list(torch.autograd.grad(total, leaves, allow_unused=True))


def compile_pair(model: Callable[..., Any], *inputs: Any, **options: Any) -> Pair:
    """Stock Inductor and qkvpass on the same model and data; they must agree to the bit."""
    pair = Pair(
        run(model, *inputs, backend="inductor", **options),
        run(model, *inputs, backend=qkvpass.backend, **options),
    )
    for ours, stock in zip(pair.ours.outputs, pair.stock.outputs):
        assert_same(ours, stock)
    return pair
