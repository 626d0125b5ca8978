"""Ahead of time: AOTInductor with the pass, and ``torch.export`` programs without Inductor."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import probe
import pytest
import standins
import torch
import torch._inductor.config as inductor_config
import torch.nn.functional as F
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.library import custom_op

import qkvpass

TOKENS, HEADS, HEAD_DIM = 12, 2, 16
WIDTH = HEADS * HEAD_DIM
STRIDED, DENSE = (3 * WIDTH, HEAD_DIM, 1), (WIDTH, HEAD_DIM, 1)


@custom_op("exported::attention", mutates_args=())
def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    probe.receive(q=q, k=k, v=v)
    return standins.attend(*(standins.by_stride(t) for t in (q, k, v)))


@attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return q.new_empty(q.shape)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def heads(self, x: Tensor) -> list[Tensor]:
        return [t.view(-1, HEADS, HEAD_DIM).contiguous() for t in self.qkv(x).chunk(3, -1)]

    def forward(self, x: Tensor) -> Tensor:
        return self.out(attention(*self.heads(x)).reshape(-1, WIDTH))


class Sdpa(Layer):
    """Copies to (B, H, S, D) in front of SDPA, whose CPU kernel is tagged by the table."""

    def forward(self, x: Tensor) -> Tensor:
        parts = (t.view(2, -1, HEADS, HEAD_DIM) for t in self.qkv(x).chunk(3, -1))
        q, k, v = (t.transpose(1, 2).contiguous() for t in parts)
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


@pytest.fixture(autouse=True)
def _tagged() -> None:
    qkvpass.register_stride_tag("exported::attention", operands=("q", "k", "v"))


def export(model: nn.Module, *inputs: Tensor, dynamic: int | None = None, **options: Any) -> Any:
    """The program of a model that only infers, with ``dynamic`` as the dim that may change."""
    shapes = None if dynamic is None else tuple({dynamic: Dim("tokens", max=64)} for _ in inputs)
    with torch.no_grad():
        return torch.export.export(model, inputs, dynamic_shapes=shapes, **options)


def called(program: ExportedProgram, *inputs: Tensor) -> tuple[list[Tensor], list[probe.Received]]:
    """Outputs, what the buffers hold then, and what the op received; the buffers are put back."""
    probe.taken()
    module = program.module()
    before = [buffer.clone() for buffer in module.buffers()]
    with torch.no_grad():
        outs = [out.clone() for out in pytree.tree_leaves(module(*inputs))]
        after = [buffer.clone() for buffer in module.buffers()]
        for buffer, value in zip(module.buffers(), before):
            buffer.copy_(value)
    return [*outs, *after], probe.taken()


def strides(calls: list[probe.Received]) -> list[tuple[int, ...]]:
    return [call[name].seen.stride for call in calls for name in "qkv"]


def same_bits(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(
        torch.equal(x, y) and x.stride() == y.stride() for x, y in zip(a, b)
    )


# AOTInductor, loaded in a process of its own


class Both(Sdpa):
    """The op and SDPA, one behind the other, for one package instead of two."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            t.view(-1, HEADS, HEAD_DIM).contiguous() for t in self.qkv(x.flatten(0, 1)).chunk(3, -1)
        )
        return super().forward(attention(q, k, v).view(x.shape))


