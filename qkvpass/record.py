"""Turn decisions about a graph into a :class:`Report`."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from . import policy
from .decide import Decisions, first_sink
from .layout import Layout
from .match import MOVES, Candidate, Facts, attention_name, nbytes, operands, standing, target_name
from .reason import Reason
from .report import AttentionOp, CopyDecision
from .speculate import State
from .views import is_view

# Folders of code that is not the user's.
_NOT_THE_USERS = tuple(
    os.path.dirname(os.path.abspath(file)) + os.sep for file in (torch.__file__, __file__)
)
_FRAME = re.compile(r'File "(?P<path>[^"]+)", line (?P<line>\d+)')


def graph_text(graph: Graph) -> str:
    """The graph as Python with shapes, strides and dtypes; it could be run."""
    return graph.python_code("self", verbose=True, include_stride=True, include_device=True).src


def decisions_of(original: Facts, state: State) -> tuple[CopyDecision, ...]:
    """One entry for each copy of the original graph, in graph order.

    Candidates come with what became of them; copies behind the attention that went with
    them; copies that reach no attention op; and what writes an operand by moving elements.
    A copy that was parted has an entry for each part.
    """
    entries = {node.name: entry for node, entry in _entries(state.facts, state.decisions).items()}
    for node in original.sources:
        if node.name in state.vanished:
            entries[node.name] = _vanished(node, original, state.vanished[node.name])
    if state.facts is not original:
        here = {node.name for node in state.facts.nodes}
        for node, entry in _moved_operands(original):
            if node.name not in here:  # a rewrite has another in its place, which moves the same
                entries.setdefault(node.name, entry)
    return tuple(_in_order(original, entries, state))


def _in_order(
    original: Facts, entries: dict[str, CopyDecision], state: State
) -> Iterator[CopyDecision]:
    for node in original.nodes:
        if node.name in entries:
            yield entries[node.name]
        for index, part in state.parts.get(node.name, {}).items():
            if part in entries:
                yield replace(entries[part], node=f"{node.name}[{index}]")


def _vanished(node: Node, facts: Facts, how: str) -> CopyDecision:
    """A copy that a rewrite took out."""
    inlined = not policy.is_materialised(facts.root[facts.sources[node]])
    behind = _attention_in_front(node, facts)
    folded = inlined or policy.is_folded(node)
    # The attention op is named as the finished graph has it, which may have made it anew.
    return _entry(node, Reason.REMOVED, how, behind, folded=folded, attention="")


def _entry(
    node: Node, reason: Reason, detail: str, attention_op: Node | None, **more: Any
) -> CopyDecision:
    """An entry, with what every entry says of its copy and its attention op."""
    about = {
        "op": attention_name(attention_op) if attention_op is not None else "",
        "attention": attention_op.name if attention_op is not None else "",
        "operand": "",
    }
    return CopyDecision(
        node=node.name,
        kind=target_name(node).replace("::", "."),
        reason=reason,
        detail=detail,
        nbytes=_traffic(node),
        source=source_line(node),
        **{**about, **more},
    )


def _entries(facts: Facts, decisions: Decisions) -> dict[Node, CopyDecision]:
    candidates = {c.node: c for c in decisions.candidates}
    entries: dict[Node, CopyDecision] = {}
    for node in facts.sources:
        if node in candidates:
            entries[node] = _candidate(candidates[node], facts, decisions)
        elif node in decisions.overlay.cascaded:
            entries[node] = _cascaded(node, facts, decisions)
        else:
            entries[node] = _bystander(node, facts, decisions)
    for node, entry in _moved_operands(facts):
        entries.setdefault(node, entry)
    return entries


def attention_of(facts: Facts, decisions: Decisions) -> tuple[AttentionOp, ...]:
    """Every attention op that was seen, and why it had no copy where it had none."""
    copies = Counter(node for c in decisions.candidates for node in {s.node for s in c.sinks})
    return tuple(
        AttentionOp(
            node=node.name,
            op=attention_name(node),
            status=standing(node)[1],
            copies=copies[node],
            note="" if copies[node] else _why_no_copy(node),
        )
        for node in facts.attention
    )


def _why_no_copy(node: Node) -> str:
    names = [o.name for o in operands(node)]
    if not names:
        return "none of its operands is a tensor of this graph"
    return f"{', '.join(names)}: no copy between the projection and the op"


def _candidate(candidate: Candidate, facts: Facts, decisions: Decisions) -> CopyDecision:
    node = candidate.node
    site = first_sink(candidate, facts)
    capable, status, evidence = standing(site)
    if node in decisions.overlay.cascaded:
        reason, detail = (
            Reason.REMOVED_CASCADE,
            "its input already has the layout that it was to make",
        )
    elif node in decisions.overlay.removed:
        reason, detail = (
            Reason.REMOVED,
            f"{site.name} reads {' and '.join(_names(candidate, site))} by stride",
        )
    else:
        reason, detail = decisions.kept.get(
            node, (Reason.NO_GAIN, "not tried: the limit on removals was reached")
        )
    inlined = reason.removed and decisions.target == "inductor"
    fused = policy.fused_copy(candidate, facts) if inlined else ""
    detail = fused or detail
    return _entry(
        node,
        reason,
        detail,
        site,
        operand=", ".join(_names(candidate, site)),
        evidence=f"{status}: {evidence}" if reason.removed and capable else "",
        folded=bool(fused),
    )


def _names(candidate: Candidate, site: Node) -> list[str]:
    """The operands of an attention op that a copy feeds."""
    return list(dict.fromkeys(s.name for s in candidate.sinks if s.node is site))


def _cascaded(node: Node, facts: Facts, decisions: Decisions) -> CopyDecision:
    behind = _attention_in_front(node, facts)
    why = f" once {behind.name} writes token-major" if behind is not None else ""
    detail = f"its input already has the layout that it was to make{why}"
    folded = decisions.target == "inductor" and policy.is_folded(node)
    return _entry(node, Reason.REMOVED_CASCADE, detail, behind, folded=folded)


def _bystander(node: Node, facts: Facts, decisions: Decisions) -> CopyDecision:
    behind = _attention_in_front(node, facts)
    reason = Reason.NO_ATTENTION_CONSUMER
    detail = "reaches no attention operand without crossing a matmul"
    source = decisions.overlay.value(facts.sources[node])
    if isinstance(source, Tensor) and Layout.of(source).equivalent(Layout.of(node.meta["val"])):
        reason, detail = _needless(node, facts)
    elif behind is not None:
        detail = f"behind {behind.name}, whose output is not in the layout that this copy makes"
    elif not facts.attention and _is_returned(node, facts):
        # A graph that was cut around its attention ops, as serving engines do.
        reason = Reason.GRAPH_OUTPUT
        detail = f"{node.name} leaves the graph, which has no attention op"
    return _entry(node, reason, detail, behind)


def _needless(node: Node, facts: Facts) -> tuple[Reason, str]:
    """Why a copy stays although its input now has its layout: somebody may tell them apart."""
    border = facts.borders(node)
    if border is None or border in facts.written.values():
        return Reason.MUTATED, f"the memory of {node.name} or of what it copies is written"
    if border.op == "output":
        return (
            Reason.GRAPH_OUTPUT,
            f"{node.name} is returned, and would share memory with its input",
        )
    return Reason.SUBGRAPH_BOUNDARY, f"{border.name} ({target_name(border)}) takes {node.name}"


def _is_returned(node: Node, facts: Facts) -> bool:
    border = facts.borders(node)
    return border is not None and border.op == "output"


def _attention_in_front(copy: Node, facts: Facts) -> Node | None:
    """The attention op whose output a copy re-lays, if there are only views between."""
    source: Node | None = facts.sources[copy]
    while source is not None and source.op == "call_function":
        if source in facts.attention_set:
            return source
        if not (is_view(source) or target_name(source) == "getitem"):
            return None
        source = source.all_input_nodes[0]
    return None


def _moved_operands(facts: Facts) -> list[tuple[Node, CopyDecision]]:
    """Operands written by a cast, cat, pad or gather: they move elements, and stay."""
    found = []
    for attention in facts.attention:
        for operand in operands(attention):
            root = facts.root[operand.value]
            if root.target not in MOVES or not isinstance(root.meta.get("val"), Tensor):
                continue
            made = f"{root.name} ({target_name(root)}) makes new values"
            why = f"{made}, not another layout of old ones"
            entry = _entry(root, Reason.NOT_A_LAYOUT_COPY, why, attention, operand=operand.name)
            found.append((root, entry))
    return found


def _traffic(node: Node) -> int | str:
    total = 2 * nbytes(node.meta["val"])
    return total if isinstance(total, int) else str(total)


def source_line(node: Node) -> str:
    """``"file.py:42"`` of the innermost frame outside torch; ``""`` if none was recorded."""
    frames = _FRAME.findall(node.meta.get("stack_trace") or "")
    outside = [f for f in frames if not f[0].startswith(_NOT_THE_USERS)]
    if not (frames := outside or frames):
        return ""
    path, line = frames[-1]
    return f"{os.path.basename(path)}:{line}"
