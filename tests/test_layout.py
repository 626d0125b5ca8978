"""Layouts, atomic dims and contracts, checked against real tensors."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from qkvpass.layout import Layout, NotAView, StrideContract, StridedView, known, radix_view
from qkvpass.reason import Reason
from qkvpass.views import emit, run


def symbol(hint: int = 7, env: ShapeEnv | None = None) -> torch.SymInt:
    """A backed size without an upper bound."""
    from torch._dynamo.source import ConstantSource
    from torch.fx.experimental.symbolic_shapes import DimDynamic

    env = env or ShapeEnv()
    source = ConstantSource("size")
    expr = env.create_symbol(hint, source, dynamic_dim=DimDynamic.DYNAMIC)
    return env.create_symintnode(expr, hint=hint, source=source)


def test_nothing_symbolic_is_known_by_its_example():
    size = symbol(7)
    assert not known(size == 7)
    assert not known(size > 7)
    assert known(size * 8 % 8 == 0)


PACKED = torch.arange(2 * 5 * 3 * 4 * 8).reshape(2, 5, 3, 4, 8)

CHAINS = {
    "split": lambda x: x.reshape(2, 5, 96)[..., 32:64].reshape(2, 5, 4, 8),
    "token-major": lambda x: x[:, :, 1].transpose(1, 2),
    "sam": lambda x: x.permute(2, 0, 3, 1, 4)[2],
    "narrow": lambda x: x.narrow(1, 1, 3)[:, :, 0],
    "step": lambda x: x[:, ::2, 1],
    "last dim strided": lambda x: x[:, :, 1].transpose(2, 3),
    "one token": lambda x: x[:, :1, 2].transpose(1, 2),
}


@pytest.mark.parametrize("name", CHAINS)
def test_a_layout_re_emitted_from_its_root_reads_the_same_elements(name):
    root = PACKED.reshape(10, 96)
    wanted = CHAINS[name](PACKED)
    radix = radix_view(Layout.of(root), Layout.of(wanted))
    if name == "step":  # 5 tokens in steps of 2 are no digits
        assert radix is None
        return
    assert radix is not None
    got = emit(radix, root, Layout.of(wanted), run)
    assert torch.equal(got, wanted)
    assert got.untyped_storage().data_ptr() == root.untyped_storage().data_ptr()


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_views_over_atomic_dims_agree_with_torch(data):
    """Random permute, merge, split and select: the same strides wherever torch has a view."""
    tensor = torch.empty(data.draw(st.sampled_from([(2, 3, 4), (4, 1, 6), (8, 2, 3)])))
    tensor = tensor.permute(data.draw(st.permutations(range(3))))
    view = StridedView.of(Layout.of(tensor))
    for _ in range(data.draw(st.integers(1, 4))):
        kind = data.draw(st.sampled_from(["merge", "split", "permute", "select", "slice"]))
        shape = list(tensor.shape)
        if kind == "merge" and len(shape) > 1:
            dim = data.draw(st.integers(0, len(shape) - 2))
            size = [*shape[:dim], shape[dim] * shape[dim + 1], *shape[dim + 2 :]]
            view = view.reshape(size)
            if view.layout(size) is None:
                with pytest.raises(RuntimeError):
                    tensor.view(size)
                return
            tensor = tensor.view(size)
        elif kind == "split":
            dim = data.draw(st.integers(0, len(shape) - 1))
            parts = [p for p in (2, 3) if shape[dim] % p == 0]
            if parts:
                part = data.draw(st.sampled_from(parts))
                size = [*shape[:dim], part, shape[dim] // part, *shape[dim + 1 :]]
                view, tensor = view.reshape(size), tensor.view(size)
        elif kind == "permute":
            order = data.draw(st.permutations(range(len(shape))))
            view, tensor = view.permute(order), tensor.permute(order)
        elif kind == "select" and len(shape) > 1:
            dim = data.draw(st.integers(0, len(shape) - 1))
            index = data.draw(st.integers(0, shape[dim] - 1))
            view, tensor = view.select(dim, index), tensor.select(dim, index)
        elif kind == "slice":
            dim = data.draw(st.integers(0, len(shape) - 1))
            start = data.draw(st.integers(0, shape[dim] - 1))
            size = shape[dim] - start
            view, tensor = view.slice(dim, start, size, 1), tensor.narrow(dim, start, size)
        layout = view.layout(tuple(tensor.shape))
        assert layout is not None and layout.equivalent(Layout.of(tensor))


def test_a_merged_dim_splits_again_but_cannot_be_cut():
    view = StridedView.of(Layout.of(PACKED)).permute([2, 0, 3, 1, 4]).reshape([3, 8, 5, 8])
    assert view.layout((3, 8, 5, 8)) is None
    with pytest.raises(NotAView):
        view.select(1, 0)
    again = view.select(0, 1).reshape([2, 4, 5, 8]).layout((2, 4, 5, 8))
    assert again == Layout.of(PACKED.permute(2, 0, 3, 1, 4)[1])


def test_expanded_heads_never_merge_with_real_ones():
    heads = torch.empty(2, 4, 8)[:, :, None].expand(2, 4, 3, 8)
    assert StridedView.of(Layout.of(heads)).reshape([2, 12, 8]).layout((2, 12, 8)) is None


def test_row_major_and_gap_free():
    x = torch.empty(4, 3, 2)
    assert Layout.of(x).row_major and Layout.of(x.permute(2, 0, 1)).gap_free
    assert not Layout.of(x.permute(2, 0, 1)).row_major
    assert not Layout.of(x[:, :2]).gap_free
    assert not Layout.of(x[:1].expand(4, 3, 2)).gap_free
    for layout in itertools.permutations(range(3)):
        assert Layout.of(x.permute(layout)).gap_free


def strided(size, stride, offset=0):
    return Layout(tuple(size), tuple(stride), offset)


@pytest.mark.parametrize(
    ("contract", "layout", "reason"),
    [
        (StrideContract(), strided((5, 4, 8), (96, 8, 1), 32), None),
        (StrideContract(), strided((5, 4, 8), (96, 1, 4)), Reason.LAST_DIM_STRIDE),
        (StrideContract(), strided((5, 4, 1), (96, 4, 7)), None),
        (StrideContract(), strided((5, 4, 8), (8, 0, 1)), Reason.BROADCAST_STRIDE),
        (StrideContract(allow_broadcast=True), strided((5, 4, 8), (8, 0, 1)), None),
        (StrideContract(), strided((5, 1, 8), (8, 0, 1)), None),
        (StrideContract(), strided((5, 4, 8), (98, 8, 1)), Reason.ALIGNMENT),
        (StrideContract(), strided((5, 4, 8), (96, 8, 1), 1), Reason.ALIGNMENT),
        (StrideContract(alignment=4), strided((5, 4, 8), (98, 8, 1), 1), None),
        (
            StrideContract(allow_storage_offset=False),
            strided((5, 4, 8), (96, 8, 1), 32),
            Reason.STORAGE_OFFSET,
        ),
        (
            StrideContract(max_offset=2**31 - 1),
            strided((2**17, 56, 128), (21504, 128, 1)),
            Reason.OFFSET_RANGE,
        ),
        (StrideContract(max_offset=2**31 - 1), strided((2**17, 56, 128), (7168, 128, 1)), None),
    ],
)
def test_contract_on_fp32(contract, layout, reason):
    fault = contract.violation(layout, itemsize=4)
    assert (fault and fault[0]) == reason
    assert fault is None or fault[1]


def test_a_finite_bound_refuses_an_unbounded_size_and_alignment_is_proven_by_form():
    tokens = symbol(100)
    layout = strided((tokens, 16, 72), (3456, 72, 1))
    assert StrideContract().violation(layout, 2) is None
    reason, _ = StrideContract(max_offset=2**31 - 1).violation(layout, 2)
    assert reason is Reason.OFFSET_RANGE
    ragged = strided((5, 16, 72), (tokens, 72, 1))
    reason, _ = StrideContract().violation(ragged, 2)
    assert reason is Reason.ALIGNMENT


@pytest.mark.parametrize(
    "wrong", [{"alignment": 0}, {"max_offset": 0}, {"output": "sparse"}, {"alignment": -16}]
)
def test_contract_says_what_is_wrong(wrong):
    with pytest.raises(ValueError, match=str(next(iter(wrong.values())))):
        StrideContract(**wrong)
