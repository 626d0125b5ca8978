"""Public reports that this pass must get right; each test names its report.

The threads: B01 pytorch#112577, B05 flash-attention#2886, B06 SageAttention#386, B07
TransformerEngine#1195, B08 pytorch#181133, B09 vllm#27744, B10 ComfyUI#15494, B12 sglang#31667,
B14 pytorch#184051, B15 vllm#58182, B16 pytorch#132102, B17 pytorch#197489, B20 pytorch#139628,
B21 vllm#17735, B22 vllm#8480, B24 pytorch#137298, B25 pytorch#192042, B26 pytorch#136329, B27
vllm#33967, B28 pytorch#137039, B29 pytorch#186381, B30 pytorch#176305, B32 pytorch#195320, B34
vllm#27028, B35 pytorch#136543, B37 transformers#40315, B40 vllm#32687, B41 pytorch#168373, B43
pytorch#131360, B45 pytorch#118123.

``decide`` runs the rewritten graph on two sets of data against the original, bit for bit, so a
copy that is wrongly gone in front of a blind kernel shows as a wrong number there.
"""

from __future__ import annotations

import copy
import gc
import os
import pickle
import re
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import graph_caches
import pytest
import standins
import torch
import torch._dynamo
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config
import torch.nn.functional as F
from standins import apply_pass, compile_pair, decide, tag, trace, trace_fake
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._inductor.fx_passes.post_grad import post_grad_passes, view_to_reshape
from torch._inductor.utils import fresh_cache
from torch.fx import GraphModule

import qkvpass

aten = torch.ops.aten
HEADS, HEAD_DIM, TOKENS = 2, 8, 6
WIDTH = HEADS * HEAD_DIM
STRIDED = (3 * WIDTH, HEAD_DIM, 1)  # of a (T, H, D) view of the packed buffer
DENSE = (WIDTH, HEAD_DIM, 1)
ALL_REMOVED = {"q": "removed", "k": "removed", "v": "removed"}


def packed() -> Tensor:
    return torch.randn(TOKENS, 3 * WIDTH)


def projection() -> tuple[Tensor, Tensor]:
    """Tokens and a weight, so that a GEMM makes the packed buffer inside the graph."""
    return torch.randn(TOKENS, 12), torch.randn(12, 3 * WIDTH)


def heads(t: Tensor) -> Tensor:
    return t.reshape(-1, HEADS, HEAD_DIM)


def copied(qkv: Tensor) -> tuple[Tensor, ...]:
    return tuple(heads(t).contiguous() for t in qkv.split(WIDTH, -1))


