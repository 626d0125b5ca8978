"""Fold a bias that is added behind a view into the GEMM in front of it.

``nn.MultiheadAttention`` over batch-first tokens traces to ``mm → view → add(bias) → views``.
Inductor's own addmm pattern does not look through the view, so that the packed projection is no
buffer, and each operand adds the bias anew.

Before, and after::

    v = view(mm(x, w), [S, B, N])            v = view(addmm(bias, x, w), [S, B, N])
    q = select(view(add(v, bias)), 0)        q = select(view(v), 0)

The sum is rounded once, where stock rounds the product and then the sum. Where every bit counts,
the sum is written once as it is: behind ``as_strided``, since Inductor realises what that op reads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

from .editor import Editor, NotPossible
from .layout import Layout, known
from .match import Facts, nbytes, tensor_of
from .reason import Reason
from .speculate import FAILED, Edited, Rewrite, State

aten = torch.ops.aten


@dataclass(frozen=True)
class Fold:
    """A bias add whose other summand is a view of a whole GEMM.

    Args:
        add: the sum.
        mm: the product; nobody else reads it.
        views: from the product to the summand, in this order; nobody else reads them.
        bias: one number for each column of the product.
    """

    add: Node
    mm: Node
    views: tuple[Node, ...]
    bias: Node


def fold_of(add: Node, facts: Facts) -> Fold | None:
    """The fold of a bias add, or None."""
    if add.target is not aten.add.Tensor or len(add.args) != 2 or add.kwargs:
        return None
    one, other = add.args
    if not isinstance(one, Node) or not isinstance(other, Node):
        return None
    for summand, bias in ((one, other), (other, one)):
        views, root = _behind(summand, facts)
        private = all(len(node.users) == 1 for node in (*views, root))
        if not private or root.target is not aten.mm.default:
            continue
        unwritten = all(facts.writer_of(n) is None for n in root.all_input_nodes)  # read later now
        if unwritten and _is_bias(bias, summand, root, add):
            return Fold(add, root, tuple(reversed(views)), bias)
    return None


def _behind(summand: Node, facts: Facts) -> tuple[list[Node], Node]:
    """The views between a value and its root, and the root."""
    views, node = [], summand
    while facts.is_view(node) and not node.kwargs:
        views.append(node)
        node = node.all_input_nodes[0]
    return views, node


def _is_bias(bias: Node, summand: Node, mm: Node, add: Node) -> bool:
    """Whether one number is added to each whole column of the product."""
    vector, viewed, product, total = (tensor_of(n) for n in (bias, summand, mm, add))
    if vector is None or viewed is None or product is None or total is None:
        return False
    columns = product.shape[1]
    alike = all(
        (t.dtype, t.device) == (product.dtype, product.device) for t in (vector, viewed, total)
    )
    return (
        alike
        and product.is_floating_point()
        and vector.dim() == 1
        and known(vector.shape[0] == columns)
        and viewed.dim() > 0
        and known(viewed.shape[-1] == columns)
        and known(viewed.stride(-1) == 1)
        and known(nbytes(viewed) == nbytes(product))
        and Layout.of(total).same(Layout.of(viewed))
    )


def find(state: State) -> list[str]:
    """Names of the bias adds that can be folded, and keep copies as long as they are not."""
    facts, kept = state.facts, state.decisions.kept
    keep = {
        facts.root[candidate.source]
        for candidate in state.decisions.candidates
        if kept.get(candidate.node, (None, ""))[0] is Reason.PRODUCER_FUSED
    }
    return [fold.add.name for fold in _folds(facts) if fold.add in keep]


def _folds(facts: Facts) -> list[Fold]:
    return [fold for node in facts.nodes if (fold := fold_of(node, facts)) is not None]


def _edit(
    graph: Graph, sites: frozenset[str], one: Callable[[Fold, Editor], Node], note: str
) -> dict[str, Edited]:
    facts = Facts(graph)
    editor = Editor(graph, facts)
    edited = {}
    for fold in _folds(facts):
        if fold.add.name not in sites:
            continue
        try:
            root = one(fold, editor)
        except NotPossible:
            edited[fold.add.name] = FAILED
            continue
        text = note.format(add=fold.add.name, mm=fold.mm.name)
        edited[fold.add.name] = Edited(text, _leads_to_removals(root))
    editor.journal.commit()
    return edited


def fold_into_gemm(graph: Graph, state: State, sites: frozenset[str]) -> dict[str, Edited]:
    """Fold the bias adds named."""
    note = (
        "the bias added by {add} is part of the GEMM {mm} now (addmm): "
        "the sum is rounded once instead of twice"
    )
    return _edit(graph, sites, _fold, note)


def realise(graph: Graph, state: State, sites: frozenset[str]) -> dict[str, Edited]:
    """Have the sums named written once, in the same bits."""
    return _edit(graph, sites, _realise, "{add}, which adds the bias to {mm}, is written once")


def _fold(fold: Fold, editor: Editor) -> Node:
    """Put one ``addmm`` and the same views in the place of product, views and sum."""
    x, weight = fold.mm.args
    editor.in_place_of(fold.mm)
    value = addmm = editor.call(fold.add, aten.addmm.default, fold.bias, x, weight)
    editor.in_place_of(fold.add)
    for view in fold.views:
        value = editor.call(fold.add, view.target, value, *view.args[1:])
    editor.journal.dead.append(fold.mm)  # commit starts with the last, and this one is read by it
    editor.replace(fold.add, value)
    return addmm


def _realise(fold: Fold, editor: Editor) -> Node:
    """Let all that reads the sum read it through ``as_strided``.

    Nodes of the graph must hold its sizes and strides: as the sum has them, or as rows and columns.
    """
    users, after, value = list(fold.add.users), fold.add.next, fold.add.meta["val"]
    rows, columns = fold.mm.meta["val"].shape
    editor.in_place_of(fold.add)
    try:
        layout = (list(value.shape), list(value.stride()), 0)
        realised = editor.call(after, aten.as_strided.default, fold.add, *layout)
    except NotPossible:
        flat = editor.view(after, fold.add, [rows, columns])
        flat = editor.call(after, aten.as_strided.default, flat, [rows, columns], [columns, 1], 0)
        realised = editor.view(after, flat, list(value.shape))
    editor.redirect(users, fold.add, realised)
    return fold.add


def _leads_to_removals(addmm: Node) -> Callable[[State], bool]:
    def pays(state: State) -> bool:
        decisions = state.decisions
        roots = (decisions.overlay.root_of(copy, state.facts) for copy in decisions.removed)
        return any(root is addmm for root in roots)

    return pays


FOLD = Rewrite("fold_bias", find, fold_into_gemm, numerics=("default",))
REALISE = Rewrite("fold_bias", find, realise, numerics=("bitwise",))
