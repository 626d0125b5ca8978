"""One call of an op on dense inputs and on strided ones, and whether the two agree to the bit."""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from . import operands as lay
from .known_inputs import Build, KnownInputs, Spec, arguments
from .layout import Layout
from .operands import THD, Operands

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Status(enum.Enum):
    """How a trial ended."""

    SAME = "same"
    DIFFERENT = "different"
    REJECTED = "rejected"  # raised on the strided inputs alone
    UNSUPPORTED = "unsupported"  # raised on dense inputs already
    FAULT = "fault"  # the device is lost; nothing more can be asked of it


@dataclass(frozen=True)
class Case:
    """Sizes and layout of one trial.

    Args:
        layout: a name of :data:`qkvpass.operands.ARRANGEMENTS`, ``"only NAME"``, or what
            :func:`place` understands besides.
    """

    order: str
    dtype: torch.dtype
    head_dim: int
    layout: str = "packed"
    lengths: tuple[int, ...] = (33, 33)
    lengths_k: tuple[int, ...] | None = None
    heads: int = 3
    kv_heads: int = 3
    mask: bool = False
    rounds: int = 2
    limit: int = 0
    beyond: bool = True

    @property
    def sizes(self) -> str:
        """The sizes in words, without dtype and head size."""
        heads = str(self.heads) if self.heads == self.kv_heads else f"{self.heads}:{self.kv_heads}"
        keys = "" if self.lengths_k is None else f" by {_words(self.lengths_k)}"
        return (
            f"{self.order} lengths {_words(self.lengths)}{keys}, {heads} heads"
            f"{', mask' if self.mask else ''}"
        )

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.layout}, {dtype}, head size {self.head_dim}, {self.sizes}"


def _words(lengths: Sequence[int]) -> str:
    if lengths and len(set(lengths)) == 1:
        return f"{len(lengths)}x{lengths[0]}"
    return "+".join(map(str, lengths)) or "none"


@dataclass(frozen=True)
class Result:
    """What a trial found.

    Args:
        detail: the difference, or the message of the error.
        touched: what was written that must not be; "" for nothing.
        layouts: layout of each operand, by name.
        granule: largest alignment in bytes that all of them have, up to 128.
    """

    case: Case
    status: Status
    detail: str = ""
    touched: str = ""
    layouts: dict[str, Layout] = field(default_factory=dict)
    granule: int = 0
    calls: int = 0


@dataclass
class Subject:
    """An op under test.

    Args:
        operands: names of q, k, v, and what else of their kind it takes (of a backward).
        deterministic: call it under ``torch.use_deterministic_algorithms``.
        loose: indices of outputs that differ between two identical calls.
        dead: the message that the device died with; "" while it lives.
    """

    op: torch._ops.OpOverload
    operands: tuple[str, ...]
    device: torch.device
    known: KnownInputs
    forward: torch._ops.OpOverload | None = None
    build: Build | None = None
    deterministic: bool = False
    loose: frozenset[int] = frozenset()
    dead: str = ""

    @property
    def qkv(self) -> tuple[str, ...]:
        """Those that a projection makes; the rest has the layout that the forward gives."""
        return self.operands[:3] if self.forward is not None else self.operands

    def arguments(self, spec: Spec) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if self.build is not None:
            return self.build(spec)
        return arguments(self.op, spec, self.known.constants)

    def call(self, spec: Spec) -> list[Any]:
        """Outputs, flat. Waits for the device.

        Raises:
            Exception: whatever the op raises.
        """
        args, kwargs = self.arguments(spec)
        with torch.no_grad(), algorithms(self.deterministic):
            return self.outputs(args, kwargs)

    def outputs(self, args: Any, kwargs: Any) -> list[Any]:
        outputs = pytree.tree_leaves(self.op(*args, **kwargs))
        self.wait()
        return outputs

    def lost(self, error: Exception) -> bool:
        """Whether ``error`` took the device with it: CUDA then answers every call with it."""
        if self.device.type != "cuda" or self.dead:
            return bool(self.dead)
        try:
            torch.zeros(1, device=self.device).add(1).item()
        except Exception:
            self.dead = first_line(error)
        return bool(self.dead)

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def names_of(op: torch._ops.OpOverload) -> list[str]:
    """Names of an op's arguments."""
    return [argument.name for argument in op._schema.arguments]


def gradient_of(backward: torch._ops.OpOverload) -> str:
    """Name of the argument of a backward that is the gradient of the output."""
    return next(n for n in names_of(backward) if n.startswith(("grad_out", "dout")))


