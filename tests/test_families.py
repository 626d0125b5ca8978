"""What the pass does to each family of encoders, and that nobody can tell from the outside."""

from __future__ import annotations

import families
import pytest
import standins
import torch
from families import HEAD_DIM, HEADS
from standins import compile_pair, decide, tag
from torch import nn

# By operand: what becomes of the copy in front of it. "" is the copy behind the attention, or
# one that reaches no attention operand.
GONE = {"q": "removed", "k": "removed", "v": "removed"}
# The cat that writes q writes it token-major, so that the output is, and its copy goes.
RELAID = dict.fromkeys("qk", "not-a-layout-copy") | {"": "removed-cascade"}
EXPECTED: dict[str, dict[str, str]] = {
    "F0": {},
    "F1": GONE,
    "F2": GONE,
    "F3": GONE | {"": "removed-cascade"},
    # One copy makes all three, and the report names it once.
    "F4": GONE | {"": "removed-cascade"},
    # The module returns the last GEMM's rows as they lie, so that their order stays.
    "F5": GONE | {"": "no-attention-consumer"},
    "F6": {"q": "mutated", "k": "mutated", "v": "removed"},
    "F7": {"q": "opaque-consumer", "k": "opaque-consumer", "v": "removed"},
    "F8": GONE,
    "F9": RELAID,
    "F10": RELAID,
    "F11": dict.fromkeys("qkv", "not-a-layout-copy") | {"": "no-attention-consumer"},
    "F12": dict.fromkeys("kv", "broadcast-stride"),
    "F13": {"": "no-attention-consumer"},
    "F14": {"": "no-attention-consumer"},
    "F15": dict.fromkeys("qkv", "last-dim-stride") | {"": "no-attention-consumer"},
}
# Removed, but Inductor would have folded them into rope or the cat: no kernel is saved.
FOLDED = {"F2": {"q", "k"}, "F8": {"q", "k"}}
STRIDED = (3 * HEADS * HEAD_DIM, HEAD_DIM, 1)
DENSE = (HEADS * HEAD_DIM, HEAD_DIM, 1)
# Strides of q, k and v inside the kernel, for the families whose kernel is a custom op.
SEEN = {
    "F1": (STRIDED, STRIDED, STRIDED),
    "F2": (DENSE, DENSE, STRIDED),
    "F6": (DENSE, DENSE, STRIDED),
    "F7": (DENSE, DENSE, STRIDED),
    "F8": (DENSE, DENSE, STRIDED),
}

each_family = pytest.mark.parametrize("family", families.ALL, ids=lambda family: family.__name__)


def test_every_family_has_an_expectation() -> None:
    assert [family.__name__ for family in families.ALL] == list(EXPECTED)


@each_family
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_decisions(family: type[nn.Module], dynamic: bool) -> None:
    tag("aware")
    x = families.example_input(family)
    if dynamic:
        torch._dynamo.mark_dynamic(x, 1 if x.dim() == 3 else 0)
    outcome = decide(family(), x, dynamic=None if dynamic else False)
    assert outcome.verdicts == EXPECTED[family.__name__]
    folded = {name for c in outcome.report.folded for name in c.operand.split(", ")}
    assert folded == FOLDED.get(family.__name__, set())
    assert all(c.detail for c in outcome.report.kept)


@each_family
def test_graph_without_removals_is_left_alone(family: type[nn.Module]) -> None:
    """Not one node is touched where there is nothing to remove."""
    tag("aware")
    outcome = decide(family(), families.example_input(family))
    changed = str(outcome.before.graph) != str(outcome.after.graph)
    assert changed == bool(outcome.report.removed)


@each_family
def test_same_bits_and_strides_as_stock(family: type[nn.Module]) -> None:
    """Under Inductor, with fewer kernels exactly where a copy went that was a kernel."""
    tag("aware")
    model, x = family(), families.example_input(family)
    with torch.no_grad():
        stock, ours = compile_pair(model, x)
    real = [c for report in ours.reports for c in report.removed if not c.folded]
    if real:
        assert ours.kernels < stock.kernels
    else:
        assert ours.kernels == stock.kernels
    if (name := family.__name__) in SEEN:
        for call in ours.seen("aware"):
            assert call.strides == SEEN[name]
        for call in stock.seen("aware"):
            assert all(seen.dense for seen in call.tensors)


@pytest.mark.parametrize(
    "family", [families.F1, families.F2, families.F3, families.F4, families.F8]
)
def test_as_few_kernels_as_without_the_copies(family: type[families.Base]) -> None:
    """What the pass leaves is what a hand that edits the model would have got."""
    tag("aware")
    x = families.example_input(family)
    ours = standins.run(family(), x, backend=standins.qkvpass.backend)
    twin = standins.run(family(fast=True), x)
    assert ours.kernels == twin.kernels
    for mine, theirs in zip(ours.outputs, twin.outputs):
        standins.assert_same(mine, theirs)


@each_family
def test_joint_graph(family: type[nn.Module]) -> None:
    """Outputs and every gradient keep their bits and strides in the joint graph of training."""
    if family in (families.F6, families.F7):
        pytest.skip("its stand-ins have no backward")
    tag("aware")
    tag("aware_bwd", backward_of="standin::aware")
    outcome = decide(family(), families.example_input(family), train=True)
    if family in (families.F2, families.F8):
        # Only v could be a view, and would hold the whole packed buffer until the backward.
        assert outcome.verdicts["v"] == "memory-pinned"


@pytest.mark.parametrize("family", [families.F1, families.F3, families.F4])
def test_training(family: type[nn.Module]) -> None:
    """The same through the whole compiler, for the families that lose copies."""
    tag("aware")
    tag("aware_bwd", backward_of="standin::aware")
    stock, ours = compile_pair(family(), families.example_input(family), train=True)
    assert ours.kernels < stock.kernels
