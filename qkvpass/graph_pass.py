"""The pass as torch.compile knows it: sorted, switched, logged, and never fatal."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import glob
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch.fx import Graph

from . import (
    bias_fold,
    halving,
    observe,
    part_copies,
    row_order,
    split_heads,
    tags,
    token_major,
    triton_tags,
)
from .compat import (
    CustomGraphPass,
    hash_files,
    saved_tensor_hooks_active,
    sort_topologically,
)
from .decide import Decisions, decide
from .edit import apply
from .editor import transplant
from .match import Facts
from .once import log_once
from .record import attention_of, decisions_of, graph_text
from .report import Report
from .speculate import Rewrite, State, improve

REWRITES = (
    bias_fold.FOLD,
    bias_fold.REALISE,
    part_copies.REWRITE,
    split_heads.REWRITE,
    row_order.REWRITE,
    token_major.REWRITE,
    token_major.MATES,
)

Listener: TypeAlias = Callable[[Report], None]
NOT_KEPT = Report((), (), "", "", cached=True, notes=("from a cache; no report was kept for it",))


@dataclass
class _Hearing:
    """One who hears of reports in this thread.

    Args:
        text: whether they want the graph's text in them.
        asked: whether a compile looked for its graph in a cache, under the pass's name.
    """

    listener: Listener
    text: bool
    asked: bool = False


_listeners: contextvars.ContextVar[tuple[_Hearing, ...]] = contextvars.ContextVar(
    "qkvpass_listeners", default=()
)


@dataclass(frozen=True)
class Options:
    """What a compile may set.

    Args:
        enabled: False leaves every graph alone.
        target: ``"inductor"`` or ``"eager"``: who runs the graph, hence what pays.
        evidence: ``"declared"`` trusts every tag; ``"certified"`` only one with a certificate
            that counts for this op, library, architecture and dtype.
        autograd: whether autograd may run over the rewritten graph, by backward ops that the
            graph does not show.
        numerics: ``"default"`` admits rewrites that may move the last bit of a result, each
            named in the report; ``"bitwise"`` only those that move elements.
        fold_bias: fold a bias add into its GEMM where copies go behind it.
        split_heads: give an attention op over merged batch and heads its two dims back, where
            copies go then.
        part_copies: copy q, k and v one by one where one copy makes them all dense, so that
            those may go that only attention reads.
        permute_rows: move a permutation of rows from in front of a GEMM to behind it, where
            it is a view.
        relay_q: let the ``cat`` or pointwise op that writes q write it token-major, where that
            spares the copy behind the attention.

    Raises:
        ValueError: for another target, evidence or numerics.
    """

    enabled: bool = True
    target: str = "inductor"
    evidence: str = "declared"
    autograd: bool = False
    numerics: str = "default"
    fold_bias: bool = True
    split_heads: bool = True
    part_copies: bool = True
    permute_rows: bool = True
    relay_q: bool = True

    def __post_init__(self) -> None:
        if self.numerics not in ("default", "bitwise"):
            raise ValueError(f'numerics is {self.numerics!r}; give "default" or "bitwise"')
        if self.target not in ("inductor", "eager"):
            raise ValueError(f'target is {self.target!r}; give "inductor" or "eager"')
        if self.evidence not in ("declared", "certified"):
            raise ValueError(f'evidence is {self.evidence!r}; give "declared" or "certified"')


@contextlib.contextmanager
def capture() -> Iterator[list[Report]]:
    """Collect one :class:`Report` for each graph compiled inside, in this thread.

    Returns:
        A list that fills as graphs are compiled. A graph that comes from a warm cache has
        a report marked ``cached``. Under :func:`inductor_options` none is kept; where all
        graphs came from a cache, one empty report says so in the end.
    """
    reports: list[Report] = []
    with listen(reports.append) as hearing:
        yield reports
    if hearing.asked and not reports:
        reports.append(NOT_KEPT)


@contextlib.contextmanager
def listen(listener: Listener, text: bool = True) -> Iterator[_Hearing]:
    """Hand every report of this thread to ``listener``, with the graphs as text or without."""
    hearing = _Hearing(listener, text)
    token = _listeners.set((*_listeners.get(), hearing))
    try:
        yield hearing
    finally:
        _listeners.reset(token)


def deliver(report: Report) -> None:
    """Hand a report to everybody who listens in this thread, and to the logs."""
    for hearing in _listeners.get():
        hearing.listener(report)
    observe.tell(report)


def asked_for_key() -> None:
    """A compile looks for its graph in a cache. If it finds one, the pass will not run."""
    for hearing in _listeners.get():
        hearing.asked = True


def text_wanted() -> bool:
    """Whether anybody will read the graph's text; rendering it takes longer than deciding."""
    return any(hearing.text for hearing in _listeners.get()) or observe.text_wanted()


