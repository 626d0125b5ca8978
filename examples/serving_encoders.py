"""The packed path through attention as serving engines write it, one layer of each vision tower.

Projection, split, view, ``contiguous()`` of q, k and v as for an attention backend that the engine
does not know, a variable-length op; and what each model does to q and k on the way. Every row runs
on a CPU in bf16, with the pass and without; the bits must agree, and the op notes what it got.

    python serving_encoders.py [--full] [--inductor]

Two heads of each model by default; ``--full`` takes all of them. The graphs run op by op;
``--inductor`` compiles them to the end, which takes a minute or two.
"""

from __future__ import annotations

import argparse
import itertools
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import qkvpass

IMAGES, WINDOW = (24, 16), 8  # tokens of each image, and of an attention window


@dataclass(frozen=True)
class Tower:
    """A model's attention layer, and what is expected of the pass.

    Args:
        model: its name; with the engine's where two write it differently.
        heads, head_dim, layers: of the published configuration.
        steps: what happens between split and attention, in order: keys of :data:`STEPS`, and
            ``"copy"`` where q, k and v are made contiguous.
        expected: what becomes of each operand's copy, a :class:`qkvpass.Reason`.
        strided: the operands that arrive at the op as views of the packed buffer.
        folded: those whose copy Inductor would have fused into the next kernel anyway.
        windows: whether tokens are put in another order first, window by window.
    """

    model: str
    heads: int
    head_dim: int
    layers: int
    steps: tuple[str, ...]
    expected: dict[str, str]
    strided: str = "v"
    folded: str = ""
    windows: bool = False

    def mib_saved(self) -> float:
        """Reads and writes of 1000 tokens, all layers, that go beyond what Inductor folds."""
        gone = [n for n, r in self.expected.items() if r == "removed" and n not in self.folded]
        return len(gone) * 2 * 2 * 1000 * self.heads * self.head_dim * self.layers / 2**20


ALL = dict.fromkeys("qkv", "removed")


def only_v(reason: str) -> dict[str, str]:
    return {"q": reason, "k": reason, "v": "removed"}


VIEWS = only_v("view-needs-dense")
TOWERS = (
    Tower("PaddleOCR-VL, no rope", 16, 72, 27, ("copy",), ALL, "qkv"),
    Tower("PaddleOCR-VL", 16, 72, 27, ("copy", "rope"), ALL, folded="qk"),
    Tower("Qwen2.5-VL, full", 16, 80, 32, ("copy", "rope"), ALL, folded="qk"),
    Tower("Qwen2.5-VL, windows", 16, 80, 32, ("copy", "rope"), ALL, folded="qk", windows=True),
    Tower("Qwen3-VL", 16, 72, 27, ("copy", "rope"), ALL, folded="qk"),
    Tower("InternViT-6B", 25, 128, 45, ("copy", "in-place norm"), only_v("mutated")),
    Tower("InternViT-300M", 16, 64, 24, ("copy",), ALL, "qkv"),
    Tower("Llama 4 vision", 16, 88, 34, ("copy", "applier"), only_v("opaque-consumer")),
    Tower("GLM-OCR", 16, 64, 24, ("copy", "norm", "rope"), ALL, folded="qk"),
    Tower("GLM-OCR, SGLang", 16, 64, 24, ("copy", "reshaping norm", "rope"), VIEWS),
    Tower("GLM-OCR, vLLM", 16, 64, 24, ("reshaping norm", "copy", "cat-rope-chunk"), VIEWS),
    Tower("Kimi MoonViT", 16, 72, 27, ("copy", "complex rope"), ALL, folded="qk"),
    Tower("dots.ocr", 12, 128, 42, ("copy", "cat-rope-chunk"), ALL, folded="qk"),
)


# ---------------------------------------------------------------------------------------------
# The ops


class Received(NamedTuple):
    """How an operand arrived at the attention op: its strides, and the memory behind it."""

    stride: tuple[int, ...]
    storage: int  # address
    room: int  # bytes


received: list[dict[str, Received]] = []  # by operand, for each call of the op


