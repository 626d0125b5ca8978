"""Move a permutation of rows from in front of a GEMM to behind it, where it is a view.

``nn.MultiheadAttention`` over batch-first tokens transposes them to sequence first, projects, and
transposes back at the end: two copies, and an attention whose tokens lie a whole batch apart. The
rows of a GEMM are independent of each other.

Before, and after (B batch, S tokens)::

    x = view(clone(permute(x, [S, B])), [S*B, E])    y = mm(view(x, [B*S, E]), w)
    y = mm(x, w)                                     y = permute(view(y, [B, S, N]), [S, B])

Both GEMMs around one attention op move together: its output follows its operands. A GEMM kernel
may sum a row differently when the row lies elsewhere in its tiles.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from .decide import first_sink
from .edit import apply
from .editor import Editor, NotPossible
from .layout import Atom, Int, Layout, NotAView, StridedView, known, product
from .match import Facts, is_hop, tensor_of
from .safety import Overlay, Propagation, Refused
from .speculate import FAILED, Edited, Rewrite, State
from .views import recompose

aten = torch.ops.aten

# The argument whose rows are the rows of the result.
ROWS_OF: dict[Any, int] = {aten.mm.default: 0, aten.addmm.default: 1}


@dataclass(frozen=True)
class Rows:
    """A GEMM that reads the rows of a source in another order than they lie there.

    Args:
        gemm: ``mm`` or ``addmm``.
        source: what views and copies lead from to the GEMM.
        rows: dims of the source that make the GEMM's rows, in the order that it reads them.
        columns: dims of the source that make the columns.
        copies: copies between source and GEMM, the last one first.
        private: whether nothing but the GEMM reads those copies.
    """

    gemm: Node
    source: Node
    rows: tuple[int, ...]
    columns: tuple[int, ...]
    copies: tuple[Node, ...]
    private: bool

    @property
    def out_of_order(self) -> bool:
        return list(self.rows) != sorted(self.rows)


def rows_of(gemm: Node, facts: Facts) -> Rows | None:
    """How a GEMM reads its rows, where that is a permutation of whole dims; else None."""
    if gemm.target not in ROWS_OF or not _rows_are_alike(gemm):
        return None
    chain, source = _chain(_operand(gemm), facts)
    value = tensor_of(source)
    if value is None or any(facts.writer_of(node) is not None for node in (*chain, source)):
        return None
    try:
        rows, columns = _whole_dims(chain, value, facts)
    except NotAView:
        return None
    if len(rows) + len(columns) != sum(not known(size == 1) for size in value.shape):
        return None
    copies = tuple(node for node in chain if node in facts.sources)
    below = chain[: chain.index(copies[-1]) + 1] if copies else ()
    private = all(len(node.users) == 1 for node in below)
    return Rows(gemm, source, tuple(rows), tuple(columns), copies, private)


def order_of(copy: Node, facts: Facts) -> tuple[Node, tuple[int, ...]] | None:
    """What a copy re-lays and the order in which it writes its dims, where those are whole."""
    chain, source = _chain(facts.sources[copy], facts)
    value = tensor_of(source)
    if value is None:
        return None
    try:
        order = [d for dim in _whole_dims(chain, value, facts) for d in dim]
    except NotAView:
        return None
    ones = [d for d, size in enumerate(value.shape) if known(size == 1)]
    order = [*ones, *order]
    return (source, tuple(order)) if len(order) == value.dim() else None


def _whole_dims(chain: Sequence[Node], value: Tensor, facts: Facts) -> list[list[int]]:
    """For each dim behind a chain of views and copies, the dims of the source that make it.

    Raises:
        NotAView: if one is made of a part of a dim.
    """
    strides = [product(value.shape[d + 1 :]) for d in range(value.dim())]
    view = StridedView.of(Layout(tuple(value.shape), tuple(strides), 0))
    for node in reversed(chain):
        view = _step(node, view, facts)
    return [[_dim(atom, value.shape, strides) for atom in dim] for dim in view.dims]


def _rows_are_alike(gemm: Node) -> bool:
    """Whether nothing but the rows that a GEMM reads tells one row of its result from another."""
    if gemm.target is not aten.addmm.default:
        return True
    bias: Any = gemm.args[0]
    added = bias.meta["val"]
    return added.dim() < 2 or known(added.shape[0] == 1)


def _operand(gemm: Node) -> Node:
    operand = gemm.args[ROWS_OF[gemm.target]]
    assert isinstance(operand, Node)
    return operand


def _chain(node: Node, facts: Facts) -> tuple[list[Node], Node]:
    """Views and copies from a value back to where it was made, and that node."""
    chain = []
    while facts.is_view(node) or node in facts.sources:
        source = facts.sources.get(node, node.all_input_nodes[0])
        if tensor_of(source) is None:  # a part of several results
            break
        chain.append(node)
        node = source
    return chain, node


def _step(node: Node, view: StridedView, facts: Facts) -> StridedView:
    if node in facts.sources and node.target is not aten.reshape.default:
        return view
    source = facts.sources.get(node, node.all_input_nodes[0])
    after = recompose(node, view, tuple(source.meta["val"].shape))
    if not isinstance(after, StridedView):
        raise NotAView("a part of several results")
    return after


def _dim(atom: Atom, sizes: Sequence[Int], strides: Sequence[Int]) -> int:
    """The dim of the source that an atom is."""
    for dim, (size, stride) in enumerate(zip(sizes, strides)):
        if known(atom[0] == size) and known(atom[1] == stride):
            return dim
    raise NotAView("a part of a dim")


@dataclass(frozen=True)
class Site:
    """The GEMMs around one attention op whose rows are out of order."""

    attention: Node
    entering: tuple[Node, ...]
    leaving: tuple[Node, ...]


def find(state: State) -> list[str]:
    """Names of the attention ops around which rows can be put in order."""
    return [site.attention.name for site in _sites(state)]


def _sites(state: State) -> list[Site]:
    facts, overlay = state.facts, state.decisions.overlay
    entering: dict[Node, dict[Node, None]] = {}  # in order, each once
    for candidate in state.decisions.candidates:
        attention, gemm = first_sink(candidate, facts), overlay.root_of(candidate.node, facts)
        if candidate.node not in overlay.removed or is_hop(attention):
            continue
        rows = rows_of(gemm, facts)
        if rows is not None and rows.out_of_order and rows.private:
            entering.setdefault(attention, {})[gemm] = None
    return [Site(node, tuple(gemms), _leaving(node, facts)) for node, gemms in entering.items()]


def _leaving(attention: Node, facts: Facts) -> tuple[Node, ...]:
    """GEMMs behind an attention op that read its output out of order."""
    found, stack = [], [attention]
    while stack:
        for user in stack.pop().users:
            if user.target in ROWS_OF and (rows := rows_of(user, facts)) and rows.out_of_order:
                found.append(user)
            elif facts.is_view(user) or user in facts.sources or user.target is operator.getitem:
                stack.append(user)
    return tuple(sorted(set(found), key=facts.order.__getitem__))


def edit(graph: Graph, state: State, sites: frozenset[str]) -> dict[str, Edited]:
    """Put the rows around the attention ops named in the order in which their sources lie."""
    facts = Facts(graph)
    editor = Editor(graph, facts)
    nodes = {node.name: node for node in graph.nodes}
    moves: dict[str, list[_Move]] = {}
    for site in _sites(state):
        if site.attention.name not in sites:
            continue
        gemms = [nodes[gemm.name] for gemm in (*site.entering, *site.leaving)]
        try:
            moves[site.attention.name] = [_move(gemm, editor) for gemm in gemms]
        except NotPossible:
            return dict.fromkeys(sites, FAILED) | {site.attention.name: FAILED}
    editor.journal.commit()
    return _sink(graph, state, moves)


@dataclass(frozen=True)
class _Move:
    """One GEMM, moved.

    Args:
        gemm: name of the GEMM that was.
        before: name of the copy in front of the new GEMM, if its source is not in order yet.
        behind: the copy that brings the new GEMM's rows into the old order.
        vanished: copies in front of the old GEMM that nobody needs any more.
    """

    gemm: str
    before: str | None
    behind: Node
    vanished: tuple[str, ...]


def _move(gemm: Node, editor: Editor) -> _Move:
    """Compute the rows in the order in which their source lies, and copy them into the old one."""
    rows = rows_of(gemm, editor.facts)
    if rows is None:
        raise NotPossible(f"the rows of {gemm.name} are no permutation any more")
    position = ROWS_OF[gemm.target]
    editor.in_place_of(gemm)
    size, result = list(_operand(gemm).meta["val"].shape), gemm.meta["val"]
    shape = rows.source.meta["val"].shape
    ordered = sorted(rows.rows)
    ones = [d for d in range(len(shape)) if d not in (*ordered, *rows.columns)]
    value = editor.permute(gemm, rows.source, [*ones, *ordered, *rows.columns])
    before = None
    if not editor.viewable(value, size):
        value = editor.dense(gemm, value)
        before = value.name
    value = editor.view(gemm, value, size)
    arguments = [*gemm.args[:position], value, *gemm.args[position + 1 :]]
    value = editor.call(gemm, gemm.target, *arguments, **gemm.kwargs)
    value = editor.view(gemm, value, [*(shape[d] for d in ordered), result.shape[1]])
    order = [ordered.index(d) for d in rows.rows]
    behind = editor.dense(gemm, editor.permute(gemm, value, [*order, len(order)]))
    vanished = rows.copies if rows.private else ()
    editor.journal.dead.extend(reversed(vanished))
    editor.replace(gemm, editor.view(gemm, behind, list(result.shape)))
    return _Move(gemm.name, before, behind, tuple(node.name for node in vanished))


def _sink(graph: Graph, state: State, moves: dict[str, list[_Move]]) -> dict[str, Edited]:
    """Take out the copies behind the moved GEMMs, by the one rule."""
    facts = Facts(graph, state.facts.autograd)
    propagation = Propagation(facts, state.certified_only)
    overlay = Overlay()
    edited = {}
    for name, moved in moves.items():
        try:
            removal = propagation.remove([move.behind for move in moved], overlay)
        except Refused:
            edited[name] = FAILED
            continue
        vanished = {
            copy: f"the rows of {move.gemm} are computed in the order in which they lie"
            for move in moved
            for copy in move.vanished
        }
        vanished |= {
            node.name: "its input already has the layout that it was to make"
            for node in removal.cascaded
        }
        edited[name] = Edited(_note(moved), _pays(name, moved, state), vanished)
        removal.merge()
    apply(graph, facts, overlay)
    return edited


def _note(moved: list[_Move]) -> str:
    names = " and ".join(move.gemm for move in moved)
    return (
        f"the rows of {names} are computed in another order: "
        f"bits are equal where a GEMM's row does not depend on the rows around it"
    )


def _pays(attention: str, moved: list[_Move], before: State) -> Callable[[State], bool]:
    """Whether all copies around the attention op still go, and those of the move too."""
    wanted = {move.before for move in moved if move.before is not None}
    wanted |= {
        candidate.node.name
        for candidate in before.decisions.candidates
        if first_sink(candidate, before.facts).name == attention
        and candidate.node in before.decisions.overlay.removed
    }
    return lambda after: wanted <= after.removed


REWRITE = Rewrite("permute_rows", find, edit, numerics=("default",))
