"""Models that were written to make the rewrites go wrong."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from typing import Any

import attention_modules as modules
import pytest
import standins
import torch
import torch._functorch.partitioners as partitioners
import torch.utils._pytree as pytree
from attention_modules import HEADS, WIDTH
from standins import tag
from torch import Tensor, nn
from torch.fx import Node
from torch.utils.checkpoint import checkpoint

import qkvpass
from qkvpass import bias_fold, graph_pass

HEAD_DIM = WIDTH // HEADS
FAKE = qkvpass.StrideContract(output="fake")


def heads_of(packed: Tensor) -> list[Tensor]:
    """q, k and v of a packed (rows, 3 * WIDTH) projection, each copied."""
    return [t.reshape(-1, HEADS, HEAD_DIM).contiguous() for t in packed.chunk(3, -1)]


def notes(outcome: standins.Outcome) -> str:
    return "\n".join(outcome.report.notes)


# A GEMM whose rows move


class Rows(nn.Module):
    """Sequence first inside; the two biases may differ from row to row."""

    def __init__(self, qkv: Callable[[int], Tensor], out: Callable[[int], Tensor]) -> None:
        super().__init__()
        rows = modules.BATCH * modules.TOKENS
        self.qkv_bias, self.out_bias = nn.Parameter(qkv(rows)), nn.Parameter(out(rows))
        self.qkv = nn.Parameter(torch.randn(WIDTH, 3 * WIDTH) / 8)
        self.out = nn.Parameter(torch.randn(WIDTH, WIDTH) / 8)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        rows = x.transpose(0, 1).reshape(-1, WIDTH)
        packed = torch.addmm(self.qkv_bias, rows, self.qkv)
        parts = packed.view(tokens, batch, 3, HEADS, HEAD_DIM).permute(2, 1, 3, 0, 4).unbind(0)
        attended = standins.like_q(*(t.contiguous() for t in parts)).permute(2, 0, 1, 3)
        out = torch.addmm(self.out_bias, attended.reshape(-1, WIDTH), self.out)
        return x + out.view(tokens, batch, WIDTH).transpose(0, 1)


ALIKE: list[Callable[[int], Tensor]] = [
    lambda rows: torch.randn(1),
    lambda rows: torch.randn(1, WIDTH),
]
BY_ROW: list[Callable[[int], Tensor]] = [
    lambda rows: torch.randn(rows, 1),
    lambda rows: torch.randn(rows, WIDTH),
]


def rows_moved(model: Rows) -> bool:
    tag("like_q", contract=FAKE)
    outcome = standins.apply_pass(standins.trace(model, modules.tokens()))
    standins.verify(outcome, bitwise=False)
    return "rows of addmm and addmm_1" in notes(outcome)


@pytest.mark.parametrize("bias", ALIKE)
def test_a_summand_that_all_rows_share(bias: Callable[[int], Tensor]) -> None:
    assert rows_moved(Rows(ALIKE[0], bias))


@pytest.mark.parametrize("bias", BY_ROW)
def test_a_summand_that_differs_by_row_holds_its_rows(bias: Callable[[int], Tensor]) -> None:
    assert not rows_moved(Rows(ALIKE[0], bias))


def test_of_the_projection_too() -> None:
    assert not rows_moved(Rows(BY_ROW[0], ALIKE[0]))


def test_a_returned_part_of_a_gemm_does_not_hold_all_of_it() -> None:
    model = modules.SelfAttention()
    traced = standins.trace(lambda x: model(x)[:1].contiguous(), modules.tokens())
    outcome = standins.apply_pass(traced)
    standins.verify(outcome, bitwise=False)
    with torch.no_grad():
        (part,) = outcome.after(*traced.meta["inputs"])
    assert part.untyped_storage().nbytes() == part.nbytes


# Exported programs: in-place ops are still in them, and names are the user's


def exported(model: nn.Module, *inputs: Tensor) -> qkvpass.Report:
    """The rewritten program does what the exported one did, to its inputs too."""
    with torch.no_grad():
        program = torch.export.export(model.eval(), inputs)
        with qkvpass.capture() as reports:
            rewritten = qkvpass.rewrite(program)
        for seed in (1, 2):
            mine, theirs = standins.fresh(inputs, seed), standins.fresh(inputs, seed)
            actual = pytree.tree_leaves(rewritten.module()(*mine))
            expected = pytree.tree_leaves(program.module()(*theirs))
            standins.assert_close([*actual, *mine], [*expected, *theirs])
    (report,) = reports
    return report


@pytest.fixture
def fold_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Folds where the eager target would do without, so that a test needs no code generation."""

    def find(state: Any) -> list[str]:
        return [fold.add.name for fold in bias_fold._folds(state.facts)]

    rewrites = (
        dataclasses.replace(r, find=find) if r.option == "fold_bias" else r
        for r in graph_pass.REWRITES
    )
    monkeypatch.setattr(graph_pass, "REWRITES", tuple(rewrites))


