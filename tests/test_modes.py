"""Modes of torch.compile, regional compilation, and graphs that run without Inductor."""

from __future__ import annotations

from typing import Any

import families
import pytest
import standins
import torch
import torch._inductor.config as inductor_config
from standins import tag
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._inductor import metrics

import qkvpass

TOKENS, HEADS, HEAD_DIM = 24, 2, 8
WIDTH = HEADS * HEAD_DIM
STRIDED = ((3 * WIDTH, HEAD_DIM, 1),) * 3
DENSE = ((WIDTH, HEAD_DIM, 1),) * 3
EAGER = qkvpass.configured(target="eager")


@pytest.fixture(autouse=True)
def _tagged() -> None:
    tag("aware")
    tag("aware_bwd", backward_of="standin::aware")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        parts = (t.reshape(-1, HEADS, HEAD_DIM) for t in self.qkv(x).split(WIDTH, -1))
        return x + self.out(standins.aware(*(t.contiguous() for t in parts)).flatten(1))


def block() -> nn.Module:
    torch.manual_seed(0)
    return Block().eval()


def run(backend: Any, **options: Any) -> tuple[list[Tensor], list[Any], list[qkvpass.Report]]:
    """(outputs, strides that the op received, reports) of two calls without grad."""
    torch._dynamo.reset()
    compiled = torch.compile(block(), backend=backend, **options)
    given = standins.fresh([torch.randn(TOKENS, WIDTH)] * 2, 1)
    with qkvpass.capture() as reports, standins.recorded("aware") as calls, torch.no_grad():
        outputs = [compiled(x) for x in given]
    return outputs, [call.strides for call in calls], list(reports)


def check_pair(**options: Any) -> None:
    """Equal bits; views for the op, where stock gives it copies; one report."""
    expected, stock, _ = run("inductor", **options)
    outputs, strides, reports = run(qkvpass.backend, **options)
    standins.assert_same(outputs, expected)
    assert (strides, stock) == ([STRIDED] * 2, [DENSE] * 2)
    (report,) = reports
    assert [str(c.reason) for c in report.copies] == ["removed"] * 3


# ---------------------------------------------------------------------------------------------
# Inductor's modes


def test_fullgraph() -> None:
    check_pair(fullgraph=True)


def test_max_autotune() -> None:
    check_pair(mode="max-autotune")


@pytest.mark.parametrize("setting", ["freezing", "cpp_wrapper"])
def test_inductor_settings(setting: str) -> None:
    with inductor_config.patch({setting: True}):
        check_pair()


# ---------------------------------------------------------------------------------------------
# One block compiled, called for every layer


