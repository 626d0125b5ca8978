"""Copy the parts of a packed buffer one by one, where one copy made them all dense.

SAM and its kin make q, k and v dense at once, and q's relative positions need that. In one copy,
k and v stay with q. Parted, each has a copy of its own, and the rule takes out those that only
attention reads.

Before, and after::

    q, k, v = unbind(view(clone(qkv), [3, B*H, N, D]))   q = view(clone(select(qkv, 0, 0)), ...)
                                                         k = view(clone(select(qkv, 0, 1)), ...)

A part lies elsewhere in its storage than before. Only the first, which began the storage, may
stay a copy; what became of the others is up to ops that read them by stride.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import Graph, Node

from .editor import Editor, NotPossible
from .layout import Int, Layout, known, product
from .match import Facts, aliases_input, may_return_input, tensor_of
from .speculate import FAILED, Edited, Rewrite, State

aten = torch.ops.aten

_MOST_PARTS = 4  # q, k, v and a gate


@dataclass(frozen=True)
class Site:
    """A copy of all parts of a packed buffer.

    Args:
        copy: row-major.
        dim: of what is copied, which tells the parts apart.
        parts: index in ``dim``, and a row-major value that is all of that part.
    """

    copy: Node
    dim: int
    parts: tuple[tuple[int, Node], ...]


def find(state: State) -> list[str]:
    """Names of the copies that stay, and that nobody reads as a whole."""
    kept = (c.node for c in state.decisions.candidates if c.node.name not in state.removed)
    return [copy.name for copy in kept if _site(copy, state.facts) is not None]


def _site(copy: Node, facts: Facts) -> Site | None:
    source, value = facts.sources[copy].meta["val"], copy.meta["val"]
    if copy.target is aten.copy.default or not Layout.of(value).row_major:
        return None
    if facts.writer_of(copy) is not None or facts.borders(copy) is not None:
        return None
    dim = next((i for i, size in enumerate(source.shape) if not known(size == 1)), None)
    count = None if dim is None else source.shape[dim]
    if dim is None or not isinstance(count, int) or not 1 < count <= _MOST_PARTS:
        return None
    parts = _parts(copy, count, facts)
    return Site(copy, dim, tuple(parts)) if parts else None


def _parts(copy: Node, count: int, facts: Facts) -> list[tuple[int, Node]]:
    """The views that are one part each, if all that is read of a copy lies within them."""
    value = copy.meta["val"]
    size = product(value.shape) // count
    found: list[tuple[int, Node]] = []
    stack = [copy]
    while stack:
        for user in stack.pop().users:
            if not (facts.is_view(user) or user.target is operator.getitem):
                return []
            index = _index(tensor_of(user), value.storage_offset(), size, count)
            if index is None:
                stack.append(user)
            elif _leaves(user, facts):
                return []
            else:
                found.append((index, user))
    return sorted(found, key=lambda part: (part[0], facts.order[part[1]]))


def _leaves(part: Node, facts: Facts) -> bool:
    """Whether ``as_strided``, or an alias not known here, may read beyond a part."""
    for user in part.users:
        if aliases_input(user) or may_return_input(user):
            return True
        if facts.is_view(user) and _leaves(user, facts):
            return True
    return False


def _index(value: Tensor | None, start: Int, size: Int, count: int) -> int | None:
    """Which part a value is, all of it and in order."""
    if value is None or not Layout.of(value).row_major or not known(product(value.shape) == size):
        return None
    offset = value.storage_offset()
    return next((i for i in range(count) if known(offset == start + i * size)), None)


def edit(graph: Graph, state: State, sites: frozenset[str]) -> dict[str, Edited]:
    """Have each part of the copies named copied alone."""
    facts = Facts(graph, state.facts.autograd)
    editor = Editor(graph, facts)
    edited = {}
    for copy in facts.sources:
        site = _site(copy, facts) if copy.name in sites else None
        if site is None:
            continue
        try:
            copies = _part(site, editor)
        except NotPossible:
            edited[copy.name] = FAILED
            continue
        note = f"{copy.name} copies its {len(copies)} parts one by one"
        names = {index: part.name for index, part in copies.items()}
        edited[copy.name] = Edited(note, _pays(names), parts={copy.name: names})
    editor.journal.commit()
    return edited


def _part(site: Site, editor: Editor) -> dict[int, Node]:
    """The copy of each part that is read, by its index."""
    source, anchor = editor.facts.sources[site.copy], site.copy.next
    editor.in_place_of(site.copy)
    editor.journal.dead.append(site.copy)
    copies: dict[int, Node] = {}
    for index, part in site.parts:
        if index not in copies:
            chosen = editor.call(anchor, aten.select.int, source, site.dim, index)
            memory_format = torch.contiguous_format
            copies[index] = editor.call(
                anchor, aten.clone.default, chosen, memory_format=memory_format
            )
        value = editor.view(anchor, copies[index], list(part.meta["val"].shape))
        editor.relocate(part, value)
    return copies


def _pays(names: dict[int, str]) -> Callable[[State], bool]:
    """Whether copies of parts go, and all of those that would lie elsewhere than before."""
    moved = {name for index, name in names.items() if index}
    return lambda after: bool(moved) and moved <= after.removed


REWRITE = Rewrite("part_copies", find, edit, opens=("split_heads",))
