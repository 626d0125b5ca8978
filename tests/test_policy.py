"""What is legal but does not pay, and what must be decided together.

Each has a check that goes wrong if the copy is dropped: a kernel that reads v by k's
strides, memory counted while the graph runs, an operand that nobody copies for.
"""

from __future__ import annotations

import pytest
import standins
import torch
from torch.library import custom_op

import qkvpass
from qkvpass import Reason, decide, policy
from qkvpass.graph_pass import Options, StridedQKVPass

HEADS, DIM = 2, 8
WIDTH = HEADS * DIM
WEIGHT = torch.randn(WIDTH, 3 * WIDTH)


def split_heads(packed):
    return (t.view(-1, HEADS, DIM) for t in packed.split(WIDTH, -1))


# ------------------------------------------------------------------------------------------
# mixed-layout


@custom_op("standin::k_strides", mutates_args=())
def k_strides(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Reads v by the strides of k, as a kernel with one stride argument for both."""
    standins.note("k_strides", q, k, v)
    v = torch.as_strided(v, v.shape, k.stride(), v.storage_offset())
    return standins.attend(*(standins.by_stride(t) for t in (q, k, v)))


k_strides.register_fake(lambda q, k, v: q.new_empty(q.shape))


def together(x, w):
    q, k, v = (t.contiguous() for t in split_heads(x @ w))
    return k_strides(q, k, v)


def k_stays_dense(x, w):
    q, k, v = (t.contiguous() for t in split_heads(x @ w))
    return k_strides(q, k, v), standins.rms_norm(k)  # an opaque consumer of k's copy


CONTRACT = qkvpass.StrideContract(together=(("k", "v"),))


def test_k_and_v_go_together():
    qkvpass.register_stride_tag("standin::k_strides", operands=("q", "k", "v"), contract=CONTRACT)
    outcome = standins.decide(together, torch.randn(6, WIDTH), WEIGHT)
    assert outcome.verdicts == dict.fromkeys("qkv", "removed")


def test_where_k_must_stay_v_stays_with_it():
    qkvpass.register_stride_tag("standin::k_strides", operands=("q", "k", "v"), contract=CONTRACT)
    outcome = standins.decide(k_stays_dense, torch.randn(6, WIDTH), WEIGHT)
    assert outcome.verdicts == {"q": "removed", "k": "opaque-consumer", "v": "opaque-consumer"}


def test_one_layout_is_checked_even_where_only_v_has_a_copy():
    def only_v(x, w, k):
        q, _, v = split_heads(x @ w)
        return k_strides(q, k, v.contiguous())

    qkvpass.register_stride_tag("standin::k_strides", operands=("q", "k", "v"), contract=CONTRACT)
    inputs = torch.randn(6, WIDTH), WEIGHT, torch.randn(6, HEADS, DIM)
    outcome = standins.decide(only_v, *inputs)
    assert outcome.verdicts == {"v": "mixed-layout"} and "k and v" in outcome.detail("v")


def test_without_the_contract_the_kernel_goes_wrong():
    qkvpass.register_stride_tag("standin::k_strides", operands=("q", "k", "v"))
    with pytest.raises(AssertionError):
        standins.decide(k_stays_dense, torch.randn(6, WIDTH), WEIGHT)


# ------------------------------------------------------------------------------------------
# memory-pinned


def v_outlives_the_attention(x, w):
    """v is read again after the peak; q and k stay dense, in front of an opaque rope."""
    q, k, v = (t.contiguous() for t in split_heads(x @ w))
    q, k = standins.rope(q, k, torch.ones(1, 1, DIM))
    out = standins.aware(q, k, v)
    wide = standins.rms_norm(out.repeat(1, 1, 8))  # the peak
    return standins.aware(wide[..., :DIM].contiguous(), q, v)


def test_a_view_that_outlives_the_attention_would_pin_the_packed_buffer():
    standins.tag("aware")
    outcome = standins.decide(v_outlives_the_attention, torch.randn(64, WIDTH), WEIGHT)
    assert outcome.verdicts["v"] == "memory-pinned"
    assert "bytes more would be held at" in outcome.detail("v")


def held(outcome, position):
    """Bytes that storages of the projection hold once the first attention op has run."""
    nodes = list(outcome.graph.nodes)
    facts = qkvpass.match.Facts(outcome.graph)
    return sum(
        storage.size
        for storage in policy.Memory(facts, "inductor").storages.values()
        if storage.first <= position(nodes) <= storage.last
    )


def test_the_policy_can_be_wrong(monkeypatch):
    """Let through, the same graph holds more bytes after its attention op than before."""
    standins.tag("aware")
    monkeypatch.setattr(policy.Memory, "growth", lambda *args: None)
    outcome = standins.decide(v_outlives_the_attention, torch.randn(64, WIDTH), WEIGHT)
    assert outcome.verdicts["v"] == "removed"

    def behind_attention(nodes):
        return next(i for i, n in enumerate(nodes) if "aware" in str(n.target)) + 1

    assert held(outcome.after, behind_attention) > held(outcome.before, behind_attention)


def test_all_three_views_pin_no_more_than_three_copies():
    """Refusing one operand and taking the others can cost more than taking all."""

    def all_outlive(x, w):
        q, k, v = (t.contiguous() for t in split_heads(x @ w))
        out = standins.aware(q, k, v)
        return standins.aware(out, k, v) + standins.aware(q, out, v)

    standins.tag("aware")
    outcome = standins.decide(all_outlive, torch.randn(64, WIDTH), WEIGHT)
    assert outcome.verdicts == dict.fromkeys("qkv", "removed")


# ------------------------------------------------------------------------------------------
# no-gain


def head_major(t):
    return t.view(2, 8, HEADS, DIM).transpose(1, 2)


def pointwise_operands(x, w):
    """Parts of one relu: Inductor would run it once for each, gaps and all."""
    q, k, v = (head_major(p).contiguous() for p in torch.relu(x @ w).split(WIDTH, -1))
    return standins.aware(q, k, v)


def separate(x, a, b, c):
    """A relu for each operand: one kernel writes it, in either layout."""
    q, k, v = (head_major(torch.relu(x @ w)).contiguous() for w in (a, b, c))
    return standins.aware(q, k, v)


def separate_inputs():
    return [torch.randn(2, 8, WIDTH), *(torch.randn(WIDTH, WIDTH) for _ in range(3))]


def test_a_producer_that_writes_either_layout_gains_nothing():
    standins.tag("aware")
    outcome = standins.decide(separate, *separate_inputs())
    assert outcome.verdicts == dict.fromkeys("qkv", "no-gain")
    assert standins.copies_in(outcome.after) == 3


def test_but_in_eager_each_copy_is_a_kernel():
    standins.tag("aware")
    gm = standins.trace(separate, *separate_inputs())
    with qkvpass.capture() as reports:
        StridedQKVPass(Options(target="eager"))(gm.graph)
    assert [c.reason for c in reports[0].copies] == [Reason.REMOVED] * 3
    assert not any(c.folded for c in reports[0].copies)


def test_a_part_of_a_pointwise_result_is_producer_fused():
    standins.tag("aware")
    outcome = standins.decide(pointwise_operands, torch.randn(2, 8, WIDTH), WEIGHT)
    assert outcome.verdicts == dict.fromkeys("qkv", "producer-fused")


def test_an_empty_tensor_gains_nothing():
    standins.tag("aware")
    outcome = standins.decide(together_aware, torch.randn(0, WIDTH), WEIGHT)
    assert set(outcome.verdicts.values()) <= {"no-gain"}


def together_aware(x, w):
    q, k, v = (t.contiguous() for t in split_heads(x @ w))
    return standins.aware(q, k, v)


@pytest.mark.parametrize("count", range(4))
def test_a_limit_takes_the_first_copies_only(count):
    standins.tag("aware")
    facts = qkvpass.match.Facts(standins.trace(together_aware, torch.randn(6, WIDTH), WEIGHT).graph)
    assert len(decide.decide(facts, "inductor", limit=count).removed) == count
