"""Layouts, strided views over atomic dims, and stride contracts. No graph in here.

Every comparison is proven (``statically_known_true``) or counts as false: nothing
in this file adds a guard, so a symbolic size can never be specialised by it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true

from .reason import Reason

Int: TypeAlias = int | torch.SymInt


def known(condition: bool | torch.SymBool) -> bool:
    """Whether ``condition`` holds for every value its symbols can take."""
    return condition if isinstance(condition, bool) else statically_known_true(condition)


def same(a: Sequence[Int], b: Sequence[Int]) -> bool:
    """Whether two shapes or strides are equal for every value of their symbols."""
    return len(a) == len(b) and all(known(x == y) for x, y in zip(a, b))


def constant(n: Int) -> Int:
    """``n`` as a plain number where its symbols cancel out, as in ``16 * s0 // s0``."""
    value = None if isinstance(n, int) else n.node.maybe_as_int()
    return n if value is None else value


def product(sizes: Sequence[Int]) -> Int:
    total: Int = 1
    for size in sizes:
        total = total * size
    return total


@dataclass(frozen=True)
class Layout:
    """Where the elements of a tensor lie in its storage.

    Args:
        size: extent of each dim, in elements.
        stride: distance between neighbours in each dim, in elements.
        offset: storage offset of element 0, in elements.
    """

    size: tuple[Int, ...]
    stride: tuple[Int, ...]
    offset: Int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Layout:
        return cls(tuple(tensor.shape), tuple(tensor.stride()), tensor.storage_offset())

    def same(self, other: Layout) -> bool:
        """Equal sizes, strides and offset, to the letter."""
        return self.same_strides(other) and known(self.offset == other.offset)

    def same_strides(self, other: Layout) -> bool:
        return same(self.size, other.size) and same(self.stride, other.stride)

    def equivalent(self, other: Layout) -> bool:
        """Equal but for the strides of size-1 dims, which address nothing."""
        return (
            same(self.size, other.size)
            and known(self.offset == other.offset)
            and all(
                known(size == 1) or known(a == b)
                for size, a, b in zip(self.size, self.stride, other.stride)
            )
        )

    @property
    def row_major(self) -> bool:
        """Whether the elements lie in order and without gaps (size-1 dims aside)."""
        expected: Int = 1
        for size, stride in zip(reversed(self.size), reversed(self.stride)):
            if known(size == 1):
                continue
            if not known(stride == expected):
                return False
            expected = expected * size
        return True

    @property
    def gap_free(self) -> bool:
        """Whether some permutation of the dims is row-major: nothing skipped, nothing shared."""
        dims = [(s, t) for s, t in zip(self.size, self.stride) if not known(s == 1)]
        expected: Int = 1
        while dims:
            inner = next((d for d in dims if known(d[1] == expected)), None)
            if inner is None:
                return False
            dims.remove(inner)
            expected = expected * inner[0]
        return True

    @property
    def extent(self) -> Int:
        """Elements between the first and the last element."""
        return sum(((s - 1) * t for s, t in zip(self.size, self.stride)), 0)

    def __str__(self) -> str:
        text = f"{_tuple(self.size)} strides {_tuple(self.stride)}"
        return text if known(self.offset == 0) else f"{text} offset {self.offset}"


def _tuple(values: Sequence[Int]) -> str:
    return "(" + ", ".join(str(v) for v in values) + ")"


Atom: TypeAlias = tuple[Int, Int]  # (size, stride); a dim is a major-to-minor run of atoms


DEFAULT_ALIGNMENT = 16  # bytes


class NotAView(Exception):
    """A view that cannot be expressed over atomic dims; the message says which step."""


