"""Pictures of benchmark results, by matplotlib."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .bench import HAND, OURS, STOCK, BenchError, Result, saving_of

# Told apart in grey and by the colour-blind too (Okabe and Ito's palette).
COLOURS = {
    "eager": "#999999",
    "stock": "#d55e00",
    "qkvpass": "#0072b2",
    "hand": "#009e73",
    "eager hand": "#cccccc",
}


def draw(results: Sequence[Result], path: str | Path) -> None:
    """One picture: one encoder's curve over several token counts, else each result's rounds.

    Args:
        path: its suffix is the format: png, svg, pdf.

    Raises:
        BenchError: if matplotlib is not installed, or there is no result.
    """
    try:
        import matplotlib
    except ModuleNotFoundError as error:
        raise BenchError(
            'matplotlib is not installed; plots need pip install "qkvpass[bench]"'
        ) from error
    if not results:
        raise BenchError("there is no result to draw")
    matplotlib.use("Agg")
    # Files that only change with the numbers.
    matplotlib.rcParams["svg.hashsalt"] = "qkvpass"
    from matplotlib import pyplot as plt

    counts = {result.facts.get("tokens") for result in results}
    curve = len(counts) > 2 and len({result.subject for result in results}) == 1
    figure = _scaling(results, plt) if curve else _rounds(results, plt)
    figure.savefig(path, dpi=130, bbox_inches="tight", metadata={"Date": None} if
                   str(path).endswith(".svg") else None)  # fmt: skip
    plt.close(figure)


def _scaling(results: Sequence[Result], plt: Any) -> Any:
    figure, axes = plt.subplots(figsize=(7, 4))
    for attention in dict.fromkeys(result.attention for result in results):
        mine = sorted(
            (r for r in results if r.attention == attention), key=lambda r: r.facts["tokens"]
        )
        tokens = [r.facts["tokens"] for r in mine]
        savings = [saving_of(r) for r in mine]
        middle = [s[0] for s in savings]
        (line,) = axes.plot(tokens, middle, marker="o", label=attention)
        axes.fill_between(
            tokens,
            [s[1] for s in savings],
            [s[2] for s in savings],
            alpha=0.2,
            color=line.get_color(),
        )
    axes.axhline(0, color="black", linewidth=0.8)
    axes.set_xscale("log", base=2)
    axes.set_xlabel("tokens")
    axes.set_ylabel("time saved over stock Inductor, %")
    axes.set_title(_title(results[0], attention=False), fontsize=9)
    axes.legend(title="attention")
    axes.grid(alpha=0.3)
    return figure


def _rounds(results: Sequence[Result], plt: Any) -> Any:
    """A row of axes a result: each round a dot."""
    figure, rows = plt.subplots(
        len(results), 1, figsize=(7, 0.8 + 1.7 * len(results)), squeeze=False
    )
    for axes, result in zip(rows[:, 0], results):
        names = [name for name in result.variants if name in (STOCK, OURS, HAND)]
        names += [name for name in result.variants if name not in names]
        for place, name in enumerate(reversed(names)):
            one = result.variants[name]
            colour = COLOURS.get(name, "#555555")
            axes.plot(one.ms, [place] * len(one.ms), "o", alpha=0.45, color=colour, markersize=4)
            axes.plot([one.median_ms] * 2, [place - 0.3, place + 0.3], color=colour, linewidth=2)
        axes.set_yticks(range(len(names)), list(reversed(names)), fontsize=8)
        axes.set_ylim(-0.6, len(names) - 0.4)
        said = textwrap.fill(textwrap.shorten(result.sentence, 210, placeholder=" …"), 105)
        axes.set_title(f"{_title(result)}\n{said}", fontsize=8, loc="left")
        axes.grid(alpha=0.3, axis="x")
    rows[-1, 0].set_xlabel("ms a call; a dot is a round, a bar the median")
    figure.tight_layout()
    return figure


def _title(result: Result, attention: bool = True) -> str:
    layers = f"{result.layers} layer{'s' if result.layers > 1 else ''}" if result.layers else ""
    facts = [result.subject, layers]
    facts += [result.attention if attention else "", result.where["device"]]
    return " · ".join(fact for fact in facts if fact)