@contextlib.contextmanager
def algorithms(deterministic: bool) -> Iterator[None]:
    """Deterministic algorithms, without filling fresh memory.

    Raises:
        RuntimeError: inside, from an op that has none. To warn would not do: attention then
            goes on as before.
    """
    before = torch.are_deterministic_algorithms_enabled()
    warn = torch.is_deterministic_algorithms_warn_only_enabled()
    memory: Any = torch.utils.deterministic
    fill = memory.fill_uninitialized_memory
    try:
        if deterministic:
            torch.use_deterministic_algorithms(True)
            memory.fill_uninitialized_memory = False
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn)
        memory.fill_uninitialized_memory = fill


def first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:160]


def values(subject: Subject, case: Case, seed: int) -> Operands:
    """Fresh q, k and v (and what has no forward to make it), dense, in the op's order."""
    generator = torch.Generator(subject.device).manual_seed(seed)

    def normal(lengths: tuple[int, ...], heads: int) -> Tensor:
        if case.order == THD:
            shape: tuple[int, ...] = (sum(lengths), heads, case.head_dim)
        else:
            shape = (len(lengths), max(lengths, default=7), heads, case.head_dim)
        t = torch.randn(shape, generator=generator, device=subject.device).to(case.dtype)
        return lay.token_major(t, case.order).contiguous()

    keys = case.lengths if case.lengths_k is None else case.lengths_k
    made = {}
    for i, name in enumerate(subject.qkv):
        is_kv = i in (1, 2)
        made[name] = normal(keys if is_kv else case.lengths, case.kv_heads if is_kv else case.heads)
    return made


def place(case: Case, dense: Operands) -> Operands | None:
    """``dense`` in the layout that ``case`` names; None where the sizes do not allow it."""
    what, _, rest = case.layout.partition(" ")
    if case.layout == "dense":
        return dict(dense)
    if what == "only":
        return {n: lay.rows(t, case.order) if n == rest else t for n, t in dense.items()}
    if what == "far":
        dim, names = rest.split(" ")
        away = {
            n: lay.far(dense[n], case.order, dim, case.limit, case.beyond) for n in names.split("+")
        }
        return dense | away
    if " aligned to " in case.layout:
        part, unit = case.layout.removesuffix(" bytes").split(" aligned to ")
        return lay.misaligned(part, int(unit), dense, case.order)
    return lay.ARRANGEMENTS[case.layout](dense, case.order)


def spec_of(subject: Subject, case: Case, given: Operands, made: dict[str, Any]) -> Spec:
    """The call of ``case`` on operands as they are."""
    mask = None
    if case.mask:
        generator = torch.Generator(subject.device).manual_seed(1)
        keys = max(case.lengths_k or case.lengths)
        shape = (len(case.lengths), case.heads, max(case.lengths), keys)
        mask = torch.randn(shape, generator=generator, device=subject.device).to(case.dtype)
    return Spec(given, case.order, case.lengths, case.lengths_k or case.lengths, mask, made)


