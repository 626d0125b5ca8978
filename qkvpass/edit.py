"""Edits of a copy of the graph, and how a finished copy becomes the user's graph.

A rewrite that pays only where copies go behind it is tried on a copy. Each edit is neutral: what
it puts in place of a value has that value's layout, so that nobody can tell them apart until the
one rule has had its say.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from .compat import detect_fake_mode, extract_tensor_metadata, no_new_guards
from .layout import Int, Layout
from .match import Facts
from .rewrite import Journal, RewriteFault, one_free
from .safety import unchanged

aten = torch.ops.aten


class NoSuchSize(Exception):
    """No node of the graph holds a size that an edit needs."""


def copy_of(graph: Graph) -> Graph:
    """A graph of equal nodes under equal names, with metas that may be edited."""
    twin = Graph()
    twins: dict[Node, Node] = {}
    result = twin.graph_copy(graph, twins)
    (output,) = graph.find_nodes(op="output")
    twin.output(result).meta.update(output.meta)
    return twin


class Editor:
    """Inserts ops with their values, and puts them in the place of others."""

    def __init__(self, graph: Graph, facts: Facts) -> None:
        self.journal = Journal(graph)
        self.facts = facts

    def call(self, anchor: Node, op: Any, *args: Any, **kwargs: Any) -> Node:
        """A new op in front of ``anchor``.

        Raises:
            NewGuard: if its value needs one.
            NoSuchSize: if no node holds a symbolic size among the arguments.
        """
        args = pytree.tree_map_only(torch.SymInt, lambda s: self.facts.size_node(s, anchor), args)
        try:
            args = (args[0], *one_free(op, args[1:]))
        except RewriteFault as fault:
            raise NoSuchSize(str(fault)) from fault
        if any(a is None for a in pytree.tree_leaves(args, is_leaf=lambda a: a is None)):
            raise NoSuchSize(f"no node of the graph holds a size of {op}")
        given = map_arg((args, kwargs), lambda n: n.meta["val"])
        mode = detect_fake_mode(given)
        if mode is None:
            raise NoSuchSize("the graph has no fake values")
        with torch.no_grad(), mode, no_new_guards(mode):
            value = op(*given[0], **given[1])
        meta = {k: anchor.meta[k] for k in ("stack_trace", "nn_module_stack") if k in anchor.meta}
        meta["val"] = value
        if "tensor_meta" in anchor.meta:
            meta["tensor_meta"] = pytree.tree_map_only(Tensor, extract_tensor_metadata, value)
        return self.journal.insert_before(anchor, op, args, meta, kwargs)

    def view(self, anchor: Node, value: Node, size: list[Int]) -> Node:
        return self.call(anchor, aten.view.default, value, size)

    def permute(self, anchor: Node, value: Node, order: list[int]) -> Node:
        if order == list(range(len(order))):
            return value
        return self.call(anchor, aten.permute.default, value, order)

    def dense(self, anchor: Node, value: Node) -> Node:
        """A row-major copy, or the value itself where it is row-major."""
        if Layout.of(value.meta["val"]).row_major:
            return value
        return self.call(
            anchor, aten.clone.default, value, memory_format=torch.contiguous_format
        )

    def replace(self, old: Node, new: Node) -> None:
        """Let the users of ``old`` read ``new``, which must look the same.

        Raises:
            RewriteFault: if it does not.
        """
        before, after = old.meta["val"], new.meta["val"]
        alike = (before.dtype, before.device) == (after.dtype, after.device)
        if not alike or not unchanged(before, after):
            raise RewriteFault(f"{new.name} is not laid out as {old.name}")
        self.journal.replace(old, new)


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