class Written(nn.Module):
    """What the GEMM read is written behind it, in front of the bias add or of the copy."""

    def __init__(self, written: str | None, rows: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, 3 * WIDTH) / 8)
        self.bias, self.out = nn.Parameter(torch.randn(3 * WIDTH)), nn.Linear(WIDTH, WIDTH)
        self.written, self.rows = written, rows

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        y = x * 2
        lies = y.transpose(0, 1).contiguous() if self.rows else y
        if self.written == "source":
            y.add_(1)
        product = torch.mm(lies.view(-1, WIDTH), self.weight)
        if self.written == "input":
            lies.add_(1)
        if not self.rows:
            packed = product.view(batch, tokens, -1) + self.bias
            return standins.aware(*heads_of(packed.view(-1, 3 * WIDTH))) + lies.sum()
        parts = product.view(tokens, batch, 3, HEADS, HEAD_DIM).permute(2, 1, 3, 0, 4).unbind(0)
        attended = standins.like_q(*(t.contiguous() for t in parts))
        dense = attended.permute(2, 0, 1, 3).clone(memory_format=torch.contiguous_format)
        viewed = dense.view(-1, WIDTH)
        if self.written == "copy":
            dense.mul_(2)
        out = torch.mm(viewed, self.out.weight)
        return y + out.view(tokens, batch, WIDTH).transpose(0, 1)


@pytest.mark.usefixtures("fold_everywhere")
@pytest.mark.parametrize(
    ("rows", "written"),
    [(False, None), (False, "input"), (True, None), (True, "source"), (True, "copy")],
)
def test_a_gemm_does_not_move_past_a_write(rows: bool, written: str | None) -> None:
    tag("aware")
    tag("like_q", contract=FAKE)
    report = exported(Written(written, rows), modules.tokens())
    moved = "rows of mm and mm_1" if rows else "bias"
    assert (moved in "".join(report.notes)) == (written is None)
    assert report.removed


class Aliased(nn.Module):
    """An einsum that only permutes returns its input's memory, which is written then."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, 3 * WIDTH) / 8)

    def forward(self, x: Tensor) -> Tensor:
        packed = torch.mm(x.flatten(0, 1), self.weight)
        q, k, v = heads_of(torch.einsum("ij->ji", packed).t())
        packed.mul_(2)
        return standins.aware(q, k, v) + packed.sum()


def test_a_write_is_seen_through_a_composite_that_aliases() -> None:
    tag("aware")
    report = exported(Aliased(), modules.tokens())
    assert {str(c.reason) for c in report.copies} == {"mutated"}


class Reshaped(nn.Module):
    """q is a view, by a reshape, of what is written then."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, 3 * WIDTH) / 8)

    def forward(self, x: Tensor) -> Tensor:
        packed = torch.matmul(x, self.weight).view(*x.shape[:2], 3, HEADS, HEAD_DIM)
        q, k, v = packed.permute(2, 0, 3, 1, 4).unbind(0)
        y = torch.exp(q).contiguous()
        q = y.reshape(q.shape)
        y.mul_(2)
        attended = standins.like_q(q, k, v).transpose(1, 2).contiguous()
        return torch.matmul(attended.view(x.shape), self.weight) + y.sum()


