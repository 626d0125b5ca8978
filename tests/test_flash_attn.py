"""The real ``flash-attn`` package, on fake CUDA tensors: its own ops, schemas and fakes.

It is installed without its GPU build (``make`` does so), and no GPU is needed: nothing runs.
"""

from __future__ import annotations

import os

import pytest
import torch
from standins import apply_pass
from torch import nn
from torch._functorch.aot_autograd import aot_export_module
from torch._subclasses.fake_tensor import FakeTensorMode

os.environ.setdefault("FLASH_ATTENTION_TRITON_AMD_ENABLE", "TRUE")  # else it wants its GPU build
flash_attn = pytest.importorskip("flash_attn", exc_type=ImportError)

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 64
WIDTH = HEADS * HEAD_DIM
SIZES = [WIDTH, KV_HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM]


class Layer(nn.Module):
    """Packed projection, split, three copies, an op of the package, output projection."""

    def __init__(self, attend):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, sum(SIZES)), nn.Linear(WIDTH, WIDTH)
        self.attend = attend

    def forward(self, x, starts):
        parts = self.qkv(x).split(SIZES, dim=-1)
        q, k, v = (t.unflatten(-1, (-1, HEAD_DIM)).contiguous() for t in parts)
        attended, *gradients = self.attend(q, k, v, starts)
        return self.out(attended.flatten(-2)), *gradients


def batched(q, k, v, starts):
    return (flash_attn.flash_attn_func(q, k, v),)


def packed(q, k, v, starts):
    return (flash_attn.flash_attn_varlen_func(q, k, v, starts, starts, 40, 40),)


def forward_and_backward(q, k, v, starts):
    """What the package's autograd function calls; no device is here to run autograd on."""
    ops = torch.ops.flash_attn
    out, lse, _, rng_state = ops._flash_attn_varlen_forward(
        q, k, v, starts, starts, 40, 40, 0.0, 0.125, False
    )
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    ops._flash_attn_varlen_backward(
        torch.ones_like(out), q, k, v, out, lse, dq, dk, dv, starts, starts, 40, 40,
        0.0, 0.125, False, -1, -1, 0.0, None, False, rng_state,
    )  # fmt: skip
    return out, dq, dk, dv


def rewritten(attend, dtype=torch.bfloat16, shape=(100,)):
    before = torch.get_default_dtype()
    with FakeTensorMode(), torch.no_grad(), torch.device("cuda"):
        try:
            torch.set_default_dtype(dtype)
            model = Layer(attend)
            x, starts = torch.empty(*shape, WIDTH), torch.zeros(4, dtype=torch.int32)
        finally:
            torch.set_default_dtype(before)
        gm, _ = aot_export_module(model, (x, starts), trace_joint=False)
    return apply_pass(gm)


def layouts(outcome, op):
    """Strides of q, k and v as the op's node has them, and the buffer that each lies in."""
    (node,) = (n for n in outcome.after.graph.nodes if op in (n.target, *n.args[:1]))
    given = node.kwargs if node.target is not op else dict(zip("qkv", node.args))
    values = [given[name].meta["val"] for name in "qkv"]
    return [v.stride() for v in values], len({v.untyped_storage()._cdata for v in values})


ROW = sum(SIZES)


def test_varlen_attention_is_matched_tagged_and_rewritten() -> None:
    outcome = rewritten(packed)
    assert outcome.verdicts == dict.fromkeys("qkv", "removed")
    assert {c.op for c in outcome.report.copies} == {"flash_attn::_flash_attn_varlen_forward"}
    op = torch.ops.flash_attn._flash_attn_varlen_forward.default
    assert layouts(outcome, op) == ([(ROW, HEAD_DIM, 1)] * 3, 1)


def test_batched_attention_is_matched_tagged_and_rewritten() -> None:
    outcome = rewritten(batched, shape=(2, 50))
    assert outcome.verdicts == dict.fromkeys("qkv", "removed")
    op = torch.ops.flash_attn._flash_attn_forward.default
    assert layouts(outcome, op) == ([(50 * ROW, ROW, HEAD_DIM, 1)] * 3, 1)


def test_its_backward_which_writes_gradients_reads_the_same_views() -> None:
    outcome = rewritten(forward_and_backward)
    assert outcome.verdicts == dict.fromkeys("qkv", "removed")
    for name in ("_flash_attn_varlen_forward", "_flash_attn_varlen_backward"):
        op = getattr(torch.ops.flash_attn, name).default
        assert layouts(outcome, op) == ([(ROW, HEAD_DIM, 1)] * 3, 1)


def test_in_fp32_which_the_kernel_does_not_take_the_copies_stay() -> None:
    outcome = rewritten(packed, dtype=torch.float32)
    assert outcome.verdicts == dict.fromkeys("qkv", "tag-condition")
