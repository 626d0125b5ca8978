"""What writes q writes it as the output is wanted, if the copy behind the attention goes for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import families
import pytest
import standins
import torch
import torch.nn.functional as F
from families import DIM, F9, F10, HEAD_DIM, head_major, merged
from standins import tag
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code

import qkvpass

aten = torch.ops.aten
SDPA = aten._scaled_dot_product_flash_attention_for_cpu.default


class Normed(families.Base):
    """A norm over the head size, of q alone, in (B, H, N, D) order."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HEAD_DIM)
        nn.init.normal_(self.norm.weight)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (head_major(t) for t in self.qkv(x).chunk(3, -1))
        return self.out(merged(F.scaled_dot_product_attention(self.norm(q), k, v)))


class ScaledCat(families.Base):
    """An op on every element stands between the cat and the attention."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (head_major(t) for t in self.qkv(x).chunk(3, -1))
        q = torch.cat((q[:, :, :1], q[:, :, 1:] * 2), 2) * 0.5
        return self.out(merged(F.scaled_dot_product_attention(q, k, v)))


class CatOfKey(families.Base):
    """Only k is written by a cat."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (head_major(t) for t in self.qkv(x).chunk(3, -1))
        k = torch.cat((k[:, :, :1], k[:, :, 1:] * 2), 2)
        return self.out(merged(F.scaled_dot_product_attention(q, k, v)))


class KeyReadTwice(families.Base):
    """A kernel that nobody tagged takes k for dense."""

    def forward(self, x: Tensor) -> Any:
        q, k, v = (head_major(t) for t in self.qkv(x).chunk(3, -1))
        q, k = (torch.cat((t[:, :, :1], t[:, :, 1:] * 2), 2) for t in (q, k))
        read = torch.ops.standin.rotary(k)
        return self.out(merged(F.scaled_dot_product_attention(q, k, v))), read


def x(batch: int = 2) -> Tensor:
    return torch.randn(batch, 16, DIM)


def relaid(outcome: standins.Outcome) -> bool:
    return any("writes q" in note for note in outcome.report.notes)


MODELS = [F9, F10, Normed, ScaledCat]


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("model", MODELS)
def test_the_copy_behind_goes(model: type[nn.Module], dynamic: bool, batch: int) -> None:
    outcome = standins.decide(model(), x(batch), dynamic=dynamic)
    assert relaid(outcome) and outcome.verdicts[""] == "removed-cascade"


@pytest.mark.parametrize("model", MODELS)
def test_training(model: type[nn.Module]) -> None:
    """Every gradient keeps its bits and strides, whatever the rule lets go."""
    standins.decide(model(), x(), train=True)


def launches(code: str) -> int:
    """Kernels that the generated code calls, beside GEMMs and attention."""
    return code[code.index("def call") :].count("cpp_fused_")


def buffers(code: str) -> int:
    return code[code.index("def call") :].count("= empty_strided_cpu(")


@pytest.mark.parametrize("model", [F9, Normed])
def test_generated_code_has_one_kernel_less(model: type[nn.Module]) -> None:
    """The kernel that writes q writes it in place of another; the copy is no launch any more."""
    data, module = x(), model()
    results = []
    for backend in ("inductor", qkvpass.backend):
        torch._dynamo.reset()
        with torch.no_grad():
            out, (code,) = run_and_get_code(torch.compile(module, backend=backend), data)
        results.append((out, launches(code), buffers(code)))
    (stock, before, room_before), (ours, after, room_after) = results
    assert after == before - 1
    assert room_after <= room_before
    standins.assert_same([ours], [stock])