@qkvpass.stride_capable("q", "k", "v")
@torch.library.custom_op("serving::varlen_attention", mutates_args=())
def varlen_attention(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Attention within each sequence; q, k, v are (tokens, heads, head_dim) of any strides."""
    memory = {name: t.untyped_storage() for name, t in zip("qkv", (q, k, v))}
    strides = {name: t.stride() for name, t in zip("qkv", (q, k, v))}
    received.append(
        {n: Received(strides[n], memory[n].data_ptr(), memory[n].nbytes()) for n in "qkv"}
    )
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    for start, end in itertools.pairwise(cu_seqlens.tolist()):
        # The kernels that engines call read strides to the bit; SDPA on a CPU may round by them.
        one = (t[start:end].transpose(0, 1)[None].contiguous() for t in (q, k, v))
        out[start:end] = F.scaled_dot_product_attention(*one)[0].transpose(0, 1)
    return out


@varlen_attention.register_fake
def _(q, k, v, cu_seqlens):
    return torch.empty(q.shape, dtype=q.dtype, device=q.device)


@torch.library.custom_op("serving::rms_norm_", mutates_args=("x",))
def rms_norm_(x: Tensor, weight: Tensor) -> None:
    """Normalise rows in place. It takes x for dense: on a view of the packed buffer it would
    write into the neighbours."""
    rows = x.as_strided((x.numel() // weight.numel(), weight.numel()), (weight.numel(), 1))
    rows.copy_(F.rms_norm(rows, weight.shape, weight))


@torch.library.custom_op("serving::apply_positions", mutates_args=())
def apply_positions(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """A model's own rope, which nobody tagged. It reshapes as it likes: a strided q raises."""
    q, k = (rotated(t.view(-1).view(t.shape), (cos, sin)) for t in (q, k))
    return q, k


@apply_positions.register_fake
def _(q, k, cos, sin):
    return tuple(torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (q, k))


# ---------------------------------------------------------------------------------------------
# What stands between the split and the attention


def rotated(x, rope):
    cos, sin = rope
    first, second = x.float().chunk(2, dim=-1)
    return (x.float() * cos + torch.cat((-second, first), dim=-1) * sin).to(x.dtype)


def rotated_as_complex(x, rope):
    turns = torch.complex(*(t[..., : t.shape[-1] // 2] for t in rope))
    pairs = torch.view_as_complex(x.float().view(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * turns).flatten(-2).type_as(x)


def chunked_after_one_rope(block, q, k, rope):
    qk = rotated(torch.cat((q[None], k[None])), rope)
    return tuple(t.squeeze(0) for t in qk.chunk(2))


def normed_in_place(block, q, k, rope):
    for t in (q, k):
        rms_norm_(t, block.norm)
    return q, k


def head_normed(block, t):
    return F.rms_norm(t, block.head_norm.shape, block.head_norm)


STEPS = {
    "rope": lambda block, q, k, rope: (rotated(q, rope), rotated(k, rope)),
    "complex rope": lambda block, q, k, rope: tuple(rotated_as_complex(t, rope) for t in (q, k)),
    "cat-rope-chunk": chunked_after_one_rope,
    "norm": lambda block, q, k, rope: tuple(head_normed(block, t) for t in (q, k)),
    # On a strided input the reshape makes a dense copy of its own.
    "reshaping norm": lambda block, q, k, rope: tuple(
        head_normed(block, t.reshape(-1, t.shape[-1])).view(t.shape) for t in (q, k)
    ),
    "in-place norm": normed_in_place,
    "applier": lambda block, q, k, rope: apply_positions(q, k, *rope),
}


class Block(nn.Module):
    """The attention of one layer, with so many heads."""

    def __init__(self, tower: Tower, heads: int) -> None:
        super().__init__()
        self.heads, self.head_dim, self.steps = heads, tower.head_dim, tower.steps
        self.width = heads * tower.head_dim
        self.qkv = nn.Linear(self.width, 3 * self.width)
        self.out = nn.Linear(self.width, self.width)
        self.norm = nn.Parameter(torch.rand(self.width) + 0.5)
        self.head_norm = nn.Parameter(torch.rand(self.head_dim) + 0.5)

    def forward(self, x, cu_seqlens, rope, order):
        if order is not None:
            x = x[order]
        parts = self.qkv(x).split(self.width, dim=-1)
        q, k, v = (t.view(-1, self.heads, self.head_dim) for t in parts)
        for step in self.steps:
            if step == "copy":
                q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
            else:
                q, k = STEPS[step](self, q, k, rope)
        out = self.out(varlen_attention(q, k, v, cu_seqlens).view(-1, self.width))
        return out if order is None else out[order.argsort()]


# ---------------------------------------------------------------------------------------------
# Running a row


class Outcome(NamedTuple):
    """What the pass did to one tower.

    Args:
        verdicts: what became of each operand's copy in the graphs that ran.
        explained: the same as ``qkvpass.explain`` tells it of Inductor's graphs.
        details: the facts that decided, by operand.
        folded: operands whose copy Inductor would have fused away.
        stock, ours: how the op received its operands, call by call.
        same_bits: whether the results agree to the bit with those of the stock compiler.
    """

    verdicts: dict[str, str]
    explained: dict[str, str]
    details: dict[str, str]
    folded: str
    stock: list[dict[str, Received]]
    ours: list[dict[str, Received]]
    same_bits: bool


def inputs_of(tower: Tower, width: int):
    tokens = sum(IMAGES)
    lengths = [WINDOW] * (tokens // WINDOW) if tower.windows else IMAGES
    angles = torch.randn(tokens, 1, tower.head_dim // 2).repeat(1, 1, 2)
    return (
        torch.randn(tokens, width, dtype=torch.bfloat16),
        torch.tensor([0, *lengths]).cumsum(0),
        (angles.cos(), angles.sin()),
        torch.randperm(tokens) if tower.windows else None,
    )


def copies_by_operand(report: qkvpass.Report) -> dict[str, list[qkvpass.CopyDecision]]:
    copies = [c for c in report.copies if c.reason is not qkvpass.Reason.NOT_A_LAYOUT_COPY]
    return {name: [c for c in copies if name in c.operand.split(", ")] for name in "qkv"}


def verdicts_of(report: qkvpass.Report) -> dict[str, str]:
    return {
        name: " + ".join(sorted({str(c.reason) for c in copies}))
        for name, copies in copies_by_operand(report).items()
    }


@torch.no_grad()
def run(tower: Tower, full: bool = False, inductor: bool = False) -> Outcome:
    """Compile a tower without the pass and with it, and call both twice, on new data each time."""
    block = Block(tower, tower.heads if full else 2).to(torch.bfloat16)
    data = [inputs_of(tower, block.width) for _ in range(2)]
    explained = qkvpass.explain(block, *data[0])
    results, calls = [], []
    for backend in BACKENDS[inductor]:
        torch._dynamo.reset()  # all towers share one forward, which Dynamo compiles only so often
        received.clear()
        compiled = torch.compile(block, backend=backend)
        with qkvpass.capture() as reports:
            results.append([compiled(*one) for one in data])
        calls.append(list(received))
    torch._dynamo.reset()
    copies = copies_by_operand(explained)
    return Outcome(
        verdicts_of(qkvpass.Report.merge(reports)),
        verdicts_of(explained),
        {name: copies[name][0].detail for name in "qkv"},
        "".join(name for name in "qkv" if all(c.folded for c in copies[name])),
        *calls,
        same_bits=all(map(torch.equal, *results)),
    )


BACKENDS = {
    False: ("aot_eager", qkvpass.configured(target="eager")),
    True: ("inductor", qkvpass.backend),
}


def cell(outcome: Outcome, name: str) -> str:
    if outcome.verdicts[name] != "removed":
        return outcome.verdicts[name]
    return "gone*" if name in outcome.folded else "gone"


def row(tower: Tower, outcome: Outcome) -> tuple[str, ...]:
    heads = f"{tower.heads}x{tower.head_dim}"
    cells = (cell(outcome, name) for name in "qkv")
    steps = ", ".join(tower.steps)
    return (tower.model, heads, str(tower.layers), steps, *cells, f"{tower.mib_saved():.0f}")


HEADER = ("model", "heads", "layers", "split to attention", "q", "k", "v", "MiB")


def table(rows) -> str:
    rows = [HEADER, *rows]
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = ["  ".join(t.ljust(w) for t, w in zip(one, widths)).rstrip() for one in rows]
    return "\n".join([lines[0], "-" * max(map(len, lines)), *lines[1:]])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--full", action="store_true", help="all heads of each model")
    parser.add_argument("--inductor", action="store_true", help="compile to the end")
    options = parser.parse_args()

    torch.manual_seed(0)
    outcomes = [run(tower, options.full, options.inductor) for tower in TOWERS]
    print(table([row(tower, outcome) for tower, outcome in zip(TOWERS, outcomes)]))
    print("\n*    Inductor would have fused this copy into the next kernel: none is saved")
    print("MiB  reads and writes saved for 1000 tokens, in all layers of the model\n")
    for tower, outcome in zip(TOWERS, outcomes):
        assert outcome.verdicts == outcome.explained == tower.expected, tower.model
        assert outcome.same_bits, tower.model
        if outcome.verdicts["q"] != "removed":
            print(f"{tower.model}: {outcome.details['q']}")


if __name__ == "__main__":
    main()
