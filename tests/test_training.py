"""Training: the same gradients, views for the backward too, and no more memory held for it."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import standins
import torch
import torch._inductor.config as inductor_config
from standins import tag
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import qkvpass
from qkvpass import policy, saved

TOKENS, HEADS, HEAD_DIM = 24, 2, 8
WIDTH = HEADS * HEAD_DIM
DENSE = (WIDTH, HEAD_DIM, 1)
# Stock, and the pass in the same place.
BACKENDS = {
    "inductor": ("inductor", qkvpass.backend),
    "eager": ("aot_eager", qkvpass.configured(target="eager")),
}
EAGER, INDUCTOR = BACKENDS["eager"], BACKENDS["inductor"]
both = pytest.mark.parametrize("backends", BACKENDS.values(), ids=BACKENDS)


@pytest.fixture(autouse=True)
def _tagged() -> None:
    tag("aware")
    tag("aware_bwd", backward_of="standin::aware")


# ---------------------------------------------------------------------------------------------
# Blocks

Between = Callable[..., Tensor]


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return standins.aware(q, k, v)


def twice(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """k's copy is an operand of two attention ops, and q's one of both sides."""
    return standins.aware(q, k, v) + standins.aware(k, q, v)


def shared(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """One copy for two operands of one op, and for two ops."""
    return standins.aware(q, q, v) + standins.aware(k, k, v)


def rope(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Only v could be a view for the backward."""
    q, k = (t * 2 + torch.cat((-t[..., 4:], t[..., :4]), -1) for t in (q, k))
    return standins.aware(q, k, v)