class StridedQKVPass(CustomGraphPass):
    """Removes the copies in front of attention that nobody needs, from any ATen graph.

    A post pass of the joint graph by default; right on pre and post-grad graphs too. It
    holds options alone, so it pickles, deep-copies and keeps no model alive.

    Before, and after::

        q = clone(view(getitem(split(addmm), 0)))         q = view(getitem(split(addmm), 0))
        o = attn(q, k, v)                                 o = attn(q, k, v)

    Args:
        options: see :class:`Options`.
    """

    def __init__(self, options: Options | None = None) -> None:
        self.options = options or Options()

    @property
    def enabled(self) -> bool:
        """Whether neither the options nor the environment turn it off."""
        return self.options.enabled and not disabled()

    def __call__(self, graph: Graph) -> None:
        """Rewrite ``graph`` in place, or leave it as it was.

        Raises:
            Exception: any fault, under ``QKVPASS_STRICT=1``; else it is logged, once.
        """
        if not self.enabled:
            return
        try:
            report = run(graph, self.options)
        except Exception as fault:
            if _strict():
                raise
            log_once(f"a graph is left as it was: {type(fault).__name__}: {fault}")
            report = Report((), (), "", "", fault=f"{type(fault).__name__}: {fault}")
        deliver(report)

    def uuid(self) -> Any | None:
        """What a compiled graph depends on: source, tags, options, versions, switches and hooks.

        None, and so an uncached compile, where a tag's condition cannot be told apart, and
        while the number of removals is being halved.
        """
        if halving.active():
            return None
        key = tags.registry_key()
        if key is None:
            log_once(
                "a condition is no importable function and has no version: compiles go uncached"
            )
            return None
        switches = tuple(os.environ.get(n) for n in ("QKVPASS_DISABLE", halving.VARIABLE))
        versions = (torch.__version__, torch.version.hip, torch.backends.cudnn.version())
        hooked = saved_tensor_hooks_active()
        return (_source_hash(), key, triton_tags.key(), self.options, switches, versions, hooked)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StridedQKVPass) and other.options == self.options

    def __hash__(self) -> int:
        return hash(self.options)


@functools.cache
def _source_hash() -> bytes:
    folder = os.path.dirname(__file__)
    return hash_files(tuple(sorted(glob.glob(os.path.join(folder, "*.py")))))


def run(graph: Graph, options: Options) -> Report:
    """Decide, edit, and say what was done.

    Raises:
        RewriteFault: if the finished graph breaks the rule; the graph is as it was.
    """
    start = time.perf_counter()
    if not _is_sorted(graph):  # the joint graph of training, between Inductor's own passes
        sort_topologically(graph)
    original = Facts(graph, options.autograd)
    state = rewritten(original, options, REWRITES)
    try:
        return _finish(original, state, start)
    except Exception as fault:
        untouched = list(graph.nodes) == original.nodes
        if state.graph is graph or not untouched or _strict():
            raise
        log_once(f"all rewrites were left out: {type(fault).__name__}: {fault}")
        return _finish(original, rewritten(original, options, ()), start)


def _finish(original: Facts, state: State, start: float) -> Report:
    """Make the user's graph what the state says it is to be."""
    graph, wanted = original.graph, text_wanted()
    copies = decisions_of(original, state)
    attention = attention_of(state.facts, state.decisions)
    seconds = time.perf_counter() - start
    before = graph_text(graph) if wanted else ""
    start = time.perf_counter()
    changed = bool(state.decisions.overlay.removed) or state.graph is not graph
    if changed:
        apply(state.graph, state.facts, state.decisions.overlay)
    if state.graph is not graph:
        transplant(graph, state.graph)
    seconds += time.perf_counter() - start
    after = graph_text(graph) if wanted and changed else before
    return Report(copies, attention, before, after, seconds=seconds, notes=state.notes)


def rewritten(facts: Facts, options: Options, rewrites: tuple[Rewrite, ...]) -> State:
    """The graph with every rewrite that leads to removals, and the decisions on it.

    Raises:
        Exception: a fault of a rewrite, under ``QKVPASS_STRICT=1``; else that one is left out.
    """
    certified_only = options.evidence == "certified"
    limit = halving.limit_of(facts)

    def decided(facts: Facts) -> Decisions:
        return decide(facts, options.target, limit, certified_only)

    names = frozenset(node.name for node in facts.nodes)
    state = State(facts.graph, facts, decided(facts), names, certified_only=certified_only)
    admitted = [
        rewrite
        for rewrite in rewrites
        if getattr(options, rewrite.option) and options.numerics in rewrite.numerics
    ]
    for rewrite in admitted:
        opened = [further for further in admitted if further.option in rewrite.opens]
        try:
            state = improve(state, rewrite, decided, opened)
        except Exception as fault:
            if _strict():
                raise
            text = f"{rewrite.option} was left out: {type(fault).__name__}: {fault}"
            log_once(text)
            state = replace(state, notes=(*state.notes, text))
    return state


def _strict() -> bool:
    return os.environ.get("QKVPASS_STRICT") == "1"


def disabled() -> bool:
    """Whether the environment turns the pass off everywhere."""
    return os.environ.get("QKVPASS_DISABLE") == "1"


def _is_sorted(graph: Graph) -> bool:
    seen = set()
    for node in graph.nodes:
        if any(source not in seen for source in node.all_input_nodes):
            return False
        seen.add(node)
    return True
