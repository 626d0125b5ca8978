"""The vision encoder of PaddleOCR-VL's shape, with its copies and without.

27 layers, 16 heads of 72, images of different sizes packed into one sequence, attention
within each by a variable-length op. By default it is small enough for a laptop's CPU;
the shape of one document page is

    python paddleocr_vl_encoder.py --layers 27 --grids 92x117 --dtype bfloat16 --device cuda
"""

import argparse
import itertools

import torch
import torch.nn.functional as F
from torch import nn

import qkvpass

HEADS, HEAD_DIM, MLP = 16, 72, 4304
WIDTH = HEADS * HEAD_DIM
received = []  # (strides, storages) of q, k, v in each call of the op


@qkvpass.stride_capable("q", "k", "v", contract=qkvpass.StrideContract(alignment=16))
@torch.library.custom_op("paddleocr_vl::varlen_attention", mutates_args=())
def varlen_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor
) -> torch.Tensor:
    """Attention within each image; q, k, v are (tokens, heads, head_dim) of any strides."""
    received.append(
        ((q.stride(), k.stride(), v.stride()), {t.untyped_storage().data_ptr() for t in (q, k, v)})
    )
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    for start, end in itertools.pairwise(cu_seqlens.tolist()):
        image = (t[start:end].transpose(0, 1).unsqueeze(0) for t in (q, k, v))
        out[start:end] = F.scaled_dot_product_attention(*image).squeeze(0).transpose(0, 1)
    return out


@varlen_attention.register_fake
def _(q, k, v, cu_seqlens):
    return torch.empty(q.shape, dtype=q.dtype, device=q.device)


class Attention(nn.Module):
    def __init__(self, attend, copies):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.attend, self.copies = attend, copies

    def forward(self, x, cu_seqlens, rope):
        q, k, v = (t.view(-1, HEADS, HEAD_DIM) for t in self.qkv(x).split(WIDTH, dim=-1))
        if rope is not None:
            q, k = rotate(q, *rope), rotate(k, *rope)
        if self.copies:  # as serving engines do for attention backends that they do not know
            q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        return self.out(self.attend(q, k, v, cu_seqlens).view(-1, WIDTH))


class Layer(nn.Module):
    def __init__(self, attend, copies):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH, eps=1e-6), nn.LayerNorm(WIDTH, eps=1e-6)
        self.attention = Attention(attend, copies)
        self.up, self.down = nn.Linear(WIDTH, MLP), nn.Linear(MLP, WIDTH)

    def forward(self, x, cu_seqlens, rope):
        x = x + self.attention(self.norm1(x), cu_seqlens, rope)
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class Encoder(nn.Module):
    """``copies=False`` is the hand edit that the pass stands for."""

    def __init__(self, layers, attend=varlen_attention, copies=True):
        super().__init__()
        self.layers = nn.ModuleList(Layer(attend, copies) for _ in range(layers))
        self.norm = nn.LayerNorm(WIDTH, eps=1e-6)

    def forward(self, x, cu_seqlens, rope=None):
        for layer in self.layers:
            x = layer(x, cu_seqlens, rope)
        return self.norm(x)


def rotate(x, cos, sin):
    """Rotary embedding, as plain PyTorch: its result is a new tensor."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def rope_2d(grids, dtype, device):
    """(cos, sin) of shape (tokens, 1, head_dim): half of the pairs turn by row, half by column."""
    quarter = HEAD_DIM // 4
    speed = 10000.0 ** (-torch.arange(quarter, device=device) / quarter)
    places = torch.cat(
        [torch.cartesian_prod(*(torch.arange(n, device=device) for n in grid)) for grid in grids]
    )
    angles = (places[:, :, None] * speed).flatten(1).repeat(1, 2).unsqueeze(1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def grid(text):
    rows, columns = text.split("x")
    return int(rows), int(columns)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument(
        "--grids",
        type=grid,
        nargs="+",
        default=[(10, 12), (8, 9)],
        help="patches of each image, as ROWSxCOLUMNS",
    )
    parser.add_argument(
        "--rope",
        action="store_true",
        help="rotate q and k: the result is dense, so that v alone has a copy",
    )
    parser.add_argument("--dtype", default="float32", type=lambda name: getattr(torch, name))
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()

    torch.manual_seed(0)
    encoder = Encoder(options.layers).to(options.device, options.dtype).eval()
    tokens = [rows * columns for rows, columns in options.grids]
    x = torch.randn(sum(tokens), WIDTH, device=options.device, dtype=options.dtype)
    cu_seqlens = torch.tensor([0, *tokens], device=options.device).cumsum(0)
    rope = rope_2d(options.grids, options.dtype, options.device) if options.rope else None

    with torch.no_grad(), qkvpass.capture() as reports:
        compiled = torch.compile(encoder, backend=qkvpass.backend)
        output = compiled(x, cu_seqlens, rope)
        strides, storages = received[-1]
        torch.testing.assert_close(output, encoder(x, cu_seqlens, rope), rtol=2e-2, atol=2e-2)

    for report in reports:
        print(report)
    print(f"the last layer's op received strides {strides}, in {len(storages)} storage(s)")


if __name__ == "__main__":
    main()
