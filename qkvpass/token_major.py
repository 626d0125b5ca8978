"""Let the op that writes q write it in the order in which the output is wanted.

The output of many attention kernels is laid out as q is. Where a ``cat`` or a norm must write q
anyway (tokens that skip rope, rope on a part of the head, qk-norm), it may as well write it
token-major: then the copy behind the attention has nothing to do.

Before, and after::

    q = cat([prefix, rest], 2)              q = permute(cat([permute(prefix), permute(rest)], 1))
    o = clone(permute(attn(q, k, v)))       o = permute(attn(q, k, v))

Inductor takes the layout of a ``cat`` from the op, so that another layout needs another ``cat``.
A pointwise op is written through a copy, which Inductor makes the op's own kernel do.

Where q's ``cat`` was turned, k's is turned as well: one kernel that walks both in one order writes
them faster than two would (DINOv3 on an H200: docs/benchmarks.md).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from .editor import Editor, NotPossible
from .layout import Layout, same
from .match import WANTED, Facts, is_hop, operands, tensor_of
from .policy import hint
from .row_order import order_of
from .safety import is_pointwise
from .speculate import FAILED, Edited, Rewrite, State

aten = torch.ops.aten


@dataclass(frozen=True)
class Site:
    """An attention op whose output is copied into another order, and what writes q.

    Args:
        writer: a cat that writes q, or what q is computed from, element by element; or, without
            a cat, the pointwise op that writes q.
        copy: re-lays the output.
        order: of the output's dims, as the copy writes them.
    """

    writer: Node
    copy: Node
    order: tuple[int, ...]


def find(state: State) -> list[str]:
    """Names of the ops that would better write q in another order."""
    return list(_sites(state.facts, state.removed))


def _sites(facts: Facts, removed: frozenset[str]) -> dict[str, Site]:
    found = {}
    for copy in facts.sources:
        ordered = order_of(copy, facts) if copy.name not in removed else None
        if ordered is None or list(ordered[1]) == sorted(ordered[1]):
            continue
        output, order = ordered
        attention = output.all_input_nodes[0] if output.target is operator.getitem else output
        if attention not in facts.attention_set or is_hop(attention):
            continue
        q = next((operand.value for operand in operands(attention)), None)
        writer = _writer_of(q, facts) if q is not None else None
        if writer is not None and _fits(writer, output):
            found[writer.name] = Site(writer, copy, order)
    return found


def _writer_of(q: Node, facts: Facts) -> Node | None:
    """The cat that q is, or is computed from element by element; else the op that makes q."""
    node = q
    while node.target is not aten.cat.default:
        value = tensor_of(node)
        if value is None or not is_pointwise(node.target) or node in facts.sources:
            break
        inputs = [n for n in node.all_input_nodes if _is_alike(n, value)]
        if len(inputs) != 1:
            break
        (node,) = inputs
    if node.target is aten.cat.default:
        return node
    is_written = is_pointwise(q.target) and facts.root[q] is q  # no view, as a reshape may be
    return q if is_written and q not in facts.sources else None


def _is_alike(node: Node, value: Tensor) -> bool:
    other = tensor_of(node)
    return other is not None and same(other.shape, value.shape)


def _fits(writer: Node, output: Node) -> bool:
    """Whether q is dense and has the dims of the output; head sizes may differ."""
    value, like = tensor_of(writer), tensor_of(output)
    if value is None or like is None or value.dim() != like.dim():
        return False
    return Layout.of(value).row_major and same(value.shape[:-1], like.shape[:-1])


def edit(graph: Graph, state: State, sites: frozenset[str]) -> dict[str, Edited]:
    """Have the cats named write in the order of the copy behind the attention."""
    facts = Facts(graph)
    turns = {
        name: Turn(
            site.order,
            f"{name}, which writes q, writes it in the order in which {site.copy.name} wants it",
            (site.copy.name,),
        )
        for name, site in _sites(facts, state.removed).items()
        if name in sites
    }
    return _turn(facts, turns)


@dataclass(frozen=True)
class Turn:
    """How a writer, known by its name, is to write.

    Args:
        order: of its dims, from the outermost in memory to the innermost.
        note: says so.
        copies: those that must go for it to pay, beside its own.
    """

    order: tuple[int, ...]
    note: str
    copies: tuple[str, ...] = ()


def _turn(facts: Facts, turns: dict[str, Turn]) -> dict[str, Edited]:
    editor = Editor(facts.graph, facts)
    nodes = {node.name: node for node in facts.nodes}
    edited = {}
    for name, turn in turns.items():
        try:
            dense = _relay(nodes[name], turn.order, editor)
        except NotPossible:
            edited[name] = FAILED
            continue
        edited[name] = Edited(turn.note, _pays(dense.name, *turn.copies))
    editor.journal.commit()
    return edited


def find_mates(state: State) -> list[str]:
    """Names of the cats that write k, or v, beside a cat of q that was turned."""
    return list(_mates(state))


def _mates(state: State) -> dict[str, tuple[int, ...]]:
    """The order of q's cat, by the name of a cat beside it; q's is none that the user wrote."""
    facts, found = state.facts, {}
    for attention in facts.attention:
        values = [operand.value for operand in operands(attention)]
        if not values or is_hop(attention):
            continue
        q, *others = values
        written = state.decisions.overlay.root_of(q, facts)
        if written.target is not aten.cat.default or written.name in state.names:
            continue
        value = state.decisions.overlay.value(q)
        order = tuple(sorted(range(value.dim()), key=lambda d: hint(value.stride(d)), reverse=True))
        for operand in others:
            writer = _writer_of(operand, facts)
            if writer is not None and writer.target is aten.cat.default:
                like = writer.meta["val"]
                if like.dim() == len(order) and Layout.of(like).row_major:
                    found[writer.name] = order
    return found


def edit_mates(graph: Graph, state: State, sites: frozenset[str]) -> dict[str, Edited]:
    """Have the cats named write in the order of q's."""
    turns = {
        name: Turn(order, f"{name} writes in the order in which q is written")
        for name, order in _mates(state).items()
        if name in sites
    }
    return _turn(Facts(graph), turns)


