"""What was decided about each copy, and why: as plain data, as text, as JSON.

The JSON of :meth:`Report.to_json` is stable. ``schema`` is raised when a field changes its
meaning or goes away; fields may be added under the same number.

- ``schema`` (1), ``name``, ``seconds`` (time the pass took), ``cached`` (the pass did not run:
  the report was stored by an earlier compile), ``fault`` (``""``, or why the graph was left as
  it was), ``notes`` (list of sentences).
- ``summary``: ``copies``, ``removed``, ``kept``, ``folded`` (counts) and ``removed_bytes``
  (a number, or an expression in the symbols of a dynamic graph).
- ``copies``: one object a copy, with the fields of :class:`CopyDecision` and ``removed``.
- ``attention_ops``: one object an op, with the fields of :class:`AttentionOp`.
- ``before``, ``after``: the graph as Python text.
"""

from __future__ import annotations

import difflib
import json
import re
import textwrap
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from .reason import Reason

SCHEMA = 1
WIDTH = 100  # columns that the text of a report fits


@dataclass(frozen=True)
class CopyDecision:
    """What became of one copy.

    Args:
        node: the copy's name in the graph before the pass; ``clone[1]`` is a part of one that
            was copied part by part.
        kind: the op that copies, as in ``"aten.clone"``.
        op: the attention op that the copy reaches, ``""`` if none.
        operand: its operand, ``"q"``, or ``"q, k"`` for a copy they share; ``""`` if none.
        reason: how the decision ended.
        detail: the node and the fact that decided.
        nbytes: memory traffic of the copy, read and write, in bytes; an expression in the
            graph's symbols where it is dynamic.
        source: ``"file.py:42"`` of the user's code, ``""`` if unknown.
        evidence: what the tag that allowed a removal rests on.
        folded: Inductor would have fused this copy into a neighbouring kernel, so that
            removing it saves no kernel and no traffic.
        attention: name of the attention op's node in the graph before the pass, ``""`` if none.
    """

    node: str
    kind: str
    op: str
    operand: str
    reason: Reason
    detail: str
    nbytes: int | str
    source: str
    evidence: str = ""
    folded: bool = False
    attention: str = ""

    @property
    def removed(self) -> bool:
        return self.reason.removed


@dataclass(frozen=True)
class AttentionOp:
    """One attention op that was seen in the graph.

    Args:
        node: its name in the graph before the pass.
        op: ``"namespace::name"``.
        status: ``"certified"``, ``"declared"``, ``"dense-only"``, ``"unverified"`` or
            ``"untagged"``.
        copies: how many copies reach its operands.
        note: why it had none, as in ``"q, k, v are views already"``.
    """

    node: str
    op: str
    status: str
    copies: int
    note: str


