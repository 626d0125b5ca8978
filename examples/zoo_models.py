"""What qkvpass does to encoders of transformers and timm; shrunken, with random weights."""

import torch
from timm.models.hiera import Hiera
from transformers import MLCDVisionConfig, MLCDVisionModel

import qkvpass


def mlcd():
    """transformers: ``transpose(1, 2).contiguous()`` in front of SDPA."""
    config = MLCDVisionConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        image_size=32,
        patch_size=8,
        attn_implementation="sdpa",
    )
    return MLCDVisionModel(config).eval(), torch.randn(2, 3, 32, 32)


def hiera():
    """timm: the same, in every stage that attends globally."""
    model = Hiera(
        img_size=(64, 64),
        embed_dim=32,
        num_heads=2,
        stages=(1, 1),
        q_pool=1,
        mask_unit_attn=(False, False),
        num_classes=10,
    )
    return model.eval(), torch.randn(2, 3, 64, 64)


if __name__ == "__main__":
    for build in (mlcd, hiera):
        model, image = build()
        report = qkvpass.explain(model, image)
        print(f"== {type(model).__name__}\n{report}\n")
        assert report.removed
