"""Edit the graph as decided: transactional, with values, metas and recorded layouts."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.utils import _pytree as pytree

from . import triton_tags
from .compat import extract_tensor_metadata
from .layout import Layout, radix_view
from .match import Facts, aliases_input, source_argument
from .safety import (
    Call,
    Overlay,
    Pending,
    Refused,
    arguments,
    consume,
    looks_at_every_stride,
    rerun,
    unchanged,
)
from .views import emit, is_view

aten = torch.ops.aten


class RewriteFault(RuntimeError):
    """The finished graph is not what was decided; it was put back as it was."""


class Journal:
    """Edits of a graph that can be undone until they are committed."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.undo: list[Callable[[], None]] = []
        self.arguments: dict[Node, tuple[Any, Any]] = {}  # as they were, of edited nodes
        self.values: dict[Node, Any] = {}  # `val` as it was, of edited nodes
        self.inserted: set[Node] = set()
        self.dead: list[Node] = []

    def set_meta(self, node: Node, key: str, value: Any) -> None:
        had, old = key in node.meta, node.meta.get(key)
        if key == "val":
            self.values.setdefault(node, old)
        self.undo.append(lambda: node.meta.update({key: old}) if had else node.meta.pop(key, None))
        node.meta[key] = value

    def insert_before(
        self,
        anchor: Node,
        target: Any,
        args: tuple[Any, ...],
        meta: dict[str, Any],
        kwargs: dict[str, Any] | None = None,
    ) -> Node:
        with self.graph.inserting_before(anchor):
            node = self.graph.call_function(target, args, kwargs)
        node.meta.update(meta)
        self.inserted.add(node)
        self.undo.append(lambda: self.graph.erase_node(node))
        return node

    def set_kwarg(self, node: Node, name: str, value: Any) -> None:
        self.set_arguments(node, node.args, {**node.kwargs, name: value})

    def set_arguments(self, node: Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._keep_arguments(node)
        node.args, node.kwargs = args, kwargs

    def retarget(self, node: Node, target: Any) -> None:
        old = node.target
        self.undo.append(lambda: setattr(node, "target", old))
        node.target = target

    def replace(self, old: Node, new: Node) -> None:
        """Let the users of ``old`` read ``new``; ``old`` dies on commit."""
        for user in list(old.users):
            self.replace_input(user, old, new)
        self.dead.append(old)

    def replace_input(self, user: Node, old: Node, new: Node) -> None:
        self._keep_arguments(user)
        user.replace_input_with(old, new)

    def _keep_arguments(self, node: Node) -> None:
        args, kwargs = node.args, node.kwargs
        self.arguments.setdefault(node, (args, kwargs))

        def restore() -> None:
            node.args, node.kwargs = args, kwargs

        self.undo.append(restore)

    def rollback(self) -> None:
        for step in reversed(self.undo):
            step()
        self.undo.clear()

    def commit(self) -> None:
        """Erase what nobody reads any more: the copies, and the views that led only to them."""
        stack = list(self.dead)
        erased: set[Node] = set()
        while stack:
            node = stack.pop()
            if node in erased or node.users:
                continue
            inputs = node.all_input_nodes
            self.graph.erase_node(node)
            erased.add(node)
            stack.extend(n for n in inputs if is_view(n))
        self.undo.clear()


def apply(graph: Graph, facts: Facts, overlay: Overlay) -> None:
    """Take the overlay's copies out of the graph and let its metas say so.

    Raises:
        RewriteFault: if the finished graph breaks the rule; the graph is as it was.
    """
    journal = Journal(graph)
    try:
        _edit(journal, facts, overlay)
        graph.lint()
        _audit(graph, journal, facts)
    except BaseException:
        journal.rollback()
        raise
    journal.commit()


def _edit(journal: Journal, facts: Facts, overlay: Overlay) -> None:
    nodes = sorted(overlay.values, key=facts.order.__getitem__)
    for node in nodes:
        value = overlay.values[node]
        if node in overlay.emitted:
            journal.replace(node, _emit(journal, node, facts, overlay))
        elif _is_pending(value):
            journal.dead.append(node)
        elif node in overlay.removed:
            journal.replace(node, source_argument(node))
        elif not unchanged(node.meta.get("val"), value) or is_view(node):
            _set_value(journal, node, value)
    readers = set(journal.arguments) | {user for n in journal.values for user in n.users}
    for node in sorted(readers, key=facts.order.__getitem__):
        if "eager_input_vals" in node.meta:
            _record_layouts(journal, node)
        for name, value in triton_tags.restated(node).items():
            journal.set_kwarg(node, name, value)


def _is_pending(value: Any) -> bool:
    return isinstance(value, Pending) or (
        isinstance(value, (list, tuple)) and any(isinstance(v, Pending) for v in value)
    )


def _set_value(journal: Journal, node: Node, value: Any) -> None:
    journal.set_meta(node, "val", value)
    if "tensor_meta" in node.meta:
        journal.set_meta(
            node, "tensor_meta", pytree.tree_map_only(Tensor, extract_tensor_metadata, value)
        )
    if node.target is aten._unsafe_view.default:  # its input is no longer a fresh buffer
        journal.retarget(node, aten.view.default)


def _emit(journal: Journal, node: Node, facts: Facts, overlay: Overlay) -> Node:
    """Views from the root buffer to the layout that ``node`` is to have."""
    root, layout = overlay.emitted[node]
    radix = radix_view(Layout.of(root.meta["val"]), layout)
    assert radix is not None
    meta = {
        k: v for k, v in node.meta.items() if k not in ("val", "tensor_meta", "eager_input_vals")
    }

    def call(op: Any, value: Node, *args: Any) -> Node:
        fake = value.meta["val"]
        with fake.fake_mode:
            result = op(fake, *args)
        symbolic = pytree.tree_map_only(torch.SymInt, lambda s: facts.size_node(s, node), args)
        new = journal.insert_before(node, op, (value, *_one_free(op, symbolic)), meta)
        _set_inserted(new, result, node)
        return new

    return emit(radix, root, layout, call)


def _set_inserted(new: Node, value: Tensor, like: Node) -> None:
    new.meta["val"] = value
    if "tensor_meta" in like.meta:
        new.meta["tensor_meta"] = extract_tensor_metadata(value)


def _one_free(op: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Let ``view`` work out one size that no node of the graph holds."""
    if op is not aten.view.default:
        return args
    unknown = [i for i, size in enumerate(args[0]) if size is None]
    if len(unknown) > 1:
        raise RewriteFault("a view needs two sizes that no node of the graph holds")
    return ([-1 if size is None else size for size in args[0]],)


def _record_layouts(journal: Journal, node: Node) -> None:
    """Bring ``eager_input_vals`` up to date: lowering re-makes a copy to honour what it says."""
    before, recorded = (node.args, dict(node.kwargs)), node.meta["eager_input_vals"]
    before = journal.arguments.get(node, before)
    old_leaves = _leaves(before)
    new_leaves = _leaves((node.args, dict(node.kwargs)))
    leaves, spec = pytree.tree_flatten(recorded, is_leaf=lambda v: v is None)
    if len(old_leaves) != len(new_leaves) or len(leaves) != len(new_leaves):
        raise RewriteFault(f"eager_input_vals of {node.name} do not fit its arguments")
    updated = [
        new.meta["val"]
        if isinstance(new, Node) and isinstance(leaf, Tensor) and _moved(journal, old, new)
        else leaf
        for old, new, leaf in zip(old_leaves, new_leaves, leaves)
    ]
    journal.set_meta(node, "eager_input_vals", pytree.tree_unflatten(updated, spec))


def _leaves(arguments: Any) -> list[Any]:
    # fx's immutable containers flatten like plain ones once they are rebuilt.
    plain = pytree.tree_map(lambda a: a, _plain(arguments))
    return pytree.tree_flatten(plain, is_leaf=lambda v: v is None or isinstance(v, Node))[0]


def _plain(arguments: Any) -> Any:
    if isinstance(arguments, dict):
        return {k: _plain(v) for k, v in arguments.items()}
    if isinstance(arguments, list):
        return [_plain(v) for v in arguments]
    if isinstance(arguments, tuple):
        return tuple(_plain(v) for v in arguments)
    return arguments


def _moved(journal: Journal, old: Node, new: Node, exact: bool = True) -> bool:
    value = journal.values.get(old, old.meta.get("val"))
    return not unchanged(value, new.meta.get("val"), exact)


def _root(node: Node) -> Node:
    """The node whose buffer a value lies in, in the graph as it is by now."""
    while is_view(node) or aliases_input(node):
        node = node.all_input_nodes[0]
    return node


def _audit(graph: Graph, journal: Journal, facts: Facts) -> None:
    """The rule, once more, on the finished graph.

    Raises:
        RewriteFault: if a node's recorded layout is not what its inputs give, or a
            layout-bound consumer sees another layout than it did.
    """
    touched = set(journal.values) | journal.inserted | set(journal.arguments)
    dead = set(journal.dead)
    for node in graph.nodes:
        if node in dead or not (node in touched or any(n in touched for n in node.all_input_nodes)):
            continue
        if any(n in dead for n in node.all_input_nodes):
            raise RewriteFault(f"{node.name} still reads a removed node")
        if node in journal.inserted:
            continue
        try:
            value = _recompute(node, journal, facts)
        except Refused as refused:
            raise RewriteFault(f"on the finished graph: {refused.detail}") from refused
        if not unchanged(value, node.meta.get("val")):
            raise RewriteFault(f"{node.name} is recorded in a layout that its inputs do not give")


def _recompute(node: Node, journal: Journal, facts: Facts) -> Any:
    after = arguments(node, lambda n: n.meta.get("val"))
    if node.target is operator.getitem:
        return after[0][0][after[0][1]]
    if triton_tags.tags_of(node):
        if triton_tags.restated(node):
            raise RewriteFault(f"the constants of {node.name} are not the strides of its operands")
        return node.meta.get("val")
    old_args, old_kwargs = journal.arguments.get(node, (node.args, node.kwargs))
    old, new = _leaves((old_args, dict(old_kwargs))), _leaves((node.args, dict(node.kwargs)))
    exact = looks_at_every_stride(node)
    changed = [n for o, n in zip(old, new) if isinstance(n, Node) and _moved(journal, o, n, exact)]
    call = Call(node, after, changed, needs_grad=facts.has_backward, root_of=_root)
    return rerun(call) if is_view(node) and changed else consume(call)
