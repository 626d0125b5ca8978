"""All benchmarks of the docs, on one GPU, the most wanted first, until the time is up.

    python tests/gpu_bench.py OUT SECONDS [NAME ...]      --small for a dry run on a CPU

Writes OUT/NAME.json as soon as a result is known, and OUT/NAME.fault.txt where there is none; what
OUT has already is not measured again, so that a second run goes on where the first one stopped.
The work is done in a child process: a kernel that faults takes one benchmark with it.
``python tests/bench_page.py`` makes the docs of what lies in docs/measured/bench.
"""

from __future__ import annotations

import argparse
import gc
import subprocess
import sys
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

COMPILED = ("stock", "qkvpass", "hand")
EAGER_TOO = ("eager", *COMPILED, "eager hand")


@dataclass(frozen=True)
class Job:
    """One benchmark: a named shape, how it is built, how it is measured.

    ``seconds`` is a guess at what it takes; a job is left out where less is left.
    """

    name: str
    shape: str
    attention: str
    seconds: float = 25
    build: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)


def job(shape: str, attention: str, label: str = "", seconds: float = 25, **options: Any) -> Job:
    settings = {k: options.pop(k) for k in ("variants", "cuda_graphs", "rounds") if k in options}
    name = "-".join(part for part in (shape, attention, label) if part)
    return Job(name, shape, attention, seconds, {"layers": 2, **options}, settings)


def small_batches() -> list[Job]:
    """Under CUDA graphs, where launches are gone and a copy is a larger share."""
    shapes = {
        "siglip-b": [8],
        "vit-b-16": [1, 8],
        "clip-l-336": [1],
        "siglip-so400m": [1],
    }
    jobs = [
        job(shape, "sdpa", f"b{batch}-graphs", 20, batch=batch, layers=6, cuda_graphs=True)
        for shape, batches in shapes.items()
        for batch in batches
    ]
    for shape in ("internvit-300m", "siglip-so400m"):
        jobs.append(job(shape, "fa3", "b1-graphs", 20, batch=1, layers=6, cuda_graphs=True))
    return jobs


def scaling(attention: str, counts: tuple[int, ...]) -> list[Job]:
    return [
        job("paddleocr-vl-page", attention, f"{count}-tokens", 12, tokens=count, layers=1)
        for count in counts
    ]


PAGE, ROPE, OPAQUE = (f"paddleocr-vl-page{end}" for end in ("", "-rope", "-opaque-rope"))
SMALL = small_batches()
JOBS: list[Job] = [
    job(PAGE, "fa3", "all-layers", 120, layers=0, variants=EAGER_TOO),
    job(PAGE, "fa3", "attention-alone", 15, part="attention", layers=1, variants=EAGER_TOO),
    job("siglip-so400m", "flash"),
    job("vit-b-16", "sdpa", "b256", batch=256, layers=4),
    job("sam-vit-h", "flash"),
    job("sam-vit-h-positions", "efficient"),
    job("openclip-bigg", "flash"),
    job("dinov3-l", "sdpa", layers=4),
    job("mlcd-bigg", "sdpa", layers=4),
    job("vit-h-518", "flash"),
    job("dinov3-7b", "flash"),
    job("internvit-6b", "fa3"),
    SMALL[0],
    SMALL[1],
    job(ROPE, "fa3"),
    job(OPAQUE, "fa3"),
    job("qwen2.5-vl-windows", "fa3"),
    job("qwen2.5-vl-full", "fa3"),
    job(PAGE, "fa4", layers=1),
    job(PAGE, "triton", layers=1),
    job("siglip-so400m", "cudnn"),
    *scaling("fa3", (256, 1024, 4096, 16384, 65536, 131072)),
    *SMALL[2:],
    job("internvit-300m", "fa3"),
    job(PAGE, "flash"),
    job(PAGE, "cudnn"),
    job("sam-vit-h", "cudnn"),
    job("siglip-so400m", "fa3"),
    job("siglip-so400m", "efficient"),
    job("openclip-bigg", "cudnn"),
    job("vit-h-518", "cudnn"),
    job("dinov3-7b", "cudnn"),
    job("qwen2.5-vl-windows", "fa4"),
    job("internvit-6b", "fa4"),
    job("qwen2.5-vl-full", "flash"),
    *scaling("flash", (256, 1024, 4096, 16384, 65536, 131072)),
    *scaling("fa4", (256, 1024, 4096, 16384, 65536)),
    *scaling("triton", (256, 1024, 4096, 16384)),
    *scaling("fa3", (512, 2048, 8192, 32768)),
]


