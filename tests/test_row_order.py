"""A permutation of rows moves through the GEMMs around an attention op, or stays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attention_modules as modules
import pytest
import standins
import torch
from families import HEAD_DIM, HEADS
from standins import tag
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

import qkvpass
from qkvpass import row_order
from qkvpass.match import Facts

aten = torch.ops.aten
WIDTH = HEADS * HEAD_DIM


def rewritten(model: Callable[..., Any], *inputs: Any, **options: Any) -> standins.Outcome:
    traced = {k: options.pop(k) for k in ("train", "dynamic") if k in options}
    outcome = standins.apply_pass(standins.trace(model, *inputs, **traced), **options)
    standins.verify(outcome, bitwise=False)
    return outcome


def moved(outcome: standins.Outcome) -> bool:
    return any("rows of" in note for note in outcome.report.notes)


class Residual(nn.Module):
    """The attention is added to its input, so that nobody sees how its own result lies."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor, **masks: Tensor) -> Tensor:
        return x + self.inner(x, **masks)


# What is done


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dynamic", [False, True])
def test_no_copy_is_left(bias: bool, dynamic: bool) -> None:
    model = Residual(modules.SelfAttention(bias=bias))
    outcome = rewritten(model, modules.tokens(), dynamic=dynamic)
    assert moved(outcome) and standins.copies_in(outcome.after) == 0
    assert len(outcome.report.removed) == 2 and not outcome.report.kept


@pytest.mark.parametrize("norm_first", [False, True])
def test_encoder(norm_first: bool) -> None:
    outcome = rewritten(modules.encoder(norm_first, layers=2), modules.tokens())
    assert moved(outcome) and standins.copies_in(outcome.after) == 0


def test_padding_mask() -> None:
    model = Residual(modules.SelfAttention())
    outcome = rewritten(
        lambda x, mask: model(x, key_padding_mask=mask), modules.tokens(), modules.padding()
    )
    assert moved(outcome)
    assert standins.copies_in(outcome.after) == 1  # of the expanded mask


def test_compiled_as_a_hand_would_write_it() -> None:
    """As few kernels as the twin has, and its bits; stock's but for rounding."""
    attention, data = modules.SelfAttention(), modules.tokens()
    model = Residual(attention)
    with torch.no_grad():
        stock = standins.run(model, data)
        ours = standins.run(model, data, backend=qkvpass.backend)
        twin = standins.run(Residual(modules.Twin(attention)), data)
    assert ours.kernels == twin.kernels == 1 < stock.kernels  # the addition
    for mine, hand, theirs in zip(ours.outputs, twin.outputs, stock.outputs):
        standins.assert_same(mine, hand)
        standins.assert_close(mine, theirs)


class Transposing(nn.Module):
    """Batch first outside, sequence first inside, around an op that says what it received."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def project(self, x: Tensor) -> Tensor:
        tokens, batch, _ = x.shape
        q, k, v = self.qkv(x).view(tokens, batch, 3, HEADS, HEAD_DIM).unbind(2)
        q, k, v = (t.permute(1, 2, 0, 3).contiguous() for t in (q, k, v))
        return standins.like_q(q, k, v).permute(2, 0, 1, 3).reshape(tokens, batch, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.out(self.project(x.transpose(0, 1).contiguous())).transpose(0, 1)


def test_tokens_lie_side_by_side() -> None:
    """The stride from one token to the next is a row of the projection, not a whole batch."""
    tag("like_q", contract=qkvpass.StrideContract(output="fake"))
    outcome = rewritten(Transposing(), modules.tokens())
    assert moved(outcome)
    for call in outcome.only("like_q"):
        assert {seen.stride[2] for seen in call.tensors} == {3 * WIDTH}
        assert len({seen.storage for seen in call.tensors}) == 1


# What stays


def unmoved(model: Callable[..., Any], *inputs: Any, **options: Any) -> standins.Outcome:
    """The pass does what it does with the rewrite switched off, node for node."""
    outcome = rewritten(model, *inputs, **options)
    options = {k: v for k, v in options.items() if k not in ("train", "dynamic")}
    without = standins.apply_pass(outcome.before, **options, permute_rows=False)
    assert not moved(outcome)
    assert str(outcome.after.graph) == str(without.after.graph)
    return outcome


class KeepsRows(Transposing):
    """The copy in front of the projection is read by somebody else too."""

    def forward(self, x: Tensor) -> Any:
        rows = x.transpose(0, 1).contiguous()
        return x + self.out(self.project(rows)).transpose(0, 1), rows


class ReturnsStrides(Transposing):
    """The caller sees how the last GEMM's rows lie."""

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.project(x.transpose(0, 1).contiguous()))


