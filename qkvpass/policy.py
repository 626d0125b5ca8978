"""Whether a legal removal pays. Stated here and nowhere else.

Under Inductor a view of a pointwise result is no view: the producer is inlined into each
operand and writes it again, gaps included. And a view keeps the whole packed buffer alive. A kernel
that was measured to lose by reading strides keeps its copies.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from . import tags, triton_tags
from .evidence import arch_of
from .gain import Slower
from .layout import Int, known
from .match import (
    MATMULS,
    Candidate,
    Facts,
    Operand,
    called_op,
    is_attention,
    nbytes,
    target_name,
)
from .reason import Reason
from .safety import Overlay, is_pointwise
from .views import is_view

# Elements assumed for a size that has no hint (unbacked); only the weighing of memory uses it.
_UNHINTED = 4096

Verdict = tuple[Reason, str]


def is_materialised(root: Node) -> bool:
    """Whether Inductor gives this value a buffer that views can point into."""
    if root.op in ("placeholder", "get_attr"):
        return True
    if root.op != "call_function":
        return False
    if root.target in MATMULS or is_attention(root) or is_realised(root):
        return True
    producer = root.all_input_nodes[0] if target_name(root) == "getitem" else root
    target = producer.target
    if not isinstance(target, torch._ops.OpOverload):
        return False
    return is_attention(producer) or target.namespace not in ("aten", "prims")


def is_realised(value: Node) -> bool:
    """Whether ``as_strided`` alone reads a value: Inductor writes what that op reads to memory."""
    while len(value.users) == 1:
        (value,) = value.users
        if value.target is torch.ops.aten.as_strided.default:
            return True
        if not is_view(value):
            return False
    return False


def producer_verdict(candidate: Candidate, facts: Facts) -> Verdict | None:
    """``producer-fused`` where an operand would be re-made, with gaps, by its producer."""
    root = facts.root[candidate.source]
    if is_materialised(root) or all(_fills(part, root) for part in _parts(candidate.node, facts)):
        return None
    return (
        Reason.PRODUCER_FUSED,
        f"{root.name} ({target_name(root)}) is no buffer: Inductor would inline it and write each "
        f"part again, gaps included",
    )


def slower_verdict(candidate: Candidate) -> Verdict | None:
    """``no-gain`` where an op was measured to lose more by strides than the copy costs."""
    for sink in candidate.sinks:
        value = sink.value.meta["val"]
        for slower in _slower(sink):
            if slower.covers(arch_of(value.device), hint(value.shape[-1]), hint(nbytes(value))):
                return Reason.NO_GAIN, f"{sink.node.name} reads strides slower: {slower.measured}"
    return None


def _slower(sink: Operand) -> tuple[Slower, ...]:
    if told := triton_tags.tags_of(sink.node):
        return tuple(s for tag in told if tag.operand == sink.name for s in tag.slower)
    tag = tags.lookup(called_op(sink.node))
    return tag.slower if tag is not None else ()


def _parts(copy: Node, facts: Facts) -> list[Node]:
    """The views of a copy that something other than a view reads."""
    parts, stack = [], [copy]
    while stack:
        node = stack.pop()
        views = [user for user in node.users if facts.is_view(user)]
        if len(views) < len(node.users):
            parts.append(node)
        stack.extend(views)
    return parts


def _fills(part: Node, root: Node) -> bool:
    """Whether a view takes all of its root, so that writing it in any order costs the same."""
    view, buffer = part.meta.get("val"), root.meta["val"]
    if not isinstance(buffer, Tensor) or not isinstance(view, Tensor):
        return False
    return known(nbytes(view) == nbytes(buffer))


def is_rewritten_anyway(candidate: Candidate, facts: Facts) -> bool:
    """A copy of a pointwise result: one kernel writes it, with the copy or without."""
    return not is_materialised(facts.root[candidate.source])


def is_folded(copy: Node) -> bool:
    """Whether Inductor fuses this copy into the kernels that read it: no kernel is saved."""
    users = list(copy.users)
    while users:
        user = users.pop()
        if is_view(user) or user.target is torch.ops.aten.clone.default:
            users.extend(user.users)
        elif not is_pointwise(user.target) or is_attention(user):
            return False
    return True


def fused_copy(candidate: Candidate, facts: Facts) -> str:
    """Why Inductor has no kernel for this copy alone, so that its removal saves none; or ""."""
    if is_folded(candidate.node):
        return f"every consumer of {candidate.node.name} is pointwise: Inductor folds it into them"
    if is_rewritten_anyway(candidate, facts):
        root = facts.root[candidate.source]
        return f"{root.name} ({target_name(root)}) is pointwise: one kernel writes it in any layout"
    return ""


def is_empty(copy: Node) -> bool:
    """Whether a copy moves nothing."""
    return known(nbytes(copy.meta["val"]) == 0)


@dataclass
class _Storage:
    size: int  # bytes
    first: int  # position of the op that makes it
    last: int  # position of the last op that reads it


class Memory:
    """Bytes that live storages hold along a graph, and what removals do to them.

    Positions are those of the graph's nodes; inputs belong to the caller and are not counted.
    """

    def __init__(self, facts: Facts, target: str) -> None:
        self.facts = facts
        self.unfused = target == "eager"
        self.storages = self._storages()
        self.live = self._live()
        self.grown: list[_Change] = []  # accepted growth

    def _storages(self) -> dict[Node, _Storage]:
        facts = self.facts
        storages = {
            node: _Storage(hint(nbytes(node.meta["val"])), position, position)
            for node, position in facts.order.items()
            if facts.root[node] is node and self._is_buffer(node)
        }
        # A fused op reads its inputs where the kernel runs that it is fused into.
        reads: dict[Node, int] = {}
        for node in reversed(facts.nodes):
            fused = is_pointwise(node.target) and not self._is_buffer(node)
            later = [reads[user] for user in node.users]
            own = facts.order[node]
            reads[node] = max(later, default=own) if fused or facts.is_view(node) else own
            for source in node.all_input_nodes:
                if (storage := storages.get(facts.root[source])) is not None:
                    storage.last = max(storage.last, reads[node])
        return storages

    def _is_buffer(self, node: Node) -> bool:
        """Whether a value gets memory of its own: a kernel that is not fused makes or reads it."""
        if node.op != "call_function" or not isinstance(node.meta.get("val"), Tensor):
            return False
        return self.unfused or is_materialised(node) or not is_folded(node)

    def _live(self) -> list[int]:
        steps = [0] * (len(self.facts.nodes) + 1)
        for storage in self.storages.values():
            steps[storage.first] += storage.size
            steps[storage.last + 1] -= storage.size
        live, total = [], 0
        for step in steps:
            total += step
            live.append(total)
        return live

    def growth(self, overlay: Overlay, attention: Node) -> str | None:
        """What would be held past the attention op, above the peak so far; or None.

        Growth is counted per storage: one that something else keeps alive costs nothing.
        The peak is that of the span in which the removals change anything. What is pinned
        only until the attention op has run ends with the layer and is admitted: it does
        not add up, where a buffer held for backward does, layer by layer.
        """
        changes = self._changes(overlay)
        until = self.facts.order[attention]
        more = [s for s in _segments(changes) if s[2] > 0 and s[1] > until]
        if not more:
            return None
        first, last = min(c[0] for c in changes), max(c[1] for c in changes)
        self.grown = [g for g in self.grown if g[1] >= first]
        peak = max(self.live[first : last + 1])
        for start, end, size in more:
            earlier = sum(g[2] for g in self.grown if g[0] <= end and start <= g[1])
            at = max(range(start, end + 1), key=self.live.__getitem__)
            if self.live[at] + size + earlier > peak:
                return (
                    f"{size} bytes more would be held at {self.facts.nodes[at].name}, "
                    f"above the peak of {peak} bytes in this span"
                )
        self.grown.extend(more)
        return None

    def _changes(self, overlay: Overlay) -> list[_Change]:
        """What is held more, or less where negative, by position."""
        changes = []
        latest: dict[Node, int] = {}
        for copy in overlay.removed:
            storage = self.storages.get(copy)
            if storage is None:
                continue
            changes.append((storage.first, storage.last, -storage.size))
            root = overlay.root_of(copy, self.facts)  # read in the copy's stead
            latest[root] = max(latest.get(root, 0), storage.last)
        for root, last in latest.items():
            storage = self.storages.get(root)
            if storage is not None and last > storage.last:
                changes.append((storage.last + 1, last, storage.size))
        return changes


_Change = tuple[int, int, int]  # (first position, last position, bytes)


def _segments(changes: list[_Change]) -> list[_Change]:
    """Overlapping changes as consecutive segments of constant sum."""
    cuts = sorted({c[0] for c in changes} | {c[1] + 1 for c in changes})
    return [
        (a, b - 1, sum(size for first, last, size in changes if first <= a <= last))
        for a, b in itertools.pairwise(cuts)
    ]


def hint(value: Int) -> int:
    """A plain number for a size, by the example's sizes; no guard."""
    if isinstance(value, int):
        return value
    node: Any = value.node
    return int(node.hint) if node.has_hint() and node.hint is not None else _UNHINTED
