"""View ops over :class:`StridedView`, and legal views re-emitted from a root buffer."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.fx import Node

from .layout import Int, Layout, NotAView, RadixView, StridedView, known

aten = torch.ops.aten

# A step takes (the view, its sizes, the node's arguments behind the input, the sizes of the
# result) and returns the view behind the node, or one for each part.
Parts: TypeAlias = "StridedView | list[StridedView]"
Step: TypeAlias = Callable[[StridedView, Sequence[Int], Sequence[Any], Any], Parts]


def _reshape(view: StridedView, size: Sequence[Int], args: Sequence[Any], out: Any) -> Parts:
    return view.reshape(out)


def _permute(view: StridedView, size: Sequence[Int], args: Sequence[Any], out: Any) -> Parts:
    return view.permute([d % len(size) for d in args[0]])


def _transpose(view: StridedView, size: Sequence[Int], args: Sequence[Any], out: Any) -> Parts:
    order = list(range(len(size)))
    a, b = args[0] % len(size), args[1] % len(size)
    order[a], order[b] = order[b], order[a]
    return view.permute(order)


def _t(view: StridedView, size: Sequence[Int], args: Sequence[Any], out: Any) -> Parts:
    return view.permute(list(reversed(range(len(size)))))


def _unsqueeze(view: StridedView, size: Sequence[Int], args: Sequence[Any], out: Any) -> Parts:
    return view.insert(args[0] % (len(size) + 1))


def _squeeze(view: StridedView, size: Sequence[Int], args: Sequence[Any], out: Any) -> Parts:
    wanted = (
        range(len(size))
        if not args
        else args[0]
        if isinstance(args[0], (list, tuple))
        else [args[0]]
    )
    for dim in sorted({d % len(size) for d in wanted}, reverse=True):
        if known(size[dim] == 1):
            view = view.drop(dim)
    if len(view.dims) != len(out):
        raise NotAView("squeeze of a dim whose size is not known")
    return view


def _select(view: StridedView, size: Sequence[Int], args: Sequence[Any], out: Any) -> Parts:
    dim, index = args[0] % len(size), args[1]
    if not known(index >= 0):
        if not known(index < 0):
            raise NotAView("select of an index whose sign is not known")
        index = index + size[dim]
    return view.select(dim, index)


def _slice(view: StridedView, size: Sequence[Int], args: Sequence[Any], out: Any) -> Parts:
    given = dict(enumerate(args))
    dim, start, step = given.get(0, 0) % len(size), given.get(1) or 0, given.get(3, 1)
    if known(start == 0) and known(out[dim] == size[dim]):
        return view
    if known(start < 0):
        start = start + size[dim]
    if not (known(start >= 0) and known(start <= size[dim])):
        raise NotAView("slice whose start is not known")
    return view.slice(dim, start, out[dim], step)


def _split(view: StridedView, size: Sequence[Int], args: Sequence[Any], out: Any) -> Parts:
    dim = (args[1] if len(args) > 1 else 0) % len(size)
    parts, start = [], 0
    for part in out:
        parts.append(view.slice(dim, start, part[dim], 1))
        start = start + part[dim]
    return parts


def _unbind(view: StridedView, size: Sequence[Int], args: Sequence[Any], out: Any) -> Parts:
    dim = (args[0] if args else 0) % len(size)
    return [view.select(dim, i) for i in range(len(out))]


def _expand(view: StridedView, size: Sequence[Int], args: Sequence[Any], out: Any) -> Parts:
    return view.expand(out)


def _same(view: StridedView, size: Sequence[Int], args: Sequence[Any], out: Any) -> Parts:
    return view


VIEW_STEPS: dict[Any, Step] = {
    aten.view.default: _reshape,
    aten._unsafe_view.default: _reshape,
    aten.reshape.default: _reshape,
    aten._reshape_alias.default: _reshape,
    aten.permute.default: _permute,
    aten.transpose.int: _transpose,
    aten.t.default: _t,
    aten.unsqueeze.default: _unsqueeze,
    aten.squeeze.default: _squeeze,
    aten.squeeze.dim: _squeeze,
    aten.squeeze.dims: _squeeze,
    aten.select.int: _select,
    aten.slice.Tensor: _slice,
    aten.split.Tensor: _split,
    aten.split_with_sizes.default: _split,
    aten.chunk.default: _split,
    aten.unbind.int: _unbind,
    aten.expand.default: _expand,
    aten.alias.default: _same,
    aten.detach.default: _same,
}


def is_view(node: Node) -> bool:
    """Whether the node's result aliases its first input and nothing is computed."""
    return node.op == "call_function" and (node.target in VIEW_STEPS or _is_part(node))


def regroups(node: Node) -> bool:
    """Whether a view merges and splits dims, which not every layout allows."""
    return VIEW_STEPS.get(node.target) is _reshape


def _is_part(node: Node) -> bool:
    """``getitem`` of a view op with several results."""
    return (
        node.target is operator.getitem
        and isinstance(node.args[0], Node)
        and node.args[0].target in VIEW_STEPS
    )


def recompose(node: Node, view: StridedView, size: Sequence[Int]) -> Parts:
    """The view behind ``node``, given the one in front of it.

    Raises:
        NotAView: if the step cannot be expressed over atomic dims.
    """
    args = [_number(a) for a in node.args[1:]]
    if node.kwargs:
        raise NotAView(f"{node.name} has keyword arguments")
    value = node.meta["val"]
    out = (
        [tuple(v.shape) for v in value] if isinstance(value, (list, tuple)) else tuple(value.shape)
    )
    return VIEW_STEPS[node.target](view, size, args, out)


def _number(arg: Any) -> Any:
    if isinstance(arg, Node):
        return arg.meta["val"]
    return [_number(a) for a in arg] if isinstance(arg, (list, tuple)) else arg


Call: TypeAlias = Callable[..., Any]  # call(op, value, *args) -> value


def emit(radix: RadixView, root: Any, target: Layout, call: Call) -> Any:
    """Reach ``target`` from ``root`` with view, slice, select, permute and unsqueeze.

    ``call(op, value, *args)`` runs the op on a fake tensor or adds it to a graph.
    """
    value = call(aten.view.default, root, [step.extent for step in radix.steps])
    for dim, step in enumerate(radix.steps):
        if not (known(step.start == 0) and known(step.size == step.extent)):
            value = call(aten.slice.Tensor, value, dim, step.start, step.start + step.size)
    for dim in reversed(range(len(radix.order), len(radix.steps))):
        value = call(aten.select.int, value, dim, 0)
    if radix.order != tuple(range(len(radix.order))):
        value = call(aten.permute.default, value, list(radix.order))
    for dim, size in enumerate(target.size):
        if known(size == 1):
            value = call(aten.unsqueeze.default, value, dim)
    return value


def run(op: Any, value: Tensor, *args: Any) -> Tensor:
    """``emit``'s ``call`` on a fake tensor."""
    return op(value, *args)
