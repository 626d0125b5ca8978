"""Real vision encoders, each the class that its library ships, with a small random configuration.

A :class:`Row` is data: where the class is, what its configuration must have beyond what
:func:`shrink` makes of the defaults, and what goes in. :func:`examine` traces one, runs the pass
on each graph of it, and holds the rewritten graphs against the originals.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import standins
import torch
from torch import Tensor, nn
from torch.library import custom_op

import qkvpass

WIDTH, HEADS, LAYERS, PATCHES, BATCH = 64, 4, 2, 4, 2
GRID = torch.tensor([[1, 4, 6], [1, 4, 4]])  # frames, rows and columns of two packed images

# ---------------------------------------------------------------------------------------------
# A small configuration from any other

_SIZES = {
    LAYERS: "num_hidden_layers num_layers depth layers encoder_layers decoder_layers n_layers",
    HEADS: "num_attention_heads num_heads heads n_heads encoder_attention_heads "
    "decoder_attention_heads num_key_value_heads attention_heads",
    WIDTH: "hidden_size embed_dim d_model width hidden_dim out_hidden_size dim embedding_dim "
    "output_dim projection_dim text_hidden_size vision_hidden_size",
    WIDTH // HEADS: "head_dim",
    2 * WIDTH: "intermediate_size mlp_dim ffn_dim encoder_ffn_dim decoder_ffn_dim "
    "vocab_size feedforward_size",
}
SMALL = {key: size for size, keys in _SIZES.items() for key in keys.split()}
_LISTS: dict[str, Callable[[int, Any], Any]] = {
    "depths": lambda i, n: 1,
    "embed_dims": lambda i, n: 16 << i,
    "embed_dim": lambda i, n: 16 << i,
    "dim_embed": lambda i, n: 16 << i,
    "hidden_sizes": lambda i, n: 16 << i,
    "encoder_hidden_sizes": lambda i, n: 16 << i,
    "num_heads": lambda i, n: 1 << i,
    "num_attention_heads": lambda i, n: 1 << i,
}


_DERIVED = ("out_features", "out_indices", "stage_names", "per_layer_config")


def shrink(config: dict[str, Any]) -> dict[str, Any]:
    """The same configuration with small numbers; keys that name no size stay as they are."""
    small: dict[str, Any] = {}
    layers = next((config[key] for key in _SIZES[LAYERS].split() if key in config), 0)
    for key, value in config.items():
        if key in _DERIVED:
            continue
        if isinstance(value, dict):
            small[key] = shrink(value)
        elif isinstance(value, (list, tuple)) and key in _LISTS:
            small[key] = [_LISTS[key](i, n) for i, n in enumerate(value)]
        elif isinstance(value, list) and len(value) > LAYERS and len(value) == layers:
            small[key] = [value[0], value[-1]]
        elif isinstance(value, int) and not isinstance(value, bool):
            small[key] = min(value, SMALL.get(key, value))
        else:
            small[key] = value
    patch = config.get("patch_size")
    deep = 4 * PATCHES if "depths" in config else PATCHES
    for key in ("image_size", "img_size"):
        if config.get(key) and isinstance(patch, (int, list, tuple)):
            small[key] = _like(config[key], deep * (patch if isinstance(patch, int) else patch[-1]))
    return small


def _like(value: Any, size: int) -> Any:
    return size if isinstance(value, int) else [size] * len(value)


# ---------------------------------------------------------------------------------------------
# A varlen kernel, for the models that pack images of several sizes


@custom_op("standin::flash_varlen", mutates_args=())
def flash_varlen(q: Tensor, k: Tensor, v: Tensor, ends: Tensor) -> Tensor:
    """(T, H, D), attention within the sequences that ``ends`` (0, …, T) delimits."""
    standins.note("flash_varlen", q, k, v)
    q, k, v = map(standins.by_stride, (q, k, v))
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    out = torch.empty_like(q)
    for start, end in zip(ends[:-1].tolist(), ends[1:].tolist()):
        parts = (t[start:end].transpose(0, 1) for t in (q, k, v))
        out[start:end] = standins.attend(*parts).transpose(0, 1)
    return out


@flash_varlen.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, ends: Tensor) -> Tensor:
    return q.new_empty(q.shape)


def flash_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    cu_seq_lens_q: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """What transformers calls for ``zoo_flash``: q, k, v of (B, H, N, D), as its own wrapper
    of flash-attn takes them, which passes views on."""
    q, k, v = (t.transpose(1, 2) for t in (query, key, value))
    batch, tokens = q.shape[:2]
    ends = cu_seq_lens_q
    if ends is None:
        ends = torch.arange(batch + 1, device=q.device) * tokens
    flat = (t.reshape(-1, *t.shape[2:]) for t in (q, k, v))
    return flash_varlen(*flat, ends).view(q.shape), None


@contextmanager
def attention_of(row: Row, model: nn.Module) -> Iterator[None]:
    """The kernel that the row wants: SDPA, or the varlen one, tagged, as ``zoo_flash``."""
    if not row.flash:
        yield
        return
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, flash_attention_mask

    AttentionInterface.register("zoo_flash", flash_attention)
    AttentionMaskInterface.register("zoo_flash", flash_attention_mask)
    standins.tag("flash_varlen")
    for config in {
        id(m.config): m.config for m in model.modules() if hasattr(m, "config")
    }.values():
        config._attn_implementation = "zoo_flash"
    try:
        yield
    finally:
        qkvpass.unregister_stride_tag("standin::flash_varlen")


# ---------------------------------------------------------------------------------------------
# Rows


Built: TypeAlias = tuple[nn.Module, Callable[[], dict[str, Any]]]


@dataclass(frozen=True)
class Row:
    """One encoder.

    Args:
        name: of the class within its library: ``folder.Class`` in transformers, the name that
            ``create_model`` knows in timm.
        family: of ENCODERS.md.
        library: where it comes from.
        config: what its configuration needs beyond :func:`shrink`.
        inputs: makes what goes in; None for images of the size that the configuration says.
        flash: traced with the varlen stand-in.
    """

    name: str
    family: str
    library: str = "transformers"
    config: dict[str, Any] = field(default_factory=dict)
    inputs: Callable[[Any], dict[str, Any]] | None = None
    flash: bool = False

    @property
    def key(self) -> str:
        return f"{self.library}:{self.name}"


class NotBuilt(RuntimeError):
    """This encoder cannot be built here, and why."""


def build(row: Row) -> tuple[nn.Module, Callable[[], dict[str, Any]]]:
    """The encoder, and what makes new inputs for it.

    Raises:
        NotBuilt: if a package is not there.
    """
    try:
        module, inputs = BUILDERS[row.library](row)
    except ImportError as error:
        raise NotBuilt(str(error).strip().splitlines()[0]) from error
    for p in module.parameters():
        if (
            p.is_floating_point() and p.numel() and (p == p.flatten()[:1]).all()
        ):  # zeros hide what is wrong
            nn.init.normal_(p, p.flatten()[0].item(), 0.1)
    return module.eval(), inputs


def hf_class(name: str) -> Any:
    folder, cls = name.split(".")
    package = importlib.import_module(f"transformers.models.{folder}")
    if hasattr(package, cls):
        return getattr(package, cls)
    folder = package.__name__.split(".")[-1]
    for tail in (folder, f"{folder}_vision", f"{folder}_swin"):
        try:
            module = importlib.import_module(f"{package.__name__}.modeling_{tail}")
        except ImportError:
            continue
        if hasattr(module, cls):
            return getattr(module, cls)
    raise ImportError(f"transformers has no {name}")


def images(config: Any) -> dict[str, Any]:
    size = getattr(config, "image_size", None) or 64
    height, width = (size, size) if isinstance(size, int) else size[-2:]
    channels = getattr(config, "num_channels", None) or getattr(config, "in_channels", 3)
    return {"pixel_values": torch.randn(BATCH, channels, height, width)}


def packed(config: Any) -> tuple[Tensor, Tensor]:
    """Two images of other sizes, as patches in one sequence, and their grids."""
    patch = config.patch_size * config.patch_size * getattr(config, "in_channels", 3)
    patch *= getattr(config, "temporal_patch_size", 1)
    return torch.randn(int(GRID.prod(-1).sum()), patch), GRID


def _transformers(row: Row) -> Built:
    cls = hf_class(row.name)
    config_class = cls.config_class
    overrides = row.config
    defaults = config_class().to_dict()
    small = shrink(defaults)
    for key, value in overrides.items():
        if isinstance(value, dict) and isinstance(small.get(key), dict):
            small[key] = small[key] | value
        else:
            small[key] = value
    config = config_class.from_dict(small)
    if cls._supports_sdpa:
        config._attn_implementation = "sdpa"
    model = cls(config)
    names = list(inspect.signature(model.forward).parameters)
    make = row.inputs or (packed if any("grid" in n for n in names) else images)
    if make is not packed:
        return model, lambda: make(config)
    grid = next(n for n in names if "grid" in n)
    return model, lambda: dict(zip((names[0], grid), packed(config)))


def _timm(row: Row) -> Built:
    import timm

    model = timm.create_model(row.name, num_classes=10, **row.config)
    size = row.config.get("img_size") or 64
    height, width = (size, size) if isinstance(size, int) else size
    name = next(iter(inspect.signature(model.forward).parameters))
    return model, lambda: {name: torch.randn(BATCH, 3, height, width)}


def _called(row: Row) -> Built:
    """A class by its path, given its arguments."""
    package, name = row.name.rsplit(".", 1)
    model = getattr(importlib.import_module(package), name)(**row.config)
    return model, lambda: row.inputs(model)


BUILDERS: dict[str, Callable[[Row], Built]] = {
    "transformers": _transformers,
    "timm": _timm,
    **dict.fromkeys(("torchvision", "open_clip", "torch", "diffusers"), _called),
}

# ---------------------------------------------------------------------------------------------
# Families, as in the census that this list follows

FAMILIES = {
    "F0": "views straight to the op",
    "F0r": "the same, with rope on q and k",
    "F1": "split, reshape, contiguous, op",
    "F2": "the same, with rope or a norm between",
    "F3": "`transpose(1, 2).contiguous()` in front of SDPA",
    "F4": "one copy of q, k and v, behind a view that merges batch and heads",
    "F5": "`nn.MultiheadAttention`",
    "F9": "rope on all but the prefix tokens, then a `cat` in (B, H, S, D)",
    "F10": "rope on a part of the head, then a `cat` in (B, H, S, D)",
    "F14": "softmax spelt out, which Inductor may make into SDPA",
    "F15": "q, k and v of a convolution, transposed, copied; views if it writes channels last",
    "F16": "text and images joined by a `cat`",
}
UNTOUCHED = ("F0", "F0r")  # families with nothing to do


@dataclass(frozen=True)
class Published:
    """A configuration that somebody runs, to say in bytes what a copy a layer costs.

    Args:
        name: of it.
        layers: that have such an attention.
        elements: of one operand in one layer: batch times tokens times width.
    """

    name: str
    layers: int
    elements: int


PUBLISHED = {
    "transformers:mlcd.MLCDVisionModel": Published("ViT-bigG/14 336 px, b8", 48, 8 * 577 * 1664),
    "transformers:blip.BlipVisionModel": Published("base/16 384 px, b8", 12, 8 * 577 * 768),
    "transformers:git.GitVisionModel": Published("base/16 224 px, b8", 12, 8 * 197 * 768),
    "transformers:mgp_str.MgpstrModel": Published("base/4 32 x 128 px, b64", 12, 64 * 257 * 768),
    "transformers:timesformer.TimesformerModel": Published(
        "base, 8 frames of 224 px, b8, time and space", 24, 8 * 8 * 196 * 768
    ),
    "transformers:bridgetower.BridgeTowerVisionModel": Published(
        "base/16 288 px, b8", 12, 8 * 325 * 768
    ),
    "transformers:sam.SamVisionModel": Published(
        "ViT-H 1024 px, b1", 32, (28 * 25 * 196 + 4 * 4096) * 1280 // 32
    ),
    "transformers:dinov3_vit.DINOv3ViTModel": Published("7B/16 1024 px, b1", 40, 4101 * 4096),
    "transformers:vjepa2.VJEPA2Model": Published("g/16 384 px, 64 frames, b1", 40, 18432 * 1408),
    "timm:vit_pe_core_base_patch16_224": Published("G/14 448 px, b16", 50, 16 * 1024 * 1536),
    "torchvision:torchvision.models.VisionTransformer": Published(
        "ViT-H/14 518 px, b8", 32, 8 * 1370 * 1280
    ),
    "open_clip:open_clip.transformer.VisionTransformer": Published(
        "bigG/14 224 px, b64", 48, 64 * 257 * 1664
    ),
    "timm:hiera_tiny_224": Published("huge 224 px, b8, 36 blocks of stage 3", 36, 8 * 196 * 1024),
}

# ---------------------------------------------------------------------------------------------
# The encoders

HERE = Path(__file__).parent
ACCEPTED_ON = ("3.11", "2.14")  # Python and torch
EXPECTED = HERE / "zoo.json"  # results of the last run whose counts were accepted
RESULTS = HERE.parent / "build" / "zoo.json"
PAGE = HERE.parent / "docs" / "encoders.md"

# One of each family goes through all of Inductor.
COMPILED = (
    "transformers:clip.CLIPVisionModel",
    "transformers:llama4.Llama4VisionModel",
    "timm:hiera_tiny_224",
    "transformers:mlcd.MLCDVisionModel",
    "transformers:sam.SamVisionModel",
    "transformers:bridgetower.BridgeTowerVisionModel",
    "transformers:dinov3_vit.DINOv3ViTModel",
    "transformers:vjepa2.VJEPA2Model",
    "transformers:blip.BlipVisionModel",
    "timm:coatnet_0_224",
)

VIT: dict[str, Any] = {
    "img_size": 32,
    "patch_size": 8,
    "embed_dim": WIDTH,
    "depth": LAYERS,
    "num_heads": HEADS,
}
rand = torch.randn


def pixels(config: Any) -> Tensor:
    return images(config)["pixel_values"]


SMALL_SAM = {
    "hidden_size": WIDTH,
    "output_channels": 16,
    "downsample_channels": [32, WIDTH],
    "image_size": 64,
}


def video(name: str, frames: int) -> Callable[[Any], dict[str, Any]]:
    return lambda c: {name: rand(BATCH, frames, 3, c.image_size, c.image_size)}


def patches(c: Any) -> dict[str, Any]:
    return {"pixel_values": rand(40, 3, c.patch_size, c.patch_size), "grid_thw": GRID}


def patches_of_one(c: Any) -> dict[str, Any]:
    return patches(c) | {"pixel_values": rand(1, 40, 3, c.patch_size, c.patch_size)}


def two_frames(c: Any) -> dict[str, Any]:
    return {"pixel_values": rand(40, 2 * 3 * c.patch_size**2), "grid_thw": GRID}


def scaled(c: Any) -> dict[str, Any]:
    images = {"pixel_values": rand(40, 3 * c.patch_size**2), "grid_thw": GRID}
    return images | {"merge_sizes": torch.tensor([1, 1])}


def merged(c: Any) -> dict[str, Any]:
    side = c.patch_size * c.spatial_merge_size
    grid = torch.tensor([[1, 2, 3], [1, 2, 2]])
    return {"pixel_values": rand(10, side, side, c.num_channels), "image_grid_thw": grid}


def strip(c: Any) -> dict[str, Any]:
    """The patches of two images side by side."""
    strip = rand(1, 3, c.patch_size, 32 * c.patch_size)
    return {"pixel_values": strip, "target_sizes": torch.tensor([[4, 4], [4, 4]])}


def flattened(c: Any) -> dict[str, Any]:
    """Patches that start with their row and column."""
    row, column = torch.meshgrid(torch.arange(1, 5), torch.arange(1, 5), indexing="ij")
    place = torch.stack([row, column], -1).view(1, 16, 2).expand(BATCH, -1, -1)
    patch = rand(BATCH, 16, c.patch_embed_hidden_size)
    return {"flattened_patches": torch.cat([place, patch], -1)}


def shaped(c: Any) -> dict[str, Any]:
    return {
        "pixel_values": rand(BATCH, 16, 3 * c.patch_size**2),
        "pixel_attention_mask": torch.ones(BATCH, 16, dtype=torch.long),
        "spatial_shapes": torch.tensor([[4, 4]] * BATCH),
    }


def placed(c: Any) -> dict[str, Any]:
    column, row = torch.meshgrid(torch.arange(6), torch.arange(6), indexing="xy")
    place = torch.stack([column, row], -1).view(1, 36, 2).repeat(BATCH, 1, 1)
    return {"pixel_values": rand(BATCH, 36, 3 * c.patch_size**2), "pixel_position_ids": place}


def tiled(c: Any) -> dict[str, Any]:
    """One sample of two images, of one and of two tiles out of four."""
    return {
        "pixel_values": rand(1, 2, 4, 3, c.image_size, c.image_size),
        "aspect_ratio_ids": torch.tensor([[1, 2]]),
        "aspect_ratio_mask": torch.tensor([[[1, 0, 0, 0], [1, 1, 0, 0]]]),
    }


def prompted(c: Any) -> dict[str, Any]:
    names = ("pixel_values", "prompt_pixel_values", "prompt_masks")
    return {name: rand(BATCH, 3, 32, 32) for name in names}


def detr(c: Any) -> dict[str, Any]:
    return {
        "inputs_embeds": rand(BATCH, 16, WIDTH),
        "attention_mask": torch.ones(BATCH, 16, dtype=torch.long),
        "spatial_position_embeddings": rand(BATCH, 16, WIDTH),
    }


def hf(name: str, family: str, inputs: Any = None, flash: bool = False, **config: Any) -> Row:
    return Row(name, family, "transformers", config, inputs, flash)


def tm(name: str, family: str, **config: Any) -> Row:
    return Row(name, family, "timm", config)


def other(name: str, family: str, library: str, inputs: Any, **config: Any) -> Row:
    return Row(name, family, library, config, inputs)


ROWS = [
    hf("aimv2.Aimv2VisionModel", "F0"),
    hf("altclip.AltCLIPVisionModel", "F0"),
    hf("beit.BeitModel", "F0"),
    hf("blip.BlipVisionModel", "F14"),
    hf("blip_2.Blip2VisionModel", "F0"),
    hf("bridgetower.BridgeTowerVisionModel", "F5", inputs=lambda c: {"image": pixels(c)}),
    hf("chinese_clip.ChineseCLIPVisionModel", "F0"),
    hf("clip.CLIPVisionModel", "F0"),
    hf("clipseg.CLIPSegVisionModel", "F0"),
    hf("cohere_compass.CohereCompassVisionModel", "F0r", flash=True),
    hf("conditional_detr.ConditionalDetrEncoder", "F0", inputs=detr),
    hf("cosmos3_edge.Cosmos3EdgeVisionModel", "F0", flash=True),
    hf("cvt.CvtModel", "F14"),
    hf(
        "dab_detr.DabDetrEncoder",
        "F14",
        inputs=lambda c: {
            "inputs_embeds": rand(2, 16, 64),
            "attention_mask": None,
            "object_queries": rand(2, 16, 64),
        },
    ),
    hf("data2vec.Data2VecVisionModel", "F0"),
    hf("deepseek_ocr2.DeepseekOcr2SamVisionEncoder", "F4"),
    hf("deepseek_ocr2.DeepseekOcr2VisionModel", "F4", sam_config=SMALL_SAM),
    hf("deit.DeiTModel", "F0"),
    hf("detr.DetrEncoder", "F0", inputs=detr),
    hf("dinat.DinatModel", "F14"),
    hf("dinov2.Dinov2Model", "F0"),
    hf("dinov2_with_registers.Dinov2WithRegistersModel", "F0"),
    hf("dinov3_vit.DINOv3ViTModel", "F9"),
    hf("donut.DonutSwinModel", "F0", window_size=4, image_size=[128, 128]),
    hf("dots3_note.Dots3NoteVisionModel", "F0r", flash=True, adapter_in_dim=64),
    hf("dpt.DPTModel", "F0"),
    hf("eomt.EomtForUniversalSegmentation", "F0", num_blocks=1),
    hf("eomt_dinov3.EomtDinov3ForUniversalSegmentation", "F9", num_blocks=1),
    hf("ernie4_5_vl_moe.Ernie4_5_VLMoeVisionTransformerPretrainedModel", "F0r", flash=True),
    hf("exaone4_5.Exaone4_5_VisionModel", "F0r", flash=True),
    hf("flava.FlavaImageModel", "F0"),
    hf("florence2.Florence2VisionBackbone", "F0", inputs=lambda c: {"hidden_states": pixels(c)}),
    hf("gemma4.Gemma4VisionModel", "F10", inputs=placed),
    hf("git.GitVisionModel", "F14"),
    hf("glm4v.Glm4vVisionModel", "F0r", flash=True),
    hf("glm5_next.Glm5NextVisionModel", "F0r", flash=True),
    hf("glm_image.GlmImageVisionModel", "F0", flash=True),
    hf("glm_ocr.GlmOcrVisionModel", "F0r", flash=True),
    hf("glpn.GLPNModel", "F0"),
    hf("got_ocr2.GotOcr2VisionEncoder", "F4"),
    hf("granite_docling.GraniteDoclingVisionModel", "F0"),
    hf("groupvit.GroupViTVisionModel", "F3"),
    hf("hiera.HieraModel", "F14", image_size=[64, 64], embed_dim=32),
    hf("hunyuan_vl.HunYuanVLVisionTransformer", "F0", flash=True),
    hf("hy_v4_vl.HYV4VLVisionModel", "F0", flash=True),
    hf("idefics2.Idefics2VisionTransformer", "F0"),
    hf("idefics3.Idefics3VisionTransformer", "F0"),
    hf("ijepa.IJepaModel", "F0"),
    hf("inkling2.Inkling2VisionModel", "F0r", flash=True, inputs=merged),
    hf("instructblip.InstructBlipVisionModel", "F0"),
    hf("internvl.InternVLVisionModel", "F0"),
    hf("janus.JanusVisionModel", "F0"),
    hf("kimi_k25.Kimi_K25VisionModel", "F0r", flash=True, inputs=patches),
    hf("kosmos2.Kosmos2VisionModel", "F0"),
    hf("kosmos2_5.Kosmos2_5VisionModel", "F14", inputs=flattened),
    hf("layoutlmv3.LayoutLMv3Model", "F0", input_size=64),
    hf("levit.LevitModel", "F14"),
    hf("lfm3_vl.Lfm3VlVisionModel", "F0r", flash=True, layer_types=["conv", "full_attention"]),
    hf(
        "llama4.Llama4VisionModel",
        "F0r",
        intermediate_size=256,
        projector_input_dim=64,
        vision_output_dim=64,
        projector_output_dim=64,
    ),
    hf("lw_detr.LwDetrViTBackbone", "F0"),
    hf("metaclip_2.MetaClip2VisionModel", "F0"),
    hf("mgp_str.MgpstrModel", "F14"),
    hf("minicpm_ocr.MiniCPMOcrVisionModel", "F0", flash=True, inputs=strip),
    hf("minicpmv4_6.MiniCPMV4_6VisionModel", "F0", flash=True, inputs=strip),
    hf("minicpmv4_7.MiniCPMV4_7VisionModel", "F0", flash=True, inputs=strip),
    hf("minimax_m3_vl.MiniMaxM3VLVisionModel", "F10", flash=True),
    hf("mlcd.MLCDVisionModel", "F3"),
    hf("mllama.MllamaVisionModel", "F0", inputs=tiled, intermediate_layers_indices=[0, 1]),
    hf("mobilevit.MobileViTModel", "F14"),
    hf("mobilevitv2.MobileViTV2Model", "F14", image_size=128),
    hf(
        "molmo2.Molmo2VisionModel",
        "F0",
        inputs=lambda c: {"pixel_values": rand(2, 16, c.patch_size**2 * 3)},
        num_position_embeddings=16,
    ),
    hf("muse_glimmer.MuseGlimmerVisionModel", "F0r", flash=True, inputs=two_frames),
    hf("muse_spark.MuseSparkVisionModel", "F0r", flash=True, inputs=two_frames),
    hf("ovis2.Ovis2VisionModel", "F0"),
    hf("owlv2.Owlv2VisionModel", "F0"),
    hf("owlvit.OwlViTVisionModel", "F0"),
    hf("paddleocr_vl.PaddleOCRVisionModel", "F0r", flash=True, inputs=patches_of_one),
    hf("phi4_multimodal.Phi4MultimodalVisionModel", "F0"),
    hf("pix2struct.Pix2StructVisionModel", "F0", inputs=flattened),
    hf("pixio.PixioModel", "F0"),
    hf("pixtral.PixtralVisionModel", "F0r"),
    hf("pp_formulanet.PPFormulaNetVisionModel", "F4"),
    hf("pvt.PvtModel", "F0"),
    hf("pvt_v2.PvtV2Model", "F0"),
    hf("qianfan_ocr.QianfanOCRVisionModel", "F0"),
    hf("qwen2_5_omni.Qwen2_5OmniVisionEncoder", "F0r", flash=True),
    hf("qwen2_5_vl.Qwen2_5_VisionTransformerPretrainedModel", "F0r", flash=True),
    hf("qwen2_vl.Qwen2VisionTransformerPretrainedModel", "F0r", flash=True),
    hf("qwen3_5.Qwen3_5VisionModel", "F0r", flash=True),
    hf("qwen3_5_moe.Qwen3_5MoeVisionModel", "F0r", flash=True),
    hf("qwen3_omni_moe.Qwen3OmniMoeVisionEncoder", "F0r", flash=True),
    hf("qwen3_vl.Qwen3VLVisionModel", "F0r", flash=True),
    hf("qwen3_vl_moe.Qwen3VLMoeVisionModel", "F0r", flash=True),
    hf("qwen4_exp.Qwen4ExpVisionModel", "F0r", flash=True),
    hf("radio.RadioModel", "F0", inputs=images),
    hf("rf_detr.RfDetrDinov2Backbone", "F0"),
    hf("sam.SamVisionModel", "F4"),
    hf(
        "sam2.Sam2HieraDetModel",
        "F0",
        image_size=[64, 64],
        hidden_size=32,
        embed_dim_per_stage=[32, 64, 128, 256],
        num_attention_heads_per_stage=[1, 2, 4, 8],
        blocks_per_stage=[1, 1, 2, 1],
        global_attention_blocks=[3],
        window_size_per_stage=[4, 2, 2, 2],
    ),
    hf("sam3.Sam3ViTModel", "F0r"),
    hf("sam3.Sam3VisionModel", "F0r"),
    hf("sam_hq.SamHQVisionModel", "F4"),
    hf("sapiens2.Sapiens2Model", "F9", num_key_value_heads_per_layer=[4, 4]),
    hf("segformer.SegformerModel", "F0"),
    hf(
        "seggpt.SegGptModel",
        "F4",
        inputs=prompted,
        image_size=[64, 32],
        patch_size=8,
        pretrain_image_size=32,
    ),
    hf("siglip.SiglipVisionModel", "F0"),
    hf("siglip2.Siglip2VisionModel", "F0", inputs=shaped),
    hf("slanext.SLANeXtVisionEncoder", "F4"),
    hf("smolvlm.SmolVLMVisionTransformer", "F0"),
    hf("step3p7.Step3p7VisionModel", "F0r", flash=True),
    hf("swin.SwinModel", "F0", window_size=4, image_size=128),
    hf("swin2sr.Swin2SRModel", "F14"),
    hf("swinv2.Swinv2Model", "F14", window_size=4, pretrained_window_sizes=[0, 0, 0, 0]),
    hf("timesformer.TimesformerModel", "F14", inputs=video("pixel_values", 2), num_frames=2),
    hf("tipsv2.Tipsv2VisionModel", "F0"),
    hf("unlimited_ocr.UnlimitedOcrSamVisionEncoder", "F4"),
    hf("unlimited_ocr.UnlimitedOcrVisionModel", "F4", sam_config=SMALL_SAM),
    hf("video_llama_3.VideoLlama3VisionModel", "F0r", flash=True, inputs=scaled),
    hf("videomae.VideoMAEModel", "F0", inputs=video("pixel_values", 4), num_frames=4),
    hf(
        "videoprism.VideoPrismVisionModel",
        "F14",
        inputs=video("pixel_values_videos", 2),
        num_frames=2,
    ),
    hf(
        "vilt.ViltModel",
        "F0",
        inputs=lambda c: {"input_ids": torch.arange(8).view(2, 4), "pixel_values": pixels(c)},
    ),
    hf("vit.ViTModel", "F0"),
    hf("vit_mae.ViTMAEModel", "F0"),
    hf("vit_msn.ViTMSNModel", "F0"),
    hf("vitdet.VitDetModel", "F4"),
    hf("vitpose_backbone.VitPoseBackbone", "F0"),
    hf("vivit.VivitModel", "F0", inputs=video("pixel_values", 4), num_frames=4, image_size=64),
    hf(
        "vjepa2.VJEPA2Model",
        "F10",
        inputs=lambda c: {"pixel_values_videos": rand(1, 4, 3, 64, 64)},
        frames_per_clip=4,
        crop_size=64,
        pred_num_hidden_layers=1,
        pred_hidden_size=64,
        pred_num_attention_heads=4,
    ),
    hf(
        "x_clip.XCLIPVisionModel",
        "F0",
        inputs=lambda c: {"pixel_values": rand(c.num_frames, 3, c.image_size, c.image_size)},
    ),
    hf("yolos.YolosModel", "F0"),
    tm("aimv2_large_patch14_224", "F0", **VIT),
    tm("beit3_base_patch16_224", "F0", **VIT),
    tm("beit_base_patch16_224", "F0", **VIT),
    tm("beitv2_base_patch16_224", "F0", **VIT),
    tm("botnet26t_256", "F14", img_size=64),
    tm("caformer_s18", "F0"),
    tm(
        "cait_xxs24_224",
        "F0",
        img_size=32,
        patch_size=8,
        embed_dim=64,
        depth=2,
        num_heads=4,
        depth_token_only=1,
    ),
    tm(
        "coat_tiny",
        "F14",
        img_size=32,
        embed_dims=(32, 32, 32, 32),
        serial_depths=(1, 1, 1, 1),
        parallel_depth=1,
        num_heads=4,
        crpe_window={3: 1, 5: 1, 7: 2},
    ),
    tm("coatnet_0_224", "F15", img_size=64, depths=(1, 1, 1, 1), embed_dim=(16, 32, 64, 64)),
    tm("coatnet_nano_rw_224", "F15", img_size=64, depths=(1, 1, 1, 1), embed_dim=(16, 32, 64, 64)),
    tm(
        "coatnext_nano_rw_224",
        "F15",
        img_size=64,
        depths=(1, 1, 1, 1),
        embed_dim=(32, 64, 64, 64),
        stem_width=32,
    ),
    tm("convit_tiny", "F14", **VIT),
    tm("cpubone_b0_bfrobust", "F14"),
    tm(
        "crossvit_9_240",
        "F0",
        img_size=48,
        img_scale=(1.0, 48 / 48),
        patch_size=(12, 16),
        embed_dim=(32, 64),
        depth=((1, 1, 0),),
        num_heads=(2, 2),
    ),
    tm("csatv2", "F0"),
    tm(
        "davit_tiny",
        "F0",
        depths=(1, 1, 1, 1),
        embed_dims=(16, 32, 64, 128),
        num_heads=(1, 2, 4, 8),
    ),
    tm("deepseek_vit_412m", "F0r", img_size=56, embed_dim=64, depth=2, num_heads=4),
    tm("deit3_base_patch16_224", "F0", **VIT),
    tm("deit_base_distilled_patch16_224", "F0", **VIT),
    tm("edgenext_xx_small", "F14"),
    tm("efficientformer_l1", "F14", img_size=224),
    tm("efficientformerv2_s0", "F14", img_size=64),
    tm("efficientvit_b0", "F14"),
    tm("efficientvit_m0", "F14", img_size=64),
    tm("eva02_base_patch14_224", "F9", **VIT),
    tm("eva_giant_patch14_224", "F0", **VIT),
    tm("fastvit_sa12", "F0", layers=(1, 1, 1, 1), embed_dims=(16, 32, 64, 128)),
    tm("gcvit_xxtiny", "F14", img_size=224),
    tm("gemma4_vit_167m", "F10", **VIT),
    tm("halonet26t", "F14", img_size=256),
    tm("hiera_tiny_224", "F1", img_size=64, embed_dim=32, num_heads=1, stages=(1, 1, 2, 1)),
    tm("iformer_t", "F14"),
    tm("lambda_resnet26t", "F14"),
    tm("levit_128s", "F14", img_size=64),
    tm("lowformer_b0", "F14"),
    tm(
        "maxvit_nano_rw_256",
        "F0",
        img_size=64,
        depths=(1, 1, 1, 1),
        embed_dim=(32, 64, 64, 64),
        stem_width=32,
    ),
    tm(
        "maxxvit_rmlp_nano_rw_256",
        "F0",
        img_size=64,
        depths=(1, 1, 1, 1),
        embed_dim=(32, 64, 64, 64),
        stem_width=32,
    ),
    tm("mobilenetv4_hybrid_medium", "F15"),
    tm("mobilenetv5_300m", "F15"),
    tm("mobilevit_xxs", "F0"),
    tm("mobilevitv2_050", "F14"),
    tm("mvitv2_tiny", "F14", img_size=64),
    tm("naflexvit_base_patch16_siglip", "F0", **VIT),
    tm("nest_tiny", "F14", img_size=64),
    tm("nextvit_small", "F0"),
    tm("pit_ti_224", "F0", img_size=64),
    tm("pvt_v2_b0", "F0", depths=(1, 1, 1, 1)),
    tm("qwen3_vit_88m", "F0r", **VIT),
    tm("resnet50_clip", "F0", img_size=64),
    tm(
        "sam2_hiera_tiny",
        "F0",
        embed_dim=32,
        num_heads=1,
        stages=(1, 1, 2, 1),
        global_att_blocks=(3,),
    ),
    tm(
        "samvit_base_patch16",
        "F4",
        img_size=64,
        patch_size=8,
        embed_dim=64,
        depth=2,
        num_heads=4,
        window_size=4,
        global_attn_indexes=(1,),
    ),
    tm("shvit_s1", "F14"),
    tm("swiftformer_xs", "F14", layers=(1, 1, 1, 1)),
    tm(
        "swin_tiny_patch4_window7_224",
        "F14",
        img_size=64,
        window_size=4,
        embed_dim=32,
        depths=(2, 1),
        num_heads=(2, 4),
    ),
    tm(
        "swinv2_cr_tiny_224",
        "F14",
        img_size=64,
        window_size=4,
        embed_dim=32,
        depths=(2, 1),
        num_heads=(2, 4),
    ),
    tm(
        "swinv2_tiny_window8_256",
        "F14",
        img_size=64,
        window_size=4,
        embed_dim=32,
        depths=(2, 1),
        num_heads=(2, 4),
    ),
    tm("tiny_vit_5m_224", "F14"),
    tm(
        "tnt_s_patch16_224",
        "F14",
        img_size=64,
        embed_dim=64,
        depth=2,
        num_heads_inner=2,
        num_heads_outer=4,
    ),
    tm("twins_pcpvt_small", "F0", img_size=64, depths=(1, 1, 1, 1)),
    tm("twins_svt_small", "F14", img_size=64, depths=(1, 1, 1, 1)),
    tm("visformer_tiny", "F15", img_size=64, depth=(1, 1, 1)),
    tm("vit_base_patch14_reg4_dinov2", "F0", **VIT),
    tm("vit_base_patch16_224", "F0", **VIT),
    tm("vit_base_patch16_clip_224", "F0", **VIT),
    tm("vit_base_patch16_dinov3", "F9", **VIT),
    tm("vit_base_patch16_rope_mixed_224", "F9", **VIT),
    tm("vit_base_patch16_rpn_224", "F0", **VIT),
    tm("vit_base_patch16_siglip_224", "F0", **VIT),
    tm("vit_base_patch16_xp_224", "F0", **VIT),
    tm("vit_dwee_patch16_reg1_gap_256", "F14", **VIT),
    tm("vit_medium_patch16_rope_reg1_gap_256", "F9", **VIT),
    tm("vit_pe_core_base_patch16_224", "F9", **VIT),
    tm("vit_relpos_base_patch16_224", "F0", **VIT),
    tm("vit_small_patch16_18x2_224", "F0", **VIT),
    tm("vit_srelpos_small_patch16_224", "F0", **VIT),
    tm("vit_tiny_r_s16_p8_224", "F0", img_size=64, embed_dim=64, depth=2, num_heads=4),
    tm("vitamin_small_224", "F0", img_size=64),
    tm("volo_d1_224", "F0", img_size=64),
    tm("xcit_nano_12_p16_224", "F0", img_size=64, embed_dim=64, depth=2, num_heads=4),
    other(
        "torchvision.models.VisionTransformer",
        "F5",
        "torchvision",
        inputs=lambda m: {"x": rand(2, 3, 32, 32)},
        image_size=32,
        patch_size=8,
        num_layers=2,
        num_heads=4,
        hidden_dim=64,
        mlp_dim=128,
        num_classes=10,
    ),
    other(
        "torchvision.models.swin_transformer.SwinTransformer",
        "F14",
        "torchvision",
        inputs=lambda m: {"x": rand(2, 3, 64, 64)},
        patch_size=[4, 4],
        embed_dim=32,
        depths=[2, 1],
        num_heads=[2, 4],
        window_size=[4, 4],
    ),
    other(
        "torchvision.models.swin_v2_t",
        "F14",
        "torchvision",
        inputs=lambda m: {"x": rand(1, 3, 64, 64)},
    ),
    other(
        "torchvision.models.MaxVit",
        "F14",
        "torchvision",
        inputs=lambda m: {"x": rand(2, 3, 64, 64)},
        input_size=(64, 64),
        stem_channels=16,
        partition_size=2,
        block_channels=[16, 32],
        block_layers=[1, 1],
        head_dim=8,
        stochastic_depth_prob=0.0,
    ),
    other(
        "open_clip.transformer.VisionTransformer",
        "F5",
        "open_clip",
        inputs=lambda m: {"x": rand(2, 3, 32, 32)},
        image_size=32,
        patch_size=8,
        width=64,
        layers=2,
        heads=4,
        mlp_ratio=2.0,
        output_dim=64,
    ),
    other(
        "torch.nn.TransformerEncoder",
        "F5",
        "torch",
        inputs=lambda m: {"src": rand(2, 16, 64)},
        encoder_layer=torch.nn.TransformerEncoderLayer(64, 4, 128),
        num_layers=2,
    ),
    other(
        "diffusers.AutoencoderKL",
        "F0",
        "diffusers",
        inputs=lambda m: {"sample": rand(2, 3, 16, 16)},
        block_out_channels=(32,),
    ),
    other(
        "diffusers.AutoencoderKLWan",
        "F15",
        "diffusers",
        inputs=lambda m: {"sample": rand(1, 3, 1, 32, 32)},
        base_dim=16,
        dim_mult=[1, 1, 1, 1],
        num_res_blocks=1,
    ),
    other(
        "diffusers.DiTTransformer2DModel",
        "F0",
        "diffusers",
        inputs=lambda m: {
            "hidden_states": rand(2, 4, 8, 8),
            "timestep": torch.tensor([1, 2]),
            "class_labels": torch.tensor([1, 2]),
        },
        num_attention_heads=4,
        attention_head_dim=16,
        num_layers=2,
        sample_size=8,
        num_embeds_ada_norm=10,
    ),
    other(
        "diffusers.PixArtTransformer2DModel",
        "F0",
        "diffusers",
        inputs=lambda m: {
            "hidden_states": rand(2, 4, 8, 8),
            "encoder_hidden_states": rand(2, 6, 32),
            "timestep": torch.tensor([1, 2]),
        },
        num_attention_heads=4,
        attention_head_dim=16,
        num_layers=2,
        sample_size=8,
        cross_attention_dim=64,
        caption_channels=32,
        use_additional_conditions=False,
    ),
    other(
        "diffusers.SD3Transformer2DModel",
        "F16",
        "diffusers",
        inputs=lambda m: {
            "hidden_states": rand(2, 4, 8, 8),
            "encoder_hidden_states": rand(2, 6, 32),
            "pooled_projections": rand(2, 32),
            "timestep": torch.tensor([1, 2]),
        },
        sample_size=8,
        in_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=4,
        joint_attention_dim=32,
        caption_projection_dim=64,
        pooled_projection_dim=32,
        out_channels=4,
        pos_embed_max_size=8,
    ),
    other(
        "diffusers.FluxTransformer2DModel",
        "F16",
        "diffusers",
        inputs=lambda m: {
            "hidden_states": rand(2, 16, 4),
            "encoder_hidden_states": rand(2, 6, 32),
            "pooled_projections": rand(2, 32),
            "timestep": torch.tensor([0.1, 0.2]),
            "img_ids": rand(16, 3),
            "txt_ids": rand(6, 3),
        },
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=4,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=(4, 6, 6),
    ),
    other(
        "diffusers.AuraFlowTransformer2DModel",
        "F16",
        "diffusers",
        inputs=lambda m: {
            "hidden_states": rand(2, 4, 8, 8),
            "encoder_hidden_states": rand(2, 6, 32),
            "timestep": torch.tensor([0.1, 0.2]),
        },
        sample_size=8,
        num_mmdit_layers=1,
        num_single_dit_layers=1,
        attention_head_dim=16,
        num_attention_heads=4,
        joint_attention_dim=32,
        caption_projection_dim=64,
        pos_embed_max_size=16,
    ),
    other(
        "diffusers.CogVideoXTransformer3DModel",
        "F16",
        "diffusers",
        inputs=lambda m: {
            "hidden_states": rand(1, 3, 4, 8, 8),
            "encoder_hidden_states": rand(1, 6, 32),
            "timestep": torch.tensor([1]),
        },
        num_attention_heads=4,
        attention_head_dim=16,
        in_channels=4,
        out_channels=4,
        time_embed_dim=16,
        text_embed_dim=32,
        num_layers=2,
        sample_width=8,
        sample_height=8,
        sample_frames=9,
        max_text_seq_length=6,
    ),
]
