"""The layer that all this grew from: its attention backends, and what it does to q and k.

Backends are stand-ins with the facts of the originals. ``fa3``, ``fa4``, ``triton_attn`` and
``amx_attn`` read strides; ``flashinfer_cudnn``, ``sdpa``, ``ascend_attn``, ``aiter_attn`` and
``xpu_attn`` need dense operands or were never verified, and go wrong on strided ones here. Where
the built-in table has a row for the original, the stand-in has its name.

Every case is traced, rewritten and interpreted. Some, so chosen that they cover the variants,
heads, dtypes and ways to be kept, go through all of Inductor: ``python test_matrix.py``.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import probe
import pytest
import standins
import torch
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config
import torch.nn.functional as F
from standins import as_dense, by_stride
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.library import custom_op

import qkvpass
from qkvpass import StrideContract

TOKENS, HEAD_DIM, DIM = 1023, 16, 32
INT32 = 2**31 - 1

# ---------------------------------------------------------------------------------------------
# Backends


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention over (T, H, D), where k and v may have fewer heads, into a dense result."""
    q, k, v = (t.transpose(0, 1).unsqueeze(0) for t in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    return by_stride(out[0].transpose(0, 1))


def packed_rows(t: Tensor) -> Tensor:
    """Token offsets count the elements of a dense operand, whatever the token stride."""
    return by_stride(t.as_strided(t.shape, (t.shape[1] * t.shape[2], *t.stride()[1:])))


def from_storage_start(t: Tensor) -> Tensor:
    """Strides are read, but from the start of the storage."""
    return by_stride(t.as_strided(t.shape, t.stride(), 0))


def rows_only(t: Tensor) -> Tensor:
    assert t.stride(-1) == 1
    return by_stride(t)


def aligned(t: Tensor) -> Tensor:
    unit = 16 // t.element_size()
    assert t.stride(-1) == 1 and not any(n % unit for n in (t.storage_offset(), *t.stride()[:-1]))
    return by_stride(t)


def in_int32(t: Tensor) -> Tensor:
    assert sum((size - 1) * stride for size, stride in zip(t.shape, t.stride())) <= INT32
    return rows_only(t)


def in_pairs(t: Tensor) -> Tensor:
    assert t.shape[-1] % 2 == 0
    return in_int32(t)


def even_heads(site: qkvpass.Site) -> str | None:
    return None if site.head_dim % 2 == 0 else f"head size {site.head_dim} is odd"


@dataclass(frozen=True)
class Backend:
    """One attention op.

    Args:
        op: its name.
        read: how it reads q, and k and v unless ``read_kv`` says otherwise.
        tag: options of the stride tag that it gets; None for ops that get none.
        kept: why copies in front of it stay, where it is not capable.
        schema: of the op, as far as the pass looks at it.
    """

    op: str
    read: Callable[[Tensor], Tensor]
    read_kv: Callable[[Tensor], Tensor] | None = None
    tag: dict[str, Any] | None = None
    kept: str = ""
    schema: str = "(Tensor q, Tensor k, Tensor v) -> Tensor"

    @property
    def call(self) -> Any:
        namespace, name = self.op.split("::")
        return getattr(getattr(torch.ops, namespace), name)

    def define(self) -> None:
        def kernel(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            probe.receive(q=q, k=k, v=v)
            read_kv = self.read_kv or self.read
            return attend(self.read(q), read_kv(k), read_kv(v))

        writes = re.findall(r"!\) (\w+)", self.schema)
        op = custom_op(self.op, kernel, mutates_args=writes, schema=self.schema)
        op.register_fake(lambda q, k, v: q.new_empty(q.shape))


BACKENDS = {
    # What the tags of the real ones say: flash kernels want 16-byte rows, Triton's multiplies
    # token and stride in int32, the CPU kernel takes its strides as int and pairs of elements.
    "fa3": Backend("matrix::fa3", rows_only, tag={}),
    "fa4": Backend("matrix::fa4", aligned, tag={"contract": StrideContract(alignment=16)}),
    "triton_attn": Backend(
        "matrix::triton_attn", in_int32, tag={"contract": StrideContract(max_offset=INT32)}
    ),
    "amx_attn": Backend(
        "matrix::amx_attn",
        in_pairs,
        tag={
            "contract": StrideContract(alignment=4, max_offset=INT32, output="dense"),
            "when": even_heads,
        },
    ),
    "flashinfer_cudnn": Backend("vllm::flashinfer_wrapper", packed_rows, kept="dense-only-op"),
    "sdpa": Backend("vllm::torch_sdpa_wrapper", as_dense, kept="tag-condition"),
    "ascend_attn": Backend(
        "npu::npu_fused_infer_attention_score",
        by_stride,
        as_dense,
        kept="dense-only-op",
        schema="(Tensor query, Tensor key, Tensor value) -> Tensor",
    ),
    # Registered as if it wrote its operands, so that functionalization wraps it.
    "aiter_attn": Backend(
        "aiter::mha_varlen_fwd",
        by_stride,
        as_dense,
        kept="mutated",
        schema="(Tensor(a!) q, Tensor(b!) k, Tensor(c!) v) -> Tensor",
    ),
    "xpu_attn": Backend("matrix::xpu_attn", from_storage_start, kept="untagged-op"),
}
for _backend in BACKENDS.values():
    _backend.define()


@custom_op("matrix::head_norm_", mutates_args=("x",))
def head_norm_(x: Tensor) -> None:
    """RMS norm of dense (T, H * D), head by head, in place."""
    rows = x.as_strided((x.numel() // HEAD_DIM, HEAD_DIM), (HEAD_DIM, 1))
    rows.copy_(F.rms_norm(rows, (HEAD_DIM,)))


@head_norm_.register_fake
def _(x: Tensor) -> None:
    return None


@custom_op("matrix::apply_rope", mutates_args=())
def apply_rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """A model's own position embedding: it sees q and k as dense rows of pairs."""
    q, k = (as_dense(t).view(-1, t.shape[1] * HEAD_DIM // 2, 2) for t in (q, k))
    return tuple(
        torch.stack(
            (t[..., 0] * cos - t[..., 1] * sin, t[..., 1] * cos + t[..., 0] * sin), -1
        ).view(TOKENS, -1, HEAD_DIM)
        for t in (q, k)
    )


@apply_rope.register_fake
def _(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape)


# ---------------------------------------------------------------------------------------------
# The layer


def nothing(q: Tensor, k: Tensor, *rope: Tensor) -> tuple[Tensor, Tensor]:
    """The plain layer."""
    return q, k


def in_place_norm(q: Tensor, k: Tensor, *rope: Tensor) -> tuple[Tensor, Tensor]:
    """InternViT: in place, through a view that joins the heads."""
    head_norm_(q.view(TOKENS, -1))
    head_norm_(k.view(TOKENS, -1))
    return q, k


def applier(q: Tensor, k: Tensor, *rope: Tensor) -> tuple[Tensor, Tensor]:
    """Llama 4: q and k go through code of the model's own."""
    return apply_rope(q, k, *rope)


def head_norm(q: Tensor, k: Tensor, *rope: Tensor) -> tuple[Tensor, Tensor]:
    """GLM-OCR: rows of one head; where they are not dense, the reshape makes them so."""
    return _normed(q, q.reshape(-1, HEAD_DIM)), _normed(k, k.reshape(-1, HEAD_DIM))


def fp32_head_norm(q: Tensor, k: Tensor, *rope: Tensor) -> tuple[Tensor, Tensor]:
    """The same, where the cast in front of the reshape makes the dense copy."""
    return tuple(_normed(t, t.float().reshape(-1, HEAD_DIM)) for t in (q, k))


def _normed(t: Tensor, rows: Tensor) -> Tensor:
    return F.rms_norm(rows, (HEAD_DIM,)).to(t.dtype).view(t.shape)


@dataclass(frozen=True)
class Variant:
    """What a layer does to q and k between their copies and the op.

    Args:
        apply: does it.
        strided: operands that a capable op reads from the packed buffer, their copies gone.
        kept: why the other copies stay.
        needless: operands whose copies go in front of any op: it receives what it did.
    """

    apply: Callable[..., tuple[Tensor, Tensor]]
    strided: str
    kept: str = ""
    needless: str = ""


VARIANTS = {
    "plain": Variant(nothing, "qkv"),
    "in_place_norm": Variant(in_place_norm, "v", kept="mutated"),
    "applier": Variant(applier, "v", kept="opaque-consumer"),
    "head_norm": Variant(head_norm, "v", kept="view-needs-dense"),
    "fp32_head_norm": Variant(fp32_head_norm, "v", needless="qk"),
}
HEADS = {"mha": (16, 16, 16), "gqa": (16, 4, 4)}  # of q, k and v
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Case:
    backend: str
    variant: str
    heads: str
    dtype: str

    def __str__(self) -> str:
        return "-".join((self.backend, self.variant, self.heads, self.dtype))

    @property
    def strided(self) -> str:
        """Operands that the op reads by stride in the end."""
        return VARIANTS[self.variant].strided if BACKENDS[self.backend].tag is not None else ""

    @property
    def removed(self) -> str:
        """Operands whose copies go."""
        return VARIANTS[self.variant].needless + self.strided

    def reason(self, operand: str) -> str:
        """Why the copy of an operand went or stayed; nothing where several things forbid it."""
        backend, variant = BACKENDS[self.backend], VARIANTS[self.variant]
        if operand in self.removed:
            return "removed"
        if operand == "v" or not variant.kept:
            return backend.kept
        return variant.kept if backend.tag is not None else ""

    def layer(self) -> Layer:
        return Layer(self, "qkv")

    def twin(self) -> Layer:
        """The layer as a hand would edit it: without the copies that go."""
        return Layer(self, "".join(n for n in "qkv" if n not in self.removed))

    def inputs(self) -> Tensor:
        return torch.randn(TOKENS, DIM, dtype=DTYPES[self.dtype])

    def tag(self) -> None:
        backend = BACKENDS[self.backend]
        if backend.tag is not None:
            qkvpass.register_stride_tag(backend.op, operands=("q", "k", "v"), **backend.tag)


class Layer(nn.Module):
    """Projection, split, copies of the operands named, what the variant does, attention."""

    def __init__(self, case: Case, copied: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        dtype = DTYPES[case.dtype]
        self.case, self.copied = case, copied
        self.widths = [heads * HEAD_DIM for heads in HEADS[case.heads]]
        self.qkv = nn.Linear(DIM, sum(self.widths), dtype=dtype)
        self.out = nn.Linear(self.widths[0], DIM, dtype=dtype)
        for name in ("cos", "sin"):
            self.register_buffer(name, torch.randn(TOKENS, 1, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(x).split(self.widths, -1)
        heads = [t.view(TOKENS, -1, HEAD_DIM) for t in parts]
        q, k, v = (t.contiguous() if n in self.copied else t for n, t in zip("qkv", heads))
        q, k = VARIANTS[self.case.variant].apply(q, k, self.cos, self.sin)
        return self.out(BACKENDS[self.case.backend].call(q, k, v).flatten(1))


CASES = [
    Case(backend, variant, heads, dtype)
    for backend, variant, heads, dtype in itertools.product(BACKENDS, VARIANTS, HEADS, DTYPES)
    # The two that no backend list was ever about are there for contrast.
    if variant not in ("plain", "fp32_head_norm") or (heads == "mha") == (dtype == "fp16")
]
COMPILED = [
    Case(*text.split("-"))
    for text in (
        "fa3-plain-mha-fp16",
        "fa3-fp32_head_norm-gqa-bf16",
        "fa4-in_place_norm-gqa-bf16",
        "triton_attn-applier-mha-bf16",
        "amx_attn-head_norm-gqa-fp16",
        "flashinfer_cudnn-plain-gqa-fp16",
        "aiter_attn-in_place_norm-mha-bf16",
        "xpu_attn-applier-mha-fp16",
    )
]


def check_received(case: Case, ours: list[probe.Received], stock: list[probe.Received]) -> None:
    """What the op received: views of the packed buffer where a copy went, else what it did."""
    widths = [heads * HEAD_DIM for heads in HEADS[case.heads]]
    assert len(ours) == len(stock) == 2
    for (mine, theirs), name in itertools.product(zip(ours, stock), "qkv"):
        assert same_bytes(mine[name].values, theirs[name].values)
        assert theirs[name].seen.dense and theirs[name].seen.offset == 0
        if name in case.strided:
            assert mine[name].seen.stride == (sum(widths), HEAD_DIM, 1)
            assert mine[name].seen.offset == sum(widths[: "qkv".index(name)])
            assert mine[name].room == TOKENS * sum(widths) * 2
        else:
            assert mine[name].seen.dense and mine[name].room == theirs[name].room
    if case.strided:
        assert all(probe.storages(call, case.strided) == 1 for call in ours)
    assert all(probe.storages(call, "qkv") == 3 for call in stock)


def same_bytes(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.int16), b.view(torch.int16))


def operands(copies: Sequence[qkvpass.CopyDecision]) -> set[str]:
    """Which of q, k and v copies reach; "query, key" are two."""
    return {name[0] for copy in copies for name in copy.operand.split(", ") if name}


def check_decisions(case: Case, outcome: standins.Outcome) -> None:
    report = outcome.report
    assert operands(report.removed) == set(case.removed)
    assert operands(report.copies) == set("qkv")
    for copy in report.copies:
        for name in operands([copy]):
            assert copy.reason in ("not-a-layout-copy", case.reason(name) or copy.reason)


@pytest.mark.parametrize("name", BACKENDS)
def test_backend_reads_strides_or_goes_wrong(name: str) -> None:
    """What the rest of this file rests on."""
    packed = torch.randn(TOKENS, 3 * 16, HEAD_DIM).half()
    views = packed.chunk(3, 1)
    op, dense = BACKENDS[name].call, [by_stride(t) for t in views]
    assert torch.equal(op(*views), op(*dense)) == (BACKENDS[name].tag is not None)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_layer(case: Case) -> None:
    """The copies that nobody needs go, one by one; no bit changes, against stock or by hand."""
    case.tag()
    x = case.inputs()
    outcome = standins.apply_pass(standins.trace(case.layer(), x))
    check_decisions(case, outcome)
    out, received = run_twice(outcome.after)
    expected, stock = run_twice(outcome.before)
    standins.assert_same(out, expected)
    check_received(case, received, stock)
    if case.removed:
        by_hand, _ = run_twice(standins.trace(case.twin(), x), outcome.before.meta["inputs"])
        standins.assert_same(out, by_hand)


def run_twice(
    gm: GraphModule, inputs: list[Any] | None = None
) -> tuple[list[Any], list[probe.Received]]:
    """(what came out, what the op received) of two runs with fresh data."""
    probe.taken()
    given = gm.meta["inputs"] if inputs is None else inputs
    outs = [out for seed in (1, 2) for out in standins.run_graph(gm, standins.fresh(given, seed))]
    return outs, probe.taken()


# ---------------------------------------------------------------------------------------------
# All of Inductor, in a process that sets ``deterministic`` before it compiles anything


@pytest.mark.slow
def test_compiled_layers() -> None:
    """The same through code generation: the bits, what the op received, and fewer kernels."""
    environment = {
        **os.environ,
        "QKVPASS_STRICT": "1",
        "PYTHONPATH": os.pathsep.join([str(Path(qkvpass.__file__).parents[1]), *sys.path]),
    }
    done = subprocess.run(
        [sys.executable, __file__], env=environment, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {str(case): [] for case in COMPILED}


def main() -> None:
    functorch_config.enable_autograd_cache = False
    inductor_config.fx_graph_cache = False
    inductor_config.deterministic = True
    print(json.dumps({str(case): problems(case) for case in COMPILED}))


def problems(case: Case) -> list[str]:
    """What does not hold once a case is compiled."""
    case.tag()
    x = case.inputs()
    ours, received = compile_and_run(case.layer(), x, qkvpass.backend)
    stock, stock_received = compile_and_run(case.layer(), x, "inductor")
    by_hand, _ = compile_and_run(case.twin(), x, "inductor")
    (report,) = ours.reports
    gone = operands(report.removed)
    fewer = ours.kernels < stock.kernels if case.strided else ours.kernels == stock.kernels
    found = [
        failure(standins.assert_same, flat(ours), flat(stock)),
        failure(standins.assert_same, flat(ours), flat(by_hand)),
        failure(check_received, case, received, stock_received),
        "" if gone == set(case.removed) else f"removed {gone}",
        "" if fewer else f"{ours.kernels} kernels, stock has {stock.kernels}",
        "" if ours.kernels == by_hand.kernels else f"{by_hand.kernels} kernels by hand",
    ]
    return [problem for problem in found if problem]


def compile_and_run(
    layer: Layer, x: Tensor, backend: Any
) -> tuple[standins.Run, list[probe.Received]]:
    probe.taken()
    return standins.run(layer, x, backend=backend), probe.taken()


def flat(run: standins.Run) -> list[Any]:
    return [out for outs in run.outputs for out in outs]


def failure(check: Callable[..., None], *args: Any) -> str:
    """What a check says, or nothing."""
    try:
        check(*args)
    except AssertionError:
        return traceback.format_exc()
    return ""


if __name__ == "__main__":
    main()
