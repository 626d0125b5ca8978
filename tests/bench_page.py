"""Make docs/benchmarks.md and its plots of the JSON in docs/measured. No number is typed.

python tests/bench_page.py [--check]      --check says whether the page is up to date
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from qkvpass.bench import HAND, OURS, STOCK, Result, ratio_of, saving_of
from qkvpass.bench_shapes import SHAPES
from qkvpass.report import human_bytes

DOCS = Path(__file__).parent.parent / "docs"
INTRO = """# Benchmarks

## Measure your own

```sh
qkvpass bench siglip-so400m                        # a named shape; an unknown name lists them
qkvpass bench timm:hiera_base_224 --batch 64
qkvpass bench mymodels:encoder --twin mymodels:encoder_without_copies --json
qkvpass bench paddleocr-vl-page --attention fa3,flash --tokens 256,1024,4096,16384 --plot out.png
qkvpass bench vit-b-16 --batch 1 --cuda-graphs     # where launches are gone
```

It times eager, stock Inductor, qkvpass and, where there is one, a hand-edited twin, and ends with a
sentence: what is saved, with its interval, or that nothing is, and why. `--scale 0.1` shrinks a
shape for a dry run on a CPU.

## How to read the tables

Made by `make benchmarks` of the JSON in `docs/measured`; no number here is typed. A row is
one run of `qkvpass bench`, most of them by `tests/gpu_bench.py`.

- Variants alternate in rounds within one process, since a GPU's clock drifts by a few per cent
  over minutes. `saved` is the median over rounds of what qkvpass saves over stock Inductor, with
  half of its 95 % bootstrap interval.
- `hand` is the same model edited by hand, under stock Inductor.
- `traffic` is what the generated kernels read and write less, by Inductor's own count, beside the
  count on paper.
- `around attention` counts kernels between the projection's matmul and the next one, by the
  profiler.
"""


ENCODERS, GRAPHS = "Encoders", "Small batches under CUDA graphs"
CURVE, CPU = "By number of tokens", "On a CPU"


def load(folder: Path) -> list[Result]:
    return [Result.from_json(path.read_text()) for path in sorted(folder.glob("*.json"))]


def page(
    results: Sequence[Result],
    times: dict[str, Any] | None,
    gain: dict[str, Any] | None,
    plots: dict[str, str],
) -> str:
    """The page's Markdown.

    Args:
        results: of ``qkvpass bench``.
        times: of ``tests/gpu_encoders.py times``.
        gain: of ``tests/gpu_gain.py``.
        plots: picture by title.
    """
    parts = [INTRO]
    groups = grouped(results)
    for title, some in groups.items():
        if some:
            parts.append(f"## {title}\n\n{_where(some)}\n\n{_table(some)}")
            parts += [f"![{title}]({file})" for name, file in plots.items() if name == title]
    if gain:
        parts.append(_kernels(gain))
    told = [r for title, some in groups.items() if title != CURVE for r in some]
    lines = [f"- **{r.subject}, {r.attention}{_on(r)}**: {r.sentence}" for r in told]
    parts.append("## In words\n\n" + "\n".join(lines))
    if times:
        parts.append(_encoders(times))
    return "\n\n".join(part.strip() for part in parts) + "\n"


def grouped(results: Sequence[Result]) -> dict[str, list[Result]]:
    """Results by the title of their table."""
    groups: dict[str, list[Result]] = {title: [] for title in (ENCODERS, GRAPHS, CURVE, CPU)}
    for result in results:
        groups[_title(result)].append(result)
    return groups


def _title(result: Result) -> str:
    if result.where["arch"] == "cpu":
        return CPU
    if result.settings["cuda_graphs"]:
        return GRAPHS
    return CURVE if is_of_curve(result) else ENCODERS


def _on(result: Result) -> str:
    return ", on a CPU" if _title(result) == CPU else ""


def is_of_curve(result: Result) -> bool:
    """Whether a result is of a scaling curve: one layer, not with the shape's own tokens."""
    shape = SHAPES[result.subject]
    own = shape.sequences * shape.tokens
    return result.layers == 1 and shape.sequences == 1 and result.facts["tokens"] != own


def _where(results: Sequence[Result]) -> str:
    return "; ".join(dict.fromkeys(_place(r.where) for r in results)) + "."


def _place(where: dict[str, Any]) -> str:
    facts = ["device", "torch", *(["cudnn"] if where["arch"] != "cpu" else []), "date"]
    return ", ".join(f"{'' if k in ('device', 'date') else k + ' '}{where[k]}" for k in facts)


def _table(results: Sequence[Result]) -> str:
    titles = ["encoder", "attention", "layers", "tokens", "stock ms", "qkvpass ms", "saved"]
    titles += ["qkvpass / hand", "traffic (paper)", "around attention", "peak MiB"]
    return _markdown(titles, [_row(result) for result in results])


