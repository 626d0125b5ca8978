"""Tag an attention op that reads strides, compile with qkvpass, see which copies went."""

import torch
import torch.nn.functional as F

import qkvpass


@qkvpass.stride_capable("q", "k", "v")
@torch.library.custom_op("quickstart::attention", mutates_args=())
def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    heads_first = (t.transpose(0, 1).unsqueeze(0) for t in (q, k, v))  # (1, heads, tokens, dim)
    return F.scaled_dot_product_attention(*heads_first)[0].transpose(0, 1).contiguous()


@attention.register_fake
def _(q, k, v):
    return torch.empty(q.shape, dtype=q.dtype, device=q.device)


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = torch.nn.Linear(64, 192), torch.nn.Linear(64, 64)

    def forward(self, x):
        q, k, v = (t.view(-1, 4, 16).contiguous() for t in self.qkv(x).split(64, dim=-1))
        return self.out(attention(q, k, v).view(-1, 64))


block, x = Block(), torch.randn(100, 64)
with torch.no_grad():
    compiled = torch.compile(block, backend=qkvpass.backend)
    torch.testing.assert_close(compiled(x), block(x))
    print(qkvpass.explain(block, x))