def normed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A reduction stands behind the copy of q, which stays."""
    return standins.aware(torch.nn.functional.rms_norm(q, (HEAD_DIM,)), k, v)


class Block(nn.Module):
    """Packed projection of which ``extra`` columns are no operand; copies; ``between``."""

    def __init__(self, between: Between = attention, extra: int = 0) -> None:
        super().__init__()
        self.between, self.extra = between, extra
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH + extra)
        self.out = nn.Linear(WIDTH, WIDTH)

    @property
    def strides(self) -> tuple[tuple[int, ...], ...]:
        return ((3 * WIDTH + self.extra, HEAD_DIM, 1),) * 3

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(x).split([WIDTH, WIDTH, WIDTH, self.extra], -1)[:3]
        q, k, v = (t.reshape(-1, HEADS, HEAD_DIM).contiguous() for t in parts)
        return x + self.out(self.between(q, k, v).flatten(1))


class Checkpointed(nn.Module):
    """A block of which the backward recomputes all, or all but what ``keep`` names."""

    def __init__(self, keep: tuple[Any, ...] | None = None) -> None:
        super().__init__()
        self.block, self.strides = Block(), Block().strides
        self.options: dict[str, Any] = {}
        if keep is not None:
            self.options["context_fn"] = functools.partial(
                create_selective_checkpoint_contexts, functools.partial(saving, keep)
            )

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.block, x.sin(), use_reentrant=False, **self.options)


def saving(keep: tuple[Any, ...], ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    chosen = op in keep
    return CheckpointPolicy.MUST_SAVE if chosen else CheckpointPolicy.PREFER_RECOMPUTE


# ---------------------------------------------------------------------------------------------
# Two steps of training, gradients accumulated


@dataclass
class Trained:
    """What two steps gave.

    Args:
        values: outputs and gradients of the input, step by step, then of each parameter, summed.
        held: bytes kept for the backward, by storage, without inputs and parameters; step by step.
    """

    values: list[Tensor]
    calls: list[standins.Call]
    held: list[int]
    reports: list[qkvpass.Report] = field(default_factory=list)

    @property
    def verdicts(self) -> list[str]:
        return [str(c.reason) for r in self.reports for c in r.copies if c.operand]

    def strides(self, op: str) -> list[tuple[tuple[int, ...], ...]]:
        return [call.strides[-3:] for call in self.calls if call.op == op]


def train(
    make: Callable[[], nn.Module],
    backend: Any,
    context: Callable[[], Any] = contextlib.nullcontext,
    **options: Any,
) -> Trained:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = make()
    compiled = torch.compile(model, backend=backend, **options)
    values, held = [], []
    with qkvpass.capture() as reports, standins.recorded() as calls:
        for seed in (1, 2):
            x = torch.randn(
                TOKENS, WIDTH, generator=torch.Generator().manual_seed(seed), requires_grad=True
            )
            with context():
                out = compiled(x)
            held.append(held_for_backward(out, [x, *model.parameters()]))
            (out.float() ** 2).sum().backward()
            values += [out.detach(), x.grad]
    values += [p.grad for p in model.parameters()]
    return Trained(values, calls, held, list(reports))


def held_for_backward(out: Tensor, own: list[Tensor]) -> int:
    """Bytes of the storages that the graph behind ``out`` keeps, those of ``own`` aside."""
    storages: dict[int, int] = {}
    stack, seen = [out.grad_fn], set()
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        unchecked = getattr(node, "_tensors_no_vc_check", None) or ()
        for t in (*getattr(node, "saved_tensors", ()), *unchecked):
            if isinstance(t, Tensor):
                storages[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        stack += [behind for behind, _ in node.next_functions]
    for t in own:
        storages.pop(t.untyped_storage().data_ptr(), None)
    assert storages, "nothing is held: the graph was not found"
    return sum(storages.values())


def pair(
    make: Callable[[], nn.Module], backends: tuple[Any, Any], **options: Any
) -> tuple[Trained, Trained]:
    """(stock, ours): equal bits and strides, and no more memory held."""
    stock, ours = (train(make, backend, **options) for backend in backends)
    standins.assert_same(ours.values, stock.values)
    assert [c.op for c in ours.calls] == [c.op for c in stock.calls]
    assert all(mine <= theirs for mine, theirs in zip(ours.held, stock.held))
    return stock, ours


# ---------------------------------------------------------------------------------------------
# Forward and backward


@both
def test_forward_and_backward_ops_receive_views(backends: tuple[Any, Any]) -> None:
    stock, ours = pair(Block, backends)
    assert ours.verdicts == ["removed"] * 3
    for op in ("aware", "aware_bwd"):
        assert ours.strides(op) == [Block().strides] * 2
        assert stock.strides(op) == [(DENSE,) * 3] * 2


def test_a_tag_for_the_forward_alone_keeps_the_copies_under_grad() -> None:
    qkvpass.unregister_stride_tag("standin::aware_bwd")
    _, ours = pair(Block, EAGER)
    assert ours.verdicts == ["backward-not-capable"] * 3
    assert ours.strides("aware") == ours.strides("aware_bwd") == [(DENSE,) * 3] * 2
    with torch.no_grad(), standins.recorded("aware") as calls:
        torch.compile(Block(), backend=EAGER[1])(torch.randn(TOKENS, WIDTH))
    assert [call.strides for call in calls] == [Block().strides]


def test_a_backward_compiled_later_sees_the_same_settings() -> None:
    """The context that set the pass is left before ``backward`` compiles its graph."""

    def context() -> Any:
        return inductor_config.patch(qkvpass.inductor_options())

    stock = train(Block, "inductor")
    ours = train(Block, "inductor", context)
    standins.assert_same(ours.values, stock.values)
    assert ours.verdicts == ["removed"] * 3
    assert ours.strides("aware") == ours.strides("aware_bwd") == [Block().strides] * 2


# ---------------------------------------------------------------------------------------------
# What training does besides


def test_one_copy_with_two_readers() -> None:
    _, ours = pair(functools.partial(Block, twice), EAGER)
    assert set(ours.verdicts) == {"removed"}
    assert ours.strides("aware") == [Block().strides] * 4


def test_two_ops_that_read_one_buffer_are_weighed_together() -> None:
    """The views of one op alone would hold more. In the last layer the peak would grow, too."""
    _, ours = pair(functools.partial(Stack, shared), EAGER)
    assert ours.verdicts == ["removed"] * 3 + ["memory-pinned"] * 3


CHECKPOINTS = {
    "full": None,
    "keeps attention": (torch.ops.standin.aware.default,),
    "keeps the projection": (torch.ops.aten.addmm.default,),
    "keeps the copies": (torch.ops.aten.clone.default,),
}


@pytest.mark.parametrize("keep", CHECKPOINTS.values(), ids=CHECKPOINTS)
def test_activation_checkpointing(keep: tuple[Any, ...] | None) -> None:
    make = functools.partial(Checkpointed, keep)
    stock, ours = pair(make, EAGER)
    assert ours.verdicts == ["removed"] * 3
    calls = ours.strides("aware")
    assert calls == [make().strides] * len(calls)
    recomputed = keep is None or torch.ops.standin.aware.default not in keep
    assert (
        len(calls) == len(stock.strides("aware")) and len(calls) in ((2, 4), (2,))[not recomputed]
    )
    assert ours.strides("aware_bwd") == [make().strides] * 2


@both
def test_autocast(backends: tuple[Any, Any]) -> None:
    context = functools.partial(torch.autocast, "cpu", torch.bfloat16)
    _, ours = pair(Block, backends, context=context)
    assert ours.verdicts == ["removed"] * 3
    assert ours.strides("aware") == ours.strides("aware_bwd") == [Block().strides] * 2


# ---------------------------------------------------------------------------------------------
# Memory held for the backward


class Stack(nn.Sequential):
    """Layers; what is held adds up."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*(Block(*args, **options) for _ in range(2)))