@dataclass(frozen=True)
class Report:
    """The decisions of one run of the pass over one graph. Plain data: pickles, holds no tensor.

    Args:
        copies: every candidate copy, in the order of the graph.
        attention_ops: every attention op, in the order of the graph.
        before: the graph as it came, as Python text.
        after: the graph as it went.
        name: of the graph.
        seconds: wall time that the pass took.
        cached: the pass did not run; this was stored when the compiled code was.
        fault: the error that made the pass leave the graph as it was, ``""`` if none.
        notes: further facts, one sentence each.
    """

    copies: tuple[CopyDecision, ...]
    attention_ops: tuple[AttentionOp, ...]
    before: str
    after: str
    name: str = "graph"
    seconds: float = 0.0
    cached: bool = False
    fault: str = ""
    notes: tuple[str, ...] = ()

    @property
    def removed(self) -> tuple[CopyDecision, ...]:
        return tuple(copy for copy in self.copies if copy.removed)

    @property
    def kept(self) -> tuple[CopyDecision, ...]:
        return tuple(copy for copy in self.copies if not copy.removed)

    @property
    def folded(self) -> tuple[CopyDecision, ...]:
        """Removed copies that Inductor would have fused away: no traffic is claimed for them."""
        return tuple(copy for copy in self.removed if copy.folded)

    @property
    def removed_bytes(self) -> int | str:
        """Memory traffic saved, in bytes; an expression where a size is dynamic."""
        return add_bytes(copy.nbytes for copy in self.removed if not copy.folded)

    def diff(self) -> str:
        """The graph before and after as a unified diff; ``""`` if nothing changed."""
        lines = difflib.unified_diff(
            self.before.splitlines(), self.after.splitlines(), "before", "after", lineterm="", n=2
        )
        return "\n".join(lines)

    def to_html(self, path: str | Path) -> None:
        """Write this report as one self-contained HTML page.

        Raises:
            ModuleNotFoundError: if the ``html`` extra is not installed.
        """
        from .html import page

        Path(path).write_text(page(self), encoding="utf-8")

    def __str__(self) -> str:
        return self.text()

    def text(self, width: int = WIDTH) -> str:
        """The report as a table that fits ``width`` columns.

        Copies that differ only by the layer they are in share a row, which counts them.
        """
        prose = [
            *_bystanders(self.copies),
            *_evidence(self.copies),
            *_ops_lines(self.attention_ops),
            _summary(self),
            *(f"note: {note}" for note in self.notes),
        ]
        lines = [line for text in _heading(self) for line in _wrap(text, width)]
        lines += _copy_table(self.copies, width)
        lines += [line for text in prose for line in _wrap(text, width)]
        return "\n".join(lines)

    def to_json(self) -> str:
        """This report as JSON; the module's docstring describes it."""
        return json.dumps(
            {
                "schema": SCHEMA,
                "name": self.name,
                "seconds": self.seconds,
                "cached": self.cached,
                "fault": self.fault,
                "notes": list(self.notes),
                "summary": {
                    "copies": len(self.copies),
                    "removed": len(self.removed),
                    "kept": len(self.kept),
                    "folded": len(self.folded),
                    "removed_bytes": self.removed_bytes,
                },
                "copies": [
                    asdict(copy) | {"reason": copy.reason.value, "removed": copy.removed}
                    for copy in self.copies
                ],
                "attention_ops": [asdict(op) for op in self.attention_ops],
                "before": self.before,
                "after": self.after,
            },
            indent=2,
        )

    @classmethod
    def from_json(cls, text: str) -> Report:
        """The report that :meth:`to_json` wrote.

        Raises:
            ValueError: if ``text`` is no JSON, no report, or of another schema.
        """
        data = json.loads(text)
        schema = data.get("schema") if isinstance(data, dict) else None
        if schema != SCHEMA:
            raise ValueError(
                f"report has schema {schema!r}, this qkvpass reads {SCHEMA}; "
                "make the report again with this version"
            )
        try:
            return cls(
                copies=tuple(
                    replace(_make(CopyDecision, copy), reason=Reason(copy["reason"]))
                    for copy in data["copies"]
                ),
                attention_ops=tuple(_make(AttentionOp, op) for op in data["attention_ops"]),
                before=data["before"],
                after=data["after"],
                name=data["name"],
                seconds=data["seconds"],
                cached=data["cached"],
                fault=data["fault"],
                notes=tuple(data["notes"]),
            )
        except KeyError as error:
            raise ValueError(
                f"report has no field {error}; write it with Report.to_json()"
            ) from None

    @classmethod
    def merge(cls, reports: Iterable[Report]) -> Report:
        """One report for several graphs, in their order; cached only if each of them is."""
        reports = tuple(reports)
        if len(reports) == 1:
            return reports[0]
        cached = bool(reports) and all(report.cached for report in reports)
        return cls(
            copies=tuple(copy for report in reports for copy in report.copies),
            attention_ops=tuple(op for report in reports for op in report.attention_ops),
            before=_join_graphs((report.name, report.before) for report in reports),
            after=_join_graphs((report.name, report.after) for report in reports),
            name=f"{len(reports)} graphs",
            seconds=sum(report.seconds for report in reports),
            cached=cached,
            fault="; ".join(f"{r.name}: {r.fault}" for r in reports if r.fault),
            notes=tuple(
                f"{report.name}: {note}"
                for report in reports
                for note in (*report.notes, *(["cached"] if report.cached and not cached else []))
            ),
        )


_T = TypeVar("_T")


