"""Entry points: the torch.compile backend, Inductor options, and ``explain``."""

from __future__ import annotations

import functools
import itertools
import types
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import GraphModule

from . import store
from .compat import (
    compile_for_eager,
    compile_with_inductor,
    patches_of_mode,
    stop_after_joint_passes,
)
from .graph_pass import NOT_KEPT, Options, StridedQKVPass, capture, deliver, listen
from .report import Report
from .slots import SLOT, Shared, behind, behind_current

_calls = itertools.count()


def inductor_options(**options: Any) -> dict[str, Any]:
    """Inductor options that add the pass: for ``torch.compile(options=…)`` and AOTInductor.

    What the user keeps in the same slot of Inductor's config when a graph is compiled runs first.

    Args:
        options: fields of :class:`Options`.

    Raises:
        ValueError: for ``target="eager"``, which is no Inductor.
    """
    given = Options(**options)
    if given.target == "eager":
        raise ValueError(
            'target="eager" runs without Inductor; give backend=qkvpass.configured(target="eager")'
        )
    return {SLOT: Shared(StridedQKVPass(given))}


class Backend:
    """A torch.compile backend: Inductor with the pass added, or for ``target="eager"`` the pass
    alone, whose graphs then run op by op.

    Backends with equal options are one object (:func:`configured`), so that Dynamo, which
    compiles anew for each backend object, does so once.
    """

    def __init__(self, options: Options) -> None:
        self.options = options
        self.__name__ = "qkvpass"

    def __call__(self, gm: GraphModule, example_inputs: list[Any], **kwargs: Any) -> Any:
        ours = StridedQKVPass(self.options)
        if self.options.target == "eager":
            return _run_eagerly(gm, example_inputs, ours, kwargs)
        given = kwargs.get("options") or {}
        chain = behind(given[SLOT], ours) if SLOT in given else behind_current(ours)
        patches = {**patches_of_mode(kwargs.get("mode")), **given, SLOT: chain}
        key = store.key_of(gm, example_inputs, chain.uuid(), patches)
        reports: list[Report] = []
        with listen(reports.append, text=False):
            compiled = compile_with_inductor(gm, example_inputs, patches)
        if not reports:
            self._deliver_stored(key)
        elif key is not None:
            store.save(key, reports)
        return compiled

    def _deliver_stored(self, key: str | None) -> None:
        """The pass did not run: the compiled code came from a cache."""
        if not StridedQKVPass(self.options).enabled:
            return
        for report in (store.load(key) if key is not None else []) or [NOT_KEPT]:
            deliver(report)


def _run_eagerly(
    gm: GraphModule, example_inputs: list[Any], ours: StridedQKVPass, given: dict[str, Any]
) -> Any:
    """Rewrite, then run the graph as ``aot_eager`` would.

    Raises:
        ValueError: for a mode or options, which are Inductor's.
    """
    if given := {name: value for name, value in given.items() if value not in (None, "default")}:
        raise ValueError(
            f'target="eager" runs without Inductor and takes no mode or options; got {given}'
        )
    return compile_for_eager(gm, example_inputs, ours)


def configured(**options: Any) -> Backend:
    """The backend with these :class:`Options`; the same object for equal options.

    ``configured(target="eager")`` rewrites the graphs and runs them op by op, without Inductor.

    Raises:
        ValueError: for an option's value that does not exist.
    """
    return _configured(Options(**options))


@functools.cache
def _configured(options: Options) -> Backend:
    return Backend(options)


backend = configured()


def explain(
    model: Callable[..., Any],
    *args: Any,
    dynamic: bool | None = None,
    train: bool = False,
    **kwargs: Any,
) -> Report:
    """Say what the pass would do to ``model`` and why. Changes nothing.

    Dynamo and Inductor's graph passes run afresh, without code generation and caches; the
    model's own maths then runs eagerly once.

    Args:
        model: a module or function.
        args, kwargs: inputs to call it with.
        dynamic: as for ``torch.compile``.
        train: trace with grad, as a joint forward and backward graph.

    Returns:
        One report over all graphs that the call compiled.
    """
    reports: list[Report] = []

    def explainer(gm: GraphModule, example_inputs: list[Any]) -> Any:
        with listen(reports.append):
            patches = {SLOT: behind_current(StridedQKVPass())}
            return stop_after_joint_passes(gm, example_inputs, patches)

    compiled = torch.compile(_fresh(model), backend=explainer, dynamic=dynamic)
    devices = sorted(
        {a.device.index or 0 for a in args if isinstance(a, torch.Tensor) and a.is_cuda}
    )
    with torch.random.fork_rng(devices=devices), torch.set_grad_enabled(train):
        compiled(*args, **kwargs)
    return Report.merge(reports)


def _fresh(model: Callable[..., Any]) -> Callable[..., Any]:
    """A caller of ``model`` with a code object of its own: Dynamo caches by code object."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return model(*args, **kwargs)

    name = f"qkvpass_explain_{next(_calls)}"
    code = call.__code__.replace(co_name=name)
    return types.FunctionType(code, call.__globals__, name, None, call.__closure__)


__all__ = ["Backend", "backend", "capture", "configured", "explain", "inductor_options"]
