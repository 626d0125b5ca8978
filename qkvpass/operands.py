"""Operands of attention in every layout that a contract may admit. No op is called here.

A layout is laid into memory that holds NaN bit patterns wherever it holds no element, so
that a kernel which reads a gap says so, and one which writes there is found out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from .layout import Layout, StrideContract

Operands: TypeAlias = dict[str, Tensor]
Arrange: TypeAlias = "Callable[[Operands, str], Operands | None]"

THD, BSHD, BHSD = "THD", "BSHD", "BHSD"
ORDERS = (THD, BSHD, BHSD)
ALIGNED = 128  # bytes; more than any kernel asks for
ODD_BASE = 13  # times an alignment: a base pointer that has that alignment and no larger one
_TAIL = 64  # elements of NaN behind the last one


def poisoned(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """``size`` elements with all bits set: NaN in every floating dtype."""
    filler = torch.full((size * dtype.itemsize,), 0xFF, dtype=torch.uint8, device=device)
    return filler.view(dtype)


def dense(t: Tensor) -> Tensor:
    """The values of ``t`` in a storage of their own, in the order that ``t`` has in memory."""
    if t.numel() == 0 or not Layout.of(t).gap_free:
        return t.clone(memory_format=torch.contiguous_format)
    order = sorted(range(t.dim()), key=lambda d: (-t.stride()[d], d))
    back = [order.index(d) for d in range(t.dim())]
    return t.permute(order).clone(memory_format=torch.contiguous_format).permute(back)


def place(values: Tensor, strides: Sequence[int], offset: int) -> Tensor:
    """``values`` at ``strides`` and a storage offset, in elements, in memory of NaN."""
    extent = sum((s - 1) * t for s, t in zip(values.shape, strides)) if values.numel() else 0
    storage = poisoned(offset + extent + 1 + _TAIL, values.dtype, values.device)
    return storage.as_strided(values.shape, strides, offset).copy_(values)


def token_major(t: Tensor, order: str) -> Tensor:
    """A view in the order (tokens, heads, head_dim), batch in front; and back again."""
    return t.transpose(1, 2) if order == BHSD else t


def rows(
    values: Tensor,
    order: str,
    *,
    base: int | None = None,
    token_pad: int = 0,
    head_pad: int = 0,
    rounded: bool = False,
) -> Tensor:
    """Token-major, rows three times as far apart as they are long.

    Args:
        base: storage offset in elements; by default 16-byte aligned and no better.
        token_pad: elements more from token to token.
        head_pad: elements more from head to head.
        rounded: start from a token stride that is a multiple of 128 bytes.
    """
    t = token_major(values, order)
    itemsize = t.element_size()
    head = t.shape[-1] + head_pad
    token = 3 * t.shape[-2] * head
    if rounded:
        unit = ALIGNED // itemsize
        token = math.ceil(token / unit) * unit
    token += token_pad
    strides = [token, head, 1]
    if t.dim() == 4:
        strides.insert(0, t.shape[1] * token)
    if base is None:
        base = ODD_BASE * 16 // itemsize
    return token_major(place(t, strides, base), order)


def packed(operands: Operands, order: str) -> Operands | None:
    """q, k and v as a projection leaves them: side by side in each row, NaN behind them."""
    parts = {name: token_major(t, order) for name, t in operands.items()}
    first = next(iter(parts.values()))
    lead, dim = first.shape[:-2], first.shape[-1]
    if any(p.shape[:-2] != lead or p.shape[-1] != dim for p in parts.values()):
        return None
    widths = [p.shape[-2] * dim for p in parts.values()]
    row = sum(widths) + dim
    buffer = poisoned(math.prod(lead) * row + _TAIL, first.dtype, first.device)
    rows_ = buffer[: math.prod(lead) * row].view(*lead, row)
    return _cut(rows_, parts, widths, order)


def _cut(buffer: Tensor, parts: Operands, widths: list[int], order: str) -> Operands:
    """Each part's run of every row, filled with its values."""
    placed, start = {}, 0
    for (name, part), width in zip(parts.items(), widths):
        view = buffer[..., start : start + width].unflatten(-1, part.shape[-2:])
        placed[name] = token_major(view.copy_(part), order)
        start += width
    return placed


def sequence_first(operands: Operands, order: str) -> Operands | None:
    """Packed rows in (S, B) order, so that the batch has the smaller stride."""
    if order == THD:
        return None
    parts = {name: token_major(t, order).transpose(0, 1) for name, t in operands.items()}
    placed = packed(parts, BSHD)
    if placed is None:
        return None
    return {name: token_major(t.transpose(0, 1), order) for name, t in placed.items()}