def _row(result: Result) -> list[str]:
    stock, ours = result.variants[STOCK], result.variants[OURS]
    saved, low, high = saving_of(result)
    facts = result.facts
    part = " (attention alone)" if facts["part"] == "attention" else ""
    paper = "" if result.paper_bytes is None else f" ({human_bytes(result.paper_bytes)})"
    around = [m.kernels["in_front"] + m.kernels["behind"] for m in (stock, ours)]
    peak = "" if stock.peak_mib is None else f"{stock.peak_mib:.0f} → {ours.peak_mib:.0f}"
    return [
        f"{result.subject}{part}",
        result.attention,
        f"{result.layers} of {facts['all layers']}",
        str(facts["tokens"]),
        f"{stock.median_ms:.3f}",
        f"{ours.median_ms:.3f}",
        f"{saved:.1f} % ± {(high - low) / 2:.1f}",
        _ratio(result.ratios.get(f"{OURS} / {HAND}")),
        f"{_less(stock.generated_bytes, ours.generated_bytes)}{paper}",
        f"{around[0]} → {around[1]}",
        peak,
    ]


def _less(stock: int | None, ours: int | None) -> str:
    if stock is None or ours is None:
        return "not counted"
    return human_bytes(stock - ours) if stock >= ours else f"-{human_bytes(ours - stock)}"


def _ratio(ratio: Any) -> str:
    return f"{ratio.ratio:.3f} ({ratio.low:.3f} to {ratio.high:.3f})" if ratio else ""


def _kernels(gain: dict[str, Any]) -> str:
    """A table of ``gpu_gain.py``: what copies cost over strides, by kernel and shape."""
    shapes = dict.fromkeys((c["sequences"], c["tokens"] // c["sequences"]) for c in gain["cells"])
    found: dict[tuple[Any, ...], dict[Any, str]] = {}
    for cell in gain["cells"]:
        row = found.setdefault((cell["attention"], cell["heads"], cell["head_dim"]), {})
        ratio, low, high = cell["copies and dense / strided"]
        said = f"{ratio:.3f}" if low > 1 else f"**{ratio:.3f}**" if high < 1 else f"*{ratio:.3f}*"
        row[cell["sequences"], cell["tokens"] // cell["sequences"]] = said
    titles = ["attention", "heads", *(f"{count} of {longest}" for count, longest in shapes)]
    rows = [
        [attention, f"{heads} of {dim}", *(row.get(shape, "") for shape in shapes)]
        for (attention, heads, dim), row in found.items()
    ]
    slowest = max(c["strided / dense"][0] for c in gain["cells"] if c["us"]["dense"] > 100)
    same = sum(cell["same_bits"] for cell in gain["cells"])
    said = (
        "Three copies by Inductor and the kernel on what they wrote, over the same kernel on "
        "strided views, in a replayed CUDA graph: no matmul around it, no launches. By sequences "
        "and tokens in each; bold where strides lose, slanting where the 95 % interval touches 1. "
        f"{_place(gain['where'])}. Bits were equal in {same} of {len(gain['cells'])} cells. Of "
        f"kernels over 100 µs, none takes more than {(slowest - 1) * 100:.1f} % longer on strided "
        "operands. Where one loses more than copies cost, its tag says so (`slower=`), and its "
        "copies stay: the example's Triton kernel at head size 72. Measured by "
        "`tests/gpu_gain.py`; with intervals in [gain-h200.json](measured/gain-h200.json)."
    )
    return f"## Kernels alone\n\n{said}\n\n{_markdown(titles, rows)}"


def _encoders(times: dict[str, Any]) -> str:
    """The table of ``gpu_encoders.py times``, with intervals of its rounds."""
    titles = ["case", "stock ms", "qkvpass ms", "stock / qkvpass", "qkvpass / hand", "kernels"]
    rows = []
    for name, found in times["results"].items():
        if "fault" in found:
            continue
        rounds, median, kernels = found["all ms"], found["median ms"], found["kernels"]
        rows.append(
            [
                name,
                f"{median['stock']:.2f}",
                f"{median['pass']:.2f}",
                _ratio(ratio_of(rounds["stock"], rounds["pass"])),
                _ratio(ratio_of(rounds["pass"], rounds["hand"])),
                f"{kernels['stock']['all']} → {kernels['pass']['all']}" if kernels["stock"] else "",
            ]
        )
    said = (
        "Nine alternated rounds each, by `tests/gpu_encoders.py times` "
        f"({times['device']}, torch {times['torch']}); all rounds are in "
        "[h200-times.json](measured/h200-times.json)."
    )
    return f"## An earlier run\n\n{said}\n\n{_markdown(titles, rows)}"


def _markdown(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [titles, ["---"] * len(titles), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def make(docs: Path, draw_plots: bool = True) -> str:
    """The page's text; its plots are written on the way."""
    results = load(docs / "measured" / "bench")
    times = _json(docs / "measured" / "h200-times.json")
    gain = _json(docs / "measured" / "gain-h200.json")
    groups = grouped(results)
    plots = {
        title: f"plots/{title.lower().replace(' ', '-')}.png"
        for title, some in groups.items()
        if some
    }
    if draw_plots and plots:
        from qkvpass.bench_plot import draw

        (docs / "plots").mkdir(exist_ok=True)
        for title, file in plots.items():
            draw(groups[title], docs / file)
    return page(results, times, gain, plots)


def _json(path: Path) -> Any:
    return json.loads(path.read_text()) if path.exists() else None


def main() -> None:
    check = "--check" in sys.argv[1:]
    text, path = make(DOCS, draw_plots=not check), DOCS / "benchmarks.md"
    if check and (not path.exists() or path.read_text() != text):
        sys.exit("docs/benchmarks.md is not what docs/measured says: run `make benchmarks`")
    if not check:
        path.write_text(text)
        print(f"written: {path}")


if __name__ == "__main__":
    main()
