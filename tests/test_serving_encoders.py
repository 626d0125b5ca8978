"""Vision towers as serving engines write them: what goes, what the op then receives, the bits."""

from __future__ import annotations

import dataclasses
import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import standins
import torch

import qkvpass

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "examples"))
try:
    example = importlib.import_module("serving_encoders")
finally:
    sys.path.pop(0)
qkvpass.unregister_stride_tag(example.varlen_attention)  # no tag of this file in other tests

TOWERS = {tower.model: tower for tower in example.TOWERS}
TOKENS, CALLS = sum(example.IMAGES), 2


@pytest.fixture(autouse=True)
def _tagged() -> None:
    qkvpass.register_stride_tag(example.varlen_attention, operands=("q", "k", "v"))


def block_of(model: str, *without: str) -> tuple[Any, tuple[Any, ...]]:
    """A tower's layer, short of some steps, and inputs for it; weights follow the seed alone."""
    tower = TOWERS[model]
    tower = dataclasses.replace(tower, steps=tuple(s for s in tower.steps if s not in without))
    torch.manual_seed(0)
    block = example.Block(tower, 2).to(torch.bfloat16)
    return block, example.inputs_of(tower, block.width)


@pytest.mark.parametrize("model", TOWERS)
def test_each_operand_is_decided_as_expected(model: str) -> None:
    tower = TOWERS[model]
    outcome = example.run(tower)
    assert outcome.verdicts == outcome.explained == tower.expected
    assert outcome.folded == tower.folded
    assert all(outcome.details.values())
    assert outcome.same_bits
    width = 2 * tower.head_dim
    dense, strided = (width, tower.head_dim, 1), (3 * width, tower.head_dim, 1)
    packed = 3 * width * TOKENS * torch.bfloat16.itemsize
    assert len(outcome.stock) == len(outcome.ours) == CALLS
    for call in outcome.stock:
        assert all(operand.stride == dense for operand in call.values())
    for call in outcome.ours:
        views = [call[name] for name in tower.strided]
        assert [v.stride for v in views] == [strided] * len(views)
        assert {v.room for v in views} == {packed} and len({v.storage for v in views}) == 1
        others = [call[name] for name in "qkv" if name not in tower.strided]
        assert all(o.stride == dense and o.storage != views[0].storage for o in others)


def test_copies_that_stay_in_front_of_a_norm_are_no_kernels() -> None:
    """As many kernels as the same code without its ``contiguous()`` calls."""
    block, inputs = block_of("GLM-OCR, SGLang")
    stock, ours = standins.compile_pair(block, *inputs)
    hand_edited, _ = block_of("GLM-OCR, SGLang", "copy")
    twin = standins.run(hand_edited, *inputs)
    assert ours.kernels == twin.kernels == stock.kernels - 1


def test_in_place_norm_saves_the_kernel_of_v() -> None:
    block, inputs = block_of("InternViT-6B")
    stock, ours = standins.compile_pair(block, *inputs)
    assert ours.kernels == stock.kernels - 1


def test_in_place_norm_needs_the_copies() -> None:
    """Without them it writes into its neighbours."""
    (block, inputs), (bare, _) = block_of("InternViT-6B"), block_of("InternViT-6B", "copy")
    with torch.no_grad():
        assert not torch.allclose(block(*inputs), bare(*inputs), atol=0.1)


def test_applier_needs_the_copies() -> None:
    bare, inputs = block_of("Llama 4 vision", "copy")
    with torch.no_grad(), pytest.raises(RuntimeError, match="view"):
        bare(*inputs)


def test_page_has_the_table() -> None:
    """As ``python examples/serving_encoders.py`` prints it where all goes as expected."""
    rows = [
        example.row(t, example.Outcome(t.expected, {}, {}, t.folded, [], [], True))
        for t in example.TOWERS
    ]
    assert example.table(rows) in (ROOT / "docs" / "serving-engines.md").read_text()