@dataclass(frozen=True)
class StridedView:
    """A view as dims over atomic (size, stride) pairs, so that merging dims loses nothing.

    ``view(B * H, N, D)`` of a strided (B, H, N, D) buffer is no strided tensor, but
    splitting B * H again makes it one. Dims stay runs of atoms until somebody asks for
    a :class:`Layout`. Source of the idea: DESIGN.md, "views are re-emitted, not trusted".
    """

    dims: tuple[tuple[Atom, ...], ...]
    offset: Int

    @classmethod
    def of(cls, layout: Layout) -> StridedView:
        dims = tuple(
            () if known(size == 1) else ((size, stride),)
            for size, stride in zip(layout.size, layout.stride)
        )
        return cls(dims, layout.offset)

    def layout(self, size: Sequence[Int]) -> Layout | None:
        """This view as a strided tensor of ``size``, or None where a dim mixes strides."""
        merged = [_merge(dim) for dim in self.dims]
        if any(len(dim) > 1 for dim in merged):
            return None
        strides: list[Int] = []
        inner: Int = 1
        for extent, dim in zip(reversed(tuple(size)), reversed(merged)):
            stride = dim[0][1] if dim else inner
            strides.append(stride)
            inner = stride * extent
        return Layout(tuple(size), tuple(reversed(strides)), self.offset)

    def reshape(self, size: Sequence[Int]) -> StridedView:
        atoms = [atom for dim in self.dims for atom in dim]
        try:
            return self._regroup(atoms, size)
        except NotAView:  # sizes that cut across atoms which lie one behind the other
            return self._regroup(list(_merge(atoms)), size)

    def _regroup(self, atoms: list[Atom], size: Sequence[Int]) -> StridedView:
        atoms = list(atoms)
        dims: list[tuple[Atom, ...]] = []
        for extent in size:
            taken: list[Atom] = []
            rest = extent
            while not known(rest == 1):
                if not atoms or known(rest == 0) or known(atoms[0][0] == 0):
                    raise NotAView(f"no elements for size {extent}")
                atom_size, stride = atoms.pop(0)
                if known(rest == atom_size) or known(rest % atom_size == 0):
                    taken.append((atom_size, stride))
                    rest = 1 if known(rest == atom_size) else rest // atom_size
                elif known(atom_size % rest == 0):
                    inner = atom_size // rest
                    taken.append((rest, stride * inner))
                    atoms.insert(0, (inner, stride))
                    rest = 1
                else:
                    raise NotAView(f"size {extent} does not divide a dim of {atom_size}")
            dims.append(tuple(taken))
        if atoms:
            raise NotAView(f"sizes {_tuple(size)} leave elements over")
        return StridedView(tuple(dims), self.offset)

    def permute(self, order: Sequence[int]) -> StridedView:
        return StridedView(tuple(self.dims[d] for d in order), self.offset)

    def insert(self, dim: int) -> StridedView:
        return StridedView((*self.dims[:dim], (), *self.dims[dim:]), self.offset)

    def drop(self, dim: int) -> StridedView:
        return StridedView((*self.dims[:dim], *self.dims[dim + 1 :]), self.offset)

    def select(self, dim: int, index: Int) -> StridedView:
        return StridedView(self.drop(dim).dims, self.offset + self._step(dim) * index)

    def slice(self, dim: int, start: Int, size: Int, step: Int) -> StridedView:
        stride = self._step(dim)
        atoms = () if known(size == 1) else ((size, stride * step),)
        dims = (*self.dims[:dim], atoms, *self.dims[dim + 1 :])
        return StridedView(dims, self.offset + stride * start)

    def expand(self, size: Sequence[Int]) -> StridedView:
        dims = ((),) * (len(size) - len(self.dims)) + self.dims
        return StridedView(
            tuple(
                dim if dim or known(extent == 1) else ((extent, 0),)
                for dim, extent in zip(dims, size)
            ),
            self.offset,
        )

    def _step(self, dim: int) -> Int:
        atoms = _merge(self.dims[dim])
        if len(atoms) > 1:
            raise NotAView("a part of a merged dim")
        return atoms[0][1] if atoms else 0


