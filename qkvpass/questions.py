"""Questions to an op that take more than comparing outputs: what it costs, what its fake kernel
and its backward say. Each answers with a :class:`~qkvpass.certificate.Verdict`."""

from __future__ import annotations

import re
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.profiler import ProfilerActivity, profile

from .certificate import Outcome, Verdict
from .known_inputs import Spec
from .layout import Layout
from .trial import Case, Subject, algorithms, difference, first_line, prepare

COPIES = ("aten::copy_", "aten::clone")
COPY_KERNEL = re.compile(r"copy|clone|contiguous", re.IGNORECASE)


def passed(detail: str = "") -> Verdict:
    return Verdict(Outcome.PASS, detail)


def failed(detail: str) -> Verdict:
    return Verdict(Outcome.FAIL, detail)


def not_tried(detail: str) -> Verdict:
    return Verdict(Outcome.NOT_TRIED, detail)


def not_answered(subject: Subject, error: Exception) -> Verdict:
    """What an error amounts to that says nothing about layouts."""
    subject.lost(error)
    return not_tried(first_line(error))


@dataclass(frozen=True)
class Cost:
    """What a call took: bytes allocated (on CUDA at its peak), and the copies or kernels run."""

    nbytes: int
    ran: Counter[str]


def cost(subject: Subject, spec: Spec) -> Cost:
    subject.call(spec)  # the first call may compile, and fill caches
    args, kwargs = subject.arguments(spec)
    with torch.no_grad(), algorithms(subject.deterministic):
        if subject.device.type == "cuda":
            return _cuda_cost(subject, args, kwargs)
        return _cpu_cost(subject, args, kwargs)


def _cpu_cost(subject: Subject, args: Any, kwargs: Any) -> Cost:
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as found:
        subject.outputs(args, kwargs)
    events = found.profiler.kineto_results.events()
    nbytes = sum(max(e.nbytes(), 0) for e in events if e.name() == "[memory]")
    return Cost(nbytes, Counter(e.name() for e in events if e.name() in COPIES))


def _cuda_cost(subject: Subject, args: Any, kwargs: Any) -> Cost:
    torch.cuda.reset_peak_memory_stats(subject.device)
    before = torch.cuda.memory_allocated(subject.device)
    outputs = subject.outputs(args, kwargs)
    nbytes = torch.cuda.max_memory_allocated(subject.device) - before
    del outputs
    activities = [ProfilerActivity.CUDA, ProfilerActivity.CPU]
    with profile(activities=activities, acc_events=True) as found:
        subject.outputs(args, kwargs)
    events = found.events() or []
    on_device = (e for e in events if e.device_type == torch.autograd.DeviceType.CUDA)
    return Cost(nbytes, Counter(e.name for e in on_device))


def hidden_copy(subject: Subject, cases: Sequence[Case]) -> Verdict:
    """Whether strided inputs cost memory or a copy that dense ones do not."""
    kernels = 0
    if not cases:
        return not_tried("no case")
    for case in cases:
        try:
            pair = prepare(subject, case, seed=3)
            assert pair is not None
            dense, strided = (cost(subject, spec) for spec in pair)
        except Exception as error:
            return not_answered(subject, error)
        smallest = min(t.numel() * t.element_size() for t in pair[1].operands.values())
        if strided.nbytes - dense.nbytes >= smallest // 2:
            more = strided.nbytes - dense.nbytes
            return failed(f"{case}: allocates {more} bytes more than on dense inputs")
        extra = strided.ran - dense.ran
        grown = extra.total() > (dense.ran - strided.ran).total()
        if grown or any(COPY_KERNEL.search(name) for name in extra):
            ran = ", ".join(f"{name[:60]} x{count}" for name, count in extra.items())
            return failed(f"{case}: runs more than on dense inputs: {ran}")
        kernels += strided.ran.total()
    if subject.device.type == "cuda" and not kernels:
        return passed("by memory alone; the profiler saw no kernels")
    means = "kernels" if subject.device.type == "cuda" else "aten copies"
    return passed(f"as much memory and as many {means} as on dense inputs")


def fake_outputs(subject: Subject, spec: Spec) -> list[Any]:
    """What the fake kernel returns for tensors laid out as in ``spec``.

    Raises:
        Exception: whatever it raises; so does an op without one.
    """
    args, kwargs = subject.arguments(spec)
    mode = FakeTensorMode(allow_fallback_kernels=False)  # which would run the real one

    def fake(x: Any) -> Any:
        return mode.from_tensor(x) if isinstance(x, Tensor) else x

    with mode, torch.no_grad():
        return pytree.tree_leaves(
            subject.op(*pytree.tree_map(fake, args), **pytree.tree_map(fake, kwargs))
        )


