"""Attention over merged batch and heads gets its two dims back, where copies go then."""

from __future__ import annotations

import math
from typing import Any

import families
import pytest
import standins
import torch
import torch.nn.functional as F
from families import DIM, HEAD_DIM, HEADS, head_major, merged
from torch import Tensor, nn

aten = torch.ops.aten
SDPA = aten._scaled_dot_product_flash_attention_for_cpu.default


class Written(families.Base):
    """Softmax attention written out with ``bmm``: Inductor's fusion makes SDPA of it."""

    def heads(self, x: Tensor) -> list[Tensor]:
        q, k, v = self.qkv(x).chunk(3, -1)
        parts = q * HEAD_DIM**-0.5, k, v
        return [head_major(t).reshape(-1, x.shape[1], HEAD_DIM) for t in parts]

    def forward(self, x: Tensor) -> Any:
        q, k, v = self.heads(x)
        weights = torch.bmm(q, k.transpose(1, 2)).softmax(-1)
        return self.out(merged(torch.bmm(weights, v).view(-1, HEADS, x.shape[1], HEAD_DIM)))


class Called(Written):
    """The op itself over merged heads."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v)

    def forward(self, x: Tensor) -> Any:
        out = self.attend(*(t.unsqueeze(0) for t in self.heads(x)))
        return self.out(merged(out.view(-1, HEADS, x.shape[1], HEAD_DIM)))


def x(batch: int = 2) -> Tensor:
    return torch.randn(batch, 16, DIM)


def split(outcome: standins.Outcome) -> bool:
    return any("as two dims" in note for note in outcome.report.notes)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("model", [Written, Called])
def test_all_copies_go(model: type[nn.Module], dynamic: bool) -> None:
    outcome = standins.decide(model(), x(), dynamic=dynamic)
    assert split(outcome) and standins.copies_in(outcome.after) == 0
    assert outcome.verdicts == dict.fromkeys("qkv", "removed") | {"": "removed-cascade"}
    (attention,) = standins.nodes_of(outcome.after, SDPA)
    strides = {operand.meta["val"].stride()[1:] for operand in attention.args[1:3]}
    assert strides == {(HEAD_DIM, 3 * DIM, 1)}


def test_compiled() -> None:
    with torch.no_grad():
        stock, ours = standins.compile_pair(Called(), x())
    assert (stock.kernels, ours.kernels) == (4, 1)  # q is scaled


class Masked(Called):
    """A mask for all heads of all batches, of each head's own or the same."""

    def __init__(self, *size: int) -> None:
        super().__init__()
        self.size = size

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = torch.arange(math.prod(self.size)).view(self.size) % 7 - 3.0
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


@pytest.mark.parametrize("size", [(1, 2 * HEADS, 16, 16), (1, 1, 16, 16), (16, 16)])
def test_with_a_mask(size: tuple[int, ...]) -> None:
    outcome = standins.decide(Masked(*size), x())
    assert split(outcome)
    assert outcome.verdicts == dict.fromkeys("qkv", "removed") | {"": "removed-cascade"}


class OfOneBatch(Called):
    """q has other heads than k and v."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q[:, :4], k[:, :4], v[:, :4])

    def forward(self, x: Tensor) -> Any:
        return self.attend(*(t.unsqueeze(0) for t in self.heads(x)))


class Returned(Called):
    """The caller sees the output with its heads merged; its copies in front still go."""

    def forward(self, x: Tensor) -> Any:
        return self.attend(*(t.unsqueeze(0) for t in self.heads(x)))


def test_other_heads_are_left_alone() -> None:
    outcome = standins.decide(OfOneBatch(), x())
    assert not split(outcome)
    assert str(outcome.before.graph) == str(outcome.after.graph)


def test_output_keeps_its_layout() -> None:
    outcome = standins.decide(Returned(), x())
    assert outcome.verdicts["q"] != "removed"
    assert outcome.verdicts["k"] == outcome.verdicts["v"] == "removed"


@pytest.mark.parametrize("options", [{"split_heads": False}, {"numerics": "bitwise"}])
def test_switches(options: dict[str, Any]) -> None:
    outcome = standins.apply_pass(standins.trace(Called(), x()), **options)
    assert str(outcome.before.graph) == str(outcome.after.graph)


def test_training() -> None:
    """The backward reads the op's other result, whose sizes would change."""
    outcome = standins.decide(Called(), x(), train=True)
    assert not split(outcome)
