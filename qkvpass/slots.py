"""The pass beside what the user keeps in the same slot of Inductor's config.

Order: the slot's own passes first, as the user listed them, then ours. Every other slot is
left to Inductor, and so is putting the slot back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

from torch.fx import Graph

from .compat import CustomGraphPass, config_value, held_before
from .graph_pass import StridedQKVPass, asked_for_key

GraphPass: TypeAlias = Callable[[Graph], None]

# One object on purpose: the patch that applies our options is told from others by its key.
SLOT = "".join(("joint_custom_", "post_pass"))


class Chain(CustomGraphPass):
    """Passes of one slot, in order. One callable: torch 2.11 takes no lists."""

    def __init__(self, passes: tuple[GraphPass, ...]) -> None:
        self.passes = passes

    def __call__(self, graph: Graph) -> None:
        for one in self.passes:
            one(graph)

    def uuid(self) -> Any | None:
        """The ids of all; None, and so an uncached compile, where one has none."""
        ids = [one.uuid() if isinstance(one, CustomGraphPass) else None for one in self.passes]
        return tuple(ids) if all(ids) else None


class Shared(CustomGraphPass):
    """Ours, behind what its slot held until the options that bring it were applied.

    What that is gets looked up when a graph is compiled, so nothing of the user's is kept here.
    """

    def __init__(self, ours: StridedQKVPass) -> None:
        self.ours = ours

    def __call__(self, graph: Graph) -> None:
        self._chain()(graph)

    def uuid(self) -> Any | None:
        if self.ours.enabled:
            asked_for_key()
        return self._chain().uuid()

    def _chain(self) -> CustomGraphPass:
        return behind(held_before(SLOT, Shared), self.ours)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Shared) and other.ours == self.ours

    def __hash__(self) -> int:
        return hash(self.ours)


def behind(held: Any, ours: StridedQKVPass) -> CustomGraphPass:
    """``ours`` behind what a slot holds: nothing, one pass, or several."""
    users = tuple(_users(held))
    return Chain((*users, ours)) if users else ours


def behind_current(ours: StridedQKVPass) -> CustomGraphPass:
    """``ours`` behind what the slot holds now."""
    return behind(config_value(SLOT), ours)


def _users(held: Any) -> Iterable[GraphPass]:
    """The user's passes in a slot's value; ours would otherwise run twice."""
    if isinstance(held, Chain):
        held = held.passes
    passes = held if isinstance(held, (list, tuple)) else () if held is None else (held,)
    return [one for one in passes if not isinstance(one, (Shared, StridedQKVPass))]
