"""Certify every attention op of the table that this machine has.

    python tests/gpu_certify.py OUT [NAME ...]

Writes one JSON certificate an op into the folder OUT, whatever its verdict, and prints a
summary. Each op has a process of its own: a kernel that faults takes only that with it, and is
tried again without what is dangerous.
"""

from __future__ import annotations

import concurrent.futures
import os
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))

CORES = os.cpu_count() or 1
TOGETHER = max(1, min(6, CORES // 2))  # processes at a time; most of their time goes to Python
SECONDS = 540  # for one op, all its attempts together; FlashAttention 4 compiles as it goes
LEFT_OUT = ("aten::scaled_dot_product_attention",)  # picks another op when it runs
ATTEMPTS = ("", "misaligned", "empty,far,misaligned")  # what to leave out


def names() -> list[str]:
    """Ops of the table that are registered once their libraries are imported."""
    from qkvpass.builtin_ops import BUILTIN_OPS
    from qkvpass.certify import CannotCertify, resolve
    from qkvpass.known_inputs import KNOWN_INPUTS

    table = {op.name for op in BUILTIN_OPS if not op.name.startswith("python:")}
    found = []
    for name in dict.fromkeys((*KNOWN_INPUTS, *sorted(table))):
        if "*" in name or name in LEFT_OUT:
            continue
        try:
            resolve(name)
        except CannotCertify:
            continue
        found.append(name)
    return found


def one(name: str, out: str, skip: str) -> int:
    """Certify in this process."""
    import torch

    from qkvpass.certify import CannotCertify, certify

    torch.set_num_threads(max(1, CORES // TOGETHER))
    device = "cpu" if "for_cpu" in name or not torch.cuda.is_available() else "cuda"
    try:
        certificate = certify(name, device=device, skip=[s for s in skip.split(",") if s])
    except CannotCertify as error:
        print(f"cannot: {error}", flush=True)
        return 0
    print(certificate, flush=True)
    file = f"{name.replace('::', '.')}.{certificate.arch}.json"
    (Path(out) / file).write_text(certificate.to_json() + "\n")
    os._exit(0)  # a dead device may fault once more when it is let go


def attempt(name: str, out: str) -> tuple[str, float, str]:
    """(name, seconds, what was printed) of the first attempt that its process survived."""
    start = time.perf_counter()
    said = ""
    for skip in ATTEMPTS:
        left = SECONDS - (time.perf_counter() - start)
        if left < 10:
            break
        command = [sys.executable, "-W", "ignore", __file__, "--one", name, out, skip]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=left)
        except subprocess.TimeoutExpired:
            said += f"took more than {left:.0f} s with skip={skip!r}\n"
            break
        if done.returncode == 0:
            return name, time.perf_counter() - start, said + done.stdout.strip()
        last = (done.stdout + done.stderr).strip().splitlines()[-3:]
        said += f"died ({done.returncode}) with skip={skip!r}: {' | '.join(last)}\n"
    return name, time.perf_counter() - start, said.strip()


def main(out: str, wanted: list[str]) -> int:
    Path(out).mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    summary = []
    with concurrent.futures.ThreadPoolExecutor(TOGETHER) as pool:
        jobs = [pool.submit(attempt, name, out) for name in wanted or names()]
        for job in concurrent.futures.as_completed(jobs):
            name, seconds, said = job.result()
            state = next((s for s in ("passed", "FAILED", "cannot") if s in said), "died")
            summary.append(f"{state:<7} {seconds:5.0f} s  {name}")
            print(f"--- {name}, {seconds:.0f} s\n{said}\n", flush=True)
    print(*sorted(summary), f"{time.perf_counter() - start:.0f} s in all", sep="\n")
    return 0


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    if sys.argv[1] == "--one":
        sys.exit(one(*sys.argv[2:5]))
    sys.exit(main(sys.argv[1], sys.argv[2:]))