LOAD = """
import json, sys, torch
sys.path[:0] = json.loads(sys.argv[1])
import probe, test_export
calls = []
for path in sys.argv[2:]:
    model, inputs, outs = torch._inductor.aoti_load_package(path), torch.load(path + ".in"), []
    with torch.no_grad():
        outs = [model(x) for x in inputs]
    torch.save(outs, path + ".out")
    calls.append([
        {name: [list(o.seen.stride), o.seen.offset, o.seen.storage] for name, o in call.items()}
        for call in probe.taken()
    ])
print(json.dumps(calls))
"""
CHEAP = {"aot_inductor.compile_wrapper_opt_level": "O0", "cpp_cache_precompile_headers": False}
PACKAGES = ("stock", "non-strict", "strict")


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Packages of one model and what came of them at two lengths in one fresh process."""
    qkvpass.register_stride_tag("exported::attention", operands=("q", "k", "v"))
    folder = tmp_path_factory.mktemp("packages")
    inputs = [torch.randn(2, tokens, WIDTH) for tokens in (TOKENS, TOKENS + 3)]
    found: dict[str, dict[str, Any]] = {}
    for name in PACKAGES:
        ran: list[Any] = []
        program = export(Both(), inputs[0], dynamic=1, strict=name == "strict")
        configs = {} if name == "stock" else qkvpass.inductor_options()
        with (
            qkvpass.capture() as reports,
            torch.no_grad(),
            inductor_config.patch(joint_custom_post_pass=ran.append, deterministic=True),
        ):
            torch._inductor.aoti_compile_and_package(
                program, package_path=str(folder / f"{name}.pt2"), inductor_configs=CHEAP | configs
            )
        torch.save(inputs, folder / f"{name}.pt2.in")
        found[name] = {"reports": reports, "ran": len(ran)}
    folders = [str(Path(qkvpass.__file__).parents[1]), str(Path(__file__).parent)]
    paths = [str(folder / f"{name}.pt2") for name in PACKAGES]
    done = subprocess.run(
        [sys.executable, "-c", LOAD, json.dumps(folders), *paths],
        env={**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr
    for name, path, calls in zip(PACKAGES, paths, json.loads(done.stdout.splitlines()[-1])):
        found[name] |= {"outs": torch.load(path + ".out"), "calls": calls}
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", PACKAGES[1:])
def test_aot_inductor_package(name: str, packages: dict[str, dict[str, Any]]) -> None:
    """Numbers of stock AOTInductor; the op reads views of the packed buffer."""
    stock, ours = packages["stock"], packages[name]
    assert same_bits(ours["outs"], stock["outs"])
    assert len(ours["calls"]) == len(stock["calls"]) == 2
    for call, dense in zip(ours["calls"], stock["calls"]):
        assert [call[n][0] for n in "qkv"] == [list(STRIDED)] * 3
        assert [call[n][1] for n in "qkv"] == [0, WIDTH, 2 * WIDTH]
        assert len({call[n][2] for n in "qkv"}) == 1
        assert [dense[n][0] for n in "qkv"] == [list(DENSE)] * 3
        assert len({dense[n][2] for n in "qkv"}) == 3


@pytest.mark.slow
def test_aot_inductor_reports_and_keeps_the_users_pass(
    packages: dict[str, dict[str, Any]],
) -> None:
    """SDPA's own copies go where Inductor picks the kernel; the user's pass ran each time."""
    assert all(found["ran"] == 1 for found in packages.values())
    assert packages["stock"]["reports"] == []
    for name in PACKAGES[1:]:
        (report,) = packages[name]["reports"]
        gone = [copy.op for copy in report.removed if copy.operand]
        assert gone.count("exported::attention") == 3 and len(gone) == 6


# Programs, without Inductor


class Counting(Layer):
    """Writes a buffer of its own, beside the attention."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.count.add_(1)
        return super().forward(x) * self.count


DECOMPOSED: dict[str, Callable[[ExportedProgram], ExportedProgram]] = {
    "as exported": lambda program: program,
    "decomposed": lambda program: program.run_decompositions(),
}


@pytest.mark.parametrize("strict", [False, True], ids=["non-strict", "strict"])
@pytest.mark.parametrize("ir", DECOMPOSED)
@pytest.mark.parametrize("dynamic", [None, 0], ids=["static", "dynamic"])
def test_rewritten_program(ir: str, strict: bool, dynamic: int | None) -> None:
    x = torch.randn(TOKENS, WIDTH)
    program = DECOMPOSED[ir](export(Counting(), x, dynamic=dynamic, strict=strict))
    text, signature = str(program), str(program.graph_signature)
    with qkvpass.capture() as reports, torch.no_grad():
        rewritten = qkvpass.rewrite(program)
    (report,) = reports
    assert [copy.operand for copy in report.removed] == ["q", "k", "v"]
    assert (str(program), str(program.graph_signature)) == (text, signature), "it was changed"
    check_program(rewritten, program)
    inputs = [x, torch.randn(TOKENS + (dynamic is not None) * 5, WIDTH)]
    for one in inputs:
        expected, dense = called(program, one)
        outs, received = called(rewritten, one)
        assert same_bits(outs, expected)
        assert strides(received) == [STRIDED] * 3 and probe.storages(received[0], "qkv") == 1
        assert strides(dense) == [DENSE] * 3 and probe.storages(dense[0], "qkv") == 3


def check_program(rewritten: ExportedProgram, program: ExportedProgram) -> None:
    """What a program says of itself is as it was, and it survives a file."""
    assert type(rewritten) is ExportedProgram and rewritten is not program
    assert str(rewritten.graph_signature) == str(program.graph_signature)
    assert rewritten.call_spec == program.call_spec
    assert rewritten.verifiers == program.verifiers
    assert str(rewritten.range_constraints) == str(program.range_constraints)
    assert rewritten.state_dict.keys() == program.state_dict.keys()
    for name, value in program.state_dict.items():
        assert rewritten.state_dict[name] is value
    rewritten.validate()
    file = io.BytesIO()
    torch.export.save(rewritten, file)
    file.seek(0)
    again = torch.export.load(file)
    (x,), _ = program.example_inputs
    assert same_bits(called(again, x)[0], called(program, x)[0])
    assert strides(called(again, x)[1]) == [STRIDED] * 3


