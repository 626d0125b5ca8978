"""``nn.MultiheadAttention`` and encoders of it, in the forms that models use."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, HEADS = 64, 4
BATCH, TOKENS = 2, 16


class SelfAttention(nn.Module):
    def __init__(self, weights: bool = False, **options: Any) -> None:
        super().__init__()
        options = {"batch_first": True} | options
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, **options)
        if self.attention.in_proj_bias is not None:  # zeros would hide a lost one
            nn.init.normal_(self.attention.in_proj_bias)
            nn.init.normal_(self.attention.out_proj.bias)
        self.weights = weights

    def forward(self, x: Tensor, **masks: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=self.weights, **masks)[0]


class Twin(nn.Module):
    """A self-attention written by hand without a copy: linear, chunk, view, SDPA."""

    def __init__(self, other: SelfAttention) -> None:
        super().__init__()
        self.other = other.attention

    def forward(self, x: Tensor) -> Tensor:
        packed = F.linear(x, self.other.in_proj_weight, self.other.in_proj_bias)
        q, k, v = (
            t.view(*x.shape[:2], HEADS, WIDTH // HEADS).transpose(1, 2) for t in packed.chunk(3, -1)
        )
        attended = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape)
        return F.linear(attended, self.other.out_proj.weight, self.other.out_proj.bias)


def encoder(norm_first: bool, batch_first: bool = True, layers: int = 1) -> nn.Module:
    """In training mode, so that no fast path of inference hides the modules."""
    layer = nn.TransformerEncoderLayer(
        WIDTH, HEADS, 2 * WIDTH, dropout=0.0, batch_first=batch_first, norm_first=norm_first
    )
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False).train()


def tokens(batch: int = BATCH, count: int = TOKENS) -> Tensor:
    return torch.randn(batch, count, WIDTH)


def padding() -> Tensor:
    mask = torch.zeros(BATCH, TOKENS, dtype=torch.bool)
    mask[1, TOKENS // 2 :] = True
    return mask
