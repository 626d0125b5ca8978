"""The main job, shown on the CPU: an encoder of PaddleOCR-VL's shape, before and after.

Nothing is read off a graph dump. The attention op itself notes the strides and the storages
of the q, k and v it is given, the generated code is searched for its kernels, and the
outputs are compared bit by bit.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import qkvpass

from .report import Report

HEADS, HEAD_DIM = 16, 72  # PaddleOCR-VL's vision tower
WIDTH = HEADS * HEAD_DIM
IMAGES = (168, 120)  # tokens of each image in the packed sequence


@dataclass(frozen=True)
class Call:
    """What the attention op was given in one call.

    Args:
        strides: of q, k and v, in elements.
        storages: how many different storages hold q, k and v: 1 where they are views of one.
    """

    strides: tuple[tuple[int, ...], ...]
    storages: int


_calls: list[Call] = []


@torch.library.custom_op("qkvpass_demo::varlen_attention", mutates_args=())
def varlen_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor
) -> torch.Tensor:
    """Attention within each image of a packed (tokens, heads, head_dim) sequence."""
    storages = {t.untyped_storage().data_ptr() for t in (q, k, v)}
    _calls.append(Call((q.stride(), k.stride(), v.stride()), len(storages)))
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    for start, end in itertools.pairwise(cu_seqlens.tolist()):
        query, key, value = (t[start:end].transpose(0, 1).unsqueeze(0) for t in (q, k, v))
        attended = F.scaled_dot_product_attention(query, key, value)
        out[start:end] = attended.squeeze(0).transpose(0, 1)
    return out


@varlen_attention.register_fake
def _(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
    return torch.empty(q.shape, dtype=q.dtype, device=q.device)


class Layer(nn.Module):
    """A pre-norm encoder layer with one packed projection, as serving engines write it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm1(x)).split(WIDTH, dim=-1)
        q = q.view(-1, HEADS, HEAD_DIM).contiguous()
        k = k.view(-1, HEADS, HEAD_DIM).contiguous()
        v = v.view(-1, HEADS, HEAD_DIM).contiguous()
        x = x + self.out(varlen_attention(q, k, v, cu_seqlens).view(-1, WIDTH))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class Encoder(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(layers))

    def forward(self, x: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, cu_seqlens)
        return x


@dataclass(frozen=True)
class Run:
    """One compile and one call of the encoder.

    Args:
        output: what it returned.
        calls: what the attention op was given, call by call.
        kernels: kernel launches in the generated code, GEMMs and attention aside.
        report: what the pass decided; of no copy where it did not run.
    """

    output: torch.Tensor
    calls: tuple[Call, ...]
    kernels: int
    report: Report


def main(layers: int = 3) -> int:
    """Run the demo and print it. Returns 0 if every claim held, else 1."""
    from torch._inductor import config

    print(
        f"An encoder of PaddleOCR-VL's shape: {layers} layers, {HEADS} heads of {HEAD_DIM}, "
        f"{len(IMAGES)} images packed into {sum(IMAGES)} tokens, float32, on the CPU.\n"
    )
    # Without it, two compiles by Inductor alone need not give the same bits.
    with torch.no_grad(), config.patch(deterministic=True):
        stock, ours = compare(layers)
    print(_side("stock Inductor", stock))
    print(_side("with qkvpass", ours))
    claims = check(stock, ours)
    for claim, holds in claims.items():
        print(f"{'yes' if holds else 'NO '}  {claim}")
    print(f"\n{ours.report}")
    return 0 if all(claims.values()) else 1


def compare(layers: int) -> tuple[Run, Run]:
    """The same encoder and input under stock Inductor, then with the pass."""
    torch.manual_seed(0)
    model = Encoder(layers).eval()
    x = torch.randn(sum(IMAGES), WIDTH)
    cu_seqlens = torch.tensor([0, *IMAGES]).cumsum(0)
    stock = run(torch.compile(model, backend="inductor"), x, cu_seqlens)
    qkvpass.register_stride_tag(
        varlen_attention, operands=("q", "k", "v"), contract=qkvpass.StrideContract(alignment=16)
    )
    ours = run(torch.compile(model, backend=qkvpass.backend), x, cu_seqlens)
    return stock, ours


def run(compiled: Callable[..., Any], *args: torch.Tensor) -> Run:
    from torch._functorch import config as functorch_config
    from torch._inductor import config
    from torch._inductor.utils import run_and_get_code

    _calls.clear()
    # A cached compile would generate no code to search, and leave the pass nothing to do.
    uncached = (
        config.patch(fx_graph_cache=False),
        functorch_config.patch(enable_autograd_cache=False),
    )
    with uncached[0], uncached[1], qkvpass.capture() as reports:
        output, code = run_and_get_code(compiled, *args)  # resets Dynamo first
    return Run(
        output=output,
        calls=tuple(_calls),
        kernels=sum(len(re.findall(r"^\s+cpp_fused_\w+\(", text, re.M)) for text in code),
        report=Report.merge(reports),
    )


def check(stock: Run, ours: Run) -> dict[str, bool]:
    """What the demo claims, and whether it held."""
    return {
        "the outputs are the same to the last bit": torch.equal(stock.output, ours.output),
        "stock made q, k and v dense, each in memory of its own": all(
            call.storages == 3 for call in stock.calls
        ),
        "the op now reads all three from the packed projection, by stride": all(
            call.storages == 1 and set(call.strides) == {(3 * WIDTH, HEAD_DIM, 1)}
            for call in ours.calls
        ),
        "the generated code launches fewer kernels": ours.kernels < stock.kernels,
        "the report says that every copy went": bool(ours.report.removed) and not ours.report.kept,
    }


def _side(name: str, run: Run) -> str:
    call = run.calls[0]
    strides = " ".join(f"{operand} {stride}" for operand, stride in zip("qkv", call.strides))
    return (
        f"{name}\n"
        f"  strides that the op received  {strides}\n"
        f"  storages behind q, k, v       {call.storages}\n"
        f"  kernels besides GEMMs         {run.kernels}\n"
    )
