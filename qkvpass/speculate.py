"""Rewrites that pay only where copies go behind them: tried on a copy of the graph.

A rewrite finds its sites, edits a copy, and all decisions are made anew on it. A site stays only
if it led to removals and cost none; without such a site the graph is left as it was, node for
node.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from torch.fx import Graph

from .decide import Decisions
from .editor import copy_of
from .match import Facts

Decide = Callable[[Facts], Decisions]


@dataclass(frozen=True)
class State:
    """A graph, edited so far, and what would be removed from it.

    Args:
        graph: the user's graph, or a copy of it that was edited.
        facts: of the graph.
        decisions: on the graph.
        names: of the nodes of the user's graph.
        notes: what was edited, one sentence each.
        vanished: copies that the edits themselves took out, by name, and how.
        parts: names of the copies that stand for one of the user's, by its name and by index.
        certified_only: whether tags without a certificate are trusted by the decisions.
    """

    graph: Graph
    facts: Facts
    decisions: Decisions
    names: frozenset[str]
    notes: tuple[str, ...] = ()
    vanished: Mapping[str, str] = field(default_factory=dict)
    parts: Mapping[str, Mapping[int, str]] = field(default_factory=dict)
    certified_only: bool = False

    @property
    def taken(self) -> frozenset[str]:
        """Names that no new node may have: of the user's nodes, and of copies that are told of."""
        parts = (name for names in self.parts.values() for name in names.values())
        return self.names.union(self.vanished, parts)

    @property
    def removed(self) -> frozenset[str]:
        """Names of copies that would be gone."""
        return frozenset(self.vanished) | {node.name for node in self.decisions.overlay.removed}


@dataclass(frozen=True)
class Edited:
    """One site of a rewrite, edited.

    Args:
        note: what was done, for the report.
        pays: whether it led to removals, asked of the finished state.
        vanished: copies that the edit itself took out, by name, and how.
        parts: names of the copies that now stand for one, by its name and by index.
    """

    note: str
    pays: Callable[[State], bool]
    vanished: Mapping[str, str] = field(default_factory=dict)
    parts: Mapping[str, Mapping[int, str]] = field(default_factory=dict)


FAILED = Edited("", lambda state: False)  # the edit could not be made


@dataclass(frozen=True)
class Rewrite:
    """A kind of rewrite.

    Args:
        option: the field of ``Options`` that switches it.
        find: its sites in a state, by a stable name.
        edit: edits a copy of the state's graph at the sites named, and says what it did.
        numerics: the settings of ``Options.numerics`` that admit it.
        opens: options of rewrites that may pay only behind this one, and it with them.
    """

    option: str
    find: Callable[[State], Iterable[str]]
    edit: Callable[[Graph, State, frozenset[str]], dict[str, Edited]]
    numerics: tuple[str, ...] = ("default", "bitwise")
    opens: tuple[str, ...] = ()


def improve(
    state: State, rewrite: Rewrite, decide: Decide, opened: Sequence[Rewrite] = ()
) -> State:
    """The state with a rewrite, and those that it opens, at those of its sites that pay.

    Without such a site it is the state as it was.
    """
    sites = frozenset(rewrite.find(state))
    while sites:
        graph = copy_of(state.graph, state.taken)
        edited = rewrite.edit(graph, state, sites)
        facts = Facts(graph, state.facts.autograd)
        tried = State(
            graph,
            facts,
            decide(facts),
            state.names,
            (*state.notes, *(e.note for e in edited.values())),
            {**state.vanished, **{k: v for e in edited.values() for k, v in e.vanished.items()}},
            {**state.parts, **{k: v for e in edited.values() for k, v in e.parts.items()}},
            state.certified_only,
        )
        for further in opened:
            tried = improve(tried, further, decide)
        paying = frozenset(site for site, e in edited.items() if e.pays(tried))
        if paying == sites:
            return tried if state.removed <= tried.removed else state
        sites = paying
    return state