def _make(cls: Callable[..., _T], data: dict[str, Any]) -> _T:
    """An instance from the keys that are its fields; what is derived is left out."""
    return cls(**{f.name: data[f.name] for f in fields(cls)})  # type: ignore[arg-type]


def _join_graphs(graphs: Iterable[tuple[str, str]]) -> str:
    return "\n\n".join(f"# graph {name}\n{text}" for name, text in graphs)


def add_bytes(values: Iterable[int | str]) -> int | str:
    """The sum of numbers and expressions, with equal terms counted together.

    >>> add_bytes([10, "4*s0", 5, "4*s0"])
    '8*s0 + 15'
    """
    number = 0
    terms: Counter[str] = Counter()
    for value in values:
        if isinstance(value, int):
            number += value
        elif product := re.fullmatch(r"(\d+)\*([\w*]+)", value):
            terms[product[2]] += int(product[1])
        else:
            terms[value if re.fullmatch(r"[\w*]+", value) else f"({value})"] += 1
    if not terms:
        return number
    parts = [f"{count}*{term}" if count > 1 else term for term, count in terms.items()]
    return " + ".join([*parts, *([str(number)] if number else [])])


def human_bytes(nbytes: int | str) -> str:
    """``"3.7 GiB"`` for a number; an expression as it is, in bytes."""
    if isinstance(nbytes, str):
        return f"{nbytes} B"
    value = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        # 1023.95 would be printed as 1024.0 of this unit.
        if value < 1023.95:
            return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def _heading(report: Report) -> list[str]:
    took = f", pass took {report.seconds * 1000:.1f} ms" if report.seconds else ""
    cached = ", cached: from an earlier compile" if report.cached else ""
    lines = [f"qkvpass: {report.name}{took}{cached}"]
    if report.fault:
        lines.append(f"fault: {report.fault}")
        lines.append("the graph was left as it was")
    return lines


@dataclass(frozen=True)
class _Column:
    title: str
    cell: Callable[[CopyDecision, int], str]  # of the first copy of a row, and their number
    least: int  # columns below which it is not squeezed


_COLUMNS = (
    _Column("", lambda copy, count: f"{count}x" if count > 1 else "", 2),
    _Column("decision", lambda copy, count: "removed" if copy.removed else "kept", 8),
    _Column("reason", lambda copy, count: _reason(copy), 21),
    _Column("operand", lambda copy, count: copy.operand or "-", 7),
    _Column("attention op", lambda copy, count: copy.op or "-", 20),
    _Column("bytes each", lambda copy, count: human_bytes(copy.nbytes), 12),
    _Column("source", lambda copy, count: copy.source or "-", 14),
)


def _reason(copy: CopyDecision) -> str:
    return "-" if copy.reason is Reason.REMOVED else copy.reason.value


def _copy_table(copies: Sequence[CopyDecision], width: int) -> list[str]:
    shown = [copy for copy in copies if not _is_bystander(copy)]
    rows = _alike(
        shown, lambda copy: (replace(copy, node="", attention="", detail=_any_layer(copy.detail)),)
    )
    if not rows:
        return []
    cells = [[column.cell(row[0], len(row)) for column in _COLUMNS] for row in rows]
    table = [[column.title for column in _COLUMNS], *cells]
    wide = [max(len(line[i]) for line in table) for i in range(len(_COLUMNS))]
    used = [i for i, column in enumerate(_COLUMNS) if wide[i]]
    over = sum(wide[i] + 2 for i in used) - 2 - width
    for i in sorted(used, key=lambda i: -wide[i]):
        cut = max(0, min(over, wide[i] - _COLUMNS[i].least))
        wide[i], over = wide[i] - cut, over - cut

    def line(texts: Sequence[str]) -> str:
        return "  ".join(_shorten(texts[i], wide[i]).ljust(wide[i]) for i in used).rstrip()

    lines = [line(table[0]), "  ".join("-" * wide[i] for i in used)]
    for row, texts in zip(rows, cells):
        lines.append(line(texts))
        lines.extend(_wrap(_detail(row), width, indent="    "))
    return lines


def _is_bystander(copy: CopyDecision) -> bool:
    """Whether a copy has nothing to do with attention: said in one line, not in a row each."""
    return copy.reason is Reason.NO_ATTENTION_CONSUMER and not copy.op


