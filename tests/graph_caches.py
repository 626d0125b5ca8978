"""The graph caches of Inductor and AOTAutograd: switched on, emptied, and counted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config
from torch._dynamo.utils import counters
from torch._functorch._aot_autograd.autograd_cache import AOTAutogradCache
from torch._inductor.codecache import FxGraphCache


@contextmanager
def caches_on() -> Iterator[None]:
    """Both caches in use, and empty; compiled C++ stays where it is."""
    with (
        inductor_config.patch(fx_graph_cache=True, deterministic=False),
        functorch_config.patch(enable_autograd_cache=True),
    ):
        FxGraphCache.clear()
        AOTAutogradCache.clear()
        counters.clear()
        yield


def events() -> dict[str, int]:
    """Misses, hits and bypasses of the two caches since the last call."""
    found = {
        name: counters["inductor"][f"fxgraph_cache_{name}"]
        + counters["aot_autograd"][f"autograd_cache_{name}"]
        for name in ("miss", "hit", "bypass")
    }
    counters.clear()
    return found
