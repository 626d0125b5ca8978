"""What runs between the projection and the output: kernels, by name, from the profiler.

On a GPU every kernel is seen. On a CPU the profiler sees calls: generated kernels, copies,
matmuls and attention are told apart; other eager ops are not counted.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

ATTENTION, MATMUL, COPY, OTHER = "attention", "matmul", "copy", "other"

# Parts of names, lower case; the first group that matches decides. Inductor names a generated
# kernel after the ops that went into it, and so a copy after the attention op that wanted it.
_GENERATED = ("triton_poi", "triton_per", "triton_red", "cpp_fused")
_TEMPLATES = ("triton_tem", "triton_mm")
_ATTENTION = ("flash", "fmha", "attention", "attn", "sdpa")
_MATMUL = (
    *("gemm", "cutlass", "nvjet", "cublas", "xmma", "splitk", "addmm", "aten::mm", "aten::bmm"),
    *("mkldnn::_linear", "cpp_cpu_gemm", "packed_gemm"),
)
_COPIES = ("copy", "clone", "contiguous", "memcpy", "scaled_dot_product")
_IGNORED = ("memset", "_to_copy")  # a cast is no layout copy


@dataclass(frozen=True)
class Kernel:
    name: str
    start: float  # µs
    duration: float  # µs
    kind: str
    nbytes: int = 0  # of an eager copy: read and written


def kind_of(name: str, attention_ops: Iterable[str] = ()) -> str:
    """What a kernel or call does, by its name.

    >>> kind_of("triton_poi_fused__scaled_dot_product_flash_attention_clone_3")
    'copy'
    >>> kind_of("void cutlass::device_kernel<flash::FlashAttnFwdSm90<...>>")
    'attention'
    """
    low = name.lower()
    if any(part in low for part in _GENERATED):
        return COPY if _has(low.replace("_to_copy", ""), _COPIES) else OTHER
    if _has(low, _TEMPLATES):
        return MATMUL
    if name in attention_ops or _has(low, _ATTENTION):
        return ATTENTION
    if _has(low, _MATMUL):
        return MATMUL
    return COPY if _has(low, _COPIES) and not _has(low, _IGNORED) else OTHER


def _has(name: str, parts: Sequence[str]) -> bool:
    return any(part in name for part in parts)


def kernels_between(
    call: Callable[[], Any], device: str, attention_ops: Iterable[str] = (), itemsize: int = 4
) -> dict[str, Any]:
    """Count what one call runs around its attention.

    Args:
        attention_ops: names of ops that are attention, beside those known by their name.
        itemsize: bytes an element, for the eager copies.

    Returns:
        ``attention`` (calls of it, neighbours counted once), ``in_front`` (kernels between
        the matmul before and the attention) and ``behind`` (between the attention and the next
        matmul), ``copies`` (of both, by name), ``us`` (their time), ``names`` (count by name,
        the most frequent first) and ``copy_bytes`` (what eager copies among them
        read and write; the bytes of generated kernels are no part of a profile).
    """
    activity = torch.profiler.ProfilerActivity
    activities = [activity.CPU, activity.CUDA] if device == "cuda" else [activity.CPU]
    with torch.profiler.profile(activities=activities, record_shapes=True) as profile:
        call()
        if device == "cuda":
            torch.cuda.synchronize()
    calls = around_attention(_calls(profile.events(), set(attention_ops), itemsize))
    if device != "cuda":
        return calls
    return {**around_attention(_kernels(profile.events())), "copy_bytes": calls["copy_bytes"]}


def around_attention(kernels: Sequence[Kernel]) -> dict[str, Any]:
    """The counts of :func:`kernels_between` for kernels in the order in which they ran."""
    in_front: list[Kernel] = []
    behind: list[Kernel] = []
    waiting: list[Kernel] = []  # since the last matmul or attention
    calls, last = 0, ""
    for kernel in kernels:
        if kernel.kind == ATTENTION:
            if last != ATTENTION or waiting:
                calls += 1
                (in_front if last != ATTENTION else behind).extend(waiting)
        elif kernel.kind == MATMUL:
            if last == ATTENTION:
                behind.extend(waiting)
        else:
            waiting.append(kernel)
            continue
        waiting, last = [], kernel.kind
    between = [*in_front, *behind]
    return {
        "attention": calls,
        "in_front": len(in_front),
        "behind": len(behind),
        "copies": sum(k.kind == COPY for k in between),
        "copy_bytes": sum(k.nbytes for k in between),
        "us": round(sum(k.duration for k in between), 2),
        "names": dict(Counter(k.name[:120] for k in between).most_common(12)),
    }


def _kernels(events: Iterable[Any]) -> list[Kernel]:
    """What ran on the GPU, in its order."""
    cuda = torch.autograd.DeviceType.CUDA
    ran = [e for e in events if e.device_type == cuda and not _is_no_kernel(e)]
    return [_kernel(e, kind_of(e.name)) for e in sorted(ran, key=lambda e: e.time_range.start)]


def _is_no_kernel(event: Any) -> bool:
    """Memory that is set, and the ranges of the host's annotations on the GPU's timeline."""
    named = event.name.startswith(("Memset", "##", "Torch-Compiled Region"))
    return named or getattr(event, "is_user_annotation", False)


def _calls(events: Iterable[Any], attention_ops: set[str], itemsize: int) -> list[Kernel]:
    """Calls that do work of a known kind; what they call in turn is part of them."""
    cpu = torch.autograd.DeviceType.CPU
    events = (e for e in events if e.device_type == cpu)
    calls: list[Kernel] = []
    until = 0.0
    for event in sorted(events, key=lambda e: (e.time_range.start, -e.time_range.end)):
        kind = kind_of(event.name, attention_ops)
        copy = event.name == "aten::copy_"
        counts = copy or "cpp_fused" in event.name or kind in (ATTENTION, MATMUL)
        if counts and event.time_range.start >= until:
            until = event.time_range.end
            nbytes = 2 * itemsize * math.prod(event.input_shapes[0]) if copy else 0
            calls.append(_kernel(event, kind, nbytes))
    return calls


def _kernel(event: Any, kind: str, nbytes: int = 0) -> Kernel:
    span = event.time_range
    return Kernel(event.name, span.start, span.elapsed_us(), kind, nbytes)
