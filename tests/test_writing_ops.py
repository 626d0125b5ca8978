"""Attention that writes its output into an argument: serving engines' custom ops.

Functionalization wraps such an op in ``auto_functionalized*``. What it reads may be strided by
its tag like any other op's operand; what it writes never is.
"""

from __future__ import annotations

import pytest
import standins
import torch
from standins import attend, by_stride, compile_pair, decide, note, tag
from torch import Tensor, nn
from torch.library import custom_op

import qkvpass

HEADS, HEAD_DIM = 2, 16
WIDTH = HEADS * HEAD_DIM


@custom_op("standin::attend_out", mutates_args=("out",))
def attend_out(q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
    note("attend_out", q, k, v, out)
    out.copy_(attend(*map(by_stride, (q, k, v))))


@custom_op("standin::attend_out_lse", mutates_args=("out",))
def attend_out_lse(q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> Tensor:
    """As FlashAttention's: the output is written, a statistic is returned."""
    note("attend_out_lse", q, k, v, out)
    out.copy_(attend(*map(by_stride, (q, k, v))))
    return by_stride(q).sum(-1)


@custom_op("standin::blind_out", mutates_args=("out",))
def blind_out(q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
    note("blind_out", q, k, v, out)
    out.copy_(attend(*map(standins.as_dense, (q, k, v))))


@custom_op("standin::attend_over_q", mutates_args=("q",))
def attend_over_q(q: Tensor, k: Tensor, v: Tensor) -> None:
    """The output goes into q, as some kernels do to save memory."""
    note("attend_over_q", q, k, v)
    q.copy_(attend(*map(by_stride, (q, k, v))))


for op in (attend_out, blind_out):
    op.register_fake(lambda q, k, v, out: None)
attend_over_q.register_fake(lambda q, k, v: None)
attend_out_lse.register_fake(lambda q, k, v, out: q.new_empty(q.shape[:-1]))


class Layer(nn.Module):
    def __init__(self, op):
        super().__init__()
        self.qkv, self.out, self.op = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), op

    def forward(self, x):
        parts = self.qkv(x).split(WIDTH, -1)
        q, k, v = (t.view(-1, HEADS, HEAD_DIM).contiguous() for t in parts)
        out = torch.empty_like(q)
        self.op(q, k, v, out)
        return self.out(out.flatten(1))


def tokens():
    return torch.randn(24, WIDTH)


@pytest.mark.parametrize("name", ["attend_out", "attend_out_lse"])
@torch.no_grad()
def test_what_is_read_goes_strided_to_the_kernel(name) -> None:
    tag(name)
    stock, ours = compile_pair(Layer(globals()[name]), tokens())
    assert [str(c.reason) for r in ours.reports for c in r.copies] == ["removed"] * 3
    for call in ours.seen(name):
        q, k, v, out = call.tensors
        assert [t.stride for t in (q, k, v)] == [(3 * WIDTH, HEAD_DIM, 1)] * 3
        assert len({t.storage for t in (q, k, v)}) == 1
        assert out.dense and out.storage != q.storage
    assert all(t.dense for call in stock.seen(name) for t in call.tensors)
    assert ours.kernels < stock.kernels


@torch.no_grad()
def test_untagged_and_blind_it_keeps_its_copies() -> None:
    _, ours = compile_pair(Layer(blind_out), tokens())
    assert [str(c.reason) for r in ours.reports for c in r.copies] == ["untagged-op"] * 3


@torch.no_grad()
def test_tagged_though_blind_it_goes_wrong() -> None:
    """So that the test above can fail."""
    tag("blind_out")
    with pytest.raises(AssertionError):
        compile_pair(Layer(blind_out), tokens())


def test_an_operand_that_the_tag_leaves_out_keeps_its_copy() -> None:
    tag("attend_out", "q", "k")
    with torch.no_grad():
        outcome = decide(Layer(attend_out), tokens())
    assert outcome.verdicts["q"] == outcome.verdicts["k"] == "removed"
    assert [(c.node, str(c.reason)) for c in outcome.report.kept] == [
        ("clone_2", "no-attention-consumer")
    ]


def test_what_is_written_keeps_its_copy_whatever_the_tag_says() -> None:
    tag("attend_over_q")

    def forward(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        packed = x @ weight
        q, k, v = (t.view(-1, HEADS, HEAD_DIM).contiguous() for t in packed.split(WIDTH, -1))
        attend_over_q(q, k, v)
        return q, packed.sum(-1)

    outcome = decide(forward, tokens(), torch.randn(WIDTH, 3 * WIDTH))
    assert outcome.verdicts == {"q": "mutated", "k": "removed", "v": "removed"}


def test_the_contract_holds_for_what_is_read() -> None:
    tag("attend_out", contract=qkvpass.StrideContract(max_offset=3 * WIDTH))
    with torch.no_grad():
        outcome = decide(Layer(attend_out), tokens())
    assert outcome.verdicts == dict.fromkeys("qkv", "offset-range")