def layer(op: Callable[..., Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    """split, reshape, contiguous, ``op``: the pattern this is all about."""

    def forward(x: Tensor, weight: Tensor) -> Tensor:
        return op(*copied(x @ weight))

    return forward


def reasons(outcome: standins.Outcome, *operands: str) -> set[str]:
    return {outcome.verdicts[operand] for operand in operands}


@contextmanager
def caches_on() -> Iterator[None]:
    """An own, empty cache directory, with every graph cache in use."""
    with (
        fresh_cache(),
        inductor_config.patch(fx_graph_cache=True, deterministic=False),
        functorch_config.patch(enable_autograd_cache=True),
    ):
        counters.clear()
        yield


# (a) strided q, k and v in attention kernels


def efficient_on_cuda(kv_heads: int, mask: bool) -> GraphModule:
    def forward(q: Tensor, kv: Tensor, bias: Tensor) -> Tensor:
        k = v = kv.unsqueeze(1).expand(1, kv_heads, 16, 128).contiguous()
        return aten._scaled_dot_product_efficient_attention(q, k, v, bias if mask else None, False)[
            0
        ]

    return trace_fake(
        forward,
        ((1, 16, 1, 128), "cuda", torch.float32),
        ((1, 16, 128), "cuda", torch.float32),
        ((1, 16, 1, 16), "cuda", torch.float32),
    )


def test_b01_masked_efficient_attention_keeps_broadcast_heads() -> None:
    """B01: k and v broadcast over heads, with a mask, on CUDA's efficient kernel."""
    outcome = apply_pass(efficient_on_cuda(16, mask=True))
    assert standins.copies_in(outcome.after) == 1
    assert set(outcome.reasons) <= {"broadcast-stride", "tag-condition", "not-a-layout-copy"}
    assert outcome.reasons
    assert all(decision.detail for decision in outcome.report.copies)


def test_b01_efficient_attention_is_no_blanket_refusal() -> None:
    """B01: views of a packed buffer, no mask, on the same kernel: the copies go."""

    def forward(qkv: Tensor) -> Tensor:
        q, k, v = (t.view(1, 16, 4, 64).transpose(1, 2) for t in qkv.split(256, -1))
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        return aten._scaled_dot_product_efficient_attention(q, k, v, None, False)[0]

    outcome = apply_pass(trace_fake(forward, ((1, 16, 768), "cuda", torch.float16)))
    assert outcome.verdicts == ALL_REMOVED


def test_b01_stride_0_reaches_no_op_that_does_not_admit_it() -> None:
    """B01: a kernel that reads rows but not stride 0."""
    tag("blind")

    def forward(q: Tensor, kv: Tensor) -> Tensor:
        k, v = (t[:, None].expand(TOKENS, HEADS, HEAD_DIM).contiguous() for t in (kv, kv * 2))
        return standins.blind(q, k, v)

    outcome = decide(forward, torch.randn(TOKENS, HEADS, HEAD_DIM), torch.randn(TOKENS, HEAD_DIM))
    assert reasons(outcome, "k", "v") <= {
        *("broadcast-stride", "not-a-layout-copy", "producer-fused"),
    }


def test_b05_one_call_does_not_show_what_the_second_does() -> None:
    """B05: a kernel that densifies on its first call passes once; the second run tells."""
    tag("first_call_only")
    gm = trace(layer(standins.first_call_only), *projection())
    outcome = apply_pass(gm)
    assert outcome.verdicts == ALL_REMOVED, "the tag is a lie, and the pass believes it"
    inputs = gm.meta["inputs"]
    standins.reset()
    first = standins.run_graph(outcome.after, standins.fresh(inputs, 1))
    second = standins.run_graph(outcome.after, standins.fresh(inputs, 2))
    standins.reset()
    standins.assert_same(first, standins.run_graph(gm, standins.fresh(inputs, 1)))
    with pytest.raises(AssertionError):
        standins.assert_same(second, standins.run_graph(gm, standins.fresh(inputs, 2)))


def test_b05_unverified_kernel_keeps_its_copies() -> None:
    """B05: nobody vouches for the kernel, so both calls are right."""
    outcome = decide(layer(standins.first_call_only), *projection())
    assert outcome.reasons == ["untagged-op"] * 3


def version_unknown(site: Any) -> str | None:
    return "the kernel's version cannot be read"


def test_b05_tag_that_needs_a_version_keeps_without_one() -> None:
    """B05: the condition cannot be met, and the report says why."""
    tag("first_call_only", when=version_unknown)
    outcome = decide(layer(standins.first_call_only), *projection())
    assert outcome.reasons == ["tag-condition"] * 3
    assert "version cannot be read" in outcome.detail("k")


INT32 = qkvpass.StrideContract(max_offset=2**31 - 1)


@pytest.mark.parametrize(
    ("tokens", "contract", "reason"),
    [
        (100_000, INT32, "offset-range"),
        (1_000, INT32, "removed"),
        (100_000, qkvpass.StrideContract(), "removed"),
    ],
    ids=["past-int32", "within", "int64-safe"],
)
def test_b06_int32_offsets(tokens: int, contract: qkvpass.StrideContract, reason: str) -> None:
    """B06: the token stride triples, and 56 heads of 128 pass 2**31 near 100,000 tokens."""
    tag("aware", contract=contract)

    def forward(qkv: Tensor) -> Tensor:
        q, k, v = (t.view(-1, 56, 128).contiguous() for t in qkv.split(7168, -1))
        return standins.aware(q, k, v)

    outcome = apply_pass(trace_fake(forward, ((tokens, 21504), "cpu", torch.float16)))
    assert outcome.reasons == [reason] * 3


@pytest.mark.parametrize(
    ("most", "reason"), [(None, "offset-range"), (1000, "removed")], ids=["unbounded", "bounded"]
)
def test_b06_symbolic_tokens_need_a_bound(most: int | None, reason: str) -> None:
    """B06: an unbounded number of tokens is kept, a known bound is used, no guard is added."""
    tag("aware", contract=INT32)
    qkv = packed()
    torch._dynamo.mark_dynamic(qkv, 0, **({"min": 2, "max": most} if most else {}))
    gm = trace(lambda qkv: standins.aware(*copied(qkv)), qkv, dynamic=None)
    value = next(iter(gm.graph.find_nodes(op="placeholder"))).meta["val"]
    env = (value.node if isinstance(value, torch.SymInt) else value.fake_mode).shape_env
    guards = len(env.guards)
    outcome = apply_pass(gm)
    assert len(env.guards) == guards
    standins.verify(outcome)
    assert outcome.reasons == [reason] * 3


def multi_query(op: Callable[..., Tensor]) -> Callable[[Tensor], Tensor]:
    def forward(qkv: Tensor) -> Tensor:
        q, k, v = qkv.view(64, 1, 18, 64).split([16, 1, 1], 2)
        return op(q.contiguous(), k.contiguous(), v.contiguous())

    return forward


def test_b07_unequal_split_is_matched() -> None:
    """B07: sixteen query heads and one for each of k and v; the op is untagged."""
    qkv = torch.randn(64, 18 * 64, dtype=torch.float16)
    outcome = decide(multi_query(standins.blind), qkv)
    assert outcome.verdicts == dict.fromkeys("qkv", "untagged-op")


def test_b07_unequal_split_goes_for_an_op_that_reads_strides() -> None:
    """B07: the same graph with a capable kernel."""
    tag("aware")
    qkv = torch.randn(64, 18 * 64, dtype=torch.float16)
    outcome = decide(multi_query(standins.aware), qkv)
    assert outcome.verdicts == ALL_REMOVED
    assert all(call.one_storage for call in outcome.calls)


def flash_on_cuda() -> GraphModule:
    def forward(qkv: Tensor) -> Tensor:
        q, k, v = (t.view(4, 16, 4, 64).permute(0, 2, 1, 3) for t in qkv.split(256, -1))
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        out = aten._scaled_dot_product_flash_attention(q, k, v)[0]
        return out.transpose(1, 2).contiguous()

    return trace_fake(forward, ((4, 16, 768), "cuda", torch.bfloat16))


def moved_to(gm: GraphModule, device: str) -> GraphModule:
    """``gm`` with its fake values said to be on a device that this build of torch lacks."""
    for node in gm.graph.nodes:
        values = node.meta.get("val")
        for value in values if isinstance(values, (list, tuple)) else [values]:
            if isinstance(value, Tensor):
                value.fake_device = torch.device(device)
    return gm


UNVERIFIED = {"untagged-op", "tag-condition", "dense-only-op"}


def test_b08_mps_is_not_cuda() -> None:
    """B08: the tag holds by device: the same op on MPS keeps every copy in front of it."""
    on_cuda = apply_pass(flash_on_cuda())
    assert {on_cuda.verdicts[name] for name in "qkv"} == {"removed"}
    on_mps = apply_pass(moved_to(flash_on_cuda(), "mps"))
    assert reasons(on_mps, "q", "k", "v") <= UNVERIFIED
    assert not on_mps.report.removed


def test_b08_mps_own_kernel_is_unverified() -> None:
    """B08: MPS has an op of its own for this, and nobody has tried it."""
    gm = moved_to(flash_on_cuda(), "mps")
    (attention,) = standins.nodes_of(gm, aten._scaled_dot_product_flash_attention.default)
    attention.target = aten._scaled_dot_product_attention_math_for_mps.default
    outcome = apply_pass(gm)
    assert reasons(outcome, "q", "k", "v") <= UNVERIFIED
    assert not outcome.report.removed


def test_b08_tiny_shapes_on_the_cpu() -> None:
    """B08: the shapes of the report, where they can run: removed, and the bits are the same."""

    def forward(qkv: Tensor) -> Tensor:
        q, k, v = (t.permute(0, 2, 1, 3).contiguous() for t in qkv.unbind(2))
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(84, 3, 192)

    outcome = decide(forward, torch.randn(84, 3, 3, 3, 64))
    assert reasons(outcome, "q", "k", "v") == {"removed"}


def test_b09_same_graph_two_platforms(monkeypatch: pytest.MonkeyPatch) -> None:
    """B09: on a ROCm build the same graph keeps its copies, and the report names the platform."""
    on_cuda = apply_pass(flash_on_cuda())
    assert reasons(on_cuda, "q", "k", "v") == {"removed"}
    monkeypatch.setattr(torch.version, "hip", "6.2")
    on_rocm = apply_pass(flash_on_cuda())
    assert not on_rocm.report.removed
    assert reasons(on_rocm, "q", "k", "v") <= UNVERIFIED
    assert re.search("rocm|hip", on_rocm.detail("q"), re.IGNORECASE)


def test_b09_user_tag_overrides_the_platform(monkeypatch: pytest.MonkeyPatch) -> None:
    """B09: unless explicitly tagged."""
    monkeypatch.setattr(torch.version, "hip", "6.2")
    qkvpass.register_stride_tag(
        "aten::_scaled_dot_product_flash_attention",
        operands=("query", "key", "value"),
        contract=qkvpass.StrideContract(output="fake"),
    )
    assert reasons(apply_pass(flash_on_cuda()), "q", "k", "v") == {"removed"}


def vector_loads(start: int) -> Callable[[Tensor], Tensor]:
    """q, k and v from column ``start`` on, into a kernel that loads four elements at once."""

    def forward(x: Tensor, weight: Tensor) -> Tensor:
        return standins.aligned(*copied((x @ weight)[:, start : start + 3 * WIDTH]), 4)

    return forward


@pytest.mark.parametrize(
    ("columns", "start", "reason"),
    [(3 * WIDTH, 0, "removed"), (3 * WIDTH + 1, 0, "alignment"), (3 * WIDTH + 4, 2, "alignment")],
    ids=["holds", "stride", "offset"],
)
def test_b10_alignment(columns: int, start: int, reason: str) -> None:
    """B10: an offset or a stride that is no multiple of four elements keeps the copies."""
    tag("aligned", contract=qkvpass.StrideContract(alignment=16))
    outcome = decide(vector_loads(start), torch.randn(TOKENS, 8), torch.randn(8, columns))
    assert outcome.reasons == [reason] * 3


def test_b10_a_graph_input_may_start_anywhere() -> None:
    """B10: nothing guards the storage offset of an input, so its address is not known."""

    def forward(buffer: Tensor) -> Tensor:
        return standins.aligned(*copied(buffer), 4)

    storage = torch.randn(TOKENS * 3 * WIDTH + 5)
    for contract, expected in ((16, "alignment"), (None, "removed")):
        tag("aligned", contract=qkvpass.StrideContract(alignment=contract))
        torch._dynamo.reset()
        compiled = torch.compile(forward, backend=qkvpass.backend)
        first, second = (storage[n:][: TOKENS * 3 * WIDTH].view(TOKENS, -1) for n in (0, 5))
        with qkvpass.capture() as reports:
            assert torch.equal(compiled(first), forward(first))
        assert [str(copy.reason) for copy in reports[0].copies] == [expected] * 3
        if contract is None:  # the author asks nothing of the address, but the kernel does
            with pytest.raises(RuntimeError, match="no multiple of 4"):
                compiled(second)
        else:
            assert torch.equal(compiled(second), forward(second))


def test_b10_unknown_alignment_is_kept() -> None:
    """B10: the row stride is a symbol of which nothing is known."""
    tag("aligned", contract=qkvpass.StrideContract(alignment=16))
    inputs = torch.randn(TOKENS, 8), torch.randn(8, 3 * WIDTH + 4)
    outcome = decide(vector_loads(0), *inputs, dynamic=True)
    assert outcome.reasons == ["alignment"] * 3


def test_b10_the_kernel_would_have_noticed() -> None:
    """B10: with a contract that asks for too little, the kernel raises: these tests can fail."""
    tag("aligned", contract=qkvpass.StrideContract(alignment=1))
    with pytest.raises(RuntimeError, match="no multiple of 4"):
        decide(vector_loads(0), torch.randn(TOKENS, 8), torch.randn(8, 3 * WIDTH + 1))


def test_b12_query_alone_in_front_of_a_kernel_that_takes_its_pointer() -> None:
    """B12: k and v come from a cache, only q is a slice of the packed buffer; four rows."""

    def decode(x: Tensor, weight: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return standins.blind(heads((x @ weight)[:, :WIDTH]).contiguous(), k, v)

    cache = (torch.randn(4, HEADS, HEAD_DIM), torch.randn(4, HEADS, HEAD_DIM))
    outcome = decide(decode, torch.randn(4, 12), torch.randn(12, 3 * WIDTH), *cache)
    assert outcome.verdicts == {"q": "untagged-op"}


# (b) Inductor layout constraints and custom ops


@pytest.mark.parametrize("name", ["aware", "exact", "fixed", "flexible"])
def test_b14_kernel_really_gets_the_strided_views(name: str) -> None:
    """B14: at run time, from one storage, with fewer kernels, whatever the op's layout tag."""
    if name != "flexible":  # that one is PyTorch's own word for it
        tag(name)
    stock, ours = compile_pair(layer(getattr(standins, name)), *projection())
    assert [str(c.reason) for r in ours.reports for c in r.copies] == ["removed"] * 3
    for call in ours.seen(name):
        assert call.strides == (STRIDED,) * 3
        assert [seen.offset for seen in call.tensors] == [0, WIDTH, 2 * WIDTH]
        assert call.one_storage
    assert all(call.strides == (DENSE,) * 3 for call in stock.seen(name))
    assert ours.kernels < stock.kernels


def test_b14_no_win_is_claimed_where_inductor_densifies() -> None:
    """B14: ``needs_contiguous_strides`` wins over the user's word, because Inductor obeys it."""
    tag("contiguous")
    stock, ours = compile_pair(layer(standins.contiguous), *projection())
    assert [str(c.reason) for r in ours.reports for c in r.copies] == ["dense-only-op"] * 3
    assert all(call.strides == (DENSE,) * 3 for call in ours.seen("contiguous"))
    assert ours.kernels == stock.kernels


def transposed(op: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return op(*(t.transpose(1, 2).contiguous() for t in (q, k, v))) * 2

    return forward


def head_major() -> list[Tensor]:
    return [torch.randn(1, 4, 5, HEAD_DIM) for _ in range(3)]


@pytest.mark.parametrize("output", [None, "dense"])
def test_b15_fake_that_says_like_q(output: str | None) -> None:
    """B15: the real kernel returns dense, its fake says otherwise: kept, and nothing is raised."""
    tag("liar", contract=qkvpass.StrideContract(alignment=1, output=output))
    outcome = apply_pass(trace(transposed(standins.liar), *head_major(), dynamic=True))
    assert outcome.verdicts["q"] == "output-layout"
    assert "liar" in outcome.detail("q")
    _, ours = compile_pair(transposed(standins.liar), *head_major(), dynamic=True)
    assert all(call.tensors[0].dense for call in ours.seen("liar"))


def test_b15_a_tag_that_lies_as_the_fake_does_is_noticed() -> None:
    """B15: removed on the tag's word, it ends in the assertion that users met."""
    tag("liar", contract=qkvpass.StrideContract(output="like:q"))

    def forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return transposed(standins.liar)(q, k, v).transpose(1, 2).contiguous()

    with pytest.raises(AssertionError, match="stride"):
        compile_pair(forward, *head_major())


def test_b15_honest_fake_is_fine() -> None:
    """B15: a kernel that returns dense, and says so, needs no copies."""
    tag("aware", contract=qkvpass.StrideContract(alignment=1))
    _, ours = compile_pair(transposed(standins.aware), *head_major(), dynamic=True)
    assert all(not seen.dense for call in ours.seen("aware") for seen in call.tensors)


def test_b16_triton_kernel_keeps_its_dense_operand() -> None:
    """B16: a user's Triton kernel has the dense strides baked in as constants."""
    from torch._higher_order_ops.triton_kernel_wrap import triton_kernel_wrapper_functional

    tag("aware")
    gm = trace(layer(standins.aware), *projection())
    (attention,) = standins.nodes_of(gm, torch.ops.standin.aware.default)
    q = attention.args[0]
    with gm.graph.inserting_before(attention):
        hop = gm.graph.call_function(
            triton_kernel_wrapper_functional,
            kwargs={
                "kernel_idx": 0,
                "constant_args_idx": 0,
                "grid": [(1, 1, 1)],
                "tma_descriptor_metadata": {},
                "kwargs": {"x": q},
                "tensors_to_clone": [],
            },
        )
    hop.meta["val"] = {}
    outcome = apply_pass(gm)
    assert outcome.verdicts["q"] in {"subgraph-boundary", "opaque-consumer"}
    assert "triton_kernel_wrapper" in outcome.detail("q")
    assert reasons(outcome, "k", "v") == {"removed"}


@pytest.mark.parametrize("name", ["aware", "blind"])
def test_b16_copies_that_enter_a_subgraph_stay(name: str) -> None:
    """B16: any other higher-order op is as opaque, and the graph inside it is compiled apart."""
    tag("aware")
    op = getattr(standins, name)

    @torch.compiler.nested_compile_region
    def region(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return op(q, k, v) * 2

    def forward(x: Tensor, weight: Tensor) -> Tensor:
        # Twice, for a region that is used once is inlined.
        return region(*copied(x @ weight)) + region(*copied(x @ (weight * 2)))

    _, ours = compile_pair(forward, *projection())
    assert all(call.strides == (DENSE,) * 3 for call in ours.seen(name))


NO_OFFSET = qkvpass.StrideContract(allow_storage_offset=False)


def test_b17_offset_alone_is_a_layout() -> None:
    """B17: equal sizes and strides are not enough; k and v start inside the buffer."""
    tag("offset_reader", contract=NO_OFFSET)

    def forward(stacked: Tensor) -> Tensor:
        return standins.offset_reader(*(t.clone() for t in stacked.unbind(0)))

    stacked = torch.randn(3, TOKENS, HEADS, HEAD_DIM)
    # Inductor's own passes drop such a clone before the slot that qkvpass runs in.
    outcome = decide(forward, stacked, slot="joint_custom_pre_pass")
    assert reasons(outcome, "k", "v") == {"storage-offset"}

    eager = forward(stacked)
    stock, ours = compile_pair(forward, stacked)
    offsets = [
        [seen.offset for seen in run.seen("offset_reader")[0].tensors] for run in (stock, ours)
    ]
    assert offsets[0] == offsets[1], "wherever stock is wrong, so are we, and no further"
    assert eager.shape == stock.outputs[0][0].shape


def test_b17_packed_views_without_offsets() -> None:
    """B17: q starts at 0 and may go, k and v may not."""
    tag("offset_reader", contract=NO_OFFSET)
    outcome = decide(layer(standins.offset_reader), *projection())
    assert outcome.verdicts == {"q": "removed", "k": "storage-offset", "v": "storage-offset"}


def test_b17_the_kernel_would_have_noticed() -> None:
    """B17: tagged as safe at any offset, it is wrong: these tests can fail."""
    tag("offset_reader")
    with pytest.raises(AssertionError, match="not equal"):
        decide(layer(standins.offset_reader), *projection())


# (c) mutation and functionalization


def normed_in_place(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    qkv = x @ weight
    q, k, v = copied(qkv)
    standins.norm_(q, k)
    return standins.aware(q, k, v), qkv


def test_b20_in_place_op_keeps_the_copies_that_it_writes() -> None:
    """B20: without them the writes would show in the packed buffer, which is read later."""
    tag("aware")
    outcome = decide(normed_in_place, *projection())
    assert outcome.verdicts == {"q": "mutated", "k": "mutated", "v": "removed"}
    assert "norm_" in outcome.detail("q")


def test_b20_through_the_whole_compiler() -> None:
    """B20: v is a view of the packed buffer at run time, q and k are not."""
    tag("aware")
    stock, ours = compile_pair(normed_in_place, *projection())
    for call in ours.seen("aware"):
        assert call.strides == (DENSE, DENSE, STRIDED)
    assert all(call.strides == (DENSE, DENSE) for call in ours.seen("norm_"))
    assert ours.kernels < stock.kernels


def normed_by(norm: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    def forward(x: Tensor, weight: Tensor) -> Tensor:
        q, k, v = copied(x @ weight)
        return standins.aware(norm(q), norm(k), v)

    return forward


def test_b21_opaque_norm_keeps_its_dense_inputs() -> None:
    """B21: the norm ignores strides; v goes straight to attention and is free."""
    tag("aware")
    outcome = decide(normed_by(standins.rms_norm), *projection())
    assert outcome.verdicts == {"q": "opaque-consumer", "k": "opaque-consumer", "v": "removed"}
    assert "rms_norm" in outcome.detail("q")


def test_b21_norm_that_learnt_strides() -> None:
    """B21: once the norm is registered, all three go."""
    tag("aware")
    tag("rms_norm_strided", "x")
    outcome = decide(normed_by(standins.rms_norm_strided), *projection())
    assert outcome.reasons == ["removed"] * 3
    assert all(call.strides == (STRIDED,) for call in outcome.only("rms_norm_strided"))


def test_b22_two_layers_and_one_writes_in_place() -> None:
    """B22: the layer with the in-place op keeps q and k, the other one loses all three."""
    tag("aware")

    def forward(x: Tensor, first: Tensor, second: Tensor) -> Tensor:
        out, _ = normed_in_place(x, first)
        return standins.aware(*copied(out.reshape(-1, WIDTH) @ second))

    args = (torch.randn(TOKENS, 12), torch.randn(12, 3 * WIDTH), torch.randn(WIDTH, 3 * WIDTH))
    outcome = decide(forward, *args)
    assert [str(c.reason) for c in outcome.report.copies].count("removed") == 4
    assert outcome.reasons.count("mutated") == 2


def test_b22_in_place_op_on_views_of_the_packed_buffer() -> None:
    """B22: both arguments are views of one base; the copies come behind the writes."""
    tag("aware")

    def forward(x: Tensor, weight: Tensor) -> Tensor:
        q, k, v = (heads(t) for t in (x @ weight).split(WIDTH, -1))
        standins.norm_(q, k)
        return standins.aware(q.contiguous(), k.contiguous(), v.contiguous())

    decide(forward, *projection())
    compile_pair(forward, *projection())


# (d) custom graph passes: cache, dynamic, export, training, split


def compiled_once(model: Callable[..., Any], *args: Any) -> tuple[standins.Call, qkvpass.Report]:
    """Compile in fresh Dynamo state, run, and return what attention saw and the report."""
    torch._dynamo.reset()
    with qkvpass.capture() as reports, standins.recorded() as calls, torch.no_grad():
        torch.compile(model, backend=qkvpass.backend)(*args)
    return next(call for call in calls if call.op == "aware"), reports[0]


def test_b24_second_compile_is_a_cache_hit() -> None:
    """B24: nothing is bypassed, the pass body does not run again, the result is still strided."""
    tag("aware")
    with caches_on():
        call, report = compiled_once(layer(standins.aware), *projection())
        cold = graph_caches.events()
        again, cached = compiled_once(layer(standins.aware), *projection())
        warm = graph_caches.events()
    assert cold["miss"] and not cold["hit"] and not cold["bypass"]
    assert warm["hit"] and not warm["miss"] and not warm["bypass"]
    assert call.strides == again.strides == (STRIDED,) * 3
    assert not report.cached
    assert cached.cached
    assert cached.copies == report.copies


def test_b25_registry_is_part_of_the_cache_key() -> None:
    """B25: un-tagged, the copies come back; tagged again, the first artifact is found."""
    model, args = layer(standins.aware), projection()
    with caches_on():
        tag("aware")
        assert compiled_once(model, *args)[0].strides == (STRIDED,) * 3
        assert graph_caches.events()["miss"]
        qkvpass.unregister_stride_tag("standin::aware")
        assert compiled_once(model, *args)[0].strides == (DENSE,) * 3
        assert graph_caches.events()["miss"]
        tag("aware")
        assert compiled_once(model, *args)[0].strides == (STRIDED,) * 3
        assert not graph_caches.events()["miss"]


def test_b25_conditions_and_contracts_are_part_of_the_cache_key() -> None:
    """B25: another version of a condition, or another contract, is another pass."""
    model, args = layer(standins.aware), projection()
    with caches_on():
        tag("aware", when=lambda site: None, version="1")
        assert compiled_once(model, *args)[0].strides == (STRIDED,) * 3
        tag("aware", when=lambda site: "not today", version="2")
        assert compiled_once(model, *args)[0].strides == (DENSE,) * 3
        tag("aware", contract=NO_OFFSET)
        assert compiled_once(model, *args)[0].strides == (STRIDED, DENSE, DENSE)


def test_b25_uuid_follows_what_the_pass_can_do() -> None:
    """B25: equal state, equal uuid; every change of state changes it."""
    uuids = [qkvpass.StridedQKVPass().uuid(), qkvpass.StridedQKVPass().uuid()]
    assert uuids[0] == uuids[1]
    tag("aware")
    uuids.append(qkvpass.StridedQKVPass().uuid())
    tag("aware", contract=NO_OFFSET)
    uuids.append(qkvpass.StridedQKVPass().uuid())
    tag("aware", when=version_unknown)
    uuids.append(qkvpass.StridedQKVPass().uuid())
    assert len({repr(uuid) for uuid in uuids}) == 4
    tag("aware", when=lambda site: None)
    assert qkvpass.StridedQKVPass().uuid() is None, "a lambda cannot be told from another"


@pytest.mark.parametrize("mode", ["static", "dynamic", "marked"])
def test_b26_dynamic_tokens_match_like_static_ones(mode: str) -> None:
    """B26: the same number of copies goes however the token count is spelled."""
    tag("aware")
    x, weight = projection()
    if mode == "marked":
        torch._dynamo.mark_dynamic(x, 0)
    dynamic = {"static": False, "dynamic": True, "marked": None}[mode]
    outcome = decide(layer(standins.aware), x, weight, dynamic=dynamic)
    assert outcome.verdicts == ALL_REMOVED


def test_b26_no_recompile_for_another_token_count() -> None:
    """B26: nothing was specialised: one compile serves both."""
    tag("aware")
    x, weight = projection()
    torch._dynamo.mark_dynamic(x, 0)
    model = layer(standins.aware)
    compiled = torch.compile(model, backend=qkvpass.backend)
    with torch._dynamo.config.patch(error_on_recompile=True), torch.no_grad():
        for tokens in (TOKENS, 9, 17):
            given = x if tokens == TOKENS else torch.randn(tokens, 12)
            with standins.recorded("aware") as calls:
                result = compiled(given, weight)
            assert [call.strides for call in calls] == [(STRIDED,) * 3]
            torch.testing.assert_close(result, model(given, weight))


SPELLINGS: dict[str, Callable[[Tensor], Any]] = {
    "split": lambda qkv: (heads(t) for t in qkv.split(WIDTH, -1)),
    "split-sizes": lambda qkv: (heads(t) for t in qkv.split([WIDTH] * 3, -1)),
    "three-splits": lambda qkv: (heads(qkv.split(WIDTH, -1)[i]) for i in range(3)),
    "chunk": lambda qkv: (heads(t) for t in qkv.chunk(3, -1)),
    "tensor-split": lambda qkv: (heads(t) for t in qkv.tensor_split(3, -1)),
    "slices": lambda qkv: (heads(qkv[:, i * WIDTH : (i + 1) * WIDTH]) for i in range(3)),
    "narrow": lambda qkv: (heads(qkv.narrow(1, i * WIDTH, WIDTH)) for i in range(3)),
    "view-unbind": lambda qkv: qkv.view(-1, 3, HEADS, HEAD_DIM).unbind(1),
    "view-select": lambda qkv: (qkv.view(-1, 3, HEADS, HEAD_DIM)[:, i] for i in range(3)),
    "permute-unbind": lambda qkv: qkv.view(-1, 3, HEADS, HEAD_DIM).permute(1, 0, 2, 3).unbind(0),
}


def spelled(spelling: str) -> Callable[[Tensor, Tensor], Tensor]:
    def forward(x: Tensor, weight: Tensor) -> Tensor:
        return standins.aware(*(t.contiguous() for t in SPELLINGS[spelling](x @ weight)))

    return forward


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_b27_every_spelling_of_the_split(spelling: str, dynamic: bool) -> None:
    """B27: all of them lose three copies."""
    tag("aware")
    x, weight = projection()
    if dynamic:
        torch._dynamo.mark_dynamic(x, 0)
    outcome = decide(spelled(spelling), x, weight, dynamic=None if dynamic else False)
    assert outcome.verdicts == ALL_REMOVED
    assert standins.copies_in(outcome.after) == 0
    assert all(call.strides == (STRIDED,) * 3 and call.one_storage for call in outcome.calls)


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_b27_every_spelling_on_a_post_grad_graph(spelling: str) -> None:
    """B27: where other engines hook passes, ``view`` is called ``reshape``."""
    tag("aware")
    gm = trace(spelled(spelling), *projection())
    view_to_reshape(gm)
    post_grad_passes(gm, is_inference=True)
    outcome = apply_pass(gm)
    standins.verify(outcome)
    assert outcome.verdicts == ALL_REMOVED


def test_b27_nothing_matched_is_said() -> None:
    """B27: a fusion that silently stops is the bug; the report says what was looked for."""
    outcome = decide(lambda x, weight: torch.softmax(x @ weight, -1), *projection())
    assert not outcome.report.copies
    assert "nothing matched" in str(outcome.report)
    views = decide(
        lambda x, w: standins.aware(*(heads(t) for t in (x @ w).chunk(3, -1))), *projection()
    )
    assert not views.report.copies
    assert "standin::aware" in str(views.report)


def test_b28_unbacked_sizes() -> None:
    """B28: a size that is only known at run time raises nothing, and an empty batch works."""
    tag("aware")

    def forward(qkv: Tensor, count: Tensor) -> Tensor:
        tokens = count.item()
        torch._check(tokens >= 0)
        torch._check(tokens <= qkv.shape[0])
        rows = qkv.narrow(0, 0, tokens)
        q, k, v = (t.view(tokens, HEADS, HEAD_DIM).contiguous() for t in rows.split(WIDTH, -1))
        return standins.aware(q, k, v)

    qkv = packed()
    graphs = []
    for backend in ("inductor", qkvpass.backend):
        torch._dynamo.reset()
        counters.clear()
        with torch._dynamo.config.patch(capture_scalar_outputs=True), torch.no_grad():
            compiled = torch.compile(forward, backend=backend, fullgraph=True)
            with qkvpass.capture() as reports:
                results = {n: compiled(qkv, torch.tensor(n)) for n in (5, 0)}
        for n, result in results.items():
            torch.testing.assert_close(result, forward(qkv, torch.tensor(n)))
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[0] == graphs[1], "a guard of ours made Dynamo compile once more"
    assert {str(c.reason) for r in reports for c in r.copies} <= {"removed", "unbacked-shape"}
    assert all(len(report.copies) == 3 for report in reports)


class Flatten(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.contiguous().view(-1)


@pytest.mark.parametrize("strict", [False, True], ids=["non-strict", "strict"])
def test_b29_exported_graph_without_a_copy_is_left_alone(strict: bool) -> None:
    """B29: export drops the copy by itself; there is nothing for the pass to do or to break."""
    program = torch.export.export(Flatten(), (torch.randn(4, 6),), strict=strict)
    gm = program.run_decompositions().module()
    outcome = apply_pass(gm)
    assert str(outcome.after.graph) == str(outcome.before.graph)
    assert not outcome.report.copies


def test_b29_view_that_needs_the_copy_keeps_it() -> None:
    """B29: merging tokens and heads is no view of the packed buffer."""
    tag("aware")

    def forward(x: Tensor, weight: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q = heads((x @ weight)[:, :WIDTH]).contiguous().view(-1, HEAD_DIM)
        return standins.aware(q, k, v)

    keys = (torch.randn(5, HEAD_DIM), torch.randn(5, HEAD_DIM))
    outcome = decide(forward, *projection(), *keys)
    assert outcome.verdicts == {"q": "view-needs-dense"}
    assert "view" in outcome.detail("q")


def test_b29_view_that_does_not_need_the_copy() -> None:
    """B29: merging heads and head size is one."""
    tag("aware")

    def forward(x: Tensor, weight: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q = heads((x @ weight)[:, :WIDTH]).contiguous().view(TOKENS, WIDTH)
        return standins.aware(q, k, v)

    keys = (torch.randn(5, WIDTH), torch.randn(5, WIDTH))
    assert decide(forward, *projection(), *keys).verdicts == {"q": "removed"}


def test_b30_forward_and_lazily_compiled_backward() -> None:
    """B30: both directions get the views, and nothing of it stays in Inductor's config."""
    tag("aware")
    tag("aware_bwd", backward_of="standin::aware")
    slots = [
        name
        for name in dir(inductor_config)
        if name.endswith(("custom_pre_pass", "custom_post_pass"))
    ]
    before = {name: getattr(inductor_config, name) for name in slots}
    _, ours = compile_pair(layer(standins.aware), *projection(), train=True)
    assert {name: getattr(inductor_config, name) for name in slots} == before
    for name in ("aware", "aware_bwd"):
        assert all(call.strides == (STRIDED,) * 3 and call.one_storage for call in ours.seen(name))
    later = standins.run(layer(standins.aware), *projection(), train=True)
    assert not later.reports
    assert all(call.strides == (DENSE,) * 3 for call in later.seen("aware"))


def test_b30_backward_that_nobody_vouches_for_keeps_the_copies() -> None:
    """B30: the saved tensors would become views, which this backward misreads."""
    tag("aware_untagged_bwd")
    outcome = decide(layer(standins.aware_untagged_bwd), *projection(), train=True)
    assert outcome.reasons == ["backward-not-capable"] * 3
    assert "untagged_bwd" in outcome.detail("k")
    assert decide(layer(standins.aware_untagged_bwd), *projection()).verdicts == ALL_REMOVED


def test_b32_permuted_key_is_no_transpose() -> None:
    """B32: B = T = H = 4, so no shape tells (B, H, D, S) from (B, H, S, D); the dims do."""
    tag("aligned")

    def forward(x: Tensor, weight: Tensor) -> Tensor:
        q, k, v = (t.view(4, 4, 4, 4) for t in (x @ weight).chunk(3, -1))
        q, v = q.transpose(1, 2).contiguous(), v.transpose(1, 2).contiguous()
        return standins.aligned(q, k.permute(0, 2, 3, 1).contiguous(), v, 1)

    outcome = decide(forward, torch.randn(4, 4, 12), torch.randn(12, 48))
    assert outcome.verdicts == {"q": "removed", "k": "last-dim-stride", "v": "removed"}


def test_b32_written_out_attention_equals_stock() -> None:
    """B32: stock Inductor is wrong on this module in 2.14; the pass changes nothing about it."""

    def forward(x: Tensor, weight: Tensor) -> Tensor:
        q, k, v = (t.view(4, 4, 4, 4) for t in (x @ weight).chunk(3, -1))
        q, k, v = q.transpose(1, 2), k.permute(0, 2, 3, 1), v.transpose(1, 2)
        return torch.softmax(q @ k * 0.5, -1) @ v

    compile_pair(forward, torch.randn(4, 4, 12), torch.randn(12, 48))


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(12, 3 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return standins.aware(*copied(self.qkv(x)))


def test_b34_pass_and_options_travel() -> None:
    """B34: pickled and deep-copied, they are the same pass."""
    strided = qkvpass.StridedQKVPass()
    for twin in (pickle.loads(pickle.dumps(strided)), copy.deepcopy(strided)):
        assert twin.uuid() == strided.uuid()
    pickle.dumps(qkvpass.inductor_options())
    copy.deepcopy(qkvpass.inductor_options())


@pytest.mark.parametrize("how", ["backend", "options"])
def test_b34_compiled_model_is_let_go(how: str) -> None:
    """B34: neither the pass, nor its reports, nor Inductor's config keep the model alive."""
    tag("aware")
    model = Encoder()
    gone = weakref.ref(model)
    options: dict[str, Any] = (
        {"backend": qkvpass.backend}
        if how == "backend"
        else {"options": qkvpass.inductor_options()}
    )
    compiled = torch.compile(model, **options)
    with qkvpass.capture() as reports, torch.no_grad():
        compiled(torch.randn(TOKENS, 12))
    assert reports[0].removed
    del model, compiled
    torch._dynamo.reset()
    gc.collect()
    assert gone() is None


def sdpa_inputs() -> tuple[Tensor, Tensor]:
    return torch.randn(2, TOKENS, 12), torch.randn(12, 3 * WIDTH)


def sdpa(x: Tensor, weight: Tensor, dense_q: bool = True) -> Tensor:
    q, k, v = (
        t.view(2, TOKENS, HEADS, HEAD_DIM).transpose(1, 2) for t in (x @ weight).chunk(3, -1)
    )
    q = q.contiguous() if dense_q else q
    return F.scaled_dot_product_attention(q, k.contiguous(), v.contiguous())


FOLLOWS_Q: dict[str, tuple[Callable[..., Tensor], set[str] | None]] = {
    # What the output's layout must serve; why q's copy stays, where it has one.
    "view": (
        lambda x, w: sdpa(x, w).view(2, HEADS * TOKENS, HEAD_DIM),
        {"output-layout", "view-needs-dense"},
    ),
    "transpose-view": (
        lambda x, w: sdpa(x, w, dense_q=False).transpose(1, 2).view(2, TOKENS, WIDTH),
        None,
    ),
    "returned": (sdpa, {"output-layout", "graph-output"}),
}


@pytest.mark.parametrize("use", FOLLOWS_Q)
def test_b35_output_layout_that_follows_q(use: str) -> None:
    """B35: each use of the output still runs, with stock's values and strides."""
    forward, kept = FOLLOWS_Q[use]
    outcome = decide(forward, *sdpa_inputs())
    assert reasons(outcome, "k", "v") == {"removed"}
    assert ("q" in outcome.verdicts) == (kept is not None)
    if kept is not None:
        assert outcome.verdicts["q"] in kept
    compile_pair(forward, *sdpa_inputs())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_b37_sdpa_on_the_cpu(dtype: torch.dtype) -> None:
    """B37: q's, k's and v's copies go, and the one behind the attention has become a no-op."""

    def forward(x: Tensor, weight: Tensor, out: Tensor) -> Tensor:
        return sdpa(x, weight).transpose(1, 2).reshape(2, TOKENS, WIDTH) @ out

    inputs = [t.to(dtype) for t in (*sdpa_inputs(), torch.randn(WIDTH, WIDTH))]
    outcome = decide(forward, *inputs)
    assert standins.copies_in(outcome.before) == 4
    assert reasons(outcome, "q", "k", "v") == {"removed"}
    assert outcome.reasons == ["removed"] * 3 + ["removed-cascade"]
    if dtype is not torch.float16:  # generated alike
        stock, ours = compile_pair(forward, *inputs)
        assert ours.kernels < stock.kernels


def test_b37_copy_behind_the_attention_that_is_returned() -> None:
    """B37: a no-op as well; if it stays, the report does not blame its layout."""

    def forward(x: Tensor, weight: Tensor) -> Tensor:
        return sdpa(x, weight).transpose(1, 2).reshape(2, TOKENS, WIDTH)

    outcome = decide(forward, *sdpa_inputs())
    assert reasons(outcome, "q", "k", "v") == {"removed"}
    assert outcome.verdicts[""] in {"removed-cascade", "graph-output"}


# (e) copies that users want gone, and one that they do not


def rearranged(qkv: Tensor) -> Tensor:
    """q and k stacked on the batch: a strided view for a batch of one, a copy for more."""
    batch, tokens = qkv.shape[:2]
    qk = qkv[:, :, :2].permute(2, 0, 1, 3, 4).reshape(2 * batch, tokens, HEADS, HEAD_DIM)
    q, k = standins.rotary(qk.contiguous()).chunk(2, 0)
    return standins.aware(q, k, qkv[:, :, 2].contiguous())


@pytest.mark.parametrize("batch", [1, 2])
def test_b40_opaque_rotary_keeps_its_dense_input(batch: int) -> None:
    """B40: for every batch size, whether or not the rearrangement had to copy."""
    tag("aware")
    outcome = decide(rearranged, torch.randn(batch, TOKENS, 3, HEADS, HEAD_DIM))
    assert outcome.verdicts["v"] == "removed"
    # For more than one, no strided view could replace the copy either.
    assert outcome.verdicts["q"] in {"opaque-consumer", "view-needs-dense"}
    assert all(call.tensors[0].dense for call in outcome.only("rotary"))


def test_b40_one_dynamic_compile_serves_both() -> None:
    """B40: the case that read out of bounds was the batch of one."""
    tag("aware")
    compiled = torch.compile(rearranged, backend=qkvpass.backend, dynamic=True)
    for batch in (2, 1, 3):
        qkv = torch.randn(batch, TOKENS, 3, HEADS, HEAD_DIM)
        with torch.no_grad():
            torch.testing.assert_close(compiled(qkv), rearranged(qkv))


# (f) backend registration, options, dumps


@pytest.mark.parametrize("how", ["backend", "options"])
def test_b41_equal_layers_compile_once(how: str) -> None:
    """B41: the backend is one object, and equal options are equal, so layers reuse one compile."""
    tag("aware")
    counters.clear()
    for _ in range(3):
        options: dict[str, Any] = (
            {"backend": qkvpass.backend}
            if how == "backend"
            else {"options": qkvpass.inductor_options()}
        )
        with torch.no_grad():
            torch.compile(Encoder(), **options)(torch.randn(TOKENS, 12))
    assert counters["stats"]["unique_graphs"] == 1


def test_b41_pass_objects_are_equal() -> None:
    """B41: a pass made anew is the same pass."""
    assert qkvpass.StridedQKVPass() == qkvpass.StridedQKVPass()
    assert hash(qkvpass.StridedQKVPass()) == hash(qkvpass.StridedQKVPass())


BY_NAME = """
import sys
import torch
assert "qkvpass" in torch._dynamo.list_backends(), torch._dynamo.list_backends()
assert "qkvpass" not in sys.modules
x = torch.randn(4)
assert torch.equal(torch.compile(lambda x: x + x, backend="qkvpass")(x), x + x)
assert "qkvpass" in sys.modules
try:
    torch.compile(lambda x: x + 1, backend="qkvpas")(x)
except torch._dynamo.exc.InvalidBackend as error:
    print("refused", error)
"""


def test_b43_backend_by_name(tmp_path: Path) -> None:
    """B43: by entry point, without an import; a misspelt name is refused by torch itself."""
    root = Path(qkvpass.__file__).parents[1]
    pyproject = (root / "pyproject.toml").read_text()
    (target,) = re.findall(r'entry-points\.torch_dynamo_backends\]\nqkvpass = "(.+)"', pyproject)
    # What an installer would write, so that the test does not depend on how this was installed.
    info = tmp_path / "qkvpass-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: qkvpass\nVersion: 0\n")
    (info / "entry_points.txt").write_text(f"[torch_dynamo_backends]\nqkvpass = {target}\n")
    path = os.pathsep.join([str(tmp_path), str(root)])
    done = subprocess.run(
        [sys.executable, "-c", BY_NAME],
        env={**os.environ, "PYTHONPATH": path},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert "refused" in done.stdout


def two_attentions(x: Tensor, weight: Tensor) -> Tensor:
    first = standins.aware(*copied(x @ weight))
    second = standins.blind(*copied(x @ (weight * 2)))
    return first + second


def test_b45_silent_unless_asked(
    capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """B45: nothing is printed or logged by a compile."""
    tag("aware")
    torch.compile(two_attentions, backend=qkvpass.backend)(*projection())
    captured = capfd.readouterr()
    assert "qkvpass" not in captured.out + captured.err
    assert not [r for r in caplog.records if r.name.startswith("qkvpass") and r.levelno > 20]


def test_b45_every_copy_has_a_verdict_and_a_source_line() -> None:
    """B45: one tagged and one untagged attention; from a cached compile too, which says so."""
    tag("aware")
    with caches_on():
        texts = []
        for cached in (False, True):
            report = compiled_once(two_attentions, *projection())[1]
            assert report.cached == cached
            verdicts = [(c.op, c.operand, str(c.reason)) for c in report.copies]
            assert sorted(verdicts) == sorted(
                [("standin::aware", name, "removed") for name in "qkv"]
                + [("standin::blind", name, "untagged-op") for name in "qkv"]
            )
            assert all(re.search(r"test_cases\.py:\d+$", c.source) for c in report.copies)
            assert all(c.detail for c in report.kept)
            assert report.before != report.after
            assert report.diff()
            texts.append(str(report))
    assert "cached" in texts[1] and "cached" not in texts[0]
    assert "untagged-op" in texts[0]