def forward_of(subject: Subject, case: Case, given: Operands) -> dict[str, Any]:
    """What the forward of a backward was given and returned, by name."""
    assert subject.forward is not None
    spec = spec_of(subject, case, given, {})
    args, kwargs = arguments(subject.forward, spec, subject.known.constants)
    schema = subject.forward._schema
    named = dict(zip((a.name for a in schema.arguments), (*args, *kwargs.values())))
    with torch.no_grad():
        outputs = subject.forward(*args, **kwargs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    names = subject.known.returns or tuple(r.name for r in schema.returns)
    return {n: v for n, v in named.items() if v is not None} | dict(zip(names, outputs))


def prepare(subject: Subject, case: Case, seed: int) -> tuple[Spec, Spec] | None:
    """The same call on dense operands and on placed ones; None where sizes do not allow it.

    Operands of a backward beside q, k and v have the values that the forward gives on dense
    inputs, in the layout that it gives on these. What is no operand stays as on dense inputs.

    Raises:
        Exception: whatever the forward raises.
    """
    dense = values(subject, case, seed)
    if subject.forward is None:
        placed = place(case, dense)
        if placed is None:
            return None
        return spec_of(subject, case, dense, {}), spec_of(subject, case, placed, {})
    return _prepare_backward(subject, case, seed, dense)


def _prepare_backward(
    subject: Subject, case: Case, seed: int, dense: Operands
) -> tuple[Spec, Spec] | None:
    followers = subject.operands[3:]
    alone = next((n for n in followers if case.layout.endswith(f" {n}")), None)
    # Where a follower alone is strided, q, k and v stay as they are.
    placed = dict(dense) if alone else place(case, dense)
    if placed is None:
        return None
    made = forward_of(subject, case, dense)
    out = next(v for v in made.values() if _is_output(v, dense))
    layout = next(v for v in forward_of(subject, case, placed).values() if _is_output(v, placed))
    generator = torch.Generator(subject.device).manual_seed(seed + 1)
    grad = torch.randn(out.shape, generator=generator, device=out.device).to(out.dtype)
    made[gradient_of(subject.op)] = torch.empty_like(out).copy_(grad)
    for name in followers:
        value = out if name.startswith("out") else grad
        dense[name] = torch.empty_like(out).copy_(value)
        placed[name] = torch.empty_like(layout).copy_(value)
    if alone:
        placed |= place(case, {alone: dense[alone]}) or {}
    return spec_of(subject, case, dense, made), spec_of(subject, case, placed, made)


def _is_output(value: Any, given: Operands) -> bool:
    """Whether a value is what attention returned: as large as q, and no operand."""
    q = next(iter(given.values()))
    return (
        isinstance(value, Tensor)
        and value.shape == q.shape
        and all(value is not t for t in given.values())
    )


def run(subject: Subject, case: Case) -> Result | None:
    """Try one case; None where its sizes do not allow its layout, or the device is dead.

    The first round calls on dense inputs first, the second on strided ones, so that neither
    can lean on what the other left behind.
    """
    if subject.dead:
        return None
    layouts: dict[str, Layout] = {}
    granule = calls = 0
    touched = ""
    for turn in range(case.rounds):
        try:
            pair = prepare(subject, case, seed=1000 * turn + case.head_dim)
        except Exception as error:  # the forward of a backward, or too little memory
            return _raised(subject, case, Status.UNSUPPORTED, error)
        if pair is None:
            return None
        dense, placed = pair
        layouts = {name: Layout.of(t) for name, t in placed.operands.items()}
        granule = lay.granule(list(placed.operands.values()))
        before = None if case.limit else snapshot(placed)
        outputs: dict[bool, list[Any]] = {}
        for strided in (False, True) if turn == 0 else (True, False):
            try:
                outputs[strided] = subject.call(placed if strided else dense)
            except Exception as error:
                status = Status.REJECTED if strided else Status.UNSUPPORTED
                return replace(
                    _raised(subject, case, status, error), layouts=layouts, granule=granule
                )
            calls += strided
        touched = touched or ("" if before is None else changed(placed, before))
        if detail := difference(outputs[False], outputs[True], subject.loose):
            detail = f"call {turn + 1}: {detail}"
            return Result(case, Status.DIFFERENT, detail, touched, layouts, granule, calls)
    return Result(case, Status.SAME, "", touched, layouts, granule, calls)


def _raised(subject: Subject, case: Case, status: Status, error: Exception) -> Result:
    return Result(case, Status.FAULT if subject.lost(error) else status, first_line(error))


def snapshot(spec: Spec) -> dict[str, Tensor]:
    """The bytes of every operand's storage, gaps and all, and of the mask's."""
    return {name: _bytes(t).clone() for name, t in _inputs(spec).items()}


def changed(spec: Spec, before: dict[str, Tensor]) -> str:
    """What was written since; "" for nothing."""
    for name, t in _inputs(spec).items():
        if not torch.equal(_bytes(t), before[name]):
            return f"the memory of {name} was written"
    return ""


def _inputs(spec: Spec) -> Operands:
    return {**spec.operands, **({} if spec.mask is None else {"mask": spec.mask})}


def _bytes(t: Tensor) -> Tensor:
    flat = torch.empty(0, dtype=torch.uint8, device=t.device)
    return flat.set_(t.untyped_storage())


def difference(a: Sequence[Any], b: Sequence[Any], loose: frozenset[int] = frozenset()) -> str:
    """The first difference in bits between floating outputs; "" for none."""
    for i, (x, y) in enumerate(zip(a, b)):
        if i in loose or not isinstance(x, Tensor) or not isinstance(y, Tensor):
            continue
        if x.is_floating_point() and (found := _differs(x, y)):
            return f"output {i} {found}"
    return ""


def _differs(x: Tensor, y: Tensor) -> str:
    if x.shape != y.shape:
        return f"has shape {tuple(y.shape)}, not {tuple(x.shape)}"
    one, other = bits(x), bits(y)
    if torch.equal(one, other):
        return ""
    count = int((one != other).sum())
    gap = (x.double() - y.double()).abs()
    largest = float(gap.nan_to_num(nan=float("inf")).max())
    return f"differs in {count} of {x.numel()} elements, by up to {largest:.3g}"


def bits(t: Tensor) -> Tensor:
    return t.detach().contiguous().view(BITS[t.element_size()])