# Why each operand's copy goes or stays, in one layer.
HELD = {
    "all are views": (Block, {}, ["removed"] * 3),
    "with columns beside": (Block, {"extra": WIDTH}, ["memory-pinned"] * 3),
    "two layers": (Stack, {"extra": 2 * WIDTH}, ["memory-pinned"] * 6),
    "rope": (Block, {"between": rope}, ["removed", "removed", "memory-pinned"]),
    "a norm on q": (Block, {"between": normed}, None),
}


@pytest.mark.parametrize("case", HELD)
def test_memory_held_for_backward_never_grows(case: str) -> None:
    kind, options, verdicts = HELD[case]
    _, ours = pair(functools.partial(kind, **options), EAGER)
    if verdicts is not None:
        assert ours.verdicts == verdicts
    for report in ours.reports:
        for copy in report.kept:
            if copy.reason is qkvpass.Reason.MEMORY_PINNED:
                assert " bytes " in copy.detail


@pytest.mark.parametrize("case", ["with columns beside", "two layers", "rope"])
def test_without_the_policy_it_would(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, options, _ = HELD[case]
    make = functools.partial(kind, **options)
    stock = train(make, EAGER[0])
    monkeypatch.setattr(policy.Memory, "growth", lambda *args: None)
    monkeypatch.setattr(saved.Saved, "growth", lambda *args: None)
    ours = train(make, EAGER[1])
    standins.assert_same(ours.values, stock.values)
    assert set(ours.verdicts) == {"removed"}
    assert all(mine > theirs for mine, theirs in zip(ours.held, stock.held))


def test_some_of_a_group_would_be_worse_than_all_and_than_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Three views hold as much as three copies; two views hold that, and the third copy."""
    _, ours = pair(Block, EAGER)
    monkeypatch.setenv("QKVPASS_MAX_REWRITES", "2")
    _, none = pair(Block, EAGER)
    with monkeypatch.context() as patch:
        patch.setattr(policy.Memory, "growth", lambda *args: None)
        patch.setattr(saved.Saved, "growth", lambda *args: None)
        two = train(Block, EAGER[1])
    assert ours.verdicts == ["removed"] * 3
    assert none.verdicts == ["memory-pinned", "memory-pinned", "no-gain"]
    assert two.verdicts == ["removed", "removed", "no-gain"]
    assert two.held[0] > max(ours.held[0], none.held[0])
    why = none.reports[0].kept[0].detail
    assert f"{TOKENS * 3 * WIDTH * 4} bytes" in why and f"{TOKENS * 2 * WIDTH * 4} bytes" in why


def test_the_same_under_inductors_partitioner() -> None:
    _, ours = pair(functools.partial(Block, extra=WIDTH), INDUCTOR)
    assert ours.verdicts == ["memory-pinned"] * 3
    assert "for the backward" in ours.reports[0].kept[0].detail
