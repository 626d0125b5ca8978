"""How many copies of a graph may be tried, so that a culprit can be found by halving.

Three callers ask for less than all: ``QKVPASS_MAX_REWRITES``, Inductor's bisector, and
:func:`qkvpass.verify`.
"""

from __future__ import annotations

import contextlib
import contextvars
import os
from collections.abc import Iterator
from dataclasses import dataclass

from .compat import bisecting, bisector_disables
from .match import Candidate, Facts, find_candidates

VARIABLE = "QKVPASS_MAX_REWRITES"


@dataclass
class Budget:
    """Candidates that may be tried, over all graphs compiled in turn.

    Args:
        most: how many.
        asked: how many there were so far.
    """

    most: int
    asked: int = 0

    def share(self, wanted: int) -> int:
        """What a graph with so many candidates may try of them."""
        left = max(self.most - self.asked, 0)
        self.asked += wanted
        return min(left, wanted)


_budget: contextvars.ContextVar[Budget | None] = contextvars.ContextVar(
    "qkvpass_budget", default=None
)


@contextlib.contextmanager
def at_most(most: int) -> Iterator[Budget]:
    """Try only the first so many candidates of what this thread compiles inside."""
    budget = Budget(most)
    token = _budget.set(budget)
    try:
        yield budget
    finally:
        _budget.reset(token)


def active() -> bool:
    """Whether a search is on: what is compiled now must not be found again later."""
    return _budget.get() is not None or bisecting()


def limit_of(facts: Facts) -> int | None:
    """How many candidates of a graph, from its first, may be tried; None for all.

    Raises:
        ValueError: if the environment variable is no whole number.
    """
    if not active() and not os.environ.get(VARIABLE):
        return None
    candidates = find_candidates(facts)
    most = _most(candidates)
    return most if most < len(candidates) else None


def _most(candidates: list[Candidate]) -> int:
    if (budget := _budget.get()) is not None:
        return budget.share(len(candidates))
    if bisecting():
        return sum(not bisector_disables(_named(candidate)) for candidate in candidates)
    return _from_environment()


def _named(candidate: Candidate) -> str:
    sink = candidate.sinks[0]
    return f"qkvpass: {candidate.node.name}, {sink.name} of {sink.node.name}"


def _from_environment() -> int:
    value = os.environ[VARIABLE]
    if not value.isdecimal():
        raise ValueError(f"{VARIABLE} is {value!r}; give a whole number of copies, 0 or more")
    return int(value)