def _relay(writer: Node, order: Sequence[int], editor: Editor) -> Node:
    """What the writer wrote, in another order, behind a copy that the rule is asked to take out."""
    order = list(order)
    relay = _relaid_cat if writer.target is aten.cat.default else _relaid
    users, anchor = list(writer.users), writer.next
    editor.in_place_of(writer)
    value = relay(writer, order, anchor, editor)
    value = editor.permute(anchor, value, [order.index(d) for d in range(len(order))])
    dense = editor.dense(anchor, value)
    editor.redirect(users, writer, dense)
    return dense


def _relaid_cat(cat: Node, order: list[int], anchor: Node, editor: Editor) -> Node:
    parts: Any = cat.args[0]
    dim: Any = cat.args[1] if len(cat.args) > 1 else 0
    if cat.kwargs or any(part.meta["val"].dim() != len(order) for part in parts):
        raise NotPossible(f"{cat.name} joins tensors of different dims")
    parts = [editor.permute(anchor, part, order) for part in parts]
    editor.journal.dead.append(cat)
    return editor.call(anchor, aten.cat.default, parts, order.index(dim % len(order)))


def _relaid(value: Node, order: list[int], anchor: Node, editor: Editor) -> Node:
    written = editor.dense(anchor, editor.permute(anchor, value, order))
    written.meta[WANTED] = True
    return written


def _pays(*copies: str) -> Callable[[State], bool]:
    """Whether copies are gone: that of what was turned, and for q the one behind the attention."""
    return lambda after: after.removed.issuperset(copies)


REWRITE = Rewrite("relay_q", find, edit)
MATES = Rewrite("relay_q", find_mates, edit_mates)
