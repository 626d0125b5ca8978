"""Random attention modules, spelled in the many ways of model code.

A :class:`Program` is plain data, so that hypothesis can shrink it and a failure can be run again
from its repr. Every choice is a key of one of the tables below.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import standins
import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.library import custom_op

from qkvpass import StrideContract

FEATURES = 8  # of a token in front of the projection

# ---------------------------------------------------------------------------------------------
# Kernels beyond the stand-ins


def _attention(name: str, check: Callable[..., None]) -> Any:
    """A kernel that reads strides, and raises where ``check`` does not like them."""

    def kernel(q: Tensor, k: Tensor, v: Tensor, limit: int) -> Tensor:
        standins.note(name, q, k, v)
        check(q, k, v, limit)
        return standins.attend(*map(standins.by_stride, (q, k, v)))

    op = custom_op(f"standin::{name}", kernel, mutates_args=())
    op.register_fake(lambda q, k, v, limit: q.new_empty(q.shape))
    return op


def _one_layout(q: Tensor, k: Tensor, v: Tensor, limit: int) -> None:
    moved = [s for s in zip(k.shape, k.stride(), v.stride()) if s[0] > 1 and s[1] != s[2]]
    if moved:
        raise RuntimeError(f"k and v have strides {k.stride()} and {v.stride()}")


def _near(q: Tensor, k: Tensor, v: Tensor, limit: int) -> None:
    for t in (q, k, v):
        if sum((n - 1) * s for n, s in zip(t.shape, t.stride())) > limit:
            raise RuntimeError(f"strides {t.stride()} reach beyond {limit}")


one_layout = _attention("one_layout", _one_layout)
near = _attention("near", _near)


@custom_op("standin::scale_", mutates_args=("x",))
def scale_(x: Tensor) -> None:
    standins.note("scale_", x)
    x.mul_(2)


@custom_op("standin::attend_into", mutates_args=("out",))
def attend_into(q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
    standins.note("attend_into", q, k, v, out)
    out.copy_(standins.attend(*map(standins.by_stride, (q, k, v))))


@custom_op("standin::project", mutates_args=())
def project(x: Tensor, weight: Tensor) -> Tensor:
    return x @ weight


scale_.register_fake(lambda x: None)
attend_into.register_fake(lambda q, k, v, out: None)
project.register_fake(lambda x, weight: x.new_empty(*x.shape[:-1], weight.shape[-1]))


# ---------------------------------------------------------------------------------------------
# The packed buffer

Packed = Callable[["Module", Tensor], Tensor]

SOURCES: dict[str, Packed] = {
    "linear": lambda m, x: F.linear(x, m.weight.t()),
    "linear with bias": lambda m, x: F.linear(x, m.weight.t(), m.bias),
    "matmul": lambda m, x: x @ m.weight,
    "custom op": lambda m, x: project(x, m.weight),
    "cat": lambda m, x: torch.cat((x @ m.weight[:, :4], x @ m.weight[:, 4:]), -1),
    "input": lambda m, x: x,
    "rows turned": lambda m, x: _turned(_turned(x).contiguous() @ m.weight),
    "strided input": lambda m, x: x,
    "offset input": lambda m, x: x,
}


def _turned(x: Tensor) -> Tensor:
    """Batch first as sequence first, and back."""
    return x.transpose(0, -2)


TAKES_PACKED = frozenset({"input", "strided input", "offset input"})

PRODUCERS: dict[str, Packed] = {
    "none": lambda m, x: x,
    "relu": lambda m, x: x.relu(),
    "bias": lambda m, x: x + m.bias,
    "bias behind a view": lambda m, x: (x.flatten(0, -2) + m.bias).view(x.shape),
    "cast": lambda m, x: x.float().mul(3).to(x.dtype),
    "add_": lambda m, x: x.add_(1),
    "clone": lambda m, x: x.clone(),
    "pad": lambda m, x: F.pad(x, (0, 8))[..., : x.shape[-1]],
}

# ---------------------------------------------------------------------------------------------
# The split: packed (..., (H + 2 G) * D) to three of (..., heads, D)

Split = Callable[["Module", Tensor], Sequence[Tensor]]


def _heads(m: Module, parts: Sequence[Tensor]) -> list[Tensor]:
    return [HEADS[m.program.heads_by](t, t.shape[-1] // m.dim, m.dim) for t in parts]


HEADS: dict[str, Callable[[Tensor, int, int], Tensor]] = {
    "view": lambda t, h, d: t.view(*t.shape[:-1], h, d),
    "reshape": lambda t, h, d: t.reshape(*t.shape[:-1], h, d),
    "reshape -1": lambda t, h, d: t.reshape(-1, h, d).reshape(*t.shape[:-1], h, d),
    "unflatten": lambda t, h, d: t.unflatten(-1, (h, d)),
    "split heads": lambda t, h, d: torch.stack(t.split(d, -1), -2),
}


def _slices(m: Module, x: Tensor) -> list[Tensor]:
    a, b = m.sizes[0], m.sizes[0] + m.sizes[1]
    return _heads(m, (x[..., :a], x[..., a:b], x[..., b : b + m.sizes[2]]))


def _narrow(m: Module, x: Tensor) -> list[Tensor]:
    starts = (0, m.sizes[0], m.sizes[0] + m.sizes[1])
    return _heads(m, [x.narrow(-1, a, n) for a, n in zip(starts, m.sizes)])


def _by_head(m: Module, x: Tensor) -> Sequence[Tensor]:
    """One buffer of q heads, then k heads, then v heads, as a GQA model would pack it."""
    heads = x.view(*x.shape[:-1], -1, m.dim)
    return heads.split([n // m.dim for n in m.sizes], -2)


def _three(m: Module, x: Tensor) -> Tensor:
    return x.view(*x.shape[:-1], 3, m.heads, m.dim)


def _major(x: Tensor) -> Tensor:
    """(..., 3, H, D) as (3, ..., H, D)."""
    return x.permute(-3 % x.dim(), *range(x.dim() - 3), -2, -1)


def _head_major(m: Module, x: Tensor) -> Tensor:
    """(..., T, 3, H, D) as (3, ..., H, T, D)."""
    n = x.dim()
    return x.permute(n - 3, *range(n - 4), n - 2, n - 4, n - 1)


def _sam(m: Module, x: Tensor) -> list[Tensor]:
    three = _head_major(m, _three(m, x))
    flat = three.reshape(3, -1, three.shape[-2], m.dim)
    return [t.view(three.shape[1:]).transpose(-2, -3) for t in flat.unbind(0)]


def _multihead(m: Module, x: Tensor) -> list[Tensor]:
    """``nn.MultiheadAttention``: (N, B, 3 E), one copy, then (N, B * H, D) with a transpose."""
    x = x if x.dim() == 3 else x.unsqueeze(1)
    width = m.heads * m.dim
    packed = x.unflatten(-1, (3, width)).unsqueeze(0).transpose(0, -2).squeeze(-2).contiguous()
    parts = [
        t.view(x.shape[0], x.shape[1] * m.heads, m.dim)
        .transpose(0, 1)
        .view(-1, m.heads, *t.shape[:1], m.dim)
        for t in packed.unbind(0)
    ]
    parts = [t.permute(2, 0, 1, 3) for t in parts]
    return parts if m.program.batched else [t.squeeze(1) for t in parts]


def _staged(m: Module, x: Tensor) -> Sequence[Tensor]:
    stage = torch.empty(3, *x.shape[:-1], m.heads, m.dim, dtype=x.dtype)
    for i, t in enumerate(_three(m, x).unbind(-3)):
        stage[i].copy_(t)
    return stage.unbind(0)


SPLITS: dict[str, Split] = {
    "split": lambda m, x: _heads(m, x.split(list(m.sizes), -1)),
    "three splits": lambda m, x: _heads(m, [x.split(list(m.sizes), -1)[i] for i in range(3)]),
    "slices": _slices,
    "narrow": _narrow,
    "split heads": _by_head,
    # The others want as many k and v heads as q heads.
    "chunk": lambda m, x: _heads(m, x.chunk(3, -1)),
    "unbind": lambda m, x: _three(m, x).unbind(-3),
    "index": lambda m, x: [_three(m, x)[..., i, :, :] for i in range(3)],
    "flat index": lambda m, x: [
        x.view(-1, 3, m.heads, m.dim)[:, i].view(*x.shape[:-1], m.heads, m.dim) for i in range(3)
    ],
    "interleaved": lambda m, x: x.view(*x.shape[:-1], m.heads, 3, m.dim).unbind(-2),
    "innermost": lambda m, x: x.view(*x.shape[:-1], m.heads, m.dim, 3).unbind(-1),
    "permute": lambda m, x: _major(_three(m, x)).unbind(0),
    "permute heads": lambda m, x: [
        t.transpose(-2, -3) for t in _head_major(m, _three(m, x)).unbind(0)
    ],
    "copy, unbind": lambda m, x: _major(_three(m, x)).contiguous().unbind(0),
    "copy heads, unbind": lambda m, x: [
        t.transpose(-2, -3) for t in _head_major(m, _three(m, x)).contiguous().unbind(0)
    ],
    "sam": _sam,
    "multihead": _multihead,
    "staged": _staged,
}
UNEQUAL = frozenset({"split", "three splits", "slices", "narrow", "split heads"})

# ---------------------------------------------------------------------------------------------
# Steps on one operand, (..., A, B, D) to the same shape

Step = Callable[["Module", Tensor], Tensor]

COPIES: dict[str, Step] = {
    "contiguous": lambda m, t: t.contiguous(),
    "clone": lambda m, t: t.clone(memory_format=torch.contiguous_format),
    "reshape": lambda m, t: t.reshape(-1).view(t.shape),
    "merge": lambda m, t: t.reshape(-1, t.shape[-1]).view(t.shape),
    "merge last": lambda m, t: t.flatten(-2).unflatten(-1, t.shape[-2:]),
    "merge first": lambda m, t: t.flatten(0, 1).unflatten(0, t.shape[:2]),
    "empty, copy_": lambda m, t: torch.empty(t.shape, dtype=t.dtype).copy_(t),
    "empty_like, copy_": lambda m, t: torch.empty_like(t).copy_(t),
    "turned, copy_": lambda m, t: t.new_empty(t.mT.shape).mT.copy_(t),
    "slot": lambda m, t: _slot(t),
    "swapped": lambda m, t: t.transpose(0, -2).contiguous().transpose(0, -2),
    "feature-major": lambda m, t: t.mT.contiguous().mT,
    "twice": lambda m, t: t.transpose(0, 1).contiguous().transpose(0, 1).contiguous(),
    "preserve": lambda m, t: t.clone(),
    "channels last": lambda m, t: (
        t.contiguous(memory_format=torch.channels_last) if t.dim() == 4 else t.contiguous()
    ),
    "view the copy": lambda m, t: t.contiguous().view(-1, t.shape[-1]).view(t.shape),
}


def _slot(t: Tensor) -> Tensor:
    slots = t.new_zeros(2, *t.shape)
    slots[1] = t
    return slots[1]


def rotated(t: Tensor) -> Tensor:
    a, b = t[..., : t.shape[-1] // 2], t[..., t.shape[-1] // 2 :]
    return t * 2 + torch.cat((-b, a), -1)


OPS: dict[str, Step] = {
    "double": lambda m, t: t * 2,
    "relu": lambda m, t: t.relu(),
    "cast": lambda m, t: t.float().mul(3).to(t.dtype),
    "rope": lambda m, t: rotated(t),
    "cat dims": lambda m, t: torch.cat((t[..., :1] * 2, t[..., 1:]), -1),
    "cat heads": lambda m, t: torch.cat((t[..., :1, :], t[..., 1:, :] * 2), -2),
    "cat prefix": lambda m, t: torch.cat((t[..., :1, :, :] * 2, t[..., 1:, :, :]), -3),
    "layer norm": lambda m, t: F.layer_norm(t, t.shape[-1:]),
    "pad": lambda m, t: F.pad(t, (0, 4))[..., : t.shape[-1]],
    "flip": lambda m, t: t.flip(-1),
    "roll": lambda m, t: t.roll(1, -1),
    "gather": lambda m, t: t[torch.arange(t.shape[0])],
    "expand": lambda m, t: t[..., :1, :].expand(t.shape),
    "softmax": lambda m, t: t.softmax(-1),
    "norm": lambda m, t: F.rms_norm(t, t.shape[-1:]),
    "matmul": lambda m, t: t @ m.square,
    "as_strided": lambda m, t: t.as_strided(t.shape, t.stride(), t.storage_offset()),
    "mul_": lambda m, t: t.mul_(2),
    "fill a row": lambda m, t: _fill(t),
    "triangle": lambda m, t: t.tril(),
    "detach": lambda m, t: t.detach(),
    "scale_": lambda m, t: _written(scale_, t),
    "opaque norm": lambda m, t: standins.rms_norm(t),
    "strided norm": lambda m, t: standins.rms_norm_strided(t),
    "opaque": lambda m, t: standins.rotary(t),
}


def _fill(t: Tensor) -> Tensor:
    t[..., :1, :] = 0
    return t


def _written(op: Any, *tensors: Tensor) -> Tensor:
    op(*tensors)
    return tensors[0]


def _pair(by: Callable[[Tensor, Tensor], Any]) -> Callable[[Tensor, Tensor], Any]:
    return lambda q, k: by(q, k) if q.shape == k.shape else (q, k)


def _norm_both(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    standins.norm_(q, k)
    return q, k


PAIRS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "rope": lambda q, k: (rotated(q), rotated(k)),
    "one rope": _pair(lambda q, k: rotated(torch.cat((q, k))).chunk(2)),
    "one rope over heads": _pair(lambda q, k: rotated(torch.cat((q, k), -2)).chunk(2, -2)),
    "opaque rope": lambda q, k: standins.rope(q, k, torch.ones(q.shape[-1], dtype=q.dtype)),
    "norm_": _norm_both,
    "stack": _pair(lambda q, k: torch.stack((q, k)).mul(2).unbind()),
    "swap": _pair(lambda q, k: (k, q)),
    "share": _pair(lambda q, k: (q, q)),
}

# ---------------------------------------------------------------------------------------------
# Attention, what becomes of it, and who else reads

Attention = Callable[["Module", Tensor, Tensor, Tensor], Tensor]


def _into(m: Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out = torch.empty(q.shape, dtype=q.dtype)
    attend_into(q, k, v, out)
    return out


def _with_mask(m: Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril()
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def _written_out(m: Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT).softmax(-1) @ v


def _standin(name: str) -> Attention:
    return lambda m, q, k, v: getattr(standins, name)(q, k, v)


_STANDINS = (
    *("aware", "blind", "offset_reader", "like_q", "liar"),
    *("flexible", "fixed", "exact", "contiguous"),
)
ATTENTIONS: dict[str, Attention] = {
    **{name: _standin(name) for name in _STANDINS},
    "aligned": lambda m, q, k, v: standins.aligned(q, k, v, 4),
    "one_layout": lambda m, q, k, v: one_layout(q, k, v, 0),
    "near": lambda m, q, k, v: near(q, k, v, m.limit),
    "into": _into,
    "sdpa": lambda m, q, k, v: F.scaled_dot_product_attention(q, k, v),
    "causal sdpa": lambda m, q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
    "masked sdpa": _with_mask,
    "sdpa of all heads": lambda m, q, k, v: F.scaled_dot_product_attention(
        *(t.reshape(1, -1, *t.shape[-2:]) for t in (q, k, v))
    ).view(*q.shape[:-1], v.shape[-1]),
    "written out": _written_out,
}

RESULTS: dict[str, Step] = {
    "as it is": lambda m, o: o,
    "token-major": lambda m, o: o.transpose(-2, -3).contiguous(),
    "merged": lambda m, o: o.transpose(-2, -3).reshape(-1, o.shape[-3] * o.shape[-1]),
    "merged, projected": lambda m, o: o.transpose(-2, -3).flatten(-2).matmul(m.back(o.shape[-3])),
    "turned, projected": lambda m, o: _turned(
        _turned(o.transpose(-2, -3).flatten(-2)).matmul(m.back(o.shape[-3]))
    ),
    "projected": lambda m, o: o.flatten(-2).matmul(m.back(o.shape[-2])),
    "flat": lambda m, o: o.reshape(-1),
    "viewed": lambda m, o: o.view(-1),
    "sum": lambda m, o: o.sum(-1),
    "relu": lambda m, o: o.relu(),
    "relu, copied": lambda m, o: o.relu().transpose(-2, -3).contiguous(),
    "add_": lambda m, o: o.add_(1),
    "opaque": lambda m, o: standins.rotary(o),
    "opaque, token-major": lambda m, o: standins.rotary(o.transpose(-2, -3).contiguous()),
    "attention": lambda m, o: m.attend(o, o, o),
    "attention on copies": lambda m, o: m.attend(*(o.transpose(-2, -3).contiguous(),) * 3),
    "scale_": lambda m, o: _written(scale_, o),
}

# A reader returns what the module returns beside the attention, or None.
READERS: dict[str, Callable[[Module, Tensor], Tensor | None]] = {
    "return": lambda m, t: t,
    "view": lambda m, t: t.reshape(-1),
    "turned": lambda m, t: t.mT,
    "slice": lambda m, t: t[..., :1],
    "detached": lambda m, t: t.detach(),
    "copied": lambda m, t: t.contiguous(),
    "sum": lambda m, t: t.sum(0),
    "relu": lambda m, t: t.relu(),
    "like": lambda m, t: torch.ones_like(t),
    "cat": lambda m, t: torch.cat((t, t)),
    "matmul": lambda m, t: t[..., :1] @ m.square[:1],
    "opaque": lambda m, t: standins.rotary(t),
    "opaque view": lambda m, t: standins.rotary(t.reshape(-1, t.shape[-1])),
    "attention": lambda m, t: m.attend(t, t, t) if t.dim() > 2 else None,
    "blind attention": lambda m, t: standins.blind(t, t, t) if t.dim() > 2 else None,
    "add_": lambda m, t: _silent(t.add_, 1),
    "scale_": lambda m, t: _silent(scale_, t),
}


def _silent(op: Callable[..., Any], *args: Any) -> None:
    op(*args)


# ---------------------------------------------------------------------------------------------
# Programs


@dataclass(frozen=True)
class Program:
    """One module. Names are keys of the tables above; numbers are sizes.

    Args:
        steps: for q, k and v, what happens before and behind the transpose to head-major.
        readers: (which intermediate value, what reads it, whether it does so before attention).
    """

    source: str
    producer: str
    split: str
    heads_by: str
    steps: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...]
    pairs: tuple[str, ...]
    head_major: bool
    attention: str
    result: str
    readers: tuple[tuple[int, str, bool], ...]
    batched: bool
    batch: int
    tokens: int
    heads: int
    groups: int
    dim: int
    dtype: torch.dtype
    dynamic: bool

    def inputs(self, tokens: int) -> tuple[Tensor, ...]:
        shape = (self.batch, tokens) if self.batched else (tokens,)
        if self.source not in TAKES_PACKED:
            return (torch.randn(*shape, FEATURES).to(self.dtype),)
        width = (self.heads + 2 * self.groups) * self.dim
        if self.source == "strided input":
            return (torch.randn(*shape, width + 8).to(self.dtype)[..., :width],)
        if self.source == "offset input":
            return (torch.randn(3, *shape, width).to(self.dtype)[1],)
        return (torch.randn(*shape, width).to(self.dtype),)


class Module(nn.Module):
    """What a program describes."""

    weight: Tensor
    bias: Tensor
    square: Tensor
    wide: Tensor

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.program = program
        self.heads, self.dim = program.heads, program.dim
        self.sizes = (self.heads * self.dim, *(program.groups * self.dim,) * 2)
        # Twice what dense operands need for the example: strided ones go past it.
        self.limit = 2 * program.batch * program.tokens * self.sizes[0]
        generator = torch.Generator().manual_seed(0)
        for name, shape in (
            ("weight", (FEATURES, sum(self.sizes))),
            ("bias", (sum(self.sizes),)),
            ("square", (self.dim, self.dim)),
            ("wide", (64 * self.dim, FEATURES)),
        ):
            value = torch.randn(shape, generator=generator).to(program.dtype)
            self.register_buffer(name, value)

    def back(self, heads: int) -> Tensor:
        return self.wide[: heads * self.dim]

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ATTENTIONS[self.program.attention](self, q, k, v)

    def forward(self, x: Tensor) -> list[Tensor]:
        p = self.program
        packed = PRODUCERS[p.producer](self, SOURCES[p.source](self, x))
        values = [packed]  # what the readers can pick from

        def walk(t: Tensor, names: Sequence[str]) -> Tensor:
            for name in names:
                t = (COPIES | OPS)[name](self, t)
                values.append(t)
            return t

        q, k, v = (walk(t, s[0]) for t, s in zip(SPLITS[p.split](self, packed), p.steps))
        if p.head_major:
            q, k, v = q.transpose(-2, -3), k.transpose(-2, -3), v.transpose(-2, -3)
            k, v = _repeated(k, q), _repeated(v, q)
        q, k, v = (walk(t, s[1]) for t, s in zip((q, k, v), p.steps))
        for name in p.pairs:
            q, k = PAIRS[name](q, k)
        values += [q, k, v]
        early, late = ([r[:2] for r in p.readers if r[2] is before] for before in (True, False))
        extra = [READERS[how](self, values[i % len(values)]) for i, how in early]
        out = self.attend(q, k, v)
        values.append(out)
        result = RESULTS[p.result](self, out)
        extra += [READERS[how](self, values[-1 - i % len(values)]) for i, how in late]
        return [result, *(t for t in extra if t is not None)]


def _repeated(t: Tensor, q: Tensor) -> Tensor:
    """Grouped heads, (..., G, T, D), once for each of q's."""
    if t.shape[-3] == q.shape[-3]:
        return t
    shape = (*t.shape[:-2], q.shape[-3] // t.shape[-3], *t.shape[-2:])
    return t.unsqueeze(-3).expand(shape).flatten(-4, -3)


# ---------------------------------------------------------------------------------------------
# The pass

_ANY_CONTRACT = [
    StrideContract(alignment=1),
    StrideContract(),
    StrideContract(alignment=8, allow_storage_offset=False),
    StrideContract(alignment=1, max_offset=100),
    StrideContract(alignment=1, together=(("k", "v"),)),
    StrideContract(alignment=1, together=(("q", "k", "v"),)),
    StrideContract(alignment=1, allow_broadcast=True),
    StrideContract(alignment=1, output="dense"),
]
# What each kernel really admits. None: it must not be tagged.
CONTRACTS: dict[str, list[StrideContract | None]] = {
    "aware": _ANY_CONTRACT,
    "blind": [None],
    "offset_reader": [StrideContract(alignment=1, allow_storage_offset=False)],
    "like_q": [
        StrideContract(alignment=1, output="fake"),
        StrideContract(alignment=1, output="like:q"),
        StrideContract(alignment=1, output="dense"),
        StrideContract(alignment=1),
    ],
    "liar": [StrideContract(alignment=1), StrideContract(alignment=1, output="dense")],
    "aligned": [StrideContract(alignment=16), StrideContract(alignment=64)],
    "one_layout": [StrideContract(alignment=1, together=(("k", "v"),))],
}


@dataclass(frozen=True)
class Setting:
    """How the pass is set up for a program: what is tagged, for whom, in which spelling.

    Args:
        operands: of the attention op that are tagged; () leaves it untagged.
        contract: which of those that the kernel admits.
        norm: whether the opaque norm that reads strides is tagged.
        post_grad: whether views are spelled ``reshape``, as in post-grad graphs.
        numerics: whether rewrites that may round otherwise are admitted.
    """

    operands: tuple[str, ...]
    contract: int
    norm: bool
    target: str
    post_grad: bool
    numerics: str = "bitwise"

    def tag(self, module: Module) -> None:
        if self.norm:
            standins.tag("rms_norm_strided", "x", contract=StrideContract(alignment=1))
        name = module.program.attention
        admitted = CONTRACTS.get(name, [None])
        if name == "near":
            admitted = [StrideContract(alignment=1, max_offset=max(1, module.limit))]
        contract = admitted[self.contract % len(admitted)]
        if contract is not None and self.operands:
            standins.tag(name, *self.operands, contract=contract)


# ---------------------------------------------------------------------------------------------
# Drawing


class Choices:
    """Choices made by the bytes of a string, byte 0 for the first option.

    One string, not a strategy for each choice: Hypothesis would mutate the last example for most
    of the new ones, and a few hundred examples would be a few dozen programs.
    """

    def __init__(self, data: bytes) -> None:
        self.data = iter(data)

    def of(self, options: Sequence[Any]) -> Any:
        return options[next(self.data, 0) % len(options)]

    def often(self, usual: Sequence[Any], others: Sequence[Any], odds: int = 3) -> Any:
        """One of the usual, ``odds`` times out of ``odds + 1``."""
        return self.of([*usual, *others]) if self.of(range(odds + 1)) == odds else self.of(usual)

    def name(self, table: dict[str, Any], usual: int, odds: int = 3) -> str:
        """A key of a table, oftener one of the first ``usual``."""
        return self.often(list(table)[:usual], list(table)[usual:], odds)

    def some(self, most: int, one: Callable[[], Any]) -> tuple[Any, ...]:
        return tuple(one() for _ in range(self.of(range(most + 1))))


def _steps(choose: Choices) -> tuple[str, ...]:
    copy = choose.name(COPIES, 2)
    return choose.of(
        [
            (copy,),
            (),
            (copy,),
            (),
            choose.some(2, lambda: choose.of([*COPIES, *OPS])),
            (choose.of(list(OPS)), copy),
            (copy, choose.of(list(OPS))),
        ]
    )


def _all_steps(choose: Choices) -> tuple[tuple[tuple[str, ...], tuple[str, ...]], ...]:
    """Half of the time what model code has: the same copy for q, k and v, and no more."""
    copy = (choose.name(COPIES, 2),)
    alike = choose.of([((), copy), (copy, ()), None, None])
    return tuple(alike or (_steps(choose), _steps(choose)) for _ in "qkv")


def _program(data: bytes) -> Program:
    choose = Choices(data)
    equal = choose.of([True, True, False])
    heads = choose.of([2, 1, 3, 4])
    return Program(
        source=choose.name(SOURCES, 3),
        producer=choose.name(PRODUCERS, 1),
        split=choose.of(list(SPLITS) if equal else sorted(UNEQUAL)),
        heads_by=choose.name(HEADS, 4),
        steps=_all_steps(choose),
        pairs=choose.often([()], [(name,) for name in PAIRS], 2),
        head_major=choose.of([False, True]),
        attention=choose.name(ATTENTIONS, 1, 1),
        result=choose.name(RESULTS, 4, 1),
        readers=choose.some(
            2,
            lambda: (choose.of(range(12)), choose.of(list(READERS)), choose.of([True, False])),
        ),
        batched=choose.of([True, False]),
        batch=choose.of([2, 1, 3]),
        tokens=choose.often([6, 4, 5, 1], [0], 6),
        heads=heads,
        groups=heads if equal else choose.of([g for g in (1, 2) if heads % g == 0]),
        dim=choose.of([8, 4, 16, 6, 5, 1]),
        dtype=choose.often([torch.float32], [torch.bfloat16, torch.float16], 2),
        dynamic=choose.often([False], [True], 2),
    )


def _setting(data: bytes) -> Setting:
    choose = Choices(data)
    return Setting(
        operands=choose.often([("q", "k", "v")], [(), ("q", "k"), ("v",)], 6),
        contract=choose.of(range(8)),
        norm=choose.of([True, False]),
        target=choose.of(["inductor", "eager"]),
        post_grad=choose.of([False, False, True]),
        numerics=choose.of(["default", "bitwise"]),
    )


# Some programs raise when they are run.
programs = st.binary(min_size=100, max_size=100).map(_program)
settings_of_the_pass = st.binary(min_size=10, max_size=10).map(_setting)
