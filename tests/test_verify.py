"""The self-check: what it compares, and that it names the copy that is to blame."""

from __future__ import annotations

import itertools

import pytest
import standins
import torch
from torch import Tensor, nn
from torch.library import custom_op

import qkvpass

HEADS, HEAD_DIM, TOKENS = 4, 8, 16
WIDTH = HEADS * HEAD_DIM
_calls = itertools.count()


@custom_op("verified::dense_v", mutates_args=())
def dense_v(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Reads q and k by stride, and takes v for dense."""
    return standins.attend(standins.by_stride(q), standins.by_stride(k), standins.as_dense(v))


@custom_op("verified::unsteady", mutates_args=())
def unsteady(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Another value on each call, as a kernel with atomics may give."""
    return standins.attend(*(standins.by_stride(t) for t in (q, k, v))) + next(_calls)


for _op in (dense_v, unsteady):
    _op.register_fake(lambda q, k, v: q.new_empty(q.shape))


class Layer(nn.Module):
    def __init__(self, op) -> None:
        super().__init__()
        self.qkv, self.op = nn.Linear(WIDTH, 3 * WIDTH), op

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.view(-1, HEADS, HEAD_DIM) for t in self.qkv(x).split(WIDTH, -1))
        return x + self.op(q.contiguous(), k.contiguous(), v.contiguous()).view(-1, WIDTH)


def encoder(*ops) -> nn.Module:
    return nn.Sequential(*map(Layer, ops))


@pytest.fixture(autouse=True)
def _tags() -> None:
    standins.tag("aware")
    standins.tag("aware_bwd", backward_of="standin::aware")
    for op in ("verified::dense_v", "verified::unsteady"):
        qkvpass.register_stride_tag(op, operands=("q", "k", "v"))


def x() -> Tensor:
    return torch.randn(TOKENS, WIDTH)


@pytest.mark.parametrize("train", [False, True])
def test_a_right_model_is_ok(train):
    with standins.recorded("aware") as calls:
        found = qkvpass.verify(encoder(standins.aware), x(), train=train)
    assert found and found.culprit is None
    # Twice an output and an input; in training the gradients of two parameters too.
    assert found.compared == (8 if train else 4)
    received = [call.strides[0] for call in calls]
    dense, strided = (WIDTH, HEAD_DIM, 1), (3 * WIDTH, HEAD_DIM, 1)
    # Two runs each: stock, its control, then the pass.
    assert received == [dense] * 4 + [strided] * 2
    assert str(found).startswith(f"ok: {found.compared} values") and "3 of 3" in str(found)


def test_the_copy_that_is_to_blame_is_named():
    """Four layers, of which the third has an op that was tagged though it takes v for dense."""
    ops = [standins.aware] * 4
    ops[2] = dense_v
    with torch.no_grad():
        found = qkvpass.verify(encoder(*ops), x())
    assert not found and not found.unstable
    assert {d.value for d in found.differences} == {"output 0"}
    assert {d.run for d in found.differences} == {0, 1}
    blamed = [c for c in found.report.copies if c.op == "verified::dense_v" and c.operand == "v"]
    assert [found.culprit] == blamed
    for word in ("verified::dense_v", "v of", "test_verify.py:", "registered by the user"):
        assert word in str(found)


def test_without_the_wrong_tag_that_model_is_ok():
    qkvpass.unregister_stride_tag("verified::dense_v")
    with torch.no_grad():
        found = qkvpass.verify(encoder(standins.aware, dense_v), x())
    assert found and len(found.report.removed) == 3


def test_a_gradient_alone_may_differ():
    """The forward op reads strides, and its backward op was tagged though it does not."""
    standins.tag("aware_untagged_bwd")
    standins.tag("untagged_bwd", backward_of="standin::aware_untagged_bwd")
    found = qkvpass.verify(encoder(standins.aware, standins.aware_untagged_bwd), x())
    assert not found
    assert all(d.value.startswith("gradient of ") for d in found.differences)
    assert found.culprit is not None and found.culprit.op == "standin::aware_untagged_bwd"


def test_nothing_is_said_where_stock_differs_from_itself():
    with torch.no_grad():
        found = qkvpass.verify(encoder(unsteady, dense_v), x())
    assert not found and found.unstable and found.differences
    assert found.culprit is None
    assert str(found).startswith("nothing can be said: stock Inductor differs from itself")


def test_a_model_that_breaks_into_graphs():
    """Dynamo finds the parts by the user's code: stock and pass must not find each other's."""

    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Layer(standins.aware), Layer(dense_v)

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            torch._dynamo.graph_break()
            return self.second(x)

    with torch.no_grad():
        found = qkvpass.verify(Broken(), x())
    assert len(found.report.removed) == 6
    assert found.culprit is not None
    assert (found.culprit.op, found.culprit.operand) == ("verified::dense_v", "v")


class Stateful(nn.Module):
    """Counts its calls in a buffer, drops out, and writes its input."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Layer(standins.aware)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        self.calls += 1
        y = nn.functional.dropout(self.layer(x * scale), 0.5, self.training)
        scale.mul_(2)
        return y


def test_nothing_of_the_callers_is_touched():
    model, data, scale = Stateful(), x(), torch.ones(WIDTH)
    before, state = data.clone(), torch.get_rng_state()
    found = qkvpass.verify(model, data, scale)
    assert found, str(found)
    assert torch.equal(data, before) and torch.equal(scale, torch.ones(WIDTH))
    assert model.calls == 0 and all(p.grad is None for p in model.parameters())
    assert torch.equal(torch.get_rng_state(), state)


def test_inputs_may_be_made_by_the_caller():
    made = []

    def factory():
        made.append(x() + 3)
        return (made[-1],)

    with torch.no_grad():
        found = qkvpass.verify(encoder(dense_v), inputs=factory)
        assert not found and len(made) == 2
        with pytest.raises(TypeError, match=r"inputs\(\) returned Tensor; return a tuple"):
            qkvpass.verify(encoder(dense_v), inputs=x)
