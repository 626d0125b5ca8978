"""Attention kernels that are plain Python, as registered ops, so that a graph can hold a call.

Importing this module registers the ops; each imports its kernel when it first runs.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op

__all__ = ["flash_attn_4"]


@custom_op("qkvpass::flash_attn_4", mutates_args=(), device_types="cuda")
def flash_attn_4(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
) -> tuple[Tensor, Tensor]:
    """FlashAttention 4 (``flash_attn.cute``), forward only.

    Args:
        q: (tokens, heads, head size) with ``cu_seqlens_q`` and ``cu_seqlens_k``, else
            (batch, tokens, heads, head size); float16 or bfloat16, read by stride.
        k: as q, with as many heads as q or a divisor of them.
        v: as k; its head size may be another.
        cu_seqlens_q: (sequences + 1,) int32, where each sequence of q starts, in tokens.
        cu_seqlens_k: likewise for k and v.
        max_seqlen_q: tokens of the longest sequence of q; by default a bound is found.
        max_seqlen_k: likewise for k and v.
        softmax_scale: by default the head size of q to the power of -0.5.
        causal: mask what comes later.

    Returns:
        The output, dense, shaped as q but for the head size of v; and the log of the sums of
        exponentials, float32, (heads, tokens) or (batch, heads, tokens).

    Raises:
        ImportError: where flash-attn-4 is not installed.
    """
    if (cu_seqlens_q is None) != (cu_seqlens_k is None):
        raise ValueError("cu_seqlens_q was given without cu_seqlens_k, or the other way round")
    cute = _kernel("flash_attn.cute", "flash-attn-4")
    options: dict[str, Any] = {"softmax_scale": softmax_scale, "causal": causal, "return_lse": True}
    if cu_seqlens_q is None:
        out, lse = cute.flash_attn_func(q, k, v, **options)
        return out, lse
    out, lse = cute.flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        **options,
    )
    return out, lse


@flash_attn_4.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None = None,
    *options: Any,
    **more: Any,
) -> tuple[Tensor, Tensor]:
    *lead, tokens, heads, _ = q.shape
    out = q.new_empty((*lead, tokens, heads, v.shape[-1]))
    return out, q.new_empty((*lead, heads, tokens), dtype=torch.float32)


@functools.cache
def _kernel(module: str, distribution: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as missing:
        raise ImportError(
            f"this op runs {module}, which could not be imported ({missing}): "
            f"pip install {distribution}"
        ) from missing
