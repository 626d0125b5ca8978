"""Edits of a copy of the graph, and how a finished copy becomes the user's graph.

A rewrite that pays only where copies go behind it is tried on a copy. Each edit is neutral: what
it puts in place of a value has that value's layout, so that nobody can tell them apart until the
one rule has had its say.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from .compat import ORIGIN, detect_fake_mode, extract_tensor_metadata, no_new_guards
from .edit import Journal, RewriteFault
from .layout import Int, Layout, NotAView, StridedView
from .match import Facts
from .safety import unchanged

aten = torch.ops.aten


class NotPossible(Exception):
    """An edit cannot be expressed here; the copy of the graph is of no use any more."""


def copy_of(graph: Graph, taken: Iterable[str] = ()) -> Graph:
    """A graph of equal nodes under equal names, with metas that may be edited.

    Args:
        graph: the user's, or what an edit has made of a copy of it.
        taken: names that no new node may have: of the user's nodes, also those that are gone.
    """
    twin = Graph()
    twins: dict[Node, Node] = {}
    result = twin.graph_copy(graph, twins)
    (output,) = graph.find_nodes(op="output")
    twin.output(result).meta.update(output.meta)
    name_alike(twin, graph)
    for name in set(taken) - {node.name for node in graph.nodes}:
        twin.erase_node(twin.placeholder(name))  # a graph gives out no name twice
    return twin


def name_alike(twin: Graph, graph: Graph) -> None:
    """Name the nodes of a copy as those of the graph: copying renames what is no fresh name, such
    as ``input`` and ``w_01``, and so what is exported may be called."""
    for copied, node in zip(twin.nodes, graph.nodes):
        copied.name = node.name


class Editor:
    """Inserts ops with their values, and puts them in the place of others."""

    def __init__(self, graph: Graph, facts: Facts) -> None:
        self.journal = Journal(graph)
        self.facts = facts
        self._like: Node | None = None

    def in_place_of(self, node: Node) -> None:
        """What is inserted from here on has the origin of ``node``: its module in tracebacks, and
        what activation checkpointing is to do with it."""
        self._like = node

    def call(self, anchor: Node, op: Any, *args: Any, **kwargs: Any) -> Node:
        """A new op in front of ``anchor``, with its value.

        Raises:
            NotPossible: if the op rejects its inputs, needs a guard, or needs a symbolic size
                that no node of the graph holds.
        """
        args = pytree.tree_map_only(torch.SymInt, lambda s: self._named(s, anchor), args)
        value = self._value(op, args, kwargs)
        origin = (self._like or anchor).meta
        meta: dict[str, Any] = {key: origin[key] for key in ORIGIN if key in origin}
        meta["val"] = value
        if "tensor_meta" in anchor.meta:
            meta["tensor_meta"] = pytree.tree_map_only(Tensor, extract_tensor_metadata, value)
        return self.journal.insert_before(anchor, op, args, meta, kwargs)

    def _value(self, op: Any, args: Any, kwargs: Any) -> Any:
        if any(a is None for a in pytree.tree_leaves(args, is_leaf=lambda a: a is None)):
            raise NotPossible(f"no node of the graph holds a size of {op}")
        given = map_arg((args, kwargs), lambda n: n.meta["val"])
        mode = detect_fake_mode(given)
        if mode is None:
            raise NotPossible("the graph has no fake values")
        try:
            with torch.no_grad(), mode, no_new_guards(mode):
                return op(*given[0], **given[1])
        except Exception as fault:
            raise NotPossible(f"{op}: {fault}") from fault

    def view(self, anchor: Node, value: Node, size: list[Int]) -> Node:
        """``value.view(size)``, where the view is legal.

        Raises:
            NotPossible: if it is not.
        """
        if not self.viewable(value, size):
            raise NotPossible(f"{value.name} has no view of sizes {size}")
        sizes = [self._named(s, anchor) for s in size]
        if sizes.count(None) == 1:  # `view` works out one size that no node holds
            sizes[sizes.index(None)] = -1
        return self.call(anchor, aten.view.default, value, sizes)

    def _named(self, size: Int, anchor: Node) -> Int | Node | None:
        return size if isinstance(size, int) else self.facts.size_node(size, anchor)

    @staticmethod
    def viewable(value: Node, size: list[Int]) -> bool:
        """Whether a view of these sizes is legal; fake tensors let some pass that are not."""
        try:
            view = StridedView.of(Layout.of(value.meta["val"])).reshape(size)
        except NotAView:
            return False
        return view.layout(size) is not None

    def permute(self, anchor: Node, value: Node, order: list[int]) -> Node:
        if order == list(range(len(order))):
            return value
        return self.call(anchor, aten.permute.default, value, order)

    def dense(self, anchor: Node, value: Node) -> Node:
        """A row-major copy, or the value itself where it is row-major."""
        if Layout.of(value.meta["val"]).row_major:
            return value
        return self.call(anchor, aten.clone.default, value, memory_format=torch.contiguous_format)

    def replace(self, old: Node, new: Node) -> None:
        """Let the users of ``old`` read ``new``, which must look the same; ``old`` dies.

        Raises:
            NotPossible: if it does not.
        """
        self.redirect(list(old.users), old, new)
        self.journal.dead.append(old)

    def relocate(self, old: Node, new: Node) -> None:
        """Let the users of ``old`` read ``new``, which may begin elsewhere in its storage.

        Raises:
            NotPossible: if it differs in more.
        """
        before, after = old.meta["val"], new.meta["val"]
        if not Layout.of(before).same_strides(Layout.of(after)):
            raise NotPossible(f"{new.name} is not laid out as {old.name}")
        for user in list(old.users):
            self.journal.replace_input(user, old, new)
        self.journal.dead.append(old)

    def redirect(self, users: list[Node], old: Node, new: Node) -> None:
        """Let some users of ``old`` read ``new``, which must look the same.

        Raises:
            NotPossible: if it does not.
        """
        before, after = old.meta["val"], new.meta["val"]
        alike = (before.dtype, before.device) == (after.dtype, after.device)
        if not alike or not unchanged(before, after):
            raise NotPossible(f"{new.name} is not laid out as {old.name}")
        for user in users:
            self.journal.replace_input(user, old, new)


def transplant(graph: Graph, finished: Graph) -> None:
    """Make ``graph`` what ``finished``, an edited copy of it, has become.

    Raises:
        RewriteFault: if a node would be left that reads an erased one; ``graph`` is as it was.
    """
    journal = Journal(graph)
    try:
        gone = _move(journal, graph, finished)
    except BaseException:
        journal.rollback()
        raise
    for node in reversed(gone):
        graph.erase_node(node)


def _move(journal: Journal, graph: Graph, finished: Graph) -> list[Node]:
    originals = {node.name: node for node in graph.nodes}
    kept = {node.name for node in finished.nodes}
    twins: dict[Node, Node] = {}
    waiting: list[Node] = []
    for node in finished.nodes:
        if node.name not in originals:
            waiting.append(node)
            continue
        twin = originals[node.name]
        for new in waiting:
            args, kwargs = map_arg((new.args, new.kwargs), twins.__getitem__)
            twins[new] = journal.insert_before(twin, new.target, args, new.meta, kwargs)
        waiting.clear()
        twins[node] = twin
        _assimilate(journal, node, twin, twins)
    gone = [node for name, node in originals.items() if name not in kept]
    dead = set(gone)
    if any(user not in dead for node in gone for user in node.users):
        raise RewriteFault("a node that stays reads one that is gone")
    graph.lint()
    return gone


def _assimilate(journal: Journal, node: Node, twin: Node, twins: dict[Node, Node]) -> None:
    args, kwargs = map_arg((node.args, node.kwargs), twins.__getitem__)
    if (args, kwargs) != (twin.args, twin.kwargs):
        journal.set_arguments(twin, args, kwargs)
    if node.target is not twin.target:
        journal.retarget(twin, node.target)
    for key, value in node.meta.items():
        if twin.meta.get(key) is not value:
            journal.set_meta(twin, key, value)
