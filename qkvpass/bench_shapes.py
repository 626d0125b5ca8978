"""The encoders that ``qkvpass bench`` knows by name: their dims, their blocks, their attention.

A block is written twice by one class: as the model has it, with copies, and as a hand would
edit it (``copies=False``), the same maths over strided views. Weights are random and shared.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel


class BenchError(Exception):
    """A benchmark that cannot be run as asked; the message says what to give instead."""


@dataclass(frozen=True)
class Shape:
    """One encoder's dims.

    Args:
        family: how q, k and v are split and copied: a key of :data:`FAMILIES`.
        heads, dim, mlp: heads, head size and width of the MLP's middle.
        sequences, tokens: how many sequences, and tokens in each.
        layers: of the whole encoder.
        rope: ``""``, ``"functional"`` (plain PyTorch) or ``"opaque"`` (an op that nobody tagged).
    """

    family: str
    heads: int
    dim: int
    mlp: int
    sequences: int
    tokens: int
    layers: int
    rope: str = ""

    @property
    def width(self) -> int:
        return self.heads * self.dim

    def scaled(self, scale: float) -> Shape:
        """Fewer heads and tokens, for a dry run; the head size stays, and with it alignment."""
        heads = max(1, round(self.heads * scale))
        return replace(
            self,
            heads=heads,
            mlp=max(8, round(self.mlp * heads / self.heads)),
            sequences=max(1, round(self.sequences * scale)),
            tokens=max(8, round(self.tokens * scale)),
        )

    def with_tokens(self, total: int) -> Shape:
        """About ``total`` tokens: more or fewer sequences, or one longer one if there was one."""
        if self.sequences == 1 or total < self.tokens:
            return replace(self, sequences=1, tokens=total)
        return replace(self, sequences=total // self.tokens)


PAGE = Shape("packed", 16, 72, 4304, 1, 10764, 27)
SHAPES: dict[str, Shape] = {
    "paddleocr-vl-page": PAGE,
    "paddleocr-vl-page-rope": replace(PAGE, rope="functional"),
    "paddleocr-vl-page-opaque-rope": replace(PAGE, rope="opaque"),
    "qwen2.5-vl-windows": Shape("packed", 16, 80, 3420, 256, 64, 32),
    "qwen2.5-vl-full": Shape("packed", 16, 80, 3420, 4, 4096, 32),
    "internvit-6b": Shape("packed", 25, 128, 12800, 13, 1025, 45),
    "internvit-300m": Shape("packed", 16, 64, 4096, 13, 1025, 24),
    "siglip-so400m": Shape("heads-first", 16, 72, 4304, 32, 729, 27),
    "siglip-b": Shape("heads-first", 12, 64, 3072, 8, 196, 12),
    "sam-vit-h": Shape("windows", 16, 80, 5120, 25, 196, 32),
    "sam-vit-h-positions": Shape("positions", 16, 80, 5120, 25, 196, 32),
    "vit-h-518": Shape("mha", 16, 80, 5120, 8, 1370, 32),
    "vit-b-16": Shape("mha", 12, 64, 3072, 8, 197, 12),
    "clip-l-336": Shape("mha", 16, 64, 4096, 1, 577, 24),
    "openclip-bigg": Shape("mha-sequence-first", 16, 104, 8192, 64, 257, 48),
    "mlcd-bigg": Shape("heads-first", 16, 104, 8192, 8, 1025, 48),
    "dinov3-l": Shape("prefix", 16, 64, 4096, 16, 1029, 24),
    "dinov3-7b": Shape("prefix", 32, 128, 8192, 2, 4101, 40),
}
PREFIX_TOKENS = 5  # DINOv3's class token and registers


@dataclass(frozen=True)
class Attention:
    """A way to call attention.

    Args:
        load: returns a call of packed (tokens, heads, dim) operands, sequence bounds and the
            longest sequence; None for SDPA.
        backend: SDPA's backend; None leaves the choice to PyTorch.
        needs: the package that brings it, for the message where it is missing.
    """

    load: Callable[[], Callable[..., Tensor]] | None = None
    backend: SDPBackend | None = None
    needs: str = ""

    def using(self) -> contextlib.AbstractContextManager[Any]:
        """What must be in force when the attention is compiled and run."""
        return contextlib.nullcontext() if self.backend is None else sdpa_kernel(self.backend)


def _fa3() -> Callable[..., Tensor]:
    importlib.import_module("fa3_fwd_interface")
    return _varlen(torch.ops.fa3_fwd._flash_attn_forward)


def _fa4() -> Callable[..., Tensor]:
    importlib.import_module("flash_attn.cute")  # the op would look for it in the middle of a run
    importlib.import_module("qkvpass.ops")
    return _varlen(torch.ops.qkvpass.flash_attn_4)


def _varlen(op: Callable[..., Any]) -> Callable[..., Tensor]:
    def attend(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, longest: int) -> Tensor:
        return op(
            q, k, v, cu_seqlens_q=bounds, cu_seqlens_k=bounds,
            max_seqlen_q=longest, max_seqlen_k=longest, softmax_scale=q.shape[-1] ** -0.5,
        )[0]  # fmt: skip

    return attend


def _triton() -> Callable[..., Tensor]:
    """The kernel of the example, which is also its documentation."""
    path = Path(__file__).parent.parent / "examples" / "triton_varlen.py"
    if not path.exists():
        raise BenchError("the Triton kernel is examples/triton_varlen.py: run from a checkout")
    if (example := sys.modules.get("triton_varlen")) is None:
        spec = importlib.util.spec_from_file_location("triton_varlen", path)
        assert spec is not None and spec.loader is not None
        example = sys.modules["triton_varlen"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(example)
    launch = example.launch

    def attend(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, longest: int) -> Tensor:
        return launch(q, k, v, bounds, longest)[0]

    return attend


ATTENTIONS: dict[str, Attention] = {
    "sdpa": Attention(),
    "flash": Attention(backend=SDPBackend.FLASH_ATTENTION),
    "cudnn": Attention(backend=SDPBackend.CUDNN_ATTENTION),
    "efficient": Attention(backend=SDPBackend.EFFICIENT_ATTENTION),
    "fa3": Attention(load=_fa3, needs="fa3-fwd"),
    "fa4": Attention(load=_fa4, needs="flash-attn-4"),
    "triton": Attention(load=_triton, needs="triton"),
}
ON_CPU = ("sdpa", "flash")


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


@torch.library.custom_op("qkvpass_bench::rope", mutates_args=())
def opaque_rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotary embedding as an op that nobody vouches for."""
    return rotate(q, cos, sin), rotate(k, cos, sin)


