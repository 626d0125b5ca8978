"""Where an op was measured to lose by reading strided operands: data on its tag.

The rule says what is right; this says what pays. Most kernels read strided rows as fast as dense
ones, and then a copy can only cost. Where one does not, its tag says so, with the measurement.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Slower:
    """Calls that were measured to be slower by stride than with copies in front, under Inductor.

    Args:
        measured: what was measured, on what, when; it is the reason in reports.
        arch: the architecture it holds on, as in :class:`Site`; None for every one.
        head_dims: sizes of the operand's last dim; none for all.
        from_bytes: of the operand, the least that it holds for.
        below_bytes: of the operand, where it ends; None for no end.

    Raises:
        ValueError: without a measurement.

    Source: ``python tests/gpu_gain.py`` measures it.
    """

    measured: str
    arch: str | None = None
    head_dims: tuple[int, ...] = ()
    from_bytes: int = 0
    below_bytes: int | None = None

    def __post_init__(self) -> None:
        if not self.measured:
            raise ValueError("measured is empty; say what was measured, on what, and when")

    def covers(self, arch: str | None, head_dim: int, nbytes: int) -> bool:
        """Whether it holds for an operand."""
        if self.arch is not None and arch != self.arch:
            return False
        if self.head_dims and head_dim not in self.head_dims:
            return False
        return nbytes >= self.from_bytes and (self.below_bytes is None or nbytes < self.below_bytes)
