"""Copies stay where an op was measured to lose by reading strides; the table says so as data."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import families
import pytest
import standins
import torch
from standins import tag

import qkvpass
from qkvpass import Slower, tags
from qkvpass.builtin_ops import BUILTIN_OPS

ROOT = Path(__file__).parent.parent
MEASURED = json.loads((ROOT / "docs/measured/gain-h200.json").read_text())
# The op behind each name of the measurement, as the table calls it; triton is an example's.
OPS = {
    "fa3": "fa3_fwd::_flash_attn_forward",
    "fa4": "qkvpass::flash_attn_4",
    "flash": "aten::_scaled_dot_product_flash_attention",
    "cudnn": "aten::_scaled_dot_product_cudnn_attention",
    "efficient": "aten::_scaled_dot_product_efficient_attention",
}


def decided(slower: Slower, **options: Any) -> standins.Outcome:
    tag("aware", slower=(slower,))
    trace = {"dynamic": options.pop("dynamic", False)}
    outcome = standins.apply_pass(
        standins.trace(families.F1(), families.example_input(families.F1), **trace), **options
    )
    standins.verify(outcome)
    return outcome


@pytest.mark.parametrize("dynamic", [False, True])
def test_copies_stay_where_the_op_is_slower(dynamic: bool) -> None:
    outcome = decided(Slower("a measurement"), dynamic=dynamic)
    assert {outcome.verdicts[name] for name in "qkv"} == {"no-gain"}
    assert "a measurement" in outcome.detail("q")
    assert str(outcome.before.graph) == str(outcome.after.graph)


@pytest.mark.parametrize(
    "slower",
    [
        Slower("elsewhere", arch="sm_90"),
        Slower("larger heads", head_dims=(families.HEAD_DIM + 8,)),
        Slower("larger operands", from_bytes=1 << 30),
        Slower("smaller operands", below_bytes=1),
    ],
    ids=lambda slower: slower.measured,
)
def test_copies_go_everywhere_else(slower: Slower) -> None:
    outcome = decided(slower)
    assert {outcome.verdicts[name] for name in "qkv"} == {"removed"}


def test_in_eager_copies_cost_more_than_was_measured() -> None:
    outcome = decided(Slower("against Inductor's copies"), target="eager")
    assert {outcome.verdicts[name] for name in "qkv"} == {"removed"}


def test_what_covers() -> None:
    slower = Slower("m", arch="sm_90", head_dims=(72,), from_bytes=100, below_bytes=200)
    assert slower.covers("sm_90", 72, 100) and slower.covers("sm_90", 72, 199)
    assert not slower.covers("sm_90", 72, 99) and not slower.covers("sm_90", 72, 200)
    assert not slower.covers("sm_80", 72, 100) and not slower.covers("sm_90", 64, 100)


def test_a_claim_needs_a_measurement() -> None:
    with pytest.raises(ValueError, match="measured is empty"):
        Slower("")


def test_a_cached_graph_depends_on_it() -> None:
    tag("aware")
    before = tags.registry_key()
    tag("aware", slower=(Slower("a measurement"),))
    assert tags.registry_key() != before


@pytest.mark.parametrize("attention", OPS)
def test_built_in_ops_gain_wherever_they_were_measured(attention: str) -> None:
    """Every cell beyond its interval, or else the table's row must bar it."""
    (row,) = [op for op in BUILTIN_OPS if op.name == OPS[attention]]
    cells = [cell for cell in MEASURED["cells"] if cell["attention"] == attention]
    assert len(cells) == 32 and all(cell["same_bits"] for cell in cells)
    for cell in cells:
        assert gains(cell) or covered(row.slower, cell), cell


def test_the_example_kernel_is_barred_where_it_loses() -> None:
    pytest.importorskip("triton")
    sys.path.insert(0, str(ROOT / "examples"))
    try:
        from triton_varlen import SLOWER
    finally:
        sys.path.pop(0)
    cells = [cell for cell in MEASURED["cells"] if cell["attention"] == "triton"]
    assert any(not gains(cell) for cell in cells)
    assert all(gains(cell) or covered((SLOWER,), cell) for cell in cells)
    assert sum(covered((SLOWER,), cell) for cell in cells) < len(cells) / 4


def gains(cell: dict[str, Any]) -> bool:
    return bool(cell["copies and dense / strided"][1] > 1)


def covered(slower: tuple[Slower, ...], cell: dict[str, Any]) -> bool:
    arch, dim = MEASURED["where"]["arch"], cell["head_dim"]
    nbytes = cell["tokens"] * cell["heads"] * dim * torch.bfloat16.itemsize
    return any(one.covers(arch, dim, nbytes) for one in slower)


def test_public_name() -> None:
    assert qkvpass.Slower is Slower