@opaque_rope.register_fake
def _(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape)


def by_sdpa(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, longest: int) -> Tensor:
    """All sequences are equally long, so that SDPA's batch is a view."""
    q, k, v = (t.unflatten(0, (-1, longest)).transpose(1, 2) for t in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(0, 1)


class Packed(nn.Module):
    """(tokens, width): split, three copies, attention within each sequence (SGLang, vLLM)."""

    def __init__(self, shape: Shape, attend: Callable[..., Tensor] | None, copies: bool) -> None:
        super().__init__()
        self.shape, self.attend, self.copies = shape, attend or by_sdpa, copies
        self.qkv = nn.Linear(shape.width, 3 * shape.width)
        self.out = nn.Linear(shape.width, shape.width)

    def forward(self, x: Tensor, bounds: Tensor, longest: int, cos: Tensor, sin: Tensor) -> Tensor:
        shape = self.shape
        parts = self.qkv(x).split(shape.width, dim=-1)
        q, k, v = (t.view(-1, shape.heads, shape.dim) for t in parts)
        if self.copies:
            q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        if shape.rope == "functional":
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        elif shape.rope == "opaque":
            q, k = opaque_rope(q, k, cos, sin)
        return self.out(self.attend(q, k, v, bounds, longest).reshape(-1, shape.width))


class Batched(nn.Module):
    """(batch, tokens, width) with SDPA; subclasses say how q, k and v come about."""

    def __init__(self, shape: Shape, attend: Callable[..., Tensor] | None, copies: bool) -> None:
        super().__init__()
        self.shape, self.copies = shape, copies
        self.qkv = nn.Linear(shape.width, 3 * shape.width)
        self.out = nn.Linear(shape.width, shape.width)

    def forward(self, x: Tensor, *rope: Tensor) -> Tensor:
        q, k, v = self.operands(self.qkv(x), *rope)
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask(q))
        return self.out(attended.transpose(1, 2).reshape(x.shape))

    def mask(self, q: Tensor) -> Tensor | None:
        """What is added to the scores, of shape (batch, heads, tokens, tokens)."""
        return None

    def operands(self, packed: Tensor, *rope: Tensor) -> tuple[Tensor, ...]:
        raise NotImplementedError


class HeadsFirst(Batched):
    """``transpose(1, 2).contiguous()`` in front of SDPA (MLCD, GroupViT)."""

    def operands(self, packed: Tensor, *rope: Tensor) -> tuple[Tensor, ...]:
        parts = packed.split(self.shape.width, dim=-1)
        q, k, v = (t.unflatten(-1, (self.shape.heads, -1)).transpose(1, 2) for t in parts)
        if self.copies:
            q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        return q, k, v


