"""Self-check: does a model compute the same bits with the pass as without it?"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from .backend import _fresh, inductor_options
from .compat import compile_with_inductor, repeatable_compiles
from .graph_pass import listen
from .halving import at_most
from .report import CopyDecision, Report

RUNS = 2
_ALL = 1 << 30  # more copies than any model has

Results = list[dict[str, Any]]  # one a run: values by what they are called
Inputs = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Difference:
    """One value that is not the same, bit for bit and stride for stride.

    Args:
        run: 0 for the first inputs, 1 for the second.
        value: what it is, as in ``"output 0"`` or ``"gradient of blocks.0.qkv.weight"``.
        detail: how it differs.
    """

    run: int
    value: str
    detail: str

    def __str__(self) -> str:
        return f"run {self.run}, {self.value}: {self.detail}"


@dataclass(frozen=True)
class Verification:
    """What :func:`verify` found.

    Args:
        ok: the pass changed no bit, and stock Inductor agreed with itself.
        differences: between stock and the pass.
        culprit: the first copy whose removal changes a value; None if none does, or if it
            cannot be said.
        unstable: differences of stock Inductor from itself. If there are any, differences
            from stock mean nothing.
        compared: how many values were compared, over both runs.
        report: of the compile with the pass.
    """

    ok: bool
    differences: tuple[Difference, ...]
    culprit: CopyDecision | None
    unstable: tuple[Difference, ...]
    compared: int
    report: Report

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        if self.unstable:
            return _lines("nothing can be said: stock Inductor differs from itself", self.unstable)
        went = f"{len(self.report.removed)} of {len(self.report.copies)} copies removed"
        if self.ok:
            return f"ok: {self.compared} values are the same bit for bit, with {went}"
        head = f"the pass changes {len(self.differences)} of {self.compared} values, with {went}"
        text = _lines(head, self.differences)
        if self.culprit is None:
            return text
        copy = self.culprit
        where = f" at {copy.source}" if copy.source else ""
        return (
            f"{text}\nfirst copy whose removal changes a value: {copy.node}, {copy.operand} of "
            f"{copy.op}{where}\n  {copy.detail}\n  allowed by: {copy.evidence or 'no tag'}"
        )


def _lines(head: str, differences: Sequence[Difference], most: int = 5) -> str:
    shown = [f"  {difference}" for difference in differences[:most]]
    rest = [f"  and {len(differences) - most} more"] if len(differences) > most else []
    return "\n".join([head, *shown, *rest])


def verify(
    model: Callable[..., Any],
    *args: Any,
    inputs: Callable[[], Any] | None = None,
    train: bool | None = None,
    dynamic: bool | None = None,
    **kwargs: Any,
) -> Verification:
    """Compile ``model`` with and without the pass, run both twice, and compare every bit.

    Outputs, their strides, inputs and buffers that the model writes and, in training, gradients
    are compared, under ``torch._inductor.config.deterministic`` with the compile caches off.
    Stock Inductor is compiled a second time as the control. Where the pass changes a value,
    the number of copies that it may remove is halved down to the first that does it.

    Buffers, ``.grad``, random state and the caller's tensors are left as they were. The model is
    compiled three times, and about log2 of the number of copies more to find a culprit.

    Kernels that were tuned earlier in a process outlive ``deterministic``, and two compiles can
    then choose otherwise for the same kernel. On a GPU, verify in a fresh process that
    compiled nothing before: ``qkvpass verify pkg.module:factory`` is one.

    Args:
        model: a module or function.
        args, kwargs: inputs to call it with. The first run has their values, the second
            random ones for floating tensors, in the same shapes and layouts.
        inputs: called once a run instead, for where random values will not do: returns a
            tuple of args, or (args, kwargs) with args a tuple and kwargs a dict.
        train: compare gradients; by default where the model is a module in training mode
            and grad is enabled.
        dynamic: as for ``torch.compile``.

    Returns:
        A :class:`Verification`; true in a condition if all is well.
    """
    if train is None:
        train = isinstance(model, nn.Module) and model.training and torch.is_grad_enabled()
    with _own_random_state(pytree.tree_leaves((args, kwargs))):
        drawn = pytree.tree_map_only(Tensor, _random, (args, kwargs))
    given = [(args, kwargs), drawn] if inputs is None else [_made(inputs) for _ in range(RUNS)]

    def results(patches: Callable[[], dict[str, Any]]) -> Results:
        return _results(model, given, patches, train, dynamic)

    def removing(most: int) -> tuple[Results, Report, int]:
        reports: list[Report] = []
        with at_most(most) as budget, listen(reports.append, text=False):
            found = results(inductor_options)
        return found, _merged(reports), budget.asked

    with repeatable_compiles():
        stock = results(dict)
        unstable = _differences(results(dict), stock)
        ours, report, candidates = removing(_ALL)
        differences = _differences(ours, stock)
        culprit = None
        if differences and not unstable:
            culprit = _culprit(candidates, report, lambda n: removing(n)[:2], stock)
    return Verification(
        ok=not differences and not unstable,
        differences=differences,
        culprit=culprit,
        unstable=unstable,
        compared=sum(map(len, stock)),
        report=report,
    )


def _culprit(
    candidates: int,
    report: Report,
    removing: Callable[[int], tuple[Results, Report]],
    stock: Results,
) -> CopyDecision | None:
    """The copy that goes with the fewest candidates that change a value, and not with one less."""
    good, bad = 0, candidates
    without, with_it = Report((), (), "", ""), report
    while bad - good > 1:
        middle = (good + bad) // 2
        found, told = removing(middle)
        if _differences(found, stock):
            bad, with_it = middle, told
        else:
            good, without = middle, told
    stays = {copy.node for copy in without.removed}
    new = [copy for copy in with_it.removed if copy.node not in stays]
    # What went behind the attention went because of what went in front of it.
    return next(iter([copy for copy in new if copy.operand] or new), None)


def _merged(reports: Sequence[Report]) -> Report:
    """One report; nodes carry the number of their graph where there are several."""
    if len(reports) == 1:
        return reports[0]
    numbered = [
        replace(r, copies=tuple(replace(c, node=f"graph {i}: {c.node}") for c in r.copies))
        for i, r in enumerate(reports)
    ]
    return Report.merge(numbered)


def _results(
    model: Callable[..., Any],
    given: Sequence[Inputs],
    patches: Callable[[], dict[str, Any]],
    train: bool,
    dynamic: bool | None,
) -> Results:
    # A function of its own for each compile: Dynamo finds what it compiled by its backend.
    def compiler(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
        return compile_with_inductor(gm, example_inputs, patches())

    compiled = torch.compile(_fresh(model), backend=compiler, dynamic=dynamic)
    return [_run(model, compiled, inputs, train, seed) for seed, inputs in enumerate(given)]


def _run(
    model: Callable[..., Any],
    compiled: Callable[..., Any],
    inputs: Inputs,
    train: bool,
    seed: int,
) -> dict[str, Any]:
    """Every value that one call makes or writes, by name."""
    args, kwargs = pytree.tree_map_only(Tensor, _own, inputs)
    leaves = pytree.tree_leaves((args, kwargs))
    tensors = {f"input {i}": x for i, x in enumerate(leaves) if isinstance(x, Tensor)}
    with _restored(model), _own_random_state(leaves), torch.set_grad_enabled(train):
        torch.manual_seed(seed)
        outputs = pytree.tree_leaves(compiled(*args, **kwargs))
        values = {f"output {i}": x for i, x in enumerate(outputs)}
        if train:
            values |= _gradients(model, values, tensors)
        values |= {f"{name} after the call": x for name, x in tensors.items()}
        if isinstance(model, nn.Module):
            values |= {f"buffer {name}": b for name, b in model.named_buffers()}
        return {name: _kept(value) for name, value in values.items()}


def _gradients(
    model: Callable[..., Any], outputs: dict[str, Any], tensors: dict[str, Tensor]
) -> dict[str, Tensor | None]:
    """Gradients of parameters and inputs that want one, for random gradients of the outputs."""
    wanted = {name: x for name, x in tensors.items() if x.requires_grad}
    if isinstance(model, nn.Module):
        wanted |= {name: p for name, p in model.named_parameters() if p.requires_grad}
    roots = [x for x in outputs.values() if isinstance(x, Tensor) and x.requires_grad]
    if not (wanted and roots):
        return {}
    found = torch.autograd.grad(
        roots, list(wanted.values()), [torch.randn_like(x) for x in roots], allow_unused=True
    )
    return {f"gradient of {name}": gradient for name, gradient in zip(wanted, found)}


def _made(inputs: Callable[[], Any]) -> Inputs:
    made = inputs()
    if not isinstance(made, tuple):
        raise TypeError(
            f"inputs() returned {type(made).__name__}; return a tuple of args, or (args, kwargs)"
        )
    if len(made) == 2 and isinstance(made[0], tuple) and isinstance(made[1], dict):
        return made
    return made, {}


def _random(x: Tensor) -> Tensor:
    if not x.is_floating_point():
        return x  # an index or a mask means what it says
    return _laid_like(x, torch.randn(x.shape, device=x.device).to(x.dtype))


def _own(x: Tensor) -> Tensor:
    """A copy that the model may write, in the same layout."""
    return _laid_like(x, x)


def _laid_like(x: Tensor, values: Tensor) -> Tensor:
    reach = 1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride())) if x.numel() else 0
    room = x.new_zeros(x.storage_offset() + reach)
    own = room.as_strided(x.shape, x.stride(), x.storage_offset())
    if any(s == 0 and n > 1 for n, s in zip(x.shape, x.stride())):
        # Elements that share memory have one value: that of the first of them.
        first = tuple(slice(0, 1) if s == 0 else slice(None) for s in x.stride())
        own[first].copy_(values.detach()[first])
    else:
        own.copy_(values.detach())
    return own.requires_grad_(x.requires_grad)


@contextlib.contextmanager
def _restored(model: Callable[..., Any]) -> Iterator[None]:
    """Buffers as they were, afterwards."""
    buffers = dict(model.named_buffers()) if isinstance(model, nn.Module) else {}
    before = {name: buffer.detach().clone() for name, buffer in buffers.items()}
    try:
        yield
    finally:
        with torch.no_grad():
            for name, value in before.items():
                buffers[name].copy_(value)


@contextlib.contextmanager
def _own_random_state(leaves: Sequence[Any]) -> Iterator[None]:
    devices = {x.device.index or 0 for x in leaves if isinstance(x, Tensor) and x.is_cuda}
    with torch.random.fork_rng(devices=sorted(devices)):
        yield


def _kept(value: Any) -> Any:
    """The value as it is now, whatever is written later, with its strides."""
    if not isinstance(value, Tensor):
        return value
    return value.detach().clone(memory_format=torch.preserve_format), value.stride()


def _differences(actual: Results, expected: Results) -> tuple[Difference, ...]:
    found = []
    for run, (left, right) in enumerate(zip(actual, expected)):
        for name in dict.fromkeys(itertools.chain(right, left)):
            if detail := _difference(left.get(name), right.get(name)):
                found.append(Difference(run, name, detail))
    return tuple(found)


def _difference(actual: Any, expected: Any) -> str:
    """How two values differ; ``""`` if they do not."""
    if not (isinstance(actual, tuple) and isinstance(expected, tuple)):
        return "" if actual is expected or actual == expected else f"{actual!r}, not {expected!r}"
    (a, a_strides), (e, e_strides) = actual, expected
    for what, got, wanted in (
        ("dtype", a.dtype, e.dtype),
        ("shape", tuple(a.shape), tuple(e.shape)),
        ("strides", a_strides, e_strides),
    ):
        if got != wanted:
            return f"{what} {got}, not {wanted}"
    if torch.equal(_bits(a), _bits(e)):
        return ""
    if not a.is_floating_point():
        return "other values"
    apart = (a.double() - e.double()).abs()
    elements = int((_bits(a) != _bits(e)).view(-1, a.element_size()).any(-1).sum())
    return f"{elements} of {a.numel()} elements, by up to {apart.nan_to_num(torch.inf).max():.3g}"


def _bits(t: Tensor) -> Tensor:
    return t.resolve_conj().resolve_neg().contiguous().flatten().view(torch.uint8)
