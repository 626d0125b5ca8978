"""A bias added behind a view joins its GEMM, only where copies go behind it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attention_modules as modules
import pytest
import standins
import torch
import torch.nn.functional as F
from families import HEAD_DIM, HEADS
from standins import tag
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

import qkvpass
from qkvpass import bias_fold, edit, editor, graph_pass, speculate
from qkvpass.graph_pass import Options, run
from qkvpass.match import Facts

aten = torch.ops.aten
WIDTH, PACKED = HEADS * HEAD_DIM, 3 * HEADS * HEAD_DIM
FOLD_ALONE = {"permute_rows": False}


class Packed(nn.Module):
    """What ``nn.MultiheadAttention`` traces to, in front of an op that says what it received."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, PACKED))
        self.bias = nn.Parameter(torch.randn(PACKED))

    def forward(self, x: Tensor) -> Tensor:
        packed = (x.view(-1, WIDTH) @ self.weight).view(*x.shape[:2], PACKED) + self.bias
        q, k, v = packed.view(-1, 3, HEADS, HEAD_DIM).unbind(1)
        return standins.aware(q.contiguous(), k.contiguous(), v.contiguous())


def x() -> Tensor:
    return torch.randn(2, 8, WIDTH)


def rewritten(model: Callable[..., Any], *inputs: Any, **options: Any) -> standins.Outcome:
    """The pass on a model's graph; values agree, to the bit if that was asked for."""
    traced = {k: options.pop(k) for k in ("train", "dynamic") if k in options}
    outcome = standins.apply_pass(standins.trace(model, *inputs, **traced), **options)
    standins.verify(outcome, bitwise=options.get("numerics") == "bitwise")
    return outcome


# What is done


def test_the_bias_becomes_part_of_the_gemm() -> None:
    tag("aware")
    outcome = rewritten(Packed(), x())
    assert outcome.verdicts == dict.fromkeys("qkv", "removed")
    assert len(standins.nodes_of(outcome.after, aten.addmm.default)) == 1
    for op in (aten.mm.default, aten.add.Tensor, aten.clone.default):
        assert not standins.nodes_of(outcome.after, op)
    (note,) = outcome.report.notes
    assert "the bias added by add" in note and "rounded once" in note
    for call in outcome.only("aware"):
        assert len({seen.storage for seen in call.tensors}) == 1


def test_bitwise_writes_the_sum_once() -> None:
    tag("aware")
    outcome = rewritten(Packed(), x(), numerics="bitwise")
    assert outcome.verdicts == dict.fromkeys("qkv", "removed")
    assert len(standins.nodes_of(outcome.after, aten.mm.default)) == 1
    assert len(standins.nodes_of(outcome.after, aten.add.Tensor)) == 1
    assert any("written once" in note for note in outcome.report.notes)


@pytest.mark.parametrize(
    ("numerics", "dynamic"), [("default", False), ("default", True), ("bitwise", False)]
)
def test_kernels_receive_views_of_one_buffer(numerics: str, dynamic: bool) -> None:
    """At run time: the strides, one storage, and fewer kernels, not a claim of the graph's."""
    tag("aware")
    model, data = Packed(), x()
    with torch.no_grad():
        stock = standins.run(model, data, dynamic=dynamic)
        backend = qkvpass.configured(numerics=numerics)
        ours = standins.run(model, data, backend=backend, dynamic=dynamic)
    same = standins.assert_same if numerics == "bitwise" else standins.assert_close
    for mine, theirs in zip(ours.outputs, stock.outputs):
        same(mine, theirs)
    assert ours.kernels == (1 if numerics == "bitwise" else 0) < stock.kernels
    for call in stock.seen("aware"):
        assert len({seen.storage for seen in call.tensors}) == 3
    for call in ours.seen("aware"):
        assert call.strides == ((PACKED, HEAD_DIM, 1),) * 3
        assert len({seen.storage for seen in call.tensors}) == 1


def test_half_precision_rounds_as_a_linear_layer_does() -> None:
    """Against a hand edit under the same Inductor; stock rounds twice."""
    tag("aware")
    model = Packed().bfloat16()

    def by_hand(x: Tensor) -> Tensor:
        packed = F.linear(x.view(-1, WIDTH), model.weight.t(), model.bias)
        return standins.aware(*packed.view(-1, 3, HEADS, HEAD_DIM).unbind(1))

    with torch.no_grad():
        ours = standins.run(model, x().bfloat16(), backend=qkvpass.backend)
        twin = standins.run(by_hand, x().bfloat16())
        exact = standins.run(model, x().bfloat16(), backend=qkvpass.configured(numerics="bitwise"))
        stock = standins.run(model, x().bfloat16())
    for mine, theirs in zip(ours.outputs, twin.outputs):
        standins.assert_same(mine, theirs)
    for mine, theirs in zip(exact.outputs, stock.outputs):
        standins.assert_same(mine, theirs)


