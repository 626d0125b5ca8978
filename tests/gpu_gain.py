"""Where reading by stride pays: each kernel on strided operands, against copies and dense ones.

    python tests/gpu_gain.py OUT.json SECONDS [ATTENTION ...]      --small for a dry run on a CPU

One packed projection, three copies by Inductor, one attention call; the same call on the views.
No matmul is around it, and CUDA graphs take the launches away, so that nothing hides a kernel that
reads strided rows more slowly than dense ones. ``docs/benchmarks.md`` shows what came out.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from qkvpass import bench, bench_shapes

ATTENTIONS = ("fa3", "fa4", "flash", "cudnn", "efficient", "triton")
HEADS = ((16, 72), (16, 80), (25, 128), (16, 64))  # PaddleOCR-VL, Qwen2.5-VL, InternViT, CLIP-L
# (sequences, tokens in each): windows, batches of images, pages.
TOKENS = (
    (16, 64), (256, 64), (1, 256), (1, 1024), (13, 1025), (32, 729), (1, 4096), (1, 16384),
)  # fmt: skip
MOST_SCORES = 2**28  # of one head; beyond it a call takes so long that no copy shows


def run(attention: str, heads: int, dim: int, shape: tuple[int, int], device: str) -> Any:
    """One cell: microseconds of each way, and their ratios with 95 % intervals."""
    sequences, longest = shape
    tokens, width = sequences * longest, heads * dim
    attend = bench_shapes.load_attention(attention, device) or bench_shapes.by_sdpa
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    packed = torch.randn(tokens, 3 * width, device=device, dtype=dtype)
    bounds = torch.arange(sequences + 1, dtype=torch.int32, device=device) * longest
    views = [t.view(tokens, heads, dim) for t in packed.split(width, dim=-1)]
    copied = torch.compile(lambda ts: [t.contiguous() for t in ts], dynamic=False)
    dense = copied(views)
    ways: dict[str, Callable[[], Any]] = {
        "copies": lambda: copied(views),
        "dense": lambda: attend(*dense, bounds, longest),
        "copies and dense": lambda: attend(*copied(views), bounds, longest),
        "strided": lambda: attend(*views, bounds, longest),
    }
    settings = bench.Settings(rounds=21, sample_ms=4.0, budget_s=4.0)
    with torch.no_grad(), bench_shapes.ATTENTIONS[attention].using():
        same = torch.equal(ways["dense"](), ways["strided"]())
        timed = {k: bench.replayed(w) if device == "cuda" else w for k, w in ways.items()}
        times = bench.alternated(timed, settings, device)
    kernel = bench.ratio_of(times["strided"], times["dense"])
    pays = bench.ratio_of(times["copies and dense"], times["strided"])
    return {
        "attention": attention,
        "heads": heads,
        "head_dim": dim,
        "sequences": sequences,
        "tokens": tokens,
        "same_bits": same,
        "us": {name: round(statistics.median(found) * 1e3, 2) for name, found in times.items()},
        "strided / dense": [kernel.ratio, kernel.low, kernel.high],
        "copies and dense / strided": [pays.ratio, pays.low, pays.high],
    }


def cells(attentions: Sequence[str], until: float, device: str, small: bool) -> list[Any]:
    """Every cell that there is time for; a kernel that does not take a shape says so."""
    found: list[Any] = []
    shapes = [(2, 64), (1, 100)] if small else TOKENS
    for attention in attentions:
        for heads, dim in HEADS[:1] if small else HEADS:
            for sequences, longest in shapes:
                torch._dynamo.reset()
                if sequences * longest**2 > MOST_SCORES or time.time() > until:
                    continue
                try:
                    cell = run(attention, heads, dim, (sequences, longest), device)
                except Exception as fault:
                    cell = {"attention": attention, "fault": f"{type(fault).__name__}: {fault}"}
                    print(attention, heads, dim, sequences, longest, str(fault)[:200], flush=True)
                found.append(cell)
        print(f"{attention}: {len(found)} cells so far", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("seconds", type=float)
    parser.add_argument("attentions", nargs="*", default=list(ATTENTIONS))
    parser.add_argument("--small", action="store_true", help="small shapes, on the CPU")
    options = parser.parse_intermixed_args()
    device = "cpu" if options.small else "cuda"
    attentions = ["sdpa"] if options.small else options.attentions
    found = cells(attentions, time.time() + options.seconds, device, options.small)
    result = {"where": bench.where(device), "cells": found}
    options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
