"""What the pass does to encoders on a GPU: bits, strides, kernels, memory, time.

    python tests/gpu_encoders.py bits OUT.json     deterministic, in a fresh process
    python tests/gpu_encoders.py times OUT.json    alternated rounds of stock, pass, hand edit

Both write JSON and print it. ``--small`` shrinks the shapes, so that the script itself can
be tried without a GPU (with ops of the CPU).
"""

from __future__ import annotations

import argparse
import collections
import json
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))

import paddleocr_vl_encoder

import qkvpass

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
received: list[tuple[tuple[int, ...], ...]] = []  # strides and storage of q, k, v in the FA3 kernel


def fa3():
    """FlashAttention 3's op, with the strides recorded where its kernel is called."""
    import fa3_fwd_interface as interface

    real = interface.fa3_fwd_cuda

    class Recorder:
        def fwd(self, q, k, v, *rest):
            storages = {t.untyped_storage().data_ptr() for t in (q, k, v)}
            received.append((q.stride(), k.stride(), v.stride(), (len(storages),)))
            return real.fwd(q, k, v, *rest)

    if not isinstance(real, Recorder) and type(real).__name__ != "Recorder":
        interface.fa3_fwd_cuda = Recorder()
    op = torch.ops.fa3_fwd._flash_attn_forward

    def attend(q, k, v, cu_seqlens):
        # One page is one image: the longest sequence has all tokens.
        return op(
            q, k, v, cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens,
            max_seqlen_q=q.shape[0], max_seqlen_k=q.shape[0], softmax_scale=q.shape[-1] ** -0.5,
        )[0]  # fmt: skip

    return attend


class Block(nn.Module):
    """Pre-norm block with one packed projection; subclasses say how it is split and attended."""

    def __init__(self, heads, dim, mlp, copies=True):
        super().__init__()
        width = heads * dim
        self.heads, self.dim, self.width = heads, dim, width
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, mlp), nn.Linear(mlp, width)
        self.copies = copies

    def forward(self, x, *rest):
        x = x + self.out(self.attention(self.qkv(self.norm1(x)), *rest))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class BatchedBlock(Block):
    """Over (batch, tokens, width) with SDPA (F3): copies to head-major."""

    def attention(self, packed):
        batch, tokens, _ = packed.shape
        parts = packed.split(self.width, dim=-1)
        q, k, v = (t.view(batch, tokens, self.heads, self.dim).transpose(1, 2) for t in parts)
        if self.copies:
            q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        out = F.scaled_dot_product_attention(q, k, v).transpose(1, 2)
        return out.reshape(batch, tokens, self.width)


class WindowBlock(Block):
    """SAM's windows (F4): the copy hides in ``reshape(3, B * H, N, D)``."""

    def attention(self, packed):
        batch, tokens, _ = packed.shape
        packed = packed.view(batch, tokens, 3, self.heads, self.dim).permute(2, 0, 3, 1, 4)
        if self.copies:
            parts = packed.reshape(3, batch * self.heads, tokens, self.dim).unbind(0)
            q, k, v = (t.view(batch, self.heads, tokens, self.dim) for t in parts)
        else:
            q, k, v = packed.unbind(0)
        out = F.scaled_dot_product_attention(q, k, v).transpose(1, 2)
        return out.reshape(batch, tokens, self.width)


class Stack(nn.Module):
    def __init__(self, blocks):
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x, *rest):
        for block in self.blocks:
            x = block(x, *rest)
        return x


def stack(kind, layers, *shape, **options):
    torch.manual_seed(0)
    return Stack(kind(*shape, **options) for _ in range(layers)).to(DEVICE, torch.bfloat16).eval()


def page_inputs(tokens):
    x = torch.randn(tokens, paddleocr_vl_encoder.WIDTH, device=DEVICE, dtype=torch.bfloat16)
    return x, torch.tensor([0, tokens], device=DEVICE, dtype=torch.int32)


