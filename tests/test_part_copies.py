"""One copy of q, k and v is made part by part, where k and v then go and q needs its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import families
import pytest
import standins
import torch
import torch.nn.functional as F
from families import DIM, HEAD_DIM, HEADS, merged
from standins import tag
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from qkvpass import editor, html

aten = torch.ops.aten
SDPA = aten._scaled_dot_product_flash_attention_for_cpu.default
TOKENS = 16


class Packed(families.Base):
    """SAM's attention: positions by q, over merged batch and heads, are added to the scores."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.randn(TOKENS, TOKENS, HEAD_DIM) / 4)

    def whole(self, x: Tensor) -> Tensor:
        b, n, _ = x.shape
        qkv = self.qkv(x).view(b, n, 3, HEADS, HEAD_DIM).permute(2, 0, 3, 1, 4)
        return qkv.reshape(3, b * HEADS, n, HEAD_DIM)

    def parts(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.whole(x).unbind(0)

    def mask(self, q: Tensor) -> Tensor:
        return torch.einsum("bqd,qkd->bqk", q, self.positions)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Any:
        mask = self.mask(q).view(-1, HEADS, TOKENS, TOKENS)
        q, k, v = (t.view(-1, HEADS, TOKENS, HEAD_DIM) for t in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    def forward(self, x: Tensor) -> Any:
        return self.out(merged(self.attend(*self.parts(x))))


class Merged(Packed):
    """timm's: the op itself sees batch and heads as one dim."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Any:
        mask = self.mask(q).unsqueeze(0)
        q, k, v = (t.unsqueeze(0) for t in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return out.view(-1, HEADS, TOKENS, HEAD_DIM)


def x(batch: int = 2) -> Tensor:
    return torch.randn(batch, TOKENS, DIM)


def parted(outcome: standins.Outcome) -> bool:
    return any("one by one" in note for note in outcome.report.notes)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("model", [Packed, Merged])
def test_keys_and_values_go(model: type[nn.Module], dynamic: bool) -> None:
    outcome = standins.decide(model(), x(), dynamic=dynamic)
    assert parted(outcome)
    assert outcome.verdicts | {"": ""} == {
        "q": "view-needs-dense",
        "k": "removed",
        "v": "removed",
        "": "",
    }
    (attention,) = standins.nodes_of(outcome.after, SDPA)
    q, k, v = (operand.meta["val"] for operand in attention.args[:3])
    assert q.stride()[-2:] == (HEAD_DIM, 1)
    assert k.stride()[1:] == v.stride()[1:] == (HEAD_DIM, 3 * DIM, 1)


def test_the_report_counts_bytes_by_part() -> None:
    report = standins.decide(Packed(), x()).report
    third = 2 * x().numel() * 4
    sizes = {copy.operand: copy.nbytes for copy in report.copies if copy.operand}
    assert sizes == {"query": third, "key": third, "value": third}
    assert [copy.node for copy in report.copies if copy.operand] == [
        f"clone[{i}]" for i in range(3)
    ]
    assert report.removed_bytes == 2 * third


def test_the_page_marks_the_copy_that_was_parted() -> None:
    """And the copies behind it, which are marked in the order of the graph."""
    report = standins.decide(Packed(), x()).report
    marked = [row.before for row in html.side_by_side(report) if row.number]
    assert len(marked) == len({copy.node.partition("[")[0] for copy in report.copies})
    assert " clone: " in (marked[0] or "")


class Kernel(Packed):
    """A stand-in that writes down what it is given."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Any:
        bias = self.mask(q).sum(-1).view(-1, HEADS, TOKENS, 1)
        q, k, v = (t.view(-1, HEADS, TOKENS, HEAD_DIM) for t in (q, k, v))
        return torch.ops.standin.aware(q, k, v) + bias


def test_compiled() -> None:
    """Run: the kernel reads k and v out of the packed projection, and q from a copy."""
    tag("aware")
    with torch.no_grad():
        stock, ours = standins.compile_pair(Kernel(), x())
    assert ours.kernels < stock.kernels
    for call in stock.seen("aware"):
        assert all(seen.dense for seen in call.tensors)
    for call in ours.seen("aware"):
        q, k, v = call.tensors
        assert q.dense and k.storage == v.storage != q.storage
        assert k.stride == v.stride == (TOKENS * 3 * DIM, HEAD_DIM, 3 * DIM, 1)
        assert (k.offset, v.offset) == (DIM, 2 * DIM)


class ReadWhole(Kernel):
    """Somebody reads all three at once, as dense."""

    def forward(self, x: Tensor) -> Any:
        qkv = self.whole(x)
        return self.attend(*qkv.unbind(0)), torch.ops.standin.rotary(qkv)


class ReadsOffset(Kernel):
    """v goes to a kernel that minds where in its storage it lies; k alone could go."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Any:
        read = torch.ops.standin.offset_reader(q, q, v)
        return super().attend(q, k, v) + read.view(-1, HEADS, TOKENS, HEAD_DIM)


class ReturnsPart(Kernel):
    """The caller gets q, whose storage would be another."""

    def forward(self, x: Tensor) -> Any:
        q, k, v = self.parts(x)
        return self.attend(q, k, v), q


class KeyIsNeeded(Kernel):
    """k's relative positions, not q's: k would begin elsewhere in its storage."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Any:
        return super().attend(k, q, v)


class FiveParts(Kernel):
    """More parts than a projection of q, k and v has: a batch of items, say."""

    def parts(self, x: Tensor) -> tuple[Tensor, ...]:
        n = x.shape[1]
        items = self.qkv(x).view(5, -1, n, HEADS, HEAD_DIM).permute(0, 1, 3, 2, 4)
        return items.reshape(5, -1, n, HEAD_DIM).unbind(0)[:3]


class ReachesBeyond(Kernel):
    """q is read beyond its end, where k lies, as ``as_strided`` may."""

    def forward(self, x: Tensor) -> Any:
        q, k, v = self.parts(x)
        return self.attend(q, k, v), q.view(-1)[1:].as_strided((4,), (1,), q.numel()).sum()


@pytest.mark.parametrize("model", [ReachesBeyond, ReadWhole, ReadsOffset, ReturnsPart, KeyIsNeeded])
def test_left_alone(model: Callable[[], nn.Module]) -> None:
    tag("aware")
    outcome = standins.decide(model(), x())
    assert not parted(outcome)
    assert str(outcome.before.graph) == str(outcome.after.graph)


def test_no_part_of_a_batch() -> None:
    tag("aware")
    outcome = standins.decide(FiveParts(), x(5))
    assert not parted(outcome)


def test_nothing_to_part() -> None:
    """No batch, so that a copy's first dim has no size."""

    def model(x: Tensor) -> Tensor:
        parts = (t.unflatten(-1, (HEADS, HEAD_DIM)).mT for t in x.chunk(3, -1))
        q, k, v = (t.clone(memory_format=torch.contiguous_format) for t in parts)
        return torch.ops.standin.aware(q, k, v)

    tag("aware")
    outcome = standins.decide(model, torch.randn(0, TOKENS, 3 * DIM))
    assert not parted(outcome)


@pytest.mark.parametrize(
    ("model", "options"),
    [
        (Packed, {"part_copies": False}),
        (Merged, {"split_heads": False}),
        (Merged, {"numerics": "bitwise"}),
    ],
)
def test_switches(model: type[nn.Module], options: dict[str, Any]) -> None:
    outcome = standins.apply_pass(standins.trace(model(), x()), **options)
    assert str(outcome.before.graph) == str(outcome.after.graph)


def test_bitwise_admits_what_moves_elements_only() -> None:
    outcome = standins.apply_pass(standins.trace(Packed(), x()), numerics="bitwise")
    standins.verify(outcome)
    assert parted(outcome)


def test_training_would_hold_more() -> None:
    """The packed projection and q's copy are more than the one copy that was held."""
    outcome = standins.decide(Packed(), x(), train=True)
    assert not parted(outcome)
    assert not outcome.report.removed


def test_no_name_is_given_twice() -> None:
    """A node that a second rewrite makes is none of the user's that the first took out."""
    graph = make_fx(lambda a: a.split(1)[0] + 1)(torch.randn(2, 2)).graph
    first = editor.copy_of(graph)
    (add,) = first.find_nodes(op="call_function", target=aten.add.Tensor)
    add.replace_all_uses_with(add.args[0])
    first.erase_node(add)
    names = {node.name for node in graph.nodes}
    second = editor.copy_of(first, names)
    (split,) = second.find_nodes(op="call_function", target=aten.split.Tensor)
    with second.inserting_after(split):
        new = second.create_node("call_function", aten.add.Tensor, (split.args[0], 1), name="add")
    assert new.name not in names
