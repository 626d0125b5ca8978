"""Vision encoders as their libraries ship them, shrunk, with random weights.

``explain`` says what would go; ``decide`` runs the rewritten graph against the original. Three
go through all of Inductor, and must come out with the same bits, strides, and fewer kernels.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import standins
import torch
from torch import Tensor, nn

import qkvpass

WIDTH, HEADS, IMAGE, PATCH = 64, 4, 32, 8
SIZES = {
    "hidden_size": WIDTH,
    "intermediate_size": 2 * WIDTH,
    "num_attention_heads": HEADS,
    "image_size": IMAGE,
    "patch_size": PATCH,
}


def images(size: int = IMAGE, batch: int = 2) -> Tensor:
    return torch.randn(batch, 3, size, size)


def mlcd(layers: int) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.MLCDVisionConfig(**SIZES, num_hidden_layers=layers)
    config._attn_implementation = "sdpa"
    return transformers.MLCDVisionModel(config).eval()


def groupvit() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.GroupViTVisionConfig(
        **SIZES,
        depths=[1, 1],
        num_hidden_layers=2,
        num_group_tokens=[8, 0],
        num_output_groups=[4, 4],
    )
    return transformers.GroupViTVisionModel(config).eval()


def siglip_layers() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    from transformers.models.siglip.modeling_siglip import SiglipEncoder

    config = transformers.SiglipVisionConfig(**SIZES, num_hidden_layers=2)
    config._attn_implementation = "sdpa"
    return SiglipEncoder(config).eval()


def siglip() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.SiglipVisionConfig(**SIZES, num_hidden_layers=1)
    return transformers.SiglipVisionModel(config).eval()


def dinov2() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.Dinov2Config(
        hidden_size=WIDTH,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        image_size=IMAGE,
        patch_size=PATCH,
    )
    return transformers.Dinov2Model(config).eval()


def timm_vit() -> nn.Module:
    pytest.importorskip("timm")
    from timm.models.vision_transformer import VisionTransformer

    model = VisionTransformer(
        img_size=IMAGE, patch_size=PATCH, embed_dim=WIDTH, depth=2, num_heads=HEADS, num_classes=10
    )
    return model.eval()


def hiera(stages: tuple[int, ...], windowed: tuple[bool, ...]) -> nn.Module:
    """``windowed`` stages attend within mask units, the others to everything."""
    pytest.importorskip("timm")
    from timm.models.hiera import Hiera

    model = Hiera(
        img_size=(64, 64),
        embed_dim=32,
        num_heads=2,
        stages=stages,
        q_pool=len(stages) - 1,
        mask_unit_size=(8, 8),
        mask_unit_attn=windowed,
        num_classes=10,
    )
    return model.eval()


def timm_sam() -> nn.Module:
    pytest.importorskip("timm")
    from timm.models.vision_transformer_sam import VisionTransformerSAM

    model = VisionTransformerSAM(
        img_size=64,
        patch_size=PATCH,
        embed_dim=WIDTH,
        depth=2,
        num_heads=HEADS,
        num_classes=10,
        window_size=4,
        global_attn_indexes=(1,),
        use_rel_pos=True,
    )
    for name, table in model.named_parameters():
        if "rel_pos" in name:  # they start as zeros, which would hide a wrong one
            nn.init.normal_(table)
    return model.eval()


def torchvision_vit() -> nn.Module:
    models = pytest.importorskip("torchvision.models")
    model = models.VisionTransformer(
        image_size=IMAGE,
        patch_size=PATCH,
        num_layers=2,
        num_heads=HEADS,
        hidden_dim=WIDTH,
        mlp_dim=2 * WIDTH,
        num_classes=10,
    )
    return model.eval()


def removed(report: qkvpass.Report) -> dict[str, int]:
    """How many copies went, by operand; ``behind`` counts those behind the attention."""
    names = [copy.operand or "behind" for copy in report.removed]
    return {name: names.count(name) for name in dict.fromkeys(names)}


# Views straight to the op: nothing to do


@pytest.mark.parametrize(
    ("build", "x"),
    [
        (timm_vit, images()),
        (dinov2, images()),
        (siglip_layers, torch.randn(2, 16, WIDTH)),
    ],
    ids=["timm-vit", "dinov2", "siglip"],
)
def test_nothing_to_do(build: Callable[[], nn.Module], x: Tensor) -> None:
    """The graph comes out as it went in, node for node."""
    report = qkvpass.explain(build(), x)
    assert report.attention_ops
    assert not any(copy.operand or copy.attention for copy in report.copies)
    assert report.before == report.after and report.diff() == ""
    outcome = standins.apply_pass(standins.trace(build(), x))
    assert str(outcome.before.graph) == str(outcome.after.graph)


# Copies that stay, each with its reason


def test_siglip_pooling_head() -> None:
    """Its head is ``nn.MultiheadAttention``: one copy of k and v together, split again behind."""
    report = qkvpass.explain(siglip(), images())
    assert not report.removed and report.before == report.after
    assert {copy.operand for copy in report.copies} == {"", "key, value"}
    assert all(copy.detail for copy in report.copies)


def test_groupvit() -> None:
    """Attention in ``bmm`` over merged heads, which Inductor makes into SDPA behind the views."""
    traced = standins.trace(groupvit(), images())
    outcome = standins.apply_pass(traced)
    standins.verify(outcome)
    assert removed(outcome.report) == {"query": 3, "key": 3, "value": 3, "behind": 3}
    assert {str(copy.reason) for copy in outcome.report.kept} == {"no-attention-consumer"}
    alone = standins.apply_pass(traced, split_heads=False)
    assert str(alone.before.graph) == str(alone.after.graph)
    assert {alone.verdicts[name] for name in "qkv"} == {"view-needs-dense"}


def test_samvit_with_rel_pos() -> None:
    """One copy makes q, k and v dense, and the einsum with positions needs q's part alone."""
    traced = standins.trace(timm_sam(), images(64))
    outcome = standins.apply_pass(traced)
    standins.verify(outcome)
    if not outcome.report.attention_ops:
        pytest.skip("this torch writes SDPA over three dims out")
    assert removed(outcome.report) == {"key": 2, "value": 2}
    assert outcome.verdicts["q"] == "view-needs-dense"
    alone = standins.apply_pass(traced, part_copies=False)
    assert str(alone.before.graph) == str(alone.after.graph)
    feeding = [copy for copy in alone.report.copies if copy.operand]
    assert [copy.operand for copy in feeding] == ["query, key, value"] * 2
    assert all("merge dims with a gap" in copy.detail for copy in feeding)


