"""A report as one self-contained HTML page: no script, no request to anywhere."""

from __future__ import annotations

import difflib
import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .report import AttentionOp, CopyDecision, Report, human_bytes

_TEMPLATE = Path(__file__).with_name("report.html.jinja")
_CHART_WIDTH, _ROW = 640, 22  # px


def page(report: Report) -> str:
    """The page's text.

    Raises:
        ModuleNotFoundError: if the ``html`` extra is not installed.
    """
    try:
        import jinja2
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            'jinja2 is not installed; HTML reports need pip install "qkvpass[html]"', name="jinja2"
        ) from error
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["bytes"] = human_bytes
    template = environment.from_string(_TEMPLATE.read_text(encoding="utf-8"))
    rows = list(side_by_side(report))
    return template.render(
        report=report,
        reasons=Counter(copy.reason.value for copy in report.kept),
        ops=_ops(report.attention_ops),
        chart=chart_of(report),
        rows=rows,
        changed=sum(row.changed for row in rows),
    )


def _ops(ops: Sequence[AttentionOp]) -> list[dict[str, Any]]:
    counted = Counter((op.op, op.status) for op in ops)
    return [{"op": op, "status": status, "count": n} for (op, status), n in counted.items()]


@dataclass(frozen=True)
class Row:
    """A line of the graph before beside one of the graph after; None where there is none.

    Args:
        number: of the copy whose decision this line is about, from 1; 0 if none.
        verdict: ``"removed"`` or ``"kept"`` for such a line.
    """

    before: str | None
    after: str | None
    changed: bool
    number: int = 0
    verdict: str = ""


_ASSIGNED = re.compile(r"\s*(\w+)(?::[^=]*)? = ")


def side_by_side(report: Report) -> Iterator[Row]:
    """The two graphs line by line, with the lines of the report's copies marked.

    Node names repeat where a report merges several graphs: copies are in the order of the
    graphs, so each is looked for behind the one before it.
    """
    before, after = report.before.splitlines(), report.after.splitlines()
    waiting = list(enumerate(report.copies, 1))
    marks: dict[int, tuple[int, CopyDecision]] = {}
    for place, line in enumerate(before):
        name = _ASSIGNED.match(line)
        if waiting and name and name[1] == _line_of(waiting[0][1]):
            marks[place] = waiting.pop(0)
            while waiting and _are_parts(marks[place][1], waiting[0][1]):
                waiting.pop(0)
    matcher = difflib.SequenceMatcher(None, _keys(before), _keys(after), autojunk=False)
    for tag, left, left_end, right, right_end in matcher.get_opcodes():
        if tag == "equal":
            pairs: list[tuple[int | None, int | None]] = list(
                zip(range(left, left_end), range(right, right_end))
            )
        else:
            pairs = [(old, None) for old in range(left, left_end)]
            pairs += [(None, new) for new in range(right, right_end)]
        for old, new in pairs:
            number, copy = marks.get(-1 if old is None else old, (0, None))
            texts = None if old is None else before[old], None if new is None else after[new]
            yield Row(
                *texts,
                changed=texts[0] != texts[1],
                number=number,
                verdict="" if copy is None else "removed" if copy.removed else "kept",
            )


def _line_of(copy: CopyDecision) -> str:
    """The node whose line is marked: of a part, the copy that it is a part of."""
    return copy.node.partition("[")[0]


def _are_parts(one: CopyDecision, other: CopyDecision) -> bool:
    return "[" in one.node and one.node != other.node and _line_of(one) == _line_of(other)


def _keys(lines: Sequence[str]) -> list[str]:
    """What a line is paired by: the node that it assigns, since nodes keep their names."""
    return [name[1] if (name := _ASSIGNED.match(line)) else line for line in lines]


@dataclass(frozen=True)
class Bar:
    """One attention call's copies: widths in px of what went and what stayed."""

    label: str
    y: int
    removed: float
    kept: float
    text: str


@dataclass(frozen=True)
class Chart:
    bars: tuple[Bar, ...]
    width: int
    height: int
    unit: str
    rest: str  # what is not drawn


def chart_of(report: Report) -> Chart | None:
    """Bytes of the copies around each attention call; None where they cannot be compared."""
    counted: dict[str, list[int]] = {}
    units = set()
    left_out = 0
    for label, copy in layers(report):
        if copy.folded or not copy.op:
            left_out += 1
            continue
        value, unit = _scaled(copy.nbytes)
        units.add(unit)
        sums = counted.setdefault(label, [0, 0])
        sums[0 if copy.removed else 1] += value
    most = max((sum(sums) for sums in counted.values()), default=0)
    if len(units) != 1 or not most:
        return None
    unit = units.pop()
    pixels = (_CHART_WIDTH - 330) / most
    bars = tuple(
        Bar(label, place * _ROW, gone * pixels, stay * pixels, _bar_text(gone, stay, unit))
        for place, (label, (gone, stay)) in enumerate(counted.items())
    )
    rest = f"{left_out} fused copies or copies elsewhere are not drawn" if left_out else ""
    return Chart(bars, _CHART_WIDTH, len(bars) * _ROW + 4, unit, rest)


def _bar_text(gone: int, stay: int, unit: str) -> str:
    parts = [
        f"{_size(gone, unit)} removed" if gone else "",
        f"{_size(stay, unit)} kept" if stay else "",
    ]
    return ", ".join(part for part in parts if part)


def _size(value: int, unit: str) -> str:
    return f"{value}*{unit} B" if unit else human_bytes(value)


def _scaled(nbytes: int | str) -> tuple[int, str]:
    """A number and the symbols that it counts: (36, "s0*s1") of ``"36*s0*s1"``."""
    if isinstance(nbytes, int):
        return nbytes, ""
    numbers = [int(part) for part in nbytes.split("*") if part.strip().isdigit()]
    symbols = [part.strip() for part in nbytes.split("*") if not part.strip().isdigit()]
    return math.prod(numbers), "*".join(symbols)


def layers(report: Report) -> Iterator[tuple[str, CopyDecision]]:
    """Each copy with a label of the attention call that it belongs to.

    Where a report merges several graphs, one that names a copy again has begun.
    """
    seen: set[str] = set()
    graph = 0
    for copy in report.copies:
        if copy.node in seen:
            seen, graph = set(), graph + 1
        seen.add(copy.node)
        yield (f"graph {graph}: " if graph else "") + (copy.attention or "elsewhere"), copy


__all__ = ["Bar", "Chart", "Row", "chart_of", "layers", "page", "side_by_side"]
