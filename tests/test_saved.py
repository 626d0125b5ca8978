"""What the backward reads stays private: nobody else can write it, or hand it back otherwise."""

from __future__ import annotations

import pytest
import standins
import torch
from torch import nn

import qkvpass

T, H, D = 12, 4, 16
WIDTH = H * D


def attend(packed):
    q, k, v = (t.view(-1, H, D).contiguous() for t in packed.split(WIDTH, -1))
    return standins.aware(q, k, v)


class Returned(nn.Module):
    """Returns the packed projection beside the attention's output."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x):
        packed = self.qkv(x)
        return attend(packed), packed


class Private(Returned):
    """Keeps it to itself."""

    def forward(self, x):
        return attend(self.qkv(x)), x


@pytest.fixture(autouse=True)
def _tagged():
    standins.tag("aware")
    standins.tag("aware_bwd", backward_of="standin::aware")


def gradient(model, backend, between):
    """The gradient of the input, where ``between`` runs between forward and backward."""
    torch._dynamo.reset()
    torch.manual_seed(1)
    x = torch.randn(T, WIDTH, requires_grad=True)
    run = model if backend is None else torch.compile(model, backend=backend)
    with qkvpass.capture() as reports:
        out, packed = run(x)
    with torch.no_grad():
        between(packed)
    out.sum().backward()
    return x.grad, [copy for report in reports for copy in report.copies if copy.operand]


WRITES = {
    "in place": lambda packed: packed.zero_(),
    "detached": lambda packed: packed.detach().zero_(),
    "data": lambda packed: packed.data.zero_(),
}


@pytest.mark.parametrize("how", WRITES)
def test_a_returned_buffer_may_be_written_before_the_backward(how):
    expected, _ = gradient(Returned(), "inductor", WRITES[how])
    got, copies = gradient(Returned(), qkvpass.backend, WRITES[how])
    assert torch.equal(got, expected)
    assert [str(copy.reason) for copy in copies] == ["mutated"] * 3


def test_so_may_a_graph_input():
    gradients = {}
    for backend in ("inductor", qkvpass.backend):
        torch._dynamo.reset()
        torch.manual_seed(1)
        packed = torch.randn(T, 3 * WIDTH, requires_grad=True)
        out = torch.compile(attend, backend=backend)(packed)
        with torch.no_grad():
            packed.zero_()
        out.sum().backward()
        gradients[backend] = packed.grad
    assert torch.equal(gradients["inductor"], gradients[qkvpass.backend])


def test_a_private_projection_loses_its_copies_in_training_too():
    expected, _ = gradient(Private(), "inductor", lambda _: None)
    got, copies = gradient(Private(), qkvpass.backend, lambda _: None)
    assert torch.equal(got, expected)
    assert [str(copy.reason) for copy in copies] == ["removed"] * 3


def test_hooks_on_saved_tensors_may_hand_back_another_layout():
    dense = torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone().contiguous(), lambda t: t)
    with dense:
        expected, _ = gradient(Private(), "inductor", lambda _: None)
        got, copies = gradient(Private(), qkvpass.backend, lambda _: None)
    assert torch.equal(got, expected)
    assert [str(copy.reason) for copy in copies] == ["backward-not-capable"] * 3


def test_without_the_check_the_gradient_is_wrong(monkeypatch):
    monkeypatch.setattr(qkvpass.safety.Propagation, "_check_saved", lambda *args: None)
    expected, _ = gradient(Returned(), "inductor", WRITES["detached"])
    got, copies = gradient(Returned(), qkvpass.backend, WRITES["detached"])
    assert all(copy.removed for copy in copies) and not torch.allclose(got, expected)