def masked(name: str, mask: Tensor) -> tuple[Callable[..., Tensor], tuple[Tensor, ...]]:
    model = modules.SelfAttention()
    return lambda x, mask: model(x, **{name: mask}), (modules.tokens(), mask)


FORMS: dict[str, Callable[[], tuple[Callable[..., Tensor], tuple[Tensor, ...]]]] = {
    "plain": lambda: (modules.SelfAttention(), (modules.tokens(),)),
    "no bias": lambda: (modules.SelfAttention(bias=False), (modules.tokens(),)),
    "sequence first": lambda: (modules.SelfAttention(batch_first=False), (modules.tokens(),)),
    "key padding": lambda: masked("key_padding_mask", modules.padding()),
    "mask": lambda: masked("attn_mask", torch.randn(modules.TOKENS, modules.TOKENS)),
    "post-norm encoder": lambda: (modules.encoder(norm_first=False), (modules.tokens(),)),
    "pre-norm encoder": lambda: (modules.encoder(norm_first=True), (modules.tokens(),)),
}


@pytest.mark.parametrize("numerics", ["default", "bitwise"])
@pytest.mark.parametrize("form", FORMS)
def test_multihead_attention(form: str, numerics: str) -> None:
    model, inputs = FORMS[form]()
    outcome = rewritten(model, *inputs, **FOLD_ALONE, numerics=numerics)
    assert "query, key, value" in {copy.operand for copy in outcome.report.removed}
    assert bool(outcome.report.notes) == (form not in ("no bias", "sequence first"))


@pytest.mark.parametrize("numerics", ["default", "bitwise"])
def test_training(numerics: str) -> None:
    """Outputs and gradients of the joint graph."""
    outcome = rewritten(modules.SelfAttention(), modules.tokens(), train=True, numerics=numerics)
    assert {c.operand for c in outcome.report.removed} == {"query, key, value"}


# What is left alone


def graph_of(fn: Callable[..., Any], *inputs: Tensor) -> torch.fx.Graph:
    return make_fx(fn, tracing_mode="fake")(*inputs).graph


def folds(fn: Callable[..., Any], *inputs: Tensor) -> list[str]:
    facts = Facts(graph_of(fn, *inputs))
    return [n.name for n in facts.nodes if bias_fold.fold_of(n, facts) is not None]


A, B, C = torch.randn(6, 4), torch.randn(4, 8), torch.randn(8)


@pytest.mark.parametrize(
    ("fn", "inputs"),
    [
        (lambda a, b, c: (a @ b) + c, (A, B, C)),
        (lambda a, b, c: (a @ b).view(2, 3, 8) + c, (A, B, C)),
        (lambda a, b, c: c + (a @ b).view(2, 3, 8), (A, B, C)),
        (lambda a, b, c: (a @ b).view(2, 3, 8).transpose(0, 1) + c, (A, B, C)),
        (lambda a, b, c: (a @ b).view(2, 3, 8).view(3, 2, 8) + c, (A, B, C)),
    ],
    ids=["no view", "view", "bias first", "transpose", "two views"],
)
def test_folds(fn: Callable[..., Any], inputs: tuple[Tensor, ...]) -> None:
    assert len(folds(fn, *inputs)) == 1


@pytest.mark.parametrize(
    ("fn", "inputs"),
    [
        (lambda a, b, c: (lambda p: (p + c, p))(a @ b), (A, B, C)),
        (lambda a, b, c: (lambda p: (p.view(2, 3, 8) + c, p))(a @ b), (A, B, C)),
        (lambda a, b, c: (lambda p: (p + c, p * 2))((a @ b).view(2, 3, 8)), (A, B, C)),
        (lambda a, b, c: (a @ b).view(2, 3, 2, 4) + c[:4], (A, B, C)),
        (lambda a, b, c: (a @ b).view(2, 3, 8)[:1] + c, (A, B, C)),
        (lambda a, b, c: (a @ b).t() + c[:6], (A, B, C)),
        (lambda a, b, c: (a @ b).view(2, 3, 8) + c.expand(3, 8), (A, B, C)),
        (lambda a, b, c: (a @ b).view(2, 3, 8) + c.double(), (A, B, C)),
        (lambda a, b, c: (a @ b).view(2, 3, 8) + 1.0, (A, B, C)),
        (lambda a, b, c: torch.add((a @ b).view(2, 3, 8), c, alpha=2), (A, B, C)),
        (lambda a, b, c: (a @ b).view(2, 3, 8) + c[:1], (A, B, C)),
        (lambda a, b, c: (a @ b).relu().view(2, 3, 8) + c, (A, B, C)),
        (lambda a, b, c: (a @ b).view(1, 6, 8).expand(2, 6, 8) + c, (A, B, C)),
        (lambda a, b, c: (a @ b).view(2, 3, 8) + c, (A.int(), B.int(), C.int())),
    ],
    ids=[
        "no view, product read elsewhere",
        "product read elsewhere",
        "view read elsewhere",
        "part of the columns",
        "part of the rows",
        "transposed",
        "bias of two dims",
        "another dtype",
        "number",
        "scaled",
        "one number",
        "not the product",
        "repeated",
        "integers",
    ],
)
def test_does_not_fold(fn: Callable[..., Any], inputs: tuple[Tensor, ...]) -> None:
    assert folds(fn, *inputs) == []