def _bystanders(copies: Sequence[CopyDecision]) -> list[str]:
    found = [copy for copy in copies if _is_bystander(copy)]
    if not found:
        return []
    traffic = human_bytes(add_bytes(copy.nbytes for copy in found))
    places = ", ".join(dict.fromkeys(copy.source for copy in found if copy.source))
    reach = "reaches" if len(found) == 1 else "reach"
    return [
        f"elsewhere: {len(found)} {_plural('copy', len(found))} ({traffic}) {reach} no attention op"
        + (f": {places}" if places else "")
    ]


def _detail(row: Sequence[CopyDecision]) -> str:
    first = row[0]
    others = f" (and {len(row) - 1} more like it)" if len(row) > 1 else ""
    folded = "Inductor would have fused it: no kernel saved" if first.folded else ""
    facts = "; ".join(fact for fact in (first.detail, folded) if fact)
    return f"{first.node}, {first.kind}{others}" + (f": {facts}" if facts else "")


def _evidence(copies: Sequence[CopyDecision]) -> list[str]:
    """What the removals rest on, said once an op."""
    found = dict.fromkeys((copy.op, copy.evidence) for copy in copies if copy.evidence)
    return [f"evidence for {op or 'an op'}: {evidence}" for op, evidence in found]


def _ops_lines(ops: Sequence[AttentionOp]) -> list[str]:
    lines = []
    for row in _alike(ops, lambda op: (op.op, op.status, op.copies, _any_layer(op.note))):
        first = row[0]
        each = " each" if len(row) > 1 else ""
        copies = f"{first.copies} {_plural('copy', first.copies)}{each}" if first.copies else ""
        why = first.note or ("" if first.copies else "no copy in front")
        facts = "; ".join(text for text in (copies, why) if text)
        lines.append(f"attention: {len(row)}x {first.op} ({first.status}): {facts}")
    return lines


def _summary(report: Report) -> str:
    ops = len(report.attention_ops)
    if not report.copies and not ops:
        return (
            "nothing matched: no attention op in the graph. Attention written out as matmul and "
            "softmax is not one; a custom op is one if it has a stride tag or takes q, k and v"
        )
    if not report.copies:
        return (
            f"nothing matched: {ops} attention {_plural('op', ops)} seen, none with a copy in front"
        )
    copies = f"{len(report.copies)} {_plural('copy', len(report.copies))}"
    reasons = Counter(copy.reason.value for copy in report.kept)
    why = f" ({', '.join(f'{n} {reason}' for reason, n in reasons.items())})" if reasons else ""
    if not report.removed:
        return f"removed none of {copies}{why}"
    saved = human_bytes(report.removed_bytes)
    folded = len(report.folded)
    apart = f" ({folded} of them Inductor would have fused: not counted)" if folded else ""
    return (
        f"removed {len(report.removed)} of {copies}, {saved} of traffic{apart}; "
        f"kept {len(report.kept)}{why}"
    )


def _plural(word: str, count: int) -> str:
    if count == 1:
        return word
    return f"{word[:-1]}ies" if word.endswith("y") else f"{word}s"


def _any_layer(text: str) -> str:
    """``text`` without what tells one layer's nodes from another's."""
    return re.sub(r"(?<=[a-z_])\d+", "#", re.sub(r"_\d+\b", "", text))


_Item = TypeVar("_Item")


def _alike(items: Sequence[_Item], key: Callable[[_Item], Hashable]) -> list[list[_Item]]:
    """Items of equal key in one group; groups in the order of their first."""
    groups: dict[Hashable, list[_Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return list(groups.values())


def _shorten(text: str, width: int) -> str:
    """``text`` in ``width`` columns, with its middle left out if need be: ends tell ops apart."""
    if len(text) <= width:
        return text
    head = (width - 2) // 3
    return f"{text[:head]}..{text[len(text) - (width - 2 - head) :]}"


def _wrap(text: str, width: int, indent: str = "") -> list[str]:
    return textwrap.wrap(
        text,
        width,
        initial_indent=indent,
        subsequent_indent=indent + "  ",
        break_on_hyphens=False,
    )