class Layers(nn.Module):
    def __init__(self, backend: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        for one in self.blocks:
            one.compile(backend=backend)

    def forward(self, x: Tensor) -> Tensor:
        for one in self.blocks:
            x = one(x)
        return x


@pytest.mark.parametrize("train", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("stock", ["inductor", "aot_eager"])
def test_regional_compilation_compiles_and_reports_once(stock: str, train: bool) -> None:
    ours = {"inductor": qkvpass.backend, "aot_eager": EAGER}[stock]
    results = {}
    for backend in (stock, ours):
        torch._dynamo.reset()
        counters.clear()
        layers = Layers(backend)
        x = standins.fresh([torch.randn(TOKENS, WIDTH)], 1)[0].requires_grad_(train)
        with (
            torch._dynamo.config.patch(error_on_recompile=True),
            qkvpass.capture() as reports,
            standins.recorded() as calls,
            torch.set_grad_enabled(train),
        ):
            out = layers(x)
            grads = torch.autograd.grad((out**2).sum(), [x]) if train else ()
        assert counters["stats"]["unique_graphs"] == 1
        results[backend] = [out.detach(), *grads]
        strides = [call.strides[-3:] for call in calls]
        assert strides == [STRIDED if backend is ours else DENSE] * (8 if train else 4)
        assert len(reports) == (1 if backend is ours else 0)
    standins.assert_same(results[ours], results[stock])


class Nested(nn.Module):
    """The block is a region of a graph that calls it for every layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for one in self.blocks:
            x = region(one, x)
        return x


@torch.compiler.nested_compile_region
def region(one: nn.Module, x: Tensor) -> Tensor:
    return one(x)


@pytest.mark.parametrize(
    ("stock", "train"), [("inductor", False), ("aot_eager", False), ("aot_eager", True)]
)
def test_a_nested_region_is_rewritten_once(stock: str, train: bool) -> None:
    ours = {"inductor": qkvpass.backend, "aot_eager": EAGER}[stock]
    theirs = standins.run(Nested(), torch.randn(TOKENS, WIDTH), backend=stock, train=train)
    mine = standins.run(Nested(), torch.randn(TOKENS, WIDTH), backend=ours, train=train)
    for a, b in zip(mine.outputs, theirs.outputs):
        standins.assert_same(a, b)
    assert [call.strides for call in mine.seen("aware")] == [STRIDED] * 6
    assert [call.strides for call in theirs.seen("aware")] == [DENSE] * 6
    assert sum(len(report.removed) for report in mine.reports) == 3


# ---------------------------------------------------------------------------------------------
# Without Inductor


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("family", [families.F1, families.F3, families.F4, families.F5])
def test_eager_target(family: type[nn.Module], dynamic: bool) -> None:
    """The numbers and strides of ``aot_eager`` and of the model itself, without the copies."""
    model, x = family(), families.example_input(family)
    with torch.no_grad():
        counters.clear()
        metrics.reset()
        ours = standins.run(model, x, backend=EAGER, dynamic=dynamic)
        assert metrics.generated_kernel_count == 0 and not counters["inductor"]
        stock = standins.run(model, x, backend="aot_eager", dynamic=dynamic)
        plain = [model(*standins.fresh([x], seed)) for seed in (1, 2)]
    for mine, theirs, out in zip(ours.outputs, stock.outputs, plain):
        standins.assert_same(mine, theirs)
        if family is not families.F5:  # which has a fast path of its own
            standins.assert_same(mine, [out])
    assert {str(c.reason) for r in ours.reports for c in r.copies if c.operand} == {"removed"}
    if family is families.F1:
        wide = ((3 * families.DIM, families.HEAD_DIM, 1),) * 3
        assert [call.strides for call in ours.seen("aware")] == [wide] * 2
        assert all(call.one_storage for call in ours.seen("aware"))
        assert not any(call.one_storage for call in stock.seen("aware"))


def test_eager_target_runs_fewer_copies() -> None:
    """In eager a copy is a kernel, also where Inductor would write either layout."""

    def copies(backend: Any) -> int:
        torch._dynamo.reset()
        compiled = torch.compile(families.F8(), backend=backend)
        x = families.example_input(families.F8)
        with torch.no_grad():
            compiled(x)
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
                compiled(x)
        return sum(e.name == "aten::clone" for e in seen.events())

    assert copies(EAGER) == copies("aot_eager") - 3


def test_eager_target_takes_no_option_of_inductor() -> None:
    compiled = torch.compile(block(), backend=EAGER, mode="max-autotune")
    with pytest.raises(Exception, match=r"takes no mode or options; got \{'mode': 'max-autotune'"):
        compiled(torch.randn(TOKENS, WIDTH))
    with pytest.raises(ValueError, match=r"backend=qkvpass.configured\(target=\"eager\"\)"):
        qkvpass.inductor_options(target="eager")


def test_equal_options_are_one_backend() -> None:
    """Dynamo compiles anew for each backend object."""
    assert qkvpass.configured(target="eager") is EAGER
    assert qkvpass.configured(target="inductor") is qkvpass.backend is qkvpass.configured()


# ---------------------------------------------------------------------------------------------
# On a GPU


gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune"])
@pytest.mark.parametrize("family", [families.F3, families.F4], ids=lambda f: f.__name__)
@torch.no_grad()
def test_cuda_graphs(family: type[nn.Module], mode: str) -> None:
    """Captured and replayed: the bits of stock, and fewer kernels."""
    model = family().to("cuda", torch.bfloat16)
    inputs = [families.example_input(family).to("cuda", torch.bfloat16) for _ in range(4)]
    outputs, kernels = {}, {}
    for backend in ("inductor", qkvpass.backend):
        torch._dynamo.reset()
        metrics.reset()
        counters.clear()
        with qkvpass.capture() as reports:
            compiled = torch.compile(model, backend=backend, mode=mode)
            outputs[backend] = []
            for x in inputs:  # warm up, capture, replay
                torch.compiler.cudagraph_mark_step_begin()
                outputs[backend].append(compiled(x).clone())
        kernels[backend] = metrics.generated_kernel_count
        assert not counters["inductor"]["cudagraph_skips"]
    # Two compiles may tune the same GEMM to two kernels.
    alike = standins.assert_close if mode == "max-autotune" else standins.assert_same
    alike(outputs[qkvpass.backend], outputs["inductor"])
    assert kernels[qkvpass.backend] < kernels["inductor"]
    assert any(c.removed and c.operand for report in reports for c in report.copies)


@pytest.mark.gpu
@gpu
def test_cuda_graphs_in_training() -> None:
    """Forward and backward are captured; gradients equal stock's."""
    model = families.F3().to("cuda", torch.bfloat16)
    results = {}
    for backend in ("inductor", qkvpass.backend):
        torch._dynamo.reset()
        compiled = torch.compile(model, backend=backend, mode="reduce-overhead")
        results[backend] = []
        for seed in range(4):
            torch.manual_seed(seed)
            x = families.example_input(families.F3).to("cuda", torch.bfloat16).requires_grad_()
            torch.compiler.cudagraph_mark_step_begin()
            out = compiled(x)
            grads = torch.autograd.grad((out**2).sum(), [x, *model.parameters()])
            results[backend] += [t.detach().clone() for t in (out, *grads)]
    standins.assert_same(results[qkvpass.backend], results["inductor"])
