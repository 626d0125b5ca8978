"""Pointwise ops whose last bit depends, on a CPU, on how their inputs lie: copies in front stay.

The vector loop and the scalar one may round otherwise, and which runs follows the layout.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import standins
import torch
from standins import decide, tag
from torch import Tensor, nn

import qkvpass

TOKENS, HEADS, HEAD_DIM = 100, 1, 14
WIDTH = HEADS * HEAD_DIM
TURNS = torch.polar(torch.ones(TOKENS, 1, HEAD_DIM // 2), torch.randn(TOKENS, 1, HEAD_DIM // 2))


class Scaled(nn.Module):
    """``op`` of copied q and k in front of attention; its result is returned as well."""

    def __init__(self, op: Callable[[Tensor, Tensor], Tensor], dtype: torch.dtype) -> None:
        super().__init__()
        self.op, self.qkv = op, nn.Linear(32, 3 * WIDTH, dtype=dtype)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        parts = self.qkv(x).split(WIDTH, dim=-1)
        q, k, v = (t.view(-1, HEADS, HEAD_DIM).contiguous() for t in parts)
        q = self.op(q, k)
        return standins.aware(q, k, v), q


class AsComplex(Scaled):
    """q and k are copied as complex numbers."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        packed = self.qkv(x).view(TOKENS, 3, HEADS, HEAD_DIM // 2, 2)
        parts = torch.view_as_complex(packed).unbind(1)
        q, k, v = (t.contiguous() for t in parts)
        q, k, v = (torch.view_as_real(t).flatten(-2) for t in (self.op(q, TURNS), k, v))
        return standins.aware(q, k, v), q


SCALED = {
    "add": lambda q, k: torch.add(q, k, alpha=0.3),
    "sub": lambda q, k: torch.sub(q, k, alpha=0.3),
    "rsub": lambda q, k: torch.rsub(q, k, alpha=0.3),
}
ONCE = {"add": torch.add, "sub": torch.sub, "twice": lambda q, k: q * 2 + k}


def verdict(module: nn.Module, dtype: torch.dtype) -> str:
    """What becomes of q's copy; ``decide`` compares bits and strides with the graph as it was."""
    tag("aware", contract=qkvpass.StrideContract(alignment=1))
    return decide(module, torch.randn(TOKENS, 32, dtype=dtype)).verdicts["q"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("op", SCALED.values(), ids=SCALED)
def test_a_scaled_sum_rounds_by_layout(op: Callable, dtype: torch.dtype) -> None:
    assert verdict(Scaled(op, dtype), dtype) == "opaque-consumer"


@pytest.mark.parametrize("op", ONCE.values(), ids=ONCE)
def test_a_plain_sum_does_not(op: Callable) -> None:
    assert verdict(Scaled(op, torch.bfloat16), torch.bfloat16) == "removed"


def test_a_complex_product_rounds_by_layout() -> None:
    assert verdict(AsComplex(torch.mul, torch.float32), torch.float32) == "opaque-consumer"


def test_negating_a_complex_number_does_not() -> None:
    module = AsComplex(lambda q, turns: -q, torch.float32)
    assert verdict(module, torch.float32) == "removed"
