"""Which copies go: every candidate and every group through the rule, then the policy."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

from torch.fx import Node

from . import policy, tags, triton_tags
from .match import Candidate, Facts, called_op, find_candidates, standing
from .reason import Reason
from .safety import Overlay, Propagation, Refused
from .saved import Saved

Verdict = tuple[Reason, str]

# Copies of one attention op of which every subset is weighed; beyond it is all or nothing.
_MOST_SUBSETS_OF = 6


@dataclass
class Decisions:
    """The outcome for every candidate.

    Args:
        candidates: copies that reach an attention operand, in graph order.
        overlay: what the graph looks like with the accepted ones gone.
        kept: why the others stay, by node.
        target: who runs the graph.
    """

    candidates: list[Candidate]
    overlay: Overlay
    kept: dict[Node, Verdict] = field(default_factory=dict)
    target: str = "inductor"

    @property
    def removed(self) -> list[Node]:
        return [c.node for c in self.candidates if c.node in self.overlay.removed]


def decide(
    facts: Facts, target: str, limit: int | None = None, certified_only: bool = False
) -> Decisions:
    """Decide all candidates of a graph.

    Args:
        facts: of the graph.
        target: ``"inductor"`` or ``"eager"``: who runs the graph, hence what pays.
        limit: try only the first so many candidates (to halve down to a culprit); None for all.
        certified_only: trust no tag that has no certificate.
    """
    chooser = _Chooser(facts, target, certified_only)
    candidates = find_candidates(facts)
    for group in _by_site(candidates[:limit], facts):
        chooser.choose(group)
    for group in _by_buffer(candidates, chooser):
        chooser.choose(group)
    chosen = chooser.accepted.removed - chooser.accepted.cascaded
    try:
        final = chooser.propagation.remove(chosen, Overlay())
    except Refused as refused:  # what passed one by one does not pass together: nothing goes
        final = Overlay()
        chooser.kept |= dict.fromkeys(chosen, (refused.reason, refused.detail))
    return Decisions(candidates, final, chooser.kept, target)


def _by_site(candidates: Sequence[Candidate], facts: Facts) -> list[list[Candidate]]:
    """Candidates grouped by the first attention op that they reach, in graph order."""
    sites: dict[Node, list[Candidate]] = {}
    for candidate in candidates:
        sites.setdefault(first_sink(candidate, facts), []).append(candidate)
    return [sites[site] for site in sorted(sites, key=facts.order.__getitem__)]


def _by_buffer(candidates: Sequence[Candidate], chooser: _Chooser) -> list[list[Candidate]]:
    """What was kept for its memory alone, where one buffer feeds several attention ops.

    All views of a buffer may hold no more than the copies, though those of one op do.
    """
    buffers: dict[Node, list[Candidate]] = {}
    for candidate in candidates:
        if chooser.kept.get(candidate.node, ("", ""))[0] is Reason.MEMORY_PINNED:
            buffers.setdefault(chooser.facts.root[candidate.source], []).append(candidate)
    return [
        group
        for group in buffers.values()
        if len({first_sink(candidate, chooser.facts) for candidate in group}) > 1
    ]


def first_sink(candidate: Candidate, facts: Facts) -> Node:
    return min((s.node for s in candidate.sinks), key=facts.order.__getitem__)


class _Chooser:
    def __init__(self, facts: Facts, target: str, certified_only: bool) -> None:
        self.facts = facts
        self.target = target
        self.propagation = Propagation(facts, certified_only)
        self.memory = policy.Memory(facts, target)
        self.saved = Saved(facts)
        self.accepted = Overlay()
        self.kept: dict[Node, Verdict] = {}

    def choose(self, group: list[Candidate]) -> None:
        """Decide the candidates of one attention op, or of one packed buffer."""
        fit = [c for c in group if self._worth_trying(c)]
        chosen, overlay = self._largest(fit)
        if overlay is None:
            return
        if not self._gains(chosen, overlay):
            self._keep(
                chosen,
                Reason.NO_GAIN,
                "its producer writes it in either layout, and nothing behind gains",
            )
            return
        site = max((first_sink(c, self.facts) for c in group), key=self.facts.order.__getitem__)
        if (why := self._growth(overlay, site)) is not None:
            chosen, overlay = self._within_memory(chosen, site, why)
        if overlay is not None:
            overlay.merge()
            for candidate in chosen:
                self.kept.pop(candidate.node, None)

    def _worth_trying(self, candidate: Candidate) -> bool:
        if policy.is_empty(candidate.node):
            self._keep([candidate], Reason.NO_GAIN, "the tensor has no elements")
            return False
        if self.target != "inductor":
            return True
        verdict = policy.producer_verdict(candidate, self.facts) or policy.slower_verdict(candidate)
        if verdict is not None:
            # What the rule forbids is said first: it holds whoever runs the graph.
            self._keep([candidate], *(self._try([candidate])[1] or verdict))
        return verdict is None

    def _try(self, candidates: Iterable[Candidate]) -> tuple[Overlay | None, Verdict | None]:
        nodes = [c.node for c in candidates]
        if not nodes:
            return None, None
        try:
            return self.propagation.remove(nodes, self.accepted), None
        except Refused as refused:
            return None, (refused.reason, refused.detail)

    def _largest(self, candidates: list[Candidate]) -> tuple[list[Candidate], Overlay | None]:
        """All of the candidates if the rule admits that, else as many units as it does."""
        overlay, _ = self._try(candidates)
        if overlay is not None:
            return candidates, overlay
        chosen: list[Candidate] = []
        best: Overlay | None = None
        for unit in _units(candidates):
            overlay, verdict = self._try(chosen + unit)
            if verdict is None:
                chosen, best = chosen + unit, overlay
                continue
            reason, detail = self._try(unit)[1] or verdict
            self._keep(unit, *_worded(unit, reason, detail))
        return chosen, best

    def _gains(self, chosen: list[Candidate], overlay: Overlay) -> bool:
        if self.target == "eager" or overlay.cascaded:
            return True
        return any(not policy.is_rewritten_anyway(c, self.facts) for c in chosen)

    def _growth(self, overlay: Overlay, site: Node) -> str | None:
        why = self.saved.growth(overlay) or self.memory.growth(overlay, site)
        if why is None:
            self.saved.accept(overlay)
        return why

    def _within_memory(
        self, chosen: list[Candidate], site: Node, why: str
    ) -> tuple[list[Candidate], Overlay | None]:
        """The most of the chosen that hold no more memory; refusing one can cost more than all."""
        if len(chosen) > _MOST_SUBSETS_OF:
            self._keep(chosen, Reason.MEMORY_PINNED, why)
            return [], None
        for size in range(len(chosen) - 1, 0, -1):
            for subset in combinations(chosen, size):
                overlay, _ = self._try(subset)
                if overlay is None or not self._gains(list(subset), overlay):
                    continue
                if self._growth(overlay, site) is None:
                    self._keep((c for c in chosen if c not in subset), Reason.MEMORY_PINNED, why)
                    return list(subset), overlay
        self._keep(chosen, Reason.MEMORY_PINNED, why)
        return [], None

    def _keep(self, candidates: Iterable[Candidate], reason: Reason, detail: str) -> None:
        for candidate in candidates:
            self.kept[candidate.node] = (reason, detail)


def _units(candidates: list[Candidate]) -> list[list[Candidate]]:
    """Candidates that a contract wants in one layout, together; the others alone."""
    units: list[list[Candidate]] = []
    for candidate in candidates:
        names = _together(candidate)
        mates = [u for u in units if any(names & _together(c) for c in u)]
        units = [u for u in units if u not in mates]
        units.append([c for u in mates for c in u] + [candidate])
    return units


def _together(candidate: Candidate) -> set[tuple[str, Any]]:
    """(op node, group) of what a copy's operands must share a layout within.

    A group is one of a contract's, or a stride argument of a Triton kernel.
    """
    found: set[tuple[str, Any]] = set()
    for sink in candidate.sinks:
        for told in triton_tags.tags_of(sink.node):
            if told.operand == sink.name:
                found |= {(sink.node.name, argument) for _, argument in told.strides}
        tag = tags.lookup(called_op(sink.node))
        for group in tag.contract.together if tag is not None else ():
            if sink.name in group:
                found.add((sink.node.name, group))
    return found


def _worded(unit: list[Candidate], reason: Reason, detail: str) -> Verdict:
    """An opaque op in front of an untagged attention op is not what decides."""
    if reason is not Reason.OPAQUE_CONSUMER:
        return reason, detail
    attention = [sink.node for c in unit for sink in c.sinks]
    if any(standing(node)[0] for node in attention):
        return reason, detail
    return Reason.UNTAGGED_OP, f"{detail}; {attention[0].name} behind it has no stride tag either"
