"""What a joint graph holds from forward to backward, by storage, and what removals do to that.

The partitioner weighs values, and a view of a packed buffer weighs no more there than the copy
that it replaces; but it holds the whole buffer. Where the copies that the backward reads are as
large as the buffer, stock Inductor holds as much: those copies, or the buffer to re-make them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch.fx import Node

from .match import Facts, nbytes
from .policy import hint
from .safety import Overlay, is_pointwise


@dataclass
class _Reads:
    """What the backward reads of one copy.

    Args:
        own: it reads the copy, or views of it.
        direct: it reads that, or what will be a view once other copies are gone too.
        derived: values that it reads and that could be computed again from the copy.
    """

    own: bool = False
    direct: bool = False
    derived: set[Node] = field(default_factory=set)


class Saved:
    """Bytes held for the backward."""

    def __init__(self, facts: Facts) -> None:
        self.facts = facts
        self.pinned: set[Node] = set()  # buffers that accepted removals hold

    def growth(self, overlay: Overlay) -> str | None:
        """Why more would be held with the removals of ``overlay``, or None."""
        for root, spared in self._pinned(overlay).items():
            size = _size(root)
            if root not in self.pinned and size > spared and not self._is_held_anyway(root):
                return (
                    f"all {size} bytes of {root.name} would be held for the backward, which holds "
                    f"{spared} bytes of copies instead"
                )
        return None

    def accept(self, overlay: Overlay) -> None:
        """Take it that the removals of ``overlay`` are made."""
        self.pinned.update(self._pinned(overlay))

    def _pinned(self, overlay: Overlay) -> dict[Node, int]:
        """Buffers that saved views would hold, with the bytes of copies that are held now."""
        found: dict[Node, int] = {}
        for root, copies in self._by_root(overlay).items():
            reads = {copy: self._reads(copy, overlay) for copy in copies}
            if any(reads[c].direct or _saved_itself(c, reads) for c in copies):
                found[root] = sum(_size(c) for c in copies if reads[c].own)
        return found

    def _by_root(self, overlay: Overlay) -> dict[Node, list[Node]]:
        """Removed copies of the forward by the buffer that is read in their stead."""
        found: dict[Node, list[Node]] = {}
        if not self.facts.has_backward:
            return found
        for copy in overlay.removed - self.facts.backward:
            root = overlay.root_of(copy, self.facts)
            if root.op == "call_function":  # inputs belong to the caller
                found.setdefault(root, []).append(copy)
        return found

    def _reads(self, copy: Node, overlay: Overlay) -> _Reads:
        reads = _Reads()
        stack = [(copy, True, True)]  # value, whether a view of the copy, whether by itself
        seen = set()
        while stack:
            value, is_view, is_own = stack.pop()
            if value in seen:
                continue
            seen.add(value)
            users = [user for user in value.users if user.op == "call_function"]
            if any(user in self.facts.backward for user in users):
                reads.own |= is_own
                reads.direct |= is_view
                if not is_view:
                    reads.derived.add(value)
                    continue  # saved, it spares what is computed from it
            for user in users:
                if user in self.facts.backward:
                    continue
                if self.facts.is_view(user):
                    stack.append((user, is_view, is_own))
                elif overlay.is_removed(user):
                    stack.append((user, is_view, False))
                elif is_pointwise(user.target):
                    stack.append((user, False, False))
        return reads

    def _is_held_anyway(self, root: Node) -> bool:
        """Whether the backward reads the buffer, which cannot be computed again cheaply."""
        stack = [] if is_pointwise(root.target) else [root]
        while stack:
            for user in stack.pop().users:
                if user in self.facts.backward:
                    return True
                if self.facts.is_view(user):
                    stack.append(user)
        return False


def _saved_itself(copy: Node, reads: dict[Node, _Reads]) -> bool:
    """Whether it may be cheaper to save the copy than what the backward reads of it.

    At equal cost the partitioner saves what lies closer to the backward.
    """
    share = 0.0
    for value in reads[copy].derived:
        feeding = sum(_size(c) for c, read in reads.items() if value in read.derived)
        share += _size(value) * _size(copy) / max(feeding, 1)
    return share > _size(copy)


def _size(node: Node) -> int:
    return hint(nbytes(node.meta["val"]))