def _merge(atoms: Sequence[Atom]) -> tuple[Atom, ...]:
    merged: list[Atom] = []
    for size, stride in atoms:
        if merged and known(merged[-1][1] == size * stride):
            merged[-1] = (merged[-1][0] * size, stride)
        else:
            merged.append((size, stride))
    return tuple(merged)


@dataclass(frozen=True)
class RadixStep:
    """One dim of a row-major buffer read as mixed-radix digits: ``[start : start + size]``."""

    extent: Int
    start: Int
    size: Int


@dataclass(frozen=True)
class RadixView:
    """How to reach a strided layout from its row-major root with legal views alone."""

    steps: tuple[RadixStep, ...]  # dims of the root, by falling stride
    order: tuple[int, ...]  # permutation of those dims into the target's order


def radix_view(root: Layout, target: Layout) -> RadixView | None:
    """View, slice and permute that turn ``root`` into ``target``, or None.

    Every stride of ``target`` must divide the next larger one, and each run must stay
    inside its digit. The innermost digit ends at stride 1.
    """
    if not root.row_major:
        return None
    dims = [
        (d, s, t) for d, (s, t) in enumerate(zip(target.size, target.stride)) if not known(s == 1)
    ]
    try:
        dims.sort(key=functools.cmp_to_key(_by_falling_stride))
    except NotAView:
        return None
    steps: list[RadixStep] = []
    outer = product(root.size)
    offset = target.offset - root.offset
    for _, size, stride in dims:
        if known(stride == 0) or not known(outer % stride == 0):
            return None
        start: Int = 0
        if not known(offset < stride):
            start, offset = constant(offset // stride), constant(offset % stride)
        extent = constant(outer // stride)
        if not known(start + size <= extent):
            return None
        steps.append(RadixStep(extent, start, constant(size)))
        outer = stride
    if not known(outer == 1):
        if not known(offset < outer):
            return None
        steps.append(RadixStep(constant(outer), constant(offset), 1))
    elif not known(offset == 0):
        return None
    order = tuple(sorted(range(len(dims)), key=lambda i: dims[i][0]))
    return RadixView(tuple(steps), order)


def _by_falling_stride(one: tuple[int, Int, Int], other: tuple[int, Int, Int]) -> int:
    a, b = one[2], other[2]
    if known(a == b):
        return 0
    if known(a % b == 0):
        return -1
    if known(b % a == 0):
        return 1
    raise NotAView(f"strides {a} and {b} have no order")


@dataclass(frozen=True)
class Pointer:
    """What is known of the address behind an operand.

    Args:
        offset: storage offset at which the buffer begins, in elements; None if unknown.
        alignment: bytes that its address is a multiple of; None for a buffer that the
            compiler allocates, which allocators align far beyond any contract.
    """

    offset: Int | None = 0
    alignment: int | None = None

    @property
    def is_callers(self) -> bool:
        """A graph input: it may start anywhere in its storage, and elsewhere on the next call."""
        return self.alignment is not None


ALLOCATED = Pointer()


@dataclass(frozen=True)
class StrideContract:
    """The layouts that an op admits on the operands it is tagged for.

    Args:
        alignment: bytes that the data pointer and every stride but the last must be a
            multiple of. None asks for 16 of strides and of offsets within a buffer, and
            nothing of a graph input's own address, which only its caller knows.
        max_offset: largest distance in elements from an operand's data pointer to its
            last element; None for kernels that count in int64. A finite bound refuses
            every size that has no bound of its own.
        allow_broadcast: whether a stride of 0 over more than one element is fine.
        allow_storage_offset: whether the operand may start inside its storage.
        together: groups of operands that must have equal strides.
        output: the layout of the outputs once an operand is strided. None keeps the
            copy where the predicted layout would change; ``"fake"`` trusts the op's fake
            kernel; ``"dense"`` and ``"like:<operand>"`` state it, and the copy stays
            where the fake kernel says otherwise.

    Raises:
        ValueError: for an alignment or bound below 1, or an unknown output rule.
    """

    alignment: int | None = None
    max_offset: int | None = None
    allow_broadcast: bool = False
    allow_storage_offset: bool = True
    together: tuple[tuple[str, ...], ...] = ()
    output: str | None = None

    def __post_init__(self) -> None:
        if self.alignment is not None and self.alignment < 1:
            raise ValueError(f"alignment is {self.alignment} bytes; give a positive number")
        if self.max_offset is not None and self.max_offset < 1:
            raise ValueError(
                f"max_offset is {self.max_offset}; give a positive number of elements or None"
            )
        if self.output not in (None, "fake", "dense") and not str(self.output).startswith("like:"):
            raise ValueError(
                f'output is {self.output!r}; give None, "fake", "dense" or "like:<operand>"'
            )

    def violation(
        self, layout: Layout, itemsize: int, pointer: Pointer = ALLOCATED
    ) -> tuple[Reason, str] | None:
        """The first thing about ``layout`` that this contract does not admit."""
        for check in _CHECKS:
            if (fault := check(self, layout, itemsize, pointer)) is not None:
                return fault
        return None


def _outer(layout: Layout) -> Iterator[tuple[Int, Int]]:
    """(size, stride) of every dim but the last that holds more than one element."""
    for size, stride in zip(layout.size[:-1], layout.stride[:-1]):
        if not known(size == 1):
            yield size, stride


Fault: TypeAlias = "tuple[Reason, str] | None"


def _last_dim(contract: StrideContract, layout: Layout, itemsize: int, pointer: Pointer) -> Fault:
    if not layout.size or known(layout.size[-1] == 1) or known(layout.stride[-1] == 1):
        return None
    return Reason.LAST_DIM_STRIDE, f"last dim has stride {layout.stride[-1]}, not 1"


def _broadcast(contract: StrideContract, layout: Layout, itemsize: int, pointer: Pointer) -> Fault:
    if contract.allow_broadcast or all(known(stride != 0) for _, stride in _outer(layout)):
        return None
    return Reason.BROADCAST_STRIDE, f"strides {_tuple(layout.stride)} repeat elements"


def _storage_offset(
    contract: StrideContract, layout: Layout, itemsize: int, pointer: Pointer
) -> Fault:
    if contract.allow_storage_offset:
        return None
    if pointer.is_callers:
        return Reason.STORAGE_OFFSET, "a graph input may start anywhere in its storage"
    if known(layout.offset == 0):
        return None
    return Reason.STORAGE_OFFSET, f"storage offset {layout.offset} where the op needs 0"


def _alignment(contract: StrideContract, layout: Layout, itemsize: int, pointer: Pointer) -> Fault:
    unit = DEFAULT_ALIGNMENT if contract.alignment is None else contract.alignment
    if unit <= 1:
        return None
    if pointer.offset is None:
        return Reason.ALIGNMENT, "the offset within a graph input is not known"
    if contract.alignment is not None and (pointer.alignment or 0) % unit:
        return (
            Reason.ALIGNMENT,
            f"a graph input's address is known to {pointer.alignment} bytes, not to {unit}",
        )
    for what, distance in (
        ("offset", layout.offset - pointer.offset),
        *(("stride", stride) for _, stride in _outer(layout)),
    ):
        if not known((distance * itemsize) % unit == 0):
            return (
                Reason.ALIGNMENT,
                f"{what} of {distance * itemsize} bytes is not known to be a multiple of {unit}",
            )
    return None


def _offset_range(
    contract: StrideContract, layout: Layout, itemsize: int, pointer: Pointer
) -> Fault:
    if contract.max_offset is None or known(layout.extent <= contract.max_offset):
        return None
    return (
        Reason.OFFSET_RANGE,
        f"last element lies {layout.extent} elements from the first; "
        f"the op admits {contract.max_offset}",
    )


_CHECKS: tuple[Callable[[StrideContract, Layout, int, Pointer], Fault], ...] = (
    _last_dim,
    _broadcast,
    _storage_offset,
    _alignment,
    _offset_range,
)
