"""What every test starts from: no compile state, no user tags, and internal faults that raise."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import standins
import torch
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config
from torch._inductor.utils import fresh_cache

from qkvpass import tags


@pytest.fixture(autouse=True, scope="session")
def _own_cache_dir() -> Iterator[None]:
    """One cache directory a session: C++ kernels are found again by their source, and the
    precompiled header, which costs more than a test, is made once."""
    with fresh_cache():
        yield


@pytest.fixture(autouse=True)
def _clean_slate(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Compile afresh, by the same kernels each time, with only the built-in tags in force.

    Graph caches are off, for on a hit no pass runs; the tests of caching switch them on.
    """
    monkeypatch.setenv("QKVPASS_STRICT", "1")
    monkeypatch.delenv("QKVPASS_DISABLE", raising=False)
    registry = tags._registry
    user, hidden = dict(registry.user), set(registry.hidden)
    torch.manual_seed(0)
    torch._dynamo.reset()
    standins.reset()
    with (
        inductor_config.patch(deterministic=True, fx_graph_cache=False),
        functorch_config.patch(enable_autograd_cache=False),
    ):
        yield
    registry.user, registry.hidden = user, hidden
    registry.changed()
    torch._dynamo.reset()