class Windows(Batched):
    """SAM: the copy hides in ``reshape(3, B * H, N, D)``."""

    def operands(self, packed: Tensor, *rope: Tensor) -> tuple[Tensor, ...]:
        batch, tokens, _ = packed.shape
        heads, dim = self.shape.heads, self.shape.dim
        packed = packed.view(batch, tokens, 3, heads, dim).permute(2, 0, 3, 1, 4)
        if not self.copies:
            return packed.unbind(0)
        parts = packed.reshape(3, batch * heads, tokens, dim).unbind(0)
        return tuple(t.view(batch, heads, tokens, dim) for t in parts)


class Positions(Windows):
    """SAM with its relative positions: they are added to the scores, and computed of a dense q."""

    def __init__(self, shape: Shape, attend: Callable[..., Tensor] | None, copies: bool) -> None:
        super().__init__(shape, attend, copies)
        side = math.isqrt(shape.tokens)
        self.rows = max(n for n in range(1, side + 1) if shape.tokens % n == 0)
        self.columns = shape.tokens // self.rows
        self.by_row = nn.Parameter(torch.randn(self.rows, self.rows, shape.dim) / shape.dim)
        self.by_column = nn.Parameter(
            torch.randn(self.columns, self.columns, shape.dim) / shape.dim
        )

    def operands(self, packed: Tensor, *rope: Tensor) -> tuple[Tensor, ...]:
        q, k, v = super().operands(packed)
        return (q if self.copies else q.contiguous()), k, v

    def mask(self, q: Tensor) -> Tensor:
        grid = q.view(-1, self.rows, self.columns, q.shape[-1])
        rows = torch.einsum("bhwc,hkc->bhwk", grid, self.by_row)
        columns = torch.einsum("bhwc,wkc->bhwk", grid, self.by_column)
        mask = rows[..., :, None] + columns[..., None, :]
        return mask.reshape(*q.shape[:-1], q.shape[-2])


class Prefix(Batched):
    """DINOv3: the prefix tokens skip rope by a ``cat``, which decides the output's layout."""

    def operands(self, packed: Tensor, *rope: Tensor) -> tuple[Tensor, ...]:
        q, k, v = (t.unflatten(-1, (self.shape.heads, -1)) for t in packed.chunk(3, dim=-1))
        if not self.copies:  # concatenated token-major
            q, k = (self.rotated(t, 1, *(r.unsqueeze(1) for r in rope)) for t in (q, k))
            return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        return self.rotated(q, 2, *rope), self.rotated(k, 2, *rope), v

    @staticmethod
    def rotated(t: Tensor, tokens_at: int, cos: Tensor, sin: Tensor) -> Tensor:
        prefix, rest = t.split([PREFIX_TOKENS, t.shape[tokens_at] - PREFIX_TOKENS], tokens_at)
        return torch.cat((prefix, rotate(rest, cos, sin)), tokens_at)


class Multihead(nn.Module):
    """``nn.MultiheadAttention`` (torchvision, OpenCLIP); without copies, the same maths by hand."""

    def __init__(self, shape: Shape, attend: Callable[..., Tensor] | None, copies: bool) -> None:
        super().__init__()
        self.heads, self.copies = shape.heads, copies
        self.batch_first = shape.family == "mha"
        self.mha = nn.MultiheadAttention(shape.width, shape.heads, batch_first=self.batch_first)

    def forward(self, x: Tensor) -> Tensor:
        if self.copies:
            return self.mha(x, x, x, need_weights=False)[0]
        packed = F.linear(x, self.mha.in_proj_weight, self.mha.in_proj_bias)
        heads_first = (0, 2, 1, 3) if self.batch_first else (1, 2, 0, 3)
        back = (0, 2, 1, 3) if self.batch_first else (2, 0, 1, 3)
        q, k, v = (
            t.unflatten(-1, (self.heads, -1)).permute(heads_first) for t in packed.chunk(3, dim=-1)
        )
        attended = F.scaled_dot_product_attention(q, k, v).permute(back)
        return self.mha.out_proj(attended.reshape(x.shape))


# The attention modules, and how many dense copies of (tokens, width) the model's own code makes
# around each attention call and need not make, the one behind it included where a kernel's output
# follows q.
FAMILIES: dict[str, tuple[type[nn.Module], int]] = {
    "packed": (Packed, 3),
    "heads-first": (HeadsFirst, 4),
    "windows": (Windows, 4),
    "positions": (Positions, 2),
    "mha": (Multihead, 3),
    "mha-sequence-first": (Multihead, 3),
    "prefix": (Prefix, 1),
}


class Block(nn.Module):
    """Pre-norm block around an attention module."""

    def __init__(self, shape: Shape, attention: nn.Module) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(shape.width), nn.LayerNorm(shape.width)
        self.attention = attention
        self.up, self.down = nn.Linear(shape.width, shape.mlp), nn.Linear(shape.mlp, shape.width)

    def forward(self, x: Tensor, *rest: Any) -> Tensor:
        x = x + self.attention(self.norm1(x), *rest)
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class Stack(nn.Module):
    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor, *rest: Any) -> Tensor:
        for block in self.blocks:
            x = block(x, *rest)
        return x


