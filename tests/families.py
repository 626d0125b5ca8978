"""Minimal modules, one for each pattern family found in real vision encoders.

``fast=True`` builds the same module without the copies: what its graph should amount to after
the pass. Kernels are stand-ins, so that what they received can be read.
"""

from __future__ import annotations

import standins
import torch
import torch.nn.functional as F
from torch import Tensor, nn

DIM, HEADS = 64, 4
HEAD_DIM = DIM // HEADS


class Base(nn.Module):
    def __init__(self, fast: bool = False, packed: int = 3 * DIM) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv = nn.Linear(DIM, packed)
        self.out = nn.Linear(DIM, DIM)
        self.fast = fast

    def dense(self, t: Tensor) -> Tensor:
        return t if self.fast else t.contiguous()


def rotated(x: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat((-b, a), -1)


def head_major(t: Tensor, heads: int = HEADS) -> Tensor:
    """(B, N, H * D) as (B, H, N, D)."""
    return t.view(*t.shape[:2], heads, HEAD_DIM).transpose(1, 2)


def merged(t: Tensor) -> Tensor:
    """(B, H, N, D) as (B, N, H * D)."""
    return t.transpose(1, 2).reshape(t.shape[0], t.shape[2], DIM)


class F0(Base):
    """Views straight to the op: what most encoders do."""

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        packed = self.qkv(x).reshape(batch, tokens, 3, HEADS, HEAD_DIM)
        q, k, v = packed.permute(2, 0, 3, 1, 4).unbind(0)
        return self.out(merged(F.scaled_dot_product_attention(q, k, v)))


class F1(Base):
    """Packed (T, D), split, reshape, three copies, an op that reads strides."""

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(x).split(DIM, -1)
        q, k, v = (self.dense(t.reshape(-1, HEADS, HEAD_DIM)) for t in parts)
        return self.out(standins.aware(q, k, v).reshape(-1, DIM))


class F2(Base):
    """F1 with rope on q and k behind their copies."""

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(x).chunk(3, -1)
        q, k, v = (self.dense(t.reshape(-1, HEADS, HEAD_DIM)) for t in parts)
        cos = torch.ones(x.shape[0], 1, HEAD_DIM)
        q, k = (t * cos + rotated(t) * cos for t in (q, k))
        return self.out(standins.aware(q, k, v).reshape(-1, DIM))


class F3(Base):
    """``transpose(1, 2).contiguous()`` in front of SDPA."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self.dense(head_major(t)) for t in self.qkv(x).chunk(3, -1))
        return self.out(merged(F.scaled_dot_product_attention(q, k, v)))


class F4(Base):
    """SAM: the copy hides in a reshape that merges batch and heads."""

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        packed = self.qkv(x).reshape(batch, tokens, 3, HEADS, HEAD_DIM).permute(2, 0, 3, 1, 4)
        if not self.fast:
            packed = packed.reshape(3, batch * HEADS, tokens, HEAD_DIM)
        q, k, v = (t.view(batch, HEADS, tokens, HEAD_DIM) for t in packed.unbind(0))
        return self.out(merged(F.scaled_dot_product_attention(q, k, v)))


class F5(nn.Module):
    """``nn.MultiheadAttention``: one copy of the whole packed projection."""

    def __init__(self, fast: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.attention = nn.MultiheadAttention(DIM, HEADS, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=False)[0]


class F6(Base):
    """The copies of q and k protect the packed buffer from an in-place norm."""

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(x).split(DIM, -1)
        q, k, v = (t.reshape(-1, HEADS, HEAD_DIM).contiguous() for t in parts)
        standins.norm_(q, k)
        return self.out(standins.aware(q, k, v).reshape(-1, DIM))


class F7(Base):
    """A rope kernel that nobody vouches for stands behind the copies of q and k."""

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(x).split(DIM, -1)
        q, k, v = (t.reshape(-1, HEADS, HEAD_DIM).contiguous() for t in parts)
        q, k = standins.rope(q, k, torch.ones(1, 1, HEAD_DIM))
        return self.out(standins.aware(q, k, v).reshape(-1, DIM))


class F8(Base):
    """Three copies, then ``cat([q, k])`` for one rope, then a chunk: q and k are copied twice."""

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(x).chunk(3, -1)
        q, k, v = (self.dense(t.view(1, -1, HEADS, HEAD_DIM)) for t in parts)
        cos = torch.ones(x.shape[0], 1, HEAD_DIM)
        qk = torch.cat([q, k], 0)
        qk = qk * cos + rotated(qk) * cos
        q, k = qk.chunk(2, 0)
        return self.out(standins.aware(q[0], k[0], v[0]).reshape(-1, DIM))


class F9(Base):
    """Prefix tokens skip rope, by a ``cat`` that must write."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (head_major(t) for t in self.qkv(x).chunk(3, -1))
        cos = torch.ones(x.shape[1] - 1, HEAD_DIM)
        q, k = (
            torch.cat((t[:, :, :1], t[:, :, 1:] * cos + rotated(t[:, :, 1:]) * cos), 2)
            for t in (q, k)
        )
        attended = F.scaled_dot_product_attention(q, k, v)
        return self.out(attended.transpose(1, 2).contiguous().reshape(x.shape))


class F10(Base):
    """Rope on a part of the head size, by a ``cat`` that must write."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (head_major(t) for t in self.qkv(x).chunk(3, -1))
        half = HEAD_DIM // 2
        q, k = (
            torch.cat((t[..., :half] + rotated(t[..., :half]), t[..., half:]), -1) for t in (q, k)
        )
        return self.out(merged(F.scaled_dot_product_attention(q, k, v)))


class F11(Base):
    """The head size is padded in front of the op."""

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        q, k, v = (
            F.pad(t.view(batch, tokens, HEADS, HEAD_DIM), (0, 4)).transpose(1, 2)
            for t in self.qkv(x).chunk(3, -1)
        )
        attended = F.scaled_dot_product_attention(q, k, v, scale=HEAD_DIM**-0.5)
        return self.out(merged(attended[..., :HEAD_DIM]))


class F12(Base):
    """Grouped k and v are repeated for each query head: expand, then a reshape that copies."""

    def __init__(self, fast: bool = False) -> None:
        super().__init__(fast, packed=2 * DIM)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        groups = HEADS // 2
        q, k, v = self.qkv(x).split([DIM, DIM // 2, DIM // 2], -1)
        q, k, v = head_major(q), head_major(k, groups), head_major(v, groups)
        if self.fast:
            return self.out(merged(F.scaled_dot_product_attention(q, k, v, enable_gqa=True)))
        k, v = (
            t[:, :, None]
            .expand(batch, groups, 2, tokens, HEAD_DIM)
            .reshape(batch, HEADS, tokens, HEAD_DIM)
            for t in (k, v)
        )
        return self.out(merged(F.scaled_dot_product_attention(q, k, v)))


class F13(Base):
    """A window partition: the copy is of x, not of q, k or v."""

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        half = tokens // 2
        windows = x.view(batch, 2, half, DIM).permute(0, 2, 1, 3).contiguous().view(-1, 2, DIM)
        q, k, v = (head_major(t) for t in self.qkv(windows).chunk(3, -1))
        attended = merged(F.scaled_dot_product_attention(q, k, v))
        return self.out(attended.view(batch, half, 2, DIM).permute(0, 2, 1, 3).reshape(x.shape))


class F14(Base):
    """Attention written out: the copies come from how ``matmul`` is decomposed."""

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        packed = self.qkv(x).reshape(batch, tokens, 3, HEADS, HEAD_DIM)
        q, k, v = packed.permute(2, 0, 3, 1, 4).unbind(0)
        scores = (q * HEAD_DIM**-0.5) @ k.transpose(-2, -1)
        return self.out(merged(scores.softmax(-1) @ v))


class F15(nn.Module):
    """Feature-first q, k, v of a convolution: without the copy, the last stride is not 1."""

    def __init__(self, fast: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv = nn.Conv2d(DIM, 3 * DIM, 1)
        self.out = nn.Conv2d(DIM, DIM, 1)
        self.fast = fast

    def forward(self, x: Tensor) -> Tensor:
        batch, _, height, width = x.shape
        parts = self.qkv(x).view(batch, HEADS, 3 * HEAD_DIM, height * width).chunk(3, 2)
        q, k, v = (t.transpose(-1, -2) for t in parts)
        if not self.fast:
            q, k, v = (t.contiguous() for t in (q, k, v))
        attended = F.scaled_dot_product_attention(q, k, v)
        return self.out(attended.transpose(-1, -2).reshape(batch, DIM, height, width))


ALL: tuple[type[nn.Module], ...] = (
    *(F0, F1, F2, F3, F4, F5, F6, F7),
    *(F8, F9, F10, F11, F12, F13, F14, F15),
)


def example_input(family: type[nn.Module]) -> Tensor:
    if family is F15:
        return torch.randn(2, DIM, 4, 4)
    if family in (F1, F2, F6, F7, F8):
        return torch.randn(32, DIM)
    return torch.randn(2, 16, DIM)
