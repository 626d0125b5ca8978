"""On a GPU: the families bit for bit, and a real Triton kernel whose constants follow."""

from __future__ import annotations

import sys
from pathlib import Path

import families
import pytest
import torch

import qkvpass
from qkvpass import triton_tags

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

LENGTHS = (300, 1023, 77)


def compiled(model, backend):
    torch._dynamo.reset()
    return torch.compile(model, backend=backend, dynamic=False)


SDPA_FAMILIES = [
    f for f in families.ALL if f.__name__.split("_")[0] not in ("F1", "F2", "F6", "F7", "F8")
]


@pytest.mark.parametrize("family", SDPA_FAMILIES, ids=lambda f: f.__name__)
@torch.no_grad()
def test_families_are_bit_identical_to_stock(family):
    model = family().to("cuda", torch.bfloat16)
    outputs = {}
    for backend in ("inductor", qkvpass.backend):
        run = compiled(model, backend)
        try:
            outputs[backend] = [run(x) for x in two_inputs(family)]
        except RuntimeError as mixed:  # constants that the module makes on the CPU
            pytest.skip(f"does not run on a GPU: {mixed}"[:200])
    for got, expected in zip(outputs[qkvpass.backend], outputs["inductor"]):
        assert torch.equal(got, expected) and got.stride() == expected.stride()


def two_inputs(family):
    for seed in range(2):
        torch.manual_seed(seed)
        yield families.example_input(family).to("cuda", torch.bfloat16)


def attention(call, heads, kv_heads, copies=True):
    import triton_varlen

    torch.manual_seed(0)
    call = {"direct": triton_varlen.launch, "op": triton_varlen.launch_op}[call]
    model = triton_varlen.Attention(heads, kv_heads, 72, call=call, copies=copies)
    return model.to("cuda", torch.bfloat16).eval()


def packed(heads):
    x = torch.randn(sum(LENGTHS), heads * 72, device="cuda", dtype=torch.bfloat16)
    return x, torch.tensor([0, *LENGTHS], device="cuda").cumsum(0).int(), max(LENGTHS)


@pytest.mark.parametrize("call", ["direct", "op"])
@pytest.mark.parametrize(("heads", "kv_heads"), [(16, 16), (16, 4)])
@torch.no_grad()
def test_a_triton_kernel_reads_q_k_v_by_stride_with_the_same_bits(call, heads, kv_heads):
    model = attention(call, heads, kv_heads)
    stock = compiled(model, "inductor")
    expected = [stock(*inputs) for inputs in fresh(heads)]
    with qkvpass.capture() as reports:
        ours = compiled(model, qkvpass.backend)
        got = [ours(*inputs) for inputs in fresh(heads)]
    assert [c.operand.upper() for r in reports for c in r.removed] == ["Q", "K", "V"]
    token = (heads + 2 * kv_heads) * 72
    for (out, seen), (wanted, dense) in zip(got, expected):
        assert torch.equal(out, wanted)
        assert seen[:6].tolist() == [token, 72] * 3
        assert dense[:6].tolist() == [heads * 72, 72, kv_heads * 72, 72, kv_heads * 72, 72]
        q, k, v = seen[6:].tolist()  # addresses: one buffer behind all three
        assert (k - q, v - q) == (2 * heads * 72, 2 * (heads + kv_heads) * 72)


def fresh(heads):
    for seed in range(2):
        torch.manual_seed(seed)
        yield packed(heads)


@torch.no_grad()
def test_with_stale_constants_the_numbers_are_wrong(monkeypatch):
    """The check above can fail: without the rewritten constants it does."""
    model, inputs = attention("direct", 16, 16), packed(16)
    expected, _ = compiled(model, "inductor")(*inputs)
    monkeypatch.setattr(triton_tags, "restated", lambda node: {})
    got, _ = compiled(model, qkvpass.backend)(*inputs)
    assert not torch.allclose(got, expected, rtol=0.1, atol=0.1)