def test_a_view_is_nothing_that_is_written() -> None:
    tag("like_q", contract=FAKE)
    assert not exported(Reshaped(), modules.tokens()).notes


class Named(nn.Module):
    """Names that a copy of a graph would change: of Python's own, and ending in zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.w_01 = nn.Parameter(torch.randn(WIDTH, 3 * WIDTH) / 8)
        self.w_1 = nn.Parameter(torch.randn(3 * WIDTH))

    def forward(self, input: Tensor, input_1: Tensor) -> Tensor:
        packed = (input.flatten(0, 1) @ self.w_01).view(*input.shape[:2], -1)
        product = torch.mm(input.flatten(0, 1), self.w_01).view(packed.shape) + self.w_1
        return standins.aware(*heads_of(product.flatten(0, 1))) + 2 * input_1.sum() - input.sum()


@pytest.mark.usefixtures("fold_everywhere")
def test_names_stay() -> None:
    tag("aware")
    report = exported(Named(), modules.tokens(), modules.tokens())
    assert len(report.removed) == 3 and report.notes


# Activation checkpointing


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(modules.SelfAttention() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + checkpoint(layer, x, use_reentrant=False)
        return x


@pytest.mark.usefixtures("fold_everywhere")
@pytest.mark.parametrize("numerics", ["default", "bitwise"])
def test_what_a_checkpoint_leaves_out_is_not_saved(
    numerics: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved: list[set[tuple[int, ...]]] = []
    partition = partitioners.min_cut_rematerialization_partition

    def watch(*args: Any, **kwargs: Any) -> Any:
        forward, backward = partition(*args, **kwargs)
        (output,) = forward.graph.find_nodes(op="output")
        nodes = [n for n in output.args[0] if isinstance(n, Node) and n.op == "call_function"]
        shapes = [tuple(n.meta["val"].shape) for n in nodes]
        saved.append({shape for shape in shapes if all(isinstance(n, int) for n in shape)})
        return forward, backward

    monkeypatch.setattr(partitioners, "min_cut_rematerialization_partition", watch)
    model, data = Checkpointed(), modules.tokens()
    backend = qkvpass.configured(target="eager", numerics=numerics)
    ours = standins.run(model, data, backend=backend, train=True, dynamic=False)
    (report,) = ours.reports
    assert report.removed and report.notes
    assert saved == [{tuple(data.shape)}]


# Faults


STEPS = {"find": "fold_bias was", "edit": "fold_bias was", "transplant": "all rewrites were"}


@pytest.mark.usefixtures("fold_everywhere")
@pytest.mark.parametrize("step", STEPS)
def test_a_fault_in_a_rewrite_costs_no_plain_removal(
    step: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    traced = standins.trace(modules.SelfAttention(), modules.tokens())
    without = standins.apply_pass(traced, target="eager", fold_bias=False, permute_rows=False)
    if step == "transplant":
        monkeypatch.setattr(graph_pass, step, lambda *args: 1 / 0)
    else:
        fault: dict[str, Any] = {step: lambda *args: 1 / 0}
        broken = tuple(dataclasses.replace(r, **fault) for r in graph_pass.REWRITES)
        monkeypatch.setattr(graph_pass, "REWRITES", broken)
    with pytest.raises(ZeroDivisionError):
        standins.apply_pass(traced, target="eager")
    monkeypatch.delenv("QKVPASS_STRICT")
    graph_pass.log_once.cache_clear()
    with caplog.at_level(logging.WARNING, "qkvpass"):
        outcome = standins.apply_pass(traced, target="eager")
    standins.verify(outcome)
    assert outcome.report.removed and not outcome.report.fault
    assert f"{STEPS[step]} left out: ZeroDivisionError" in caplog.text
    assert str(outcome.after.graph) == str(without.after.graph)