def cases(small):
    """name -> (module with copies, its hand-edited twin, inputs, SDPA backend or None)."""
    attend = fa3() if ON_GPU else paddleocr_vl_encoder.varlen_attention
    tokens, layers = (10764, 27) if not small else (64, 2)

    def page(count):
        def make(copies):
            torch.manual_seed(0)
            encoder = paddleocr_vl_encoder.Encoder(count, attend, copies)
            return encoder.to(DEVICE, torch.bfloat16).eval()

        return make, lambda: page_inputs(tokens), None

    def batched(kind, count, batch, tokens, shape, backend):
        def make(copies):
            return stack(kind, count, *shape, copies=copies)

        def inputs():
            size = (batch, tokens, shape[0] * shape[1])
            return (torch.randn(size, device=DEVICE, dtype=torch.bfloat16),)

        return make, inputs, backend

    so400m = ((16, 72, 4304), 32, 729, 4) if not small else ((2, 8, 32), 2, 16, 1)
    sam = ((16, 80, 5120), 25, 196, 4) if not small else ((2, 8, 32), 2, 16, 1)
    found = {"page-27-layers-fa3": page(layers), "page-4-layers-fa3": page(min(layers, 4))}
    backends = [
        SDPBackend.FLASH_ATTENTION,
        SDPBackend.EFFICIENT_ATTENTION,
        SDPBackend.CUDNN_ATTENTION,
    ]
    for backend in backends if ON_GPU else [None]:
        name = backend.name.split("_")[0].lower() if backend else "cpu"
        dims, batch, count, depth = so400m
        found[f"so400m-b32-sdpa-{name}"] = batched(BatchedBlock, depth, batch, count, dims, backend)
        dims, batch, count, depth = sam
        found[f"sam-windows-{name}"] = batched(WindowBlock, depth, batch, count, dims, backend)
    return found


class Using:
    """The SDPA backend of a case, where it names one."""

    def __init__(self, backend):
        self.context = sdpa_kernel(backend) if backend else None

    def __enter__(self):
        return self.context.__enter__() if self.context else None

    def __exit__(self, *fault):
        return self.context.__exit__(*fault) if self.context else None


def compiled_variants(make):
    torch._dynamo.reset()
    with_copies = make(True)
    return {
        "stock": torch.compile(with_copies, dynamic=False),
        "pass": torch.compile(with_copies, backend=qkvpass.backend, dynamic=False),
        "hand": torch.compile(make(False), dynamic=False),
    }


def seen(run, inputs):
    """Strides and number of storages that the kernel received, where it was recorded."""
    received.clear()
    output = run(*inputs)
    return output, [list(map(list, entry)) for entry in dict.fromkeys(received)]


def bits(small):
    """Each variant in a process of its own: two compiles in one process need not agree.

    Stock runs in two processes, to see whether it agrees with itself.
    """
    variants = {"stock": "stock", "stock again": "stock", "pass": "pass", "hand": "hand"}
    with tempfile.TemporaryDirectory() as folder:
        found = {}
        for label, variant in variants.items():
            command = [sys.executable, __file__, f"run-{variant}", f"{folder}/{label}.pt"]
            subprocess.run(command + ["--small"] * small, check=True)
            found[label] = torch.load(f"{folder}/{label}.pt")
    results = {}
    for name, ours in found["pass"].items():
        results[name] = {
            f"{other} gives the same bits": same_bits(ours, found[other][name])
            for other in ("stock", "hand")
        }
        itself = same_bits(found["stock"][name], found["stock again"][name])
        results[name]["stock agrees with itself"] = itself
        results[name]["pass"] = {k: v for k, v in ours.items() if k != "outputs"}
        results[name]["stock received"] = found["stock"][name].get("received")
        print(name, json.dumps(results[name]), flush=True)
    return results


def same_bits(one, other):
    if "outputs" not in one or "outputs" not in other:
        return None
    return all(torch.equal(a, b) for a, b in zip(one["outputs"], other["outputs"]))


def outputs(variant, small):
    """Outputs of every case by one variant on two inputs, and what the kernel received."""
    return {name: guarded(outputs_of, variant, *case) for name, case in cases(small).items()}


def outputs_of(variant, make, inputs, backend):
    torch._dynamo.reset()
    model = make(variant != "hand")
    use = qkvpass.backend if variant == "pass" else "inductor"
    with torch.no_grad(), Using(backend), qkvpass.capture() as reports:
        run = torch.compile(model, backend=use, dynamic=False)
        results, strides = [], []
        for seed in range(2):
            torch.manual_seed(seed)
            result, strides = seen(run, inputs())
            results.append(result.cpu())
    found = {"outputs": results, "received": strides}
    if reports:
        report = qkvpass.Report.merge(reports)
        found["ops"] = sorted({op.op for op in report.attention_ops})
        found["removed"] = len(report.removed)
        found["kept"] = [str(copy.reason) for copy in report.kept]
    return found