class Own(families.Base):
    """q by a cat, around an op that says what it received, and what stands behind it."""

    def __init__(self, op: Callable[..., Tensor], behind: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.op, self.behind = op, behind

    def forward(self, x: Tensor) -> Any:
        q, k, v = (head_major(t) for t in self.qkv(x).chunk(3, -1))
        q = torch.cat((q[:, :, :1], q[:, :, 1:] * 2), 2)
        attended = self.op(q, k, v)
        return self.out(merged(attended)), self.behind(attended), self.behind(q)


FAKE = qkvpass.StrideContract(output="fake")


@pytest.mark.parametrize("dynamic", [False, True])
def test_the_cat_of_k_is_turned_with_that_of_q(dynamic: bool) -> None:
    outcome = standins.decide(F9(), x(), dynamic=dynamic)
    (attention,) = standins.nodes_of(outcome.after, SDPA)
    q, k = (operand.meta["val"] for operand in attention.args[:2])
    assert q.stride() == k.stride() and q.stride(1) < q.stride(2)
    assert sum("in which q is written" in note for note in outcome.report.notes) == 1


class OneCat(families.Base):
    """One cat writes q and k."""

    def forward(self, x: Tensor) -> Tensor:
        q, _, v = (head_major(t) for t in self.qkv(x).chunk(3, -1))
        q = torch.cat((q[:, :, :1], q[:, :, 1:] * 2), 2)
        return self.out(merged(F.scaled_dot_product_attention(q, q, v)))


def test_a_turned_cat_is_told_of_like_one_that_is_not() -> None:
    traced = standins.trace(OneCat(), x())
    told = [
        [(c.node, c.operand) for c in standins.apply_pass(traced, relay_q=relay).report.copies]
        for relay in (True, False)
    ]
    assert ("cat", "query") in told[0] and set(told[0]) == set(told[1])


def test_the_cat_of_k_stays_where_that_of_q_does() -> None:
    """k's cat is turned for the sake of q's, whose turning took a copy out; never alone."""
    outcome = standins.decide(CatOfKey(), x())
    assert str(outcome.before.graph) == str(outcome.after.graph)


def test_the_cat_of_k_stays_where_somebody_reads_it_as_it_lies() -> None:
    tag("aware")
    outcome = standins.decide(KeyReadTwice(), x())
    assert relaid(outcome)
    assert not any("in which q is written" in note for note in outcome.report.notes)


def test_the_kernel_receives_q_token_major() -> None:
    tag("like_q", contract=FAKE)
    outcome = standins.decide(Own(standins.like_q, torch.sum), x())
    assert not relaid(outcome)  # a sum may depend on the order
    outcome = standins.decide(Own(standins.like_q, lambda t: t.shape[0]), x())
    assert relaid(outcome)
    for call in outcome.only("like_q"):
        assert call.strides[0] == (16 * DIM, HEAD_DIM, DIM, 1)


@pytest.mark.parametrize(
    "behind",
    [lambda t: t, standins.rotary, lambda t: t.sum(2), lambda t: t @ t.mT],
    ids=["returned", "untagged op", "reduction", "matmul"],
)
def test_somebody_else_would_notice(behind: Callable[[Tensor], Any]) -> None:
    tag("like_q", contract=FAKE)
    outcome = standins.decide(Own(standins.like_q, behind), x())
    assert not relaid(outcome)
    assert str(outcome.before.graph) == str(outcome.after.graph)


@pytest.mark.parametrize("op", ["blind", "aware", "like_q"])
def test_the_op_must_take_it_and_follow_it(op: str) -> None:
    """A kernel that reads dense q is untagged; ``aware`` writes a dense output whatever q is."""
    if op == "aware":
        tag(op)
    outcome = standins.decide(Own(getattr(standins, op), lambda t: t.shape[0]), x())
    assert not relaid(outcome)
    assert str(outcome.before.graph) == str(outcome.after.graph)


def test_switch() -> None:
    gm = standins.trace(F9(), x())
    outcome = standins.apply_pass(gm, relay_q=False)
    assert str(outcome.before.graph) == str(outcome.after.graph)
    assert outcome.verdicts["q"] == "not-a-layout-copy"


def test_again() -> None:
    """What the pass put there for its layout is no copy to a second run."""
    for model in MODELS:
        once = standins.decide(model(), x())
        once.after.meta = once.before.meta
        again = standins.apply_pass(once.after)
        standins.verify(again)
        assert not again.report.removed
        assert str(again.before.graph) == str(again.after.graph)
