"""The pass costs next to nothing beside the compile, and its time grows with the graph alone."""

from __future__ import annotations

import time

import pytest
import scaling

from qkvpass.graph_pass import Options, run

FEW, MANY = 30, 300


def milliseconds_a_layer(layers: int, rounds: int) -> float:
    """The best of some rounds, in CPU time: what else the machine does is not the pass's."""
    best = float("inf")
    for _ in range(rounds):
        graph = scaling.layered_graph(layers)
        start = time.process_time()
        report = run(graph, Options())
        best = min(best, time.process_time() - start)
        assert len(report.removed) == 4 * layers and not report.kept
    return best / layers * 1e3


@pytest.fixture(scope="module", autouse=True)
def _warm() -> None:
    scaling.pass_seconds(2)


def test_ten_milliseconds_a_layer() -> None:
    assert milliseconds_a_layer(FEW, rounds=3) <= 10


def test_linear_growth() -> None:
    """Ten times the layers take ten times as long, with room for noise and larger tables."""
    few, many = (milliseconds_a_layer(layers, rounds=2) for layers in (FEW, MANY))
    assert many <= 10
    assert many <= 2.5 * few


@pytest.mark.slow
def test_share_of_the_compile() -> None:
    spent, whole = scaling.compile_share(layers=27)
    assert spent <= 0.02 * whole, f"the pass took {spent:.2f} s of {whole:.1f} s"