def guarded(function, *args):
    try:
        return function(*args)
    except Exception as fault:
        traceback.print_exc()
        return {"fault": f"{type(fault).__name__}: {fault}"[:2000]}


def times(small):
    results = {}
    for name, (make, inputs, backend) in cases(small).items():
        results[name] = guarded(times_of, make, inputs, backend, 2 if small else 9)
        print(name, json.dumps(results[name]), flush=True)
    return results


def times_of(make, inputs, backend, rounds):
    with torch.no_grad(), Using(backend):
        variants = compiled_variants(make)
        given = inputs()
        for run in variants.values():
            for _ in range(3):
                run(*given)
        spent = {variant: [] for variant in variants}
        for i in range(rounds):
            order = list(variants.items())
            for variant, run in order if i % 2 else reversed(order):
                spent[variant].append(milliseconds(run, given))
        ratios = [s / p for s, p in zip(spent["stock"], spent["pass"])]
        to_hand = [p / h for p, h in zip(spent["pass"], spent["hand"])]
        return {
            "median ms": {v: round(statistics.median(t), 4) for v, t in spent.items()},
            "all ms": {v: [round(x, 4) for x in t] for v, t in spent.items()},
            "stock / pass": round(statistics.median(ratios), 4),
            "pass / hand": round(statistics.median(to_hand), 4),
            "q, k, v received: strides, storages": {
                v: seen(run, given)[1] for v, run in variants.items()
            },
            "peak MiB above inputs": {v: peak(run, given) for v, run in variants.items()},
            "kernels": {v: kernels(run, given) for v, run in variants.items()},
        }


def milliseconds(run, given, repeats=5):
    if not ON_GPU:
        start = time.perf_counter()
        run(*given)
        return (time.perf_counter() - start) * 1e3
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    for _ in range(repeats):
        run(*given)
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / repeats


def peak(run, given):
    if not ON_GPU:
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run(*given)
    torch.cuda.synchronize()
    return round((torch.cuda.max_memory_allocated() - before) / 2**20, 1)


def kernels(run, given):
    """Kernels of one call: how many in all, and which ran around attention, GEMM to GEMM."""
    if not ON_GPU:
        return None
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run(*given)
        torch.cuda.synchronize()
    events = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    names = [e.name for e in sorted(events, key=lambda e: e.time_range.start)]
    kinds = [kind(name) for name in names]
    spans = {span(kinds, i) for i, what in enumerate(kinds) if what == "attention"}
    around = collections.Counter(tuple(names[start:end]) for start, end in spans)
    return {
        "all": len(names),
        "named clone or copy": sum("clone" in n or "copy" in n for n in names),
        "between the two GEMMs": [
            {"layers": count, "kernels": [name[:100] for name in run]}
            for run, count in around.most_common()
        ],
    }


KINDS = {  # in this order: attention kernels are made of GEMM templates, too
    "other": ("triton_",),  # named after what they were fused from
    "attention": ("flash", "fmha", "attention", "cudnn"),
    "GEMM": ("gemm", "cutlass", "nvjet", "cublas"),
}


def kind(name):
    found = (k for k, words in KINDS.items() if any(w in name.lower() for w in words))
    return next(found, "other")


def span(kinds, at):
    """[start, end) of what ran between the GEMM before an attention kernel and the one behind."""
    start, end = at, at
    while start > 0 and kinds[start - 1] != "GEMM":
        start -= 1
    while end < len(kinds) and kinds[end] != "GEMM":
        end += 1
    return start, end


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("bits", "times", "run-stock", "run-pass", "run-hand"))
    parser.add_argument("out")
    parser.add_argument("--small", action="store_true")
    options = parser.parse_args()
    # AOTAutograd's cache does not tell SDPA backends apart, and tuned configurations are kept.
    torch._inductor.config.force_disable_caches = True
    torch._inductor.config.deterministic = options.what != "times"
    if options.what.startswith("run-"):
        torch.save(outputs(options.what.removeprefix("run-"), options.small), options.out)
        return
    results = {"bits": bits, "times": times}[options.what](options.small)
    device = torch.cuda.get_device_name() if ON_GPU else "CPU"
    text = json.dumps({"device": device, "torch": torch.__version__, "results": results}, indent=1)
    Path(options.out).write_text(text + "\n")


if __name__ == "__main__":
    main()
