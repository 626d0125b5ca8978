"""Tell qkvpass what your attention op can read: a contract, a condition, and what it refuses.

The op of this example reads q, k and v by stride under three conditions:

- it loads 32 bytes at a time, so that pointers and strides must be multiples of that;
- it has one stride for k and v, so that the two must share a layout;
- heads are at most 128 wide: above that it would take a path that wants dense inputs.
"""

import torch
import torch.nn.functional as F

import qkvpass


@torch.library.custom_op("mylib::attn", mutates_args=())
def attn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    if k.stride() != v.stride():
        raise ValueError(f"k has strides {k.stride()}, v has {v.stride()}; they must be equal")
    heads_first = (t.transpose(0, 1).unsqueeze(0) for t in (q, k, v))
    return F.scaled_dot_product_attention(*heads_first)[0].transpose(0, 1).contiguous()


@attn.register_fake
def _(q, k, v):
    return torch.empty(q.shape, dtype=q.dtype, device=q.device)


def narrow_heads(site):
    """A condition: None where the tag holds, else why it does not."""
    return None if site.head_dim <= 128 else f"head size {site.head_dim} is above 128"


qkvpass.register_stride_tag(
    "mylib::attn",
    operands=("q", "k", "v"),
    contract=qkvpass.StrideContract(alignment=32, together=(("k", "v"),)),
    when=narrow_heads,
)


class Block(torch.nn.Module):
    def __init__(self, heads, head_dim):
        super().__init__()
        self.head_dim, self.width = head_dim, heads * head_dim
        self.qkv = torch.nn.Linear(self.width, 3 * self.width)

    def forward(self, x):
        parts = self.qkv(x).split(self.width, dim=-1)
        return attn(*(t.view(x.shape[0], -1, self.head_dim).contiguous() for t in parts))


def show(title, heads, head_dim):
    block = Block(heads, head_dim)
    with torch.no_grad():
        report = qkvpass.explain(block, torch.randn(50, block.width))
    print(f"== {title}\n{report}\n")
    return len(report.removed)


if __name__ == "__main__":
    assert show("within the contract", heads=4, head_dim=16) == 3
    assert show("strides of 12 bytes are no multiple of 32", heads=4, head_dim=3) == 0
    assert show("the condition refuses heads of 160", heads=2, head_dim=160) == 0

    qkvpass.unregister_stride_tag("mylib::attn")
    assert show("without a tag nothing is known, so nothing goes", heads=4, head_dim=16) == 0
