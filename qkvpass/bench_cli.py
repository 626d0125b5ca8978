"""``qkvpass bench``: its options, its table."""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import json
import math
import os
import sys
from collections.abc import Iterator
from typing import Any

import torch

from . import bench
from .bench import BenchError, Result, Settings, Subject
from .bench_shapes import ATTENTIONS, SHAPES
from .report import human_bytes


def bench_command(
    target: str,
    *,
    attention: str,
    tokens: str,
    layers: int,
    part: str,
    batch: int,
    scale: float,
    device: str,
    dtype: str,
    twin: str,
    settings: Settings,
    as_json: bool,
    plot: str,
) -> list[Result]:
    """Measure and print. The options are those of ``qkvpass bench --help``.

    Args:
        target: a named shape, ``timm:NAME``, or ``pkg.module:factory``, whose factory returns
            (model, args) or (model, args, kwargs).

    Raises:
        BenchError: if something is not as the message then says it must be.
    """
    for package in ("rich", *(["matplotlib"] if plot else [])):
        if importlib.util.find_spec(package) is None:
            raise BenchError(
                f'{package} is not installed; bench needs pip install "qkvpass[bench]"'
            )
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler's own chatter
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    cases = _cases(target, attention, tokens)
    results = []
    for number, (kind, count) in enumerate(cases):
        if target in SHAPES:
            subject, paper = bench.named_subject(
                target,
                attention=kind or "sdpa",
                layers=None if layers < 0 else layers,
                part=part,
                batch=batch or None,
                tokens=count,
                scale=scale,
                device=device,
                dtype=_dtype(dtype or "bfloat16"),
            )
        else:
            subject, paper = _loaded(target, kind, twin, batch, device, dtype), None
        with _progress(number, len(cases)) as progress:
            results.append(bench.measure(subject, settings, paper_bytes=paper, progress=progress))
        if not as_json:
            print_result(results[-1])
    if as_json:
        print(json.dumps([json.loads(result.to_json()) for result in results], indent=1))
    if plot:
        from .bench_plot import draw

        draw(results, plot)
        print(f"drawn: {plot}", file=sys.stderr)
    return results


def _cases(target: str, attention: str, tokens: str) -> list[tuple[str, int | None]]:
    kinds = [part.strip() for part in attention.split(",") if part.strip()] or [""]
    if unknown := [kind for kind in kinds if kind and kind not in ATTENTIONS]:
        raise BenchError(f"{unknown[0]!r} is no attention; give some of {', '.join(ATTENTIONS)}")
    if target not in SHAPES:
        if ":" not in target:
            raise BenchError(
                f"{target!r} is no shape; give one of {', '.join(SHAPES)}, or timm:NAME, or "
                "pkg.module:factory"
            )
        if tokens:
            raise BenchError("--tokens needs a named shape: a model brings its own inputs")
        if calls := [kind for kind in kinds if kind and ATTENTIONS[kind].load]:
            raise BenchError(
                f"{calls[0]} is an op that the model calls itself; for a model of your own give "
                "an SDPA backend, or leave --attention out"
            )
    try:
        counts: list[int | None] = [int(part) for part in tokens.split(",") if part.strip()]
    except ValueError:
        raise BenchError(f"--tokens is {tokens!r}; give numbers such as 256,1024,4096") from None
    return [(kind, count) for kind in kinds for count in counts or [None]]


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise BenchError(f"{name!r} is no floating-point dtype; give bfloat16, float16 or float32")
    return found