def fake_layout(subject: Subject, cases: Sequence[Case]) -> Verdict:
    """Whether the fake kernel predicts the layouts of the outputs.

    What is no output of attention but a statistic counts only if strided inputs make the
    prediction worse than it is on dense ones.
    """
    aside = ""
    if not cases:
        return not_tried("no case")
    for case in cases:
        try:
            pair = prepare(subject, case, seed=5)
            assert pair is not None
            real = [subject.call(spec) for spec in pair]
        except Exception as error:
            return not_answered(subject, error)
        try:
            fake = [fake_outputs(subject, spec) for spec in pair]
        except Exception as error:
            return not_tried(f"the fake kernel raised: {first_line(error)}")
        on_dense = _wrong_predictions(fake[0], real[0])
        shapes = {t.shape for t in pair[0].operands.values()}
        for i, wrong in _wrong_predictions(fake[1], real[1]).items():
            if i not in on_dense or getattr(real[1][i], "shape", None) in shapes:
                return failed(f"{case}: output {i} {wrong}")
            aside = f"output {i}, a statistic, {wrong}, on dense inputs too"
    return passed(aside)


def _wrong_predictions(fake: Sequence[Any], real: Sequence[Any]) -> dict[int, str]:
    """Outputs whose layout is not what was predicted, by index."""
    if len(fake) != len(real):
        return {0: f"is one of {len(real)}, the fake kernel says {len(fake)}"}
    wrong = {}
    for i, (f, r) in enumerate(zip(fake, real)):
        if not (isinstance(r, Tensor) and isinstance(f, Tensor) and r.is_floating_point()):
            continue
        if r.shape == f.shape and (r.numel() == 0 or _same_strides(f, r)) and r.dtype == f.dtype:
            continue
        said, is_ = _without_offset(f), _without_offset(r)
        wrong[i] = f"is {is_} {r.dtype}; the fake kernel says {said} {f.dtype}"
    return wrong


def _same_strides(a: Tensor, b: Tensor) -> bool:
    return _without_offset(a).equivalent(_without_offset(b))


def _without_offset(t: Tensor) -> Layout:
    return Layout(tuple(t.shape), tuple(t.stride()), 0)


def backward(subject: Subject, cases: Sequence[Case]) -> Verdict:
    """Whether gradients on strided inputs equal those on dense ones.

    Where two runs on the same dense inputs differ, deterministic algorithms are asked for.
    """
    if subject.forward is not None:
        return not_tried("this is a backward")
    tried = 0
    deterministic = subject.deterministic
    for case in cases:
        try:
            pair = prepare(subject, case, seed=7)
            assert pair is not None
            want = gradients(subject, pair[0], deterministic)
            if difference(want, gradients(subject, pair[0], deterministic)):
                deterministic = True
                want = gradients(subject, pair[0], deterministic)
                if noise := difference(want, gradients(subject, pair[0], deterministic)):
                    return not_tried(f"{case}: two runs on dense inputs differ: gradient {noise}")
        except Exception as error:
            if tried:
                continue  # the backward need not take every dtype and head size
            return not_answered(subject, error)
        try:
            if found := difference(want, gradients(subject, pair[1], deterministic)):
                return failed(f"{case}: gradient {found}")
        except Exception as error:
            subject.lost(error)
            return failed(f"{case}: raised on strided inputs alone: {first_line(error)}")
        tried += 1
    if not tried:
        return not_tried("no case")
    how = " under deterministic algorithms" if deterministic else ""
    return passed(f"{tried} cases{how}")


def gradients(subject: Subject, spec: Spec, deterministic: bool) -> list[Tensor]:
    """Gradients of the first output towards the operands, for a gradient of fixed values.

    Raises:
        RuntimeError: if the op is not differentiable.
    """
    leaves = {name: t.detach().requires_grad_() for name, t in spec.operands.items()}
    args, kwargs = subject.arguments(
        Spec(leaves, spec.order, spec.lengths, spec.lengths_k, spec.mask, spec.made)
    )
    with torch.enable_grad(), algorithms(deterministic), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        out = pytree.tree_leaves(subject.op(*args, **kwargs))[0]
        generator = torch.Generator(out.device).manual_seed(11)
        grad = torch.randn(out.shape, generator=generator, device=out.device).to(out.dtype)
        grad = torch.empty_like(out).copy_(grad)
        found = torch.autograd.grad(out, list(leaves.values()), grad)
    subject.wait()
    return list(found)


def opcheck(subject: Subject, cases: Sequence[Case]) -> Verdict:
    """``torch.library.opcheck`` on strided inputs: the schema's promises, and the fake kernel.

    The fakes of aten are left to :func:`fake_layout`: opcheck compares seeds, too.
    """
    tests = ["test_schema"] + ["test_faketensor"] * (subject.op.namespace != "aten")
    if not cases:
        return not_tried("no case")
    try:
        pair = prepare(subject, cases[0], seed=9)
        assert pair is not None
        args, kwargs = subject.arguments(pair[1])
        with warnings.catch_warnings(), torch.no_grad(), algorithms(subject.deterministic):
            warnings.simplefilter("ignore")
            found = torch.library.opcheck(
                subject.op, args, kwargs, test_utils=tests, raise_exception=False
            )
    except Exception as error:
        return not_answered(subject, error)
    wrong = {name: r for name, r in found.items() if r != "SUCCESS"}
    for name, result in wrong.items():
        # The wrapper of opcheck says where to read about it; the cause says what is wrong.
        cause = getattr(result, "__cause__", None) or result
        text = first_line(cause) if isinstance(cause, Exception) else str(cause)
        return failed(f"{name}: {text}")
    return passed(", ".join(found))