def test_torchvision_vit() -> None:
    """Batch-first: rows stay in order, and the bias is added by the GEMM."""
    outcome = standins.apply_pass(standins.trace(torchvision_vit(), images()))
    standins.verify(outcome, bitwise=False)
    gone = removed(outcome.report)
    assert gone.keys() == {"query, key, value", "behind"} and gone["query, key, value"] == 2
    assert gone["behind"] >= 4  # more where dropout leaves a copy of its own
    assert {str(copy.reason) for copy in outcome.report.kept} <= {"no-attention-consumer"}


def test_torchvision_vit_bitwise() -> None:
    outcome = standins.apply_pass(standins.trace(torchvision_vit(), images()), numerics="bitwise")
    standins.verify(outcome)
    assert removed(outcome.report) == {"query, key, value": 2}


# Copies that go


def fewer_kernels(model: nn.Module | Callable[..., Any], *inputs: Any) -> int:
    """How many kernels the pass saved; outputs equal stock's in every bit and stride."""
    with torch.no_grad():
        stock, ours = standins.compile_pair(model, *inputs)
    return stock.kernels - ours.kernels


GONE = {"query": 1, "key": 1, "value": 1, "behind": 1}


@pytest.mark.parametrize("batch", [1, 2])
def test_mlcd(batch: int) -> None:
    """All four copies of a layer; those that build its table of positions are none of ours."""
    outcome = standins.decide(mlcd(layers=2), images(batch=batch))
    assert removed(outcome.report) == dict.fromkeys(GONE, 2)
    for copy in outcome.report.kept:
        assert str(copy.reason) in ("broadcast-stride", "no-attention-consumer")


def test_mlcd_compiled() -> None:
    """Rope writes q and k, with a copy or without: v's kernel goes and the one behind."""
    assert fewer_kernels(mlcd(layers=1), images(batch=1)) == 2


def test_hiera() -> None:
    """Attention within windows is decomposed, and has no copies; a pooled q has none either."""
    outcome = standins.decide(hiera((1, 2), windowed=(True, False)), images(64, batch=1))
    assert removed(outcome.report) == GONE
    assert {str(copy.reason) for copy in outcome.report.kept} == {"no-attention-consumer"}


def test_hiera_compiled() -> None:
    assert fewer_kernels(hiera((1,), windowed=(False,)), images(64, batch=1)) == 4


def test_sequence_first_multihead_attention() -> None:
    """Here the bias is in the GEMM, so that the one copy goes, which stock makes in three parts."""
    attention = nn.MultiheadAttention(WIDTH, HEADS)

    def model(x: Tensor) -> Tensor:
        return attention(x, x, x, need_weights=False)[0]

    x = torch.randn(16, 2, WIDTH)
    outcome = standins.decide(model, x)
    assert removed(outcome.report) == {"query, key, value": 1}
    assert fewer_kernels(model, x) == 3


# The encoder of PaddleOCR-VL's shape


@pytest.fixture
def paddleocr(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "examples")
    example = importlib.import_module("paddleocr_vl_encoder")
    # The import tags its op too, but only the first of a session does.
    qkvpass.register_stride_tag(example.varlen_attention, operands=("q", "k", "v"))
    example.received.clear()
    return example


GRIDS = [(3, 6), (3, 4)]


def packed(example: Any) -> tuple[Tensor, Tensor]:
    tokens = [rows * columns for rows, columns in GRIDS]
    return torch.randn(sum(tokens), example.WIDTH), torch.tensor([0, *tokens]).cumsum(0)


def test_paddleocr_with_rope(paddleocr: Any) -> None:
    """Rope makes q and k anew, dense: v alone has a copy."""
    rope = paddleocr.rope_2d(GRIDS, torch.float32, "cpu")
    outcome = standins.decide(paddleocr.Encoder(2).eval(), *packed(paddleocr), rope)
    assert removed(outcome.report) == {"v": 2} and not outcome.report.kept


def test_paddleocr_compiled(paddleocr: Any) -> None:
    """The op receives q, k and v as views of one buffer, in every layer and call."""
    layers, calls = 2, 2
    encoder, inputs = paddleocr.Encoder(layers).eval(), packed(paddleocr)
    assert removed(qkvpass.explain(encoder, *inputs)) == {"q": 2, "k": 2, "v": 2}
    paddleocr.received.clear()
    assert fewer_kernels(encoder, *inputs) == 3 * layers
    stock, ours = paddleocr.received[: layers * calls], paddleocr.received[layers * calls :]
    assert len(ours) == len(stock) == layers * calls
    dense = (paddleocr.WIDTH, paddleocr.HEAD_DIM, 1)
    for strides, storages in stock:
        assert strides == (dense,) * 3 and len(storages) == 3
    for strides, storages in ours:
        assert strides == ((3 * dense[0], *dense[1:]),) * 3 and len(storages) == 1