class OpaqueBehind(Transposing):
    """An op that nobody vouches for reads the last GEMM."""

    def forward(self, x: Tensor) -> Tensor:
        return standins.rotary(self.out(self.project(x.transpose(0, 1).contiguous())))


class Norms(Transposing):
    """A reduction over tokens reads the last GEMM in the order of its rows."""

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.project(x.transpose(0, 1).contiguous())).mean(0)


@pytest.mark.parametrize("model", [KeepsRows, ReturnsStrides, OpaqueBehind, Norms])
def test_somebody_would_notice(model: type[nn.Module]) -> None:
    tag("like_q", contract=qkvpass.StrideContract(output="fake"))
    unmoved(model(), modules.tokens())


def test_returned_copy() -> None:
    """What the module returns dense, it returns without a copy: the GEMM's own buffer."""
    model, data = modules.SelfAttention(), modules.tokens()
    outcome = rewritten(lambda x: model(x).contiguous(), data)
    assert moved(outcome) and standins.copies_in(outcome.after) == 0
    with torch.no_grad():
        mine, again = (outcome.after(*outcome.before.meta["inputs"])[0] for _ in range(2))
    assert mine.untyped_storage().nbytes() == mine.nbytes
    assert mine.data_ptr() != again.data_ptr()


def test_returned_as_it_lies() -> None:
    """In training mode the module returns the transposed view itself."""
    unmoved(modules.SelfAttention(), modules.tokens())


def test_training() -> None:
    """The weight's gradient reads the permuted rows, so that they must be there anyway."""
    unmoved(modules.SelfAttention(), modules.tokens(), train=True)


def test_bitwise() -> None:
    outcome = unmoved(Residual(modules.SelfAttention()), modules.tokens(), numerics="bitwise")
    standins.verify(outcome)


@pytest.mark.parametrize("batch_first", [True, False])
def test_nothing_out_of_order(batch_first: bool) -> None:
    data = modules.tokens(batch=1) if batch_first else modules.tokens(modules.TOKENS, 2)
    unmoved(Residual(modules.SelfAttention(batch_first=batch_first)), data)


# How a GEMM reads its rows


X, W = torch.randn(2, 3, 4), torch.randn(4, 5)


def rows(fn: Callable[..., Any], *inputs: Tensor) -> row_order.Rows | None:
    graph = make_fx(fn, tracing_mode="fake")(*inputs).graph
    (gemm,) = [node for node in graph.nodes if node.target in row_order.ROWS_OF]
    return row_order.rows_of(gemm, Facts(graph))


def test_rows_of_a_permutation() -> None:
    found = rows(lambda x, w: x.transpose(0, 1).reshape(6, 4) @ w, X, W)
    assert found is not None and found.out_of_order and found.private
    assert (found.rows, found.columns) == ((1, 0), (2,))
    x, w = torch.randn(4, 2, 3, 4), torch.randn(16, 2)
    found = rows(lambda x, w: x.permute(1, 2, 0, 3).reshape(6, 16) @ w, x, w)
    assert found is not None and (found.rows, found.columns) == ((1, 2), (0, 3))


@pytest.mark.parametrize(
    "fn",
    [
        lambda x, w: x.reshape(6, 4) @ w,
        lambda x, w: x[:1].reshape(3, 4) @ w,
        lambda x, w: x.reshape(2, 3, 2, 2).transpose(1, 2).reshape(6, 4) @ w,
        lambda x, w: x.transpose(0, 2).reshape(6, 4) @ w,
        lambda x, w: x[:, :1].expand(2, 3, 4).transpose(0, 1).reshape(6, 4) @ w,
    ],
    ids=["in order", "a part", "a part of a dim", "columns across rows", "repeated"],
)
def test_no_permutation_of_whole_rows(fn: Callable[..., Any]) -> None:
    found = rows(fn, X, W)
    assert found is None or not found.out_of_order