def no_copies(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    packed = (x.view(-1, WIDTH) @ weight).view(*x.shape[:2], PACKED) + bias
    q, k, v = packed.view(*x.shape[:2], 3, HEADS, HEAD_DIM).permute(2, 0, 3, 1, 4).unbind(0)
    return F.scaled_dot_product_attention(q, k, v)


def test_without_a_removal_not_one_node_is_touched() -> None:
    """Also where the op behind the copies is not tagged."""
    inputs = x(), torch.randn(WIDTH, PACKED), torch.randn(PACKED)
    for outcome in (
        standins.apply_pass(standins.trace(no_copies, *inputs)),
        standins.apply_pass(standins.trace(Packed(), x())),
    ):
        assert str(outcome.before.graph) == str(outcome.after.graph)
        assert not outcome.report.notes


def test_switch() -> None:
    tag("aware")
    outcome = rewritten(Packed(), x(), fold_bias=False)
    assert outcome.verdicts == dict.fromkeys("qkv", "producer-fused")
    assert str(outcome.before.graph) == str(outcome.after.graph)
    ids = [
        qkvpass.StridedQKVPass(options).uuid()
        for options in (Options(), Options(fold_bias=False), Options(numerics="bitwise"))
    ]
    assert len(set(ids)) == 3


def test_bitwise_needs_sizes_that_the_graph_holds() -> None:
    """With both dims dynamic, no node holds the number of rows, and the copies stay."""
    tag("aware")
    outcome = rewritten(Packed(), x(), numerics="bitwise", dynamic=True)
    assert outcome.verdicts == dict.fromkeys("qkv", "producer-fused")
    assert str(outcome.before.graph) == str(outcome.after.graph)


def test_run_eagerly_nothing_needs_folding() -> None:
    """There a sum is a buffer, and its copies go without."""
    tag("aware")
    outcome = rewritten(Packed(), x(), target="eager")
    assert outcome.verdicts == dict.fromkeys("qkv", "removed")
    assert standins.nodes_of(outcome.after, aten.add.Tensor) and not outcome.report.notes


def test_a_fault_costs_its_rewrite_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    tag("aware")
    monkeypatch.delenv("QKVPASS_STRICT")
    monkeypatch.setattr(bias_fold, "_fold", lambda *args: 1 / 0)
    outcome = rewritten(Packed(), x())
    assert str(outcome.before.graph) == str(outcome.after.graph) and not outcome.report.fault
    assert outcome.report.notes == ("fold_bias was left out: ZeroDivisionError: division by zero",)


def test_unknown_numerics_are_named() -> None:
    with pytest.raises(ValueError, match="numerics is 'fast'"):
        Options(numerics="fast")


@pytest.mark.parametrize("step", ["copy_of", "transplant"])
def test_a_fault_leaves_the_graph_as_it_was(step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tag("aware")
    graph = standins.trace(Packed(), x()).graph
    before = str(graph)
    module = speculate if step == "copy_of" else graph_pass
    monkeypatch.setattr(module, step, lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run(graph, Options())
    assert str(graph) == before


@pytest.mark.parametrize("call", range(1, 12))
@pytest.mark.parametrize("step", ["set_meta", "insert_before", "set_arguments", "retarget"])
def test_a_fault_in_the_move_takes_every_edit_back(
    step: str, call: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tag("aware")
    gm = standins.trace(Packed(), x())
    finished = editor.copy_of(gm.graph)
    run(finished, Options())
    metas = {node: {k: id(v) for k, v in node.meta.items()} for node in gm.graph.nodes}
    before, count = str(gm.graph), 0
    honest = getattr(edit.Journal, step)

    def faulty(self: edit.Journal, *args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        if count == call:
            raise RuntimeError("injected")
        return honest(self, *args, **kwargs)

    monkeypatch.setattr(edit.Journal, step, faulty)
    try:
        editor.transplant(gm.graph, finished)
    except RuntimeError as fault:
        assert str(fault) == "injected" and str(gm.graph) == before
        assert metas == {n: {k: id(v) for k, v in n.meta.items()} for n in gm.graph.nodes}
    else:
        assert count < call  # the step is not taken so often
        assert str(gm.graph) != before
