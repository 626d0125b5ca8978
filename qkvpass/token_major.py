"""Let the ``cat`` that writes q write it in the order in which the output is wanted.

The output of many attention kernels is laid out as q is. Where a ``cat`` must write q anyway (tokens
that skip rope, rope on a part of the head), it may as well write it token-major: then the copy
behind the attention has nothing to do.

Before, and after::

    q = cat([prefix, rest], 2)              q = permute(cat([permute(prefix), permute(rest)], 1))
    o = clone(permute(attn(q, k, v)))       o = permute(attn(q, k, v))

Inductor takes the layout of a ``cat`` from the op, so that another layout needs another ``cat``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

from .edit import Editor, NotPossible
from .layout import Layout, known, same
from .match import Facts, is_hop, operands, tensor_of
from .row_order import order_of
from .safety import is_pointwise
from .speculate import FAILED, Edited, Rewrite, State

aten = torch.ops.aten


@dataclass(frozen=True)
class Site:
    """An attention op whose output is copied into another order, and the cat that writes q.

    Args:
        cat: writes q, dense; or what q is computed from, element by element.
        copy: re-lays the output.
        order: of the output's dims, as the copy writes them.
    """

    cat: Node
    copy: Node
    order: tuple[int, ...]


def find(state: State) -> list[str]:
    """Names of the cats that would better write q in another order."""
    return list(_sites(state.facts, state.removed))


def _sites(facts: Facts, removed: frozenset[str]) -> dict[str, Site]:
    found = {}
    for copy in facts.sources:
        if copy.name in removed or (ordered := order_of(copy, facts)) is None:
            continue
        output, order = ordered
        attention = output.all_input_nodes[0] if output.op == "call_function" else output
        attention = output if output in facts.attention_set else attention
        if attention not in facts.attention_set or is_hop(attention):
            continue
        q = next((operand.value for operand in operands(attention)), None)
        cat = _cat_of(q, output, facts) if q is not None else None
        if cat is not None and list(order) != sorted(order):
            found[cat.name] = Site(cat, copy, order)
    return found


def _cat_of(q: Node, output: Node, facts: Facts) -> Node | None:
    """The cat that q is, or is computed from element by element; of the output's dims."""
    like, node = output.meta["val"], q
    while node.target is not aten.cat.default:
        value = tensor_of(node)
        if value is None or not is_pointwise(node.target) or node in facts.sources:
            return None
        inputs = [n for n in node.all_input_nodes if (t := tensor_of(n)) is not None
                  and same(t.shape, value.shape)]  # fmt: skip
        if len(inputs) != 1:
            return None
        (node,) = inputs
    value = tensor_of(node)
    if value is None or value.dim() != like.dim() or not Layout.of(value).row_major:
        return None
    alike = all(known(a == b) for a, b in zip(value.shape[:-1], like.shape[:-1]))
    return node if alike else None


def edit(graph: Graph, state: State, sites: frozenset[str]) -> dict[str, Edited]:
    """Have the cats named write in the order of the copy behind the attention."""
    facts = Facts(graph)
    editor = Editor(graph, facts)
    edited = {}
    for name, site in _sites(facts, state.removed).items():
        if name not in sites:
            continue
        try:
            dense = _relay(site, editor)
        except NotPossible:
            edited[name] = FAILED
            continue
        note = f"{name}, which writes q, writes it in the order in which {site.copy.name} wants it"
        edited[name] = Edited(note, _pays(dense.name, site.copy.name))
    editor.journal.commit()
    return edited


def _relay(site: Site, editor: Editor) -> Node:
    """A cat over permuted parts, and a copy that hides it until the rule takes that out."""
    cat, order = site.cat, list(site.order)
    parts, dim = cat.args[0], cat.args[1] if len(cat.args) > 1 else 0
    if cat.kwargs or any(part.meta["val"].dim() != len(order) for part in parts):
        raise NotPossible(f"{cat.name} joins tensors of different dims")
    parts = [editor.permute(cat, part, order) for part in parts]
    value = editor.call(cat, aten.cat.default, parts, order.index(dim % len(order)))
    value = editor.permute(cat, value, [order.index(d) for d in range(len(order))])
    dense = editor.dense(cat, value)
    editor.replace(cat, dense)
    return dense


def _pays(dense: str, copy: str) -> Callable[[State], bool]:
    """Whether q is read as it is written, and the copy behind the attention is gone."""
    return lambda after: {dense, copy} <= after.removed


REWRITE = Rewrite("relay_cat", find, edit)