def test_a_loaded_program_is_rewritten_too() -> None:
    x = torch.randn(TOKENS, WIDTH)
    program = export(Counting(), x, dynamic=0)
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    with torch.no_grad():
        rewritten = qkvpass.rewrite(torch.export.load(file))
    outs, received = called(rewritten, x)
    assert same_bits(outs, called(program, x)[0]) and strides(received) == [STRIDED] * 3


class Submodule(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Attend()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(x).chunk(3, -1)
        q, k, v = (t.view(-1, HEADS, HEAD_DIM) for t in parts)
        return self.inner(q.contiguous(), k, v)


class Attend(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k.contiguous(), v.contiguous())


def test_borders_that_were_preserved_stay() -> None:
    """``unflatten`` looks for the values at a submodule's border by name: q's copy is one."""
    x = torch.randn(TOKENS, WIDTH)
    program = export(Submodule(), x, preserve_module_call_signature=("inner",))
    with qkvpass.capture() as reports, torch.no_grad():
        rewritten = qkvpass.rewrite(program)
    reasons = {copy.operand: str(copy.reason) for copy in reports[0].copies}
    assert reasons == {"q": "graph-output", "k": "removed", "v": "removed"}
    outs, received = called(rewritten, x)
    assert same_bits(outs, called(program, x)[0]) and strides(received) == [DENSE, STRIDED, STRIDED]
    with torch.no_grad():
        assert torch.equal(torch.export.unflatten(rewritten)(x), outs[0])


# What is written must not be shared. Each goes wrong where the copies are dropped.


def write_projection(m: Layer, x: Tensor) -> Tensor:
    packed = m.qkv(x)
    q, k, v = heads(packed)
    packed.mul_(2)
    return attention(q, k, v) + packed.sum()


def write_result_of_write(m: Layer, x: Tensor) -> Tensor:
    """An in-place op returns its operand: what is split from that is the same memory."""
    packed = m.qkv(x)
    q, k, v = heads(packed.add_(1))
    packed.mul_(2)
    return attention(q, k, v) + packed.sum()


def write_through_view(m: Layer, x: Tensor) -> Tensor:
    packed = m.qkv(x)
    q, k, v = heads(packed)
    packed[0] = 3
    return attention(q, k, v) + packed.sum()


def write_through_einsum(m: Layer, x: Tensor) -> Tensor:
    """A composite that returns a view, although its schema does not say so."""
    packed = m.qkv(x)
    q, k, v = heads(packed)
    torch.einsum("ij->ji", packed).mul_(2)
    return attention(q, k, v) + packed.sum()


def write_buffer(m: Layer, x: Tensor) -> Tensor:
    """The packed operand is a buffer, and the next call must find it written."""
    q, k, v = heads(m.packed)
    m.packed.add_(x.sum())
    return attention(q, k, v) + m.packed.sum()


def write_input(m: Layer, x: Tensor) -> Tensor:
    wide = x.view(-1, 3 * WIDTH)
    q, k, v = heads(wide)
    x.mul_(2)
    return attention(q, k, v) + x.sum()


def write_copy(m: Layer, x: Tensor) -> Tensor:
    packed = m.qkv(x)
    q, k, v = heads(packed)
    for t in (q, k, v):
        t.mul_(2)
    return attention(q, k, v) + packed.sum()


def write_in_no_grad(m: Layer, x: Tensor) -> Tensor:
    """In a graph of its own, as export leaves a change of grad mode."""
    packed = m.qkv(x)
    q, k, v = heads(packed)
    with torch.enable_grad():
        packed.mul_(2)
    return attention(q, k, v) + packed.sum()


def heads(packed: Tensor) -> list[Tensor]:
    return [t.reshape(-1, HEADS, HEAD_DIM).contiguous() for t in packed.chunk(3, -1)]


class Writing(Layer):
    def __init__(self, write: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.write = write
        self.register_buffer("packed", torch.randn(TOKENS, 3 * WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.write(self, x)


WRITES = (
    write_projection,
    write_result_of_write,
    write_through_view,
    write_through_einsum,
    write_buffer,
    write_input,
    write_copy,
    write_in_no_grad,
)


@pytest.mark.parametrize("ir", DECOMPOSED)
@pytest.mark.parametrize("write", WRITES, ids=lambda write: write.__name__)
def test_what_is_written_is_not_shared(write: Callable[..., Tensor], ir: str) -> None:
    x = torch.randn(3 * TOKENS, WIDTH) if write is write_input else torch.randn(TOKENS, WIDTH)
    program = DECOMPOSED[ir](export(Writing(write), x))
    with qkvpass.capture() as reports, torch.no_grad():
        rewritten = qkvpass.rewrite(program)
    for one in (x, torch.randn_like(x)):
        given = [one.clone(), one.clone()]
        expected, actual = called(program, given[0])[0], called(rewritten, given[1])[0]
        assert same_bits([*actual, given[1]], [*expected, given[0]])
    if ir == "as exported":  # functional, writes are new values, and the copies may go
        assert {str(copy.reason) for copy in reports[0].copies} == {"mutated"}


@pytest.mark.parametrize("write", [write_projection, write_result_of_write, write_through_einsum])
def test_without_the_check_it_goes_wrong(
    write: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(qkvpass.safety.Propagation, "_check_memory", lambda *args: None)
    x = torch.randn(TOKENS, WIDTH)
    program = export(Writing(write), x)
    with torch.no_grad():
        rewritten = qkvpass.rewrite(program)
    assert not torch.allclose(called(program, x)[0][0], called(rewritten, x)[0][0])


# Autograd over a rewritten program: its backward is in no graph


class Trained(Layer):
    def __init__(self, op: Any) -> None:
        super().__init__()
        self.op = op

    def forward(self, x: Tensor) -> Tensor:
        return self.op(*self.heads(x))


def gradients(program: ExportedProgram, x: Tensor) -> list[Tensor]:
    module = program.module()
    module(x).pow(2).sum().backward()
    grads = [parameter.grad for name, parameter in module.named_parameters() if "qkv" in name]
    for parameter in module.parameters():
        parameter.grad = None
    return grads


BACKWARDS = {
    "tagged": (standins.aware, ["removed"] * 3),
    "untagged": (standins.aware_untagged_bwd, ["backward-not-capable"] * 3),
}


@pytest.mark.parametrize("backward", BACKWARDS)
def test_under_grad_the_backward_must_be_tagged(backward: str) -> None:
    """The untagged one takes its operands for dense: the gradient would be another."""
    op, reasons = BACKWARDS[backward]
    standins.tag("aware")
    standins.tag("aware_bwd", backward_of="standin::aware")
    standins.tag("aware_untagged_bwd")
    x = torch.randn(TOKENS, WIDTH)
    program = torch.export.export(Trained(op), (x,))
    with qkvpass.capture() as reports:
        rewritten = qkvpass.rewrite(program)
    assert [str(copy.reason) for copy in reports[0].copies] == reasons
    assert same_bits(gradients(rewritten, x), gradients(program, x))
    with torch.no_grad():
        for_inference = qkvpass.rewrite(program)
    same = all(map(torch.allclose, gradients(for_inference, x), gradients(program, x)))
    assert same == (backward == "tagged")


def test_an_op_without_a_gradient_needs_no_tag_for_one() -> None:
    with qkvpass.capture() as reports:
        qkvpass.rewrite(torch.export.export(Layer(), (torch.randn(TOKENS, WIDTH),)))
    assert [str(copy.reason) for copy in reports[0].copies] == ["removed"] * 3


class Returning(Trained):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        packed = self.qkv(x)
        return self.op(*heads(packed)), packed


def test_under_grad_a_returned_projection_may_be_written_first() -> None:
    standins.tag("aware")
    standins.tag("aware_bwd", backward_of="standin::aware")
    x = torch.randn(TOKENS, WIDTH)
    program = torch.export.export(Returning(standins.aware), (x,))
    with qkvpass.capture() as reports:
        rewritten = qkvpass.rewrite(program)
    assert [str(copy.reason) for copy in reports[0].copies] == ["mutated"] * 3
    found = []
    for one in (program, rewritten):
        module = one.module()
        out, packed = module(x)
        packed.data.zero_()
        found.append(torch.autograd.grad(out.sum(), module.qkv.weight)[0])
    assert torch.equal(*found)


# Refusals and switches


def test_anything_but_a_program_is_refused() -> None:
    with pytest.raises(TypeError, match=r"Layer; give what torch\.export\.export returns"):
        qkvpass.rewrite(Layer())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="target is 'gpu'"):
        qkvpass.rewrite(export(Layer(), torch.randn(TOKENS, WIDTH)), target="gpu")


def test_switched_off_it_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QKVPASS_DISABLE", "1")
    program = export(Layer(), torch.randn(TOKENS, WIDTH))
    with qkvpass.capture() as reports:
        assert str(qkvpass.rewrite(program).graph) == str(program.graph)
    assert reports == []
