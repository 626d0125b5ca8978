"""What an attention op received when it ran, read inside the op itself.

Strides on a graph's metas are a claim. Strides alone are not enough either: Inductor may give
an op strided operands that lie in three buffers of three times the size, and save nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from standins import Seen, by_stride
from torch import Tensor


@dataclass(frozen=True)
class Operand:
    """One operand as it arrived.

    Args:
        seen: its shape, strides, offset, and the address of its storage.
        room: bytes of that storage; a view of a packed buffer has all of it behind it.
        values: its elements, dense.
    """

    seen: Seen
    room: int
    values: Tensor


Received: TypeAlias = dict[str, Operand]  # by the operand's name

CALLS: list[Received] = []


def receive(**operands: Tensor) -> None:
    """To be called by an op, with its operands."""
    CALLS.append({name: _read(t) for name, t in operands.items()})


def _read(t: Tensor) -> Operand:
    storage = t.untyped_storage()
    seen = Seen(tuple(t.shape), t.stride(), t.storage_offset(), storage.data_ptr())
    return Operand(seen, storage.nbytes(), by_stride(t))


def taken() -> list[Received]:
    """The calls since this was last asked."""
    calls = list(CALLS)
    CALLS.clear()
    return calls


def room(call: Received) -> int:
    """Bytes of all storages behind the operands; one that they share counts once."""
    return sum({operand.seen.storage: operand.room for operand in call.values()}.values())


def storages(call: Received, names: Sequence[str]) -> int:
    """How many storages lie behind these operands: 1 where they are views of one buffer."""
    return len({call[name].seen.storage for name in names})
