"""A variable-length Triton attention kernel, launched by the model itself.

torch.compile traces such a launch as a higher-order op with the strides baked in. Told
which argument is which stride, qkvpass takes the copies away and writes the new strides
into the launch. Needs a GPU to run; without one it says so.

    python triton_varlen.py             launched directly
    python triton_varlen.py --op        through torch.library.triton_op
"""

import argparse

import torch

import qkvpass

try:
    import triton
    import triton.language as tl
except ImportError as missing:
    raise SystemExit(f"this example needs Triton: pip install triton ({missing})") from None


@triton.jit
def varlen_attention_kernel(
    Q, K, V, Out, Seen, CuSeqlens,
    stride_qt, stride_qh, stride_kt, stride_kh, stride_vt, stride_vh, stride_ot, stride_oh,
    SCALE: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One block of queries of one head of one sequence; rows of HEAD_DIM lie side by side.

    Seen, for the curious: the six input strides and the addresses of Q, K and V.
    """
    block, head, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    kv_head = head // (HEADS // KV_HEADS)
    start = tl.load(CuSeqlens + sequence).to(tl.int64)
    length = (tl.load(CuSeqlens + sequence + 1) - start).to(tl.int32)
    if block == 0 and head == 0 and sequence == 0:
        tl.store(Seen + 0, stride_qt)
        tl.store(Seen + 1, stride_qh)
        tl.store(Seen + 2, stride_kt)
        tl.store(Seen + 3, stride_kh)
        tl.store(Seen + 4, stride_vt)
        tl.store(Seen + 5, stride_vh)
        tl.store(Seen + 6, Q.to(tl.int64))
        tl.store(Seen + 7, K.to(tl.int64))
        tl.store(Seen + 8, V.to(tl.int64))
    if block * BLOCK_M >= length:
        return
    rows = block * BLOCK_M + tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    row_mask = (rows[:, None] < length) & (dims[None, :] < HEAD_DIM)
    q_rows = (start + rows)[:, None]
    q = tl.load(Q + q_rows * stride_qt + head * stride_qh + dims[None, :], row_mask, 0.0)
    best = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for first in range(0, length, BLOCK_N):
        columns = first + tl.arange(0, BLOCK_N)
        mask = (columns[:, None] < length) & (dims[None, :] < HEAD_DIM)
        k_rows = (start + columns)[:, None]
        k = tl.load(K + k_rows * stride_kt + kv_head * stride_kh + dims[None, :], mask, 0.0)
        v = tl.load(V + k_rows * stride_vt + kv_head * stride_vh + dims[None, :], mask, 0.0)
        scores = tl.dot(q, tl.trans(k)) * SCALE
        scores = tl.where(columns[None, :] < length, scores, float("-inf"))
        new_best = tl.maximum(best, tl.max(scores, 1))
        weights = tl.exp(scores - new_best[:, None])
        shrink = tl.exp(best - new_best)
        total = total * shrink + tl.sum(weights, 1)
        acc = acc * shrink[:, None] + tl.dot(weights.to(v.dtype), v)
        best = new_best
    out = (acc / total[:, None]).to(Out.dtype.element_ty)
    tl.store(Out + q_rows * stride_ot + head * stride_oh + dims[None, :], out, row_mask)


# Measured by tests/gpu_gain.py; with other head sizes this kernel gains at every length.
SLOWER = qkvpass.Slower(
    "H200, bf16, head size 72, one sequence of 4096 tokens: 0.5 % slower (2026-11-30)",
    arch="sm_90",
    head_dims=(72,),
    from_bytes=4 << 20,
)
for operand, letter in (("Q", "q"), ("K", "k"), ("V", "v")):
    qkvpass.register_triton_stride_tag(
        varlen_attention_kernel,
        operand=operand,
        strides={0: f"stride_{letter}t", 1: f"stride_{letter}h"},
        slower=(SLOWER,),
    )

BLOCK_M, BLOCK_N = 64, 64


def launch(q, k, v, cu_seqlens, max_seqlen, wrap=lambda kernel: kernel):
    """Attention within each sequence: q (tokens, heads, dim), k and v (tokens, kv_heads, dim).

    Returns the output, dense, and what the kernel saw of strides and addresses.
    """
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    seen = torch.empty(9, dtype=torch.int64, device=q.device)
    grid = (triton.cdiv(max_seqlen, BLOCK_M), q.shape[1], cu_seqlens.shape[0] - 1)
    wrap(varlen_attention_kernel)[grid](
        q, k, v, out, seen, cu_seqlens,
        q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1),
        out.stride(0), out.stride(1), SCALE=q.shape[-1] ** -0.5,
        HEADS=q.shape[1], KV_HEADS=k.shape[1], HEAD_DIM=q.shape[2],
        BLOCK_D=triton.next_power_of_2(q.shape[2]), BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N,
    )  # fmt: skip
    return out, seen


# An op of its own until Inductor opens it up.
@qkvpass.stride_capable("q", "k", "v", slower=(SLOWER,))
@torch.library.triton_op("qkvpass_example::varlen_attention", mutates_args=())
def launch_op(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor, max_seqlen: int
) -> tuple[torch.Tensor, torch.Tensor]:
    return launch(q, k, v, cu_seqlens, max_seqlen, torch.library.wrap_triton)


class Attention(torch.nn.Module):
    """Packed projection, split, three copies, the kernel, output projection."""

    def __init__(self, heads=16, kv_heads=16, head_dim=72, call=launch, copies=True):
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.sizes = [heads * head_dim, kv_heads * head_dim, kv_heads * head_dim]
        self.qkv = torch.nn.Linear(heads * head_dim, sum(self.sizes))
        self.out = torch.nn.Linear(heads * head_dim, heads * head_dim)
        self.call, self.copies = call, copies

    def forward(self, x, cu_seqlens, max_seqlen):
        q, k, v = (t.view(-1, t.shape[-1] // self.head_dim, self.head_dim) for t in
                   self.qkv(x).split(self.sizes, dim=-1))  # fmt: skip
        if self.copies:
            q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        attended, seen = self.call(q, k, v, cu_seqlens, max_seqlen)
        return self.out(attended.flatten(1)), seen


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--op", action="store_true", help="launch through torch.library.triton_op")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("no GPU here: a Triton kernel cannot run, so there is nothing to show")
        return
    torch.manual_seed(0)
    model = Attention(call=launch_op if options.op else launch).to("cuda", torch.bfloat16)
    lengths = [300, 1023, 77]
    x = torch.randn(sum(lengths), model.sizes[0], device="cuda", dtype=torch.bfloat16)
    cu_seqlens = torch.tensor([0, *lengths], device="cuda").cumsum(0).int()
    with torch.no_grad(), qkvpass.capture() as reports:
        stock, dense = torch.compile(model)(x, cu_seqlens, max(lengths))
        torch._dynamo.reset()
        ours, strided = torch.compile(model, backend=qkvpass.backend)(x, cu_seqlens, max(lengths))
    print(*reports, sep="\n")
    print("strides with stock", dense[:6].tolist(), "with qkvpass", strided[:6].tolist())
    print("largest difference", (stock - ours).abs().max().item())


if __name__ == "__main__":
    main()