def _loaded(target: str, attention: str, twin: str, batch: int, device: str, dtype: str) -> Subject:
    """A zoo model or a factory's; moved where the user says so, or where timm models must go."""
    from .cli import TargetError, load_target

    try:
        model, args, kwargs = load_target(target)
        other = load_target(twin)[0] if twin else None
    except TargetError as error:
        raise BenchError(str(error)) from error
    from_timm = target.startswith("timm:")
    if batch and not from_timm:
        raise BenchError("--batch needs a named shape or a timm model; a factory sets its own")
    if batch:
        args = tuple(torch.randn(batch, *a.shape[1:]) for a in args)
    kind = _dtype(dtype) if dtype else torch.bfloat16 if from_timm else None
    if isinstance(model, torch.nn.Module):
        model = model.to(device, kind).eval()
    moved = torch.utils._pytree.tree_map(lambda value: _moved(value, device, kind), (args, kwargs))
    if isinstance(other, torch.nn.Module):
        other = _with_weights_of(model, other.to(device, kind).eval())
    facts = {
        "shapes": [list(a.shape) for a in args if isinstance(a, torch.Tensor)],
        "dtype": str(kind or "").removeprefix("torch."),
    }
    return Subject(target, model, moved[0], moved[1], other, attention, 0, facts)


def _moved(value: Any, device: str, dtype: torch.dtype | None) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return value.to(device, dtype if value.is_floating_point() else None)


def _with_weights_of(model: torch.nn.Module, twin: torch.nn.Module) -> torch.nn.Module:
    try:
        twin.load_state_dict(copy.copy(model.state_dict()), assign=True)
    except RuntimeError as error:
        raise BenchError(f"the twin has other parameters than the model: {error}") from error
    return twin


@contextlib.contextmanager
def _progress(number: int, count: int) -> Iterator[bench.Progress]:
    prefix = f"[{number + 1}/{count}] " if count > 1 else ""
    with bench.bar() as inner:
        yield lambda what, done, total: inner(f"{prefix}{what}", done, total)


def print_result(result: Result) -> None:
    """One result as a table and its sentence."""
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 120
    dims = ", ".join(
        f"{result.facts[key]} {word}"
        for key, word in (("layers", "layers"), ("tokens", "tokens"), ("heads", "heads"))
        if key in result.facts
    )
    attention = result.attention or "the model's own attention"
    console.print(
        f"\n{' · '.join(x for x in (result.subject, dims, attention, result.facts['dtype']) if x)}"
        f" · {result.where['device']} · torch {result.where['torch']}",
        markup=False,
    )
    table = Table()
    titles = (
        "",
        "ms (quartiles)",
        "over stock",
        "peak MiB",
        "kernels around attention",
        "kernels' bytes",
    )
    for title in (*titles, "compile s"):
        table.add_column(title, justify="left" if not title else "right")
    for name, one in result.variants.items():
        kernels = one.kernels
        around = f"{kernels['in_front'] + kernels['behind']} ({kernels['copies']} copies)"
        nbytes = "" if one.generated_bytes is None else human_bytes(one.generated_bytes)
        table.add_row(
            name,
            f"{one.median_ms:.3f} ({one.low_ms:.3f} to {one.high_ms:.3f})",
            f"{result.variants[bench.STOCK].median_ms / one.median_ms:.3f}",
            "" if one.peak_mib is None else f"{one.peak_mib:.1f}",
            around,
            nbytes,
            f"{one.compile_s:.1f}" if one.compile_s else "",
        )
    console.print(table)
    for name, ratio in result.ratios.items():
        console.print(f"{name:20} {ratio.ratio:.4f}  ({ratio.low:.4f} to {ratio.high:.4f})")
    ours = result.variants[bench.OURS]
    seconds = result.decisions["seconds"]
    share = seconds / ours.compile_s if ours.compile_s else math.nan
    same = ", ".join(k for k, v in result.same_bits.items() if v) or "none"
    console.print(
        f"the pass took {seconds * 1e3:.0f} ms of {ours.compile_s:.1f} s of compiling"
        f" ({share:.2%}); bits equal those of: {same}",
    )
    if result.paper_bytes is not None and ours.generated_bytes is not None:
        stock = result.variants[bench.STOCK].generated_bytes or 0
        console.print(
            f"traffic saved: {human_bytes(stock - ours.generated_bytes)} by Inductor's count, "
            f"{human_bytes(result.paper_bytes)} on paper"
        )
    console.print(result.sentence, markup=False, soft_wrap=True)