def interleaved(operands: Operands, order: str) -> Operands | None:
    """q, k and v of one head side by side, so that heads are four head sizes apart."""
    parts = {name: token_major(t, order) for name, t in operands.items()}
    first = next(iter(parts.values()))
    if len(parts) > 3 or any(p.shape != first.shape for p in parts.values()):
        return None
    strides = list(first.contiguous().stride())
    strides = [4 * s for s in strides[:-1]] + [1]
    size = 4 * first.numel() + _TAIL
    buffer = poisoned(size, first.dtype, first.device)
    return {
        name: token_major(
            buffer.as_strided(part.shape, strides, i * first.shape[-1]).copy_(part), order
        )
        for i, (name, part) in enumerate(parts.items())
    }


def head_major(operands: Operands, order: str) -> Operands | None:
    """(B, H, S, D) in memory whatever the op's order, tokens two head sizes apart."""

    def one(values: Tensor) -> Tensor:
        t = token_major(values, order)
        tokens, heads, dim = t.shape[-3:]
        strides = [2 * dim, 2 * dim * tokens, 1]
        if t.dim() == 4:
            strides.insert(0, 2 * dim * tokens * heads)
        return token_major(place(t, strides, 2 * dim), order)

    return {name: one(t) for name, t in operands.items()}


def each_in_rows(operands: Operands, order: str) -> Operands | None:
    """Every operand in memory of its own, with gaps of NaN."""
    return {name: rows(t, order) for name, t in operands.items()}


def offset_only(operands: Operands, order: str) -> Operands | None:
    """Dense strides, inside a storage."""
    return {
        name: place(t, t.contiguous().stride(), ODD_BASE * 16 // t.element_size())
        for name, t in operands.items()
    }


ARRANGEMENTS: Mapping[str, Arrange] = {
    "packed": packed,
    "rows": each_in_rows,
    "interleaved heads": interleaved,
    "sequence first": sequence_first,
    "head-major": head_major,
    "offset": offset_only,
}


def misaligned(what: str, unit: int, operands: Operands, order: str) -> Operands:
    """Rows of which the base, the token stride or the head stride is aligned to ``unit`` bytes
    and no better; what else can be has 128-byte alignment."""
    itemsize = next(iter(operands.values())).element_size()
    step = unit // itemsize
    options = {
        "base": {"base": ODD_BASE * step},
        "token stride": {"base": 0, "token_pad": step},
        "head stride": {"base": 0, "head_pad": step},
    }[what]
    return {
        name: rows(t, order, rounded=what != "head stride", **options)
        for name, t in operands.items()
    }


def far(values: Tensor, order: str, what: str, limit: int, beyond: bool = True) -> Tensor:
    """The last element ``limit`` from the first, in memory that reaches as far the other way.

    An int32 offset that wraps lands in the same storage, so that a kernel is wrong, not dead.

    Args:
        what: ``"tokens"`` or ``"batch"``: the dim that goes far.
        limit: elements.
        beyond: end just beyond the limit, rather than just within.

    Raises:
        RuntimeError: if there is not enough memory.
    """
    t = token_major(values, order)
    unit = ALIGNED // t.element_size()
    tokens, heads, dim = t.shape[-3:]

    def step(size: int) -> int:
        if beyond:
            return (limit // (size - 1) // unit + 1) * unit
        return (limit - tokens * heads * dim) // (size - 1) // unit * unit

    strides = [heads * dim, dim, 1]
    if what == "tokens":
        strides[0] = step(tokens)
    if t.dim() == 4:
        strides.insert(0, tokens * strides[0])
    if what == "batch":
        strides[0] = step(t.shape[0])
    below = math.ceil(limit / unit) * unit  # as aligned as the strides
    extent = sum((s - 1) * st for s, st in zip(t.shape, strides))
    storage = torch.empty(below + extent + _TAIL, dtype=t.dtype, device=t.device)
    if t.is_cuda:
        storage.view(torch.uint8).fill_(0xFF)  # a CPU would have to find pages for it all
    return token_major(storage.as_strided(t.shape, strides, below).copy_(t), order)


def granule(operands: Sequence[Tensor]) -> int:
    """The largest alignment, in bytes, that offsets and strides of all operands have."""
    unit = ALIGNED
    while unit > 1:
        contract = StrideContract(alignment=unit, allow_broadcast=True)
        if all(contract.violation(Layout.of(t), t.element_size()) is None for t in operands):
            return unit
        unit //= 2
    return unit