def run(one: Job, out: Path, small: bool) -> str:
    """Measure one job and write it down. Returns its sentence."""
    import torch

    from qkvpass import bench

    options = dict(one.build, attention=one.attention, device="cuda")
    settings = {"fresh_kernels": False, "budget_s": 20.0, "rounds": 21, "sample_ms": 60.0}
    settings |= {"variants": COMPILED, **one.settings}
    if small:
        options |= {"attention": "sdpa", "device": "cpu", "scale": 0.13, "layers": 1}
        options |= {"tokens": None, "dtype": torch.float32}
        settings |= {"cuda_graphs": False, "rounds": 3, "sample_ms": 1.0}
    subject, paper = bench.named_subject(one.shape, **options)
    result = bench.measure(subject, bench.Settings(**settings), paper_bytes=paper)
    (out / f"{one.name}.json").write_text(result.to_json() + "\n")
    return result.sentence


def child(names: list[str], out: Path, until: float, small: bool) -> None:
    """Run the jobs that are named, in order; each is announced before it starts."""
    for one in (job for name in names for job in JOBS if job.name == name):
        if (out / f"{one.name}.json").exists():
            continue
        left = until - time.time()
        if left < one.seconds and not small:
            print(f"left out for want of time: {one.name} ({left:.0f} s left)", flush=True)
            continue
        (out / "running").write_text(one.name)
        start = time.time()
        try:
            said = run(one, out, small)
        except Exception as fault:
            (out / f"{one.name}.fault.txt").write_text(traceback.format_exc())
            said = f"FAULT {type(fault).__name__}: {str(fault)[:300]}"
        print(f"{one.name} ({time.time() - start:.0f} s): {said}", flush=True)
        _let_go()
    (out / "running").unlink(missing_ok=True)


def _let_go() -> None:
    import torch

    torch._dynamo.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("seconds", type=float)
    parser.add_argument("names", nargs="*", help="of jobs; all by default")
    parser.add_argument("--small", action="store_true", help="shrunken shapes, on the CPU")
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)
    options = parser.parse_intermixed_args()
    options.out.mkdir(parents=True, exist_ok=True)
    names = options.names or [one.name for one in JOBS]
    if unknown := set(names) - {one.name for one in JOBS}:
        parser.error(f"no job is called {unknown.pop()}; there are {[j.name for j in JOBS]}")
    if options.until is not None:
        child(names, options.out, options.until, options.small)
        return
    until = time.time() + options.seconds
    flags = ["--small"] if options.small else []
    while names and time.time() < until:
        command = [sys.executable, "-W", "ignore", __file__, str(options.out), "0"]
        command += [*names, "--until", str(until), *flags]
        try:
            code = subprocess.run(command, timeout=max(1.0, until - time.time() + 20)).returncode
        except subprocess.TimeoutExpired:
            break
        running = options.out / "running"
        if code == 0 or not running.exists():
            break
        died = running.read_text()
        print(f"{died}: the process died ({code})", flush=True)
        (options.out / f"{died}.fault.txt").write_text(f"the process died with {code}\n")
        names = names[names.index(died) + 1 :]
    (options.out / "running").unlink(missing_ok=True)


if __name__ == "__main__":
    main()