def family_for(shape: Shape, attention: str) -> str:
    """The family that is built: packed where the attention op wants packed operands.

    Raises:
        BenchError: where that family has no such form.
    """
    if ATTENTIONS[attention].load is None or shape.family == "packed":
        return shape.family
    if shape.family == "heads-first":
        return "packed"
    raise BenchError(
        f"{attention} takes packed operands, which the {shape.family} family has not; "
        "give sdpa, flash, cudnn or efficient"
    )


def load_attention(name: str, device: str) -> Callable[..., Tensor] | None:
    """The call behind a name of :data:`ATTENTIONS`; None for SDPA.

    Raises:
        BenchError: if there is no such attention, or not here.
    """
    if name not in ATTENTIONS:
        raise BenchError(f"{name!r} is no attention; give one of {', '.join(ATTENTIONS)}")
    if device == "cpu" and name not in ON_CPU:
        raise BenchError(f"{name} needs a CUDA device; on a CPU give {' or '.join(ON_CPU)}")
    chosen = ATTENTIONS[name]
    if chosen.load is None:
        return None
    try:
        return chosen.load()
    except (ImportError, AttributeError) as error:
        raise BenchError(f"{name} needs the package {chosen.needs} ({error})") from error
    except SystemExit as error:  # the Triton example's way to say that Triton is missing
        raise BenchError(str(error)) from error


def build(
    shape: Shape, attention: str, layers: int, part: str, device: str, dtype: torch.dtype
) -> tuple[nn.Module, nn.Module, tuple[Any, ...]]:
    """(model with copies, its hand-edited twin over the same weights, inputs).

    Args:
        part: ``"encoder"`` for whole blocks, ``"attention"`` for attention modules alone.

    Raises:
        BenchError: if the attention does not run here or with this family.
    """
    if shape.family == "prefix" and shape.tokens <= PREFIX_TOKENS:
        raise BenchError(f"{shape.tokens} tokens leave none beside the {PREFIX_TOKENS} of prefix")
    family = family_for(shape, attention)
    attend = load_attention(attention, device)
    kind = FAMILIES[family][0]

    def stack(copies: bool) -> nn.Module:
        made = (kind(shape, attend, copies) for _ in range(layers))
        return Stack([one if part == "attention" else Block(shape, one) for one in made]).eval()

    torch.manual_seed(0)
    with torch.device(device):
        model = stack(True).to(dtype)
        inputs = make_inputs(shape, family, device, dtype)
    with torch.device("meta"):
        twin = stack(False)
    twin.load_state_dict(model.state_dict(), assign=True)
    return model, twin, inputs


def make_inputs(shape: Shape, family: str, device: str, dtype: torch.dtype) -> tuple[Any, ...]:
    """What a stack of this family is called with."""
    sizes = {
        "packed": (shape.sequences * shape.tokens,),
        "mha-sequence-first": (shape.tokens, shape.sequences),
    }
    x = torch.randn(*sizes.get(family, (shape.sequences, shape.tokens)), shape.width, dtype=dtype)
    if family == "packed":
        bounds = torch.arange(shape.sequences + 1, dtype=torch.int32) * shape.tokens
        return x, bounds, shape.tokens, *_angles(x.shape[0], shape.dim, dtype, (1,))
    if family == "prefix":
        return x, *_angles(shape.tokens - PREFIX_TOKENS, shape.dim, dtype, ())
    return (x,)


def _angles(
    tokens: int, dim: int, dtype: torch.dtype, heads: tuple[int, ...]
) -> tuple[Tensor, Tensor]:
    """(cos, sin) of shape (tokens, *heads, dim)."""
    speed = 10000.0 ** -(torch.arange(dim // 2) / (dim // 2))
    angles = (torch.arange(tokens)[:, None] * speed).repeat(1, 2).view(tokens, *heads, dim)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def paper_bytes(shape: Shape, attention: str, layers: int, itemsize: int) -> int:
    """Traffic of the copies that the pass can save, counted by hand, in bytes.

    Two passes over (tokens, width) for each copy. With rope between, q's and k's copies are
    folded into it (functional) or must stay (opaque), so that v's alone is saved. Efficient
    attention writes token-major always, so that there is no copy behind it.
    """
    family = family_for(shape, attention)
    copies = FAMILIES[family][1]
    if shape.rope:
        copies = 1
    if attention == "efficient" and family in ("heads-first", "windows", "prefix"):
        copies -= 1
    return 2 * copies * shape.sequences * shape.tokens * shape.width * itemsize * layers
