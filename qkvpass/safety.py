"""The one rule.

A copy may go only if, after re-running fake propagation from it, every layout-bound
consumer sees exactly the layout it saw before, and nothing writes memory that the copy and
its source would now share. :class:`Propagation` re-runs, :func:`consume` states what each
node admits, and everything that wants a copy gone goes through them: each candidate, every
group, and once more the finished graph.
"""

from __future__ import annotations

import heapq
import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg

from . import tags, triton_tags
from .compat import (
    NewGuard,
    detect_fake_mode,
    has_gradient,
    no_new_guards,
    saved_tensor_hooks_active,
)
from .layout import (
    ALLOCATED,
    Int,
    Layout,
    NotAView,
    Pointer,
    RadixView,
    StridedView,
    known,
    radix_view,
    same,
)
from .match import (
    MATMULS,
    Facts,
    bound_arguments,
    called_op,
    is_attention,
    is_functionalized,
    is_hop,
    mutated_inputs,
    nbytes,
    target_name,
)
from .reason import Reason
from .tags import Site, StrideTag
from .views import emit, is_view, recompose, regroups, run

aten = torch.ops.aten

# Layout-free ops beside those that PyTorch tags as pointwise. Their values do not depend on
# the layout of their inputs, and their outputs do not carry the inputs' gaps.
LAYOUT_FREE = frozenset(
    {
        aten.cat.default,
        aten.stack.default,
        aten._to_copy.default,
        aten.constant_pad_nd.default,
        aten.copy.default,
        aten.contiguous.default,
        aten.reshape.default,
        aten.empty_like.default,
        aten.full_like.default,
        aten.zeros_like.default,
        aten.ones_like.default,
        aten.new_empty.default,
        aten.new_zeros.default,
    }
)
# Pointwise ops whose scalar and vector kernels agree: exact, or rounded once by the standard.
CORRECTLY_ROUNDED = frozenset(
    "abs add bitwise_and bitwise_not bitwise_or bitwise_xor ceil clamp clamp_max clamp_min clone "  # noqa: SIM905
    "convert_element_type div eq floor ge gt isinf isnan le logical_and logical_not logical_or "
    "lt masked_fill maximum minimum mul ne neg reciprocal relu round rsub sgn sign sqrt sub "
    "threshold trunc where".split()
)
# Those of them that treat a complex number's parts alone: a product of two rounds several times.
BY_PARTS = frozenset({"clone", "convert_element_type", "eq", "ne", "neg", "where"})
# Ops that read sizes alone. Sizes never change here.
SIZE_OPS = frozenset({aten.sym_size.int, aten.sym_numel.default})
# Deliberately not on the list:
# - matmuls and convolutions: another layout picks another GEMM, whose bits differ;
# - reductions, softmax and norms: the order of accumulation may follow the layout;
# - slice_scatter, select_scatter, as_strided_scatter: they keep a strided input's gaps;
# - as_strided, sym_stride, sym_storage_offset: they read the layout itself;
# - dropout, bernoulli, rand_like: random numbers are drawn in memory order;
# - anything with a mutable schema, and every higher-order op.


class Refused(Exception):
    """The rule forbids a removal.

    Args:
        reason: which of the ways a decision can end.
        detail: the node and the fact that decided.
        node: the deciding node.
    """

    def __init__(self, reason: Reason, detail: str, node: Node) -> None:
        super().__init__(detail)
        self.reason, self.detail, self.node = reason, detail, node


@dataclass(frozen=True)
class Pending:
    """A view that is no strided tensor until a later view splits what this one merged."""

    view: StridedView
    root: Node


def is_pointwise(target: Any) -> bool:
    """Whether each element of an op's result depends on elements alone: it may be fused."""
    if not isinstance(target, torch._ops.OpOverload) or target._schema.is_mutable:
        return False
    if not _is_core_op(target) or torch.Tag.nondeterministic_seeded in target.tags:
        return False
    return target in LAYOUT_FREE or torch.Tag.pointwise in target.tags


def is_layout_free(node: Node) -> bool:
    """Whether an op's values ignore the layout of its inputs, to the last bit.

    A CPU vectorises by layout, and a vector function rounds otherwise than a scalar one, so
    that only correctly rounded ops are layout-free there.
    """
    target, result = node.target, _first_tensor(node.meta.get("val"))
    if not is_pointwise(target):
        return False
    if result is None or result.device.type != "cpu" or target in LAYOUT_FREE:
        return True
    if bound_arguments(node).get("alpha", 1) != 1:
        return False  # scaled, then added: rounded twice, or once where the two are fused
    inputs = (_first_tensor(n.meta.get("val")) for n in node.all_input_nodes)
    is_complex = any(t is not None and t.is_complex() for t in (result, *inputs))
    name = target_name(node).partition("::")[2]
    return name in (BY_PARTS if is_complex else CORRECTLY_ROUNDED)


def looks_at_every_stride(node: Node) -> bool:
    """Whether the stride of a size-1 dim counts for a node.

    Ops of PyTorch's own never look at it; those that are re-run are compared exactly all the
    same, since their fake results carry it on.
    """
    return not _is_core_op(node.target) or is_pointwise(node.target)


def same_layout_anew(before: Any, after: Any) -> bool:
    """Whether results in memory of their own have equal sizes and strides.

    Where a fresh result starts in its storage is not part of what was decided.
    """
    if isinstance(before, (list, tuple)) and isinstance(after, (list, tuple)):
        return len(before) == len(after) and all(map(same_layout_anew, before, after))
    if isinstance(before, Tensor) and isinstance(after, Tensor):
        return Layout.of(before).same_strides(Layout.of(after))
    return unchanged(before, after)


def _is_core_op(target: Any) -> bool:
    """An op of PyTorch's own, which never looks at the stride of a size-1 dim."""
    return isinstance(target, torch._ops.OpOverload) and target.namespace in ("aten", "prims")


def unchanged(before: Any, after: Any, exact: bool = True) -> bool:
    """Whether two values have equal layouts; what storage they lie in is another question.

    Unless ``exact``, the strides of size-1 dims may differ.
    """
    if isinstance(before, (list, tuple)) and isinstance(after, (list, tuple)):
        return len(before) == len(after) and all(
            unchanged(b, a, exact) for b, a in zip(before, after)
        )
    if isinstance(before, Tensor) and isinstance(after, Tensor):
        old, new = Layout.of(before), Layout.of(after)
        return old.same(new) if exact else old.equivalent(new)
    return not isinstance(before, (Tensor, Pending)) and not isinstance(after, (Tensor, Pending))


@dataclass
class Call:
    """A node with the arguments that it would get."""

    node: Node
    after: tuple[Any, Any]  # (args, kwargs) with values for nodes
    changed: list[Node]  # inputs whose layout differs
    behind: str = ""  # name of the attention op whose output layout moved, if one did
    in_backward: bool = False
    needs_grad: bool = False
    certified_only: bool = False
    autograd: bool = False
    root_of: Callable[[Node], Node] = lambda node: node


def consume(call: Call) -> Any:
    """What ``call.node`` makes of its changed inputs: a new value, or the old one.

    Raises:
        Refused: if the node is layout-bound and an input's layout differs.
    """
    node = call.node
    if not call.changed or node.target in SIZE_OPS:
        return node.meta.get("val")
    if node.op == "output":
        raise _refusal(call, Reason.GRAPH_OUTPUT, "is returned from the graph")
    if pending := _pending(call.after):
        raise _pending_refusal(call, pending)
    if is_hop(node) and not is_functionalized(node):
        return _consume_launch(call)
    if any(n in mutated_inputs(node) for n in call.changed):
        what = f"({called_op(node)}) writes it" if is_functionalized(node) else "writes it"
        raise _refusal(call, Reason.MUTATED, what)
    tag = tags.lookup(called_op(node))
    if tag is not None and tag.status.capable:
        return _consume_tagged(call, tag)
    if is_layout_free(node):
        return rerun(call)
    raise _bound_refusal(call, tag)


def _refusal(call: Call, reason: Reason, fact: str) -> Refused:
    """A refusal; behind an attention op whose output moved, that is what decided."""
    name = (
        f"{call.node.name} ({target_name(call.node)})" if call.node.op != "output" else "the output"
    )
    inputs = ", ".join(n.name for n in call.changed)
    if call.behind:
        return Refused(
            Reason.OUTPUT_LAYOUT,
            f"the output layout of {call.behind} would change, and {name} {fact}: {inputs}",
            call.node,
        )
    return Refused(reason, f"{name} {fact}: {inputs}", call.node)


def _consume_launch(call: Call) -> Any:
    """A user's Triton kernel whose stride arguments are told; other higher-order ops refuse."""
    if not triton_tags.tags_of(call.node):
        raise _hop_refusal(call)
    values = triton_tags.pointers(call.node)
    after = {
        source: call.after[1]["kwargs"][name]
        for name, source in values.items()
        if isinstance(source, Node)
    }
    fault = triton_tags.misfit(
        call.node,
        call.changed,
        after.__getitem__,
        lambda source: pointer_of(call.root_of(source), after[source]),
    )
    if fault is not None:
        raise _refusal(call, *fault)
    return call.node.meta.get("val")


def _hop_refusal(call: Call) -> Refused:
    if any(n in mutated_inputs(call.node) for n in call.changed):
        return _refusal(call, Reason.MUTATED, f"({called_op(call.node)}) writes it")
    if is_attention(call.node):
        return _refusal(call, Reason.UNTAGGED_OP, "is an attention op without a stride tag")
    return _refusal(call, Reason.SUBGRAPH_BOUNDARY, "takes it into a subgraph")


def _bound_refusal(call: Call, tag: StrideTag | None) -> Refused:
    if tag is not None and tag.status is tags.Status.DENSE_ONLY:
        return _refusal(call, Reason.DENSE_ONLY_OP, f"needs dense operands ({tag.evidence})")
    if call.in_backward:
        return _refusal(
            call, Reason.BACKWARD_NOT_CAPABLE, "has no stride tag and runs in the backward"
        )
    if tag is not None:
        return _refusal(call, Reason.UNTAGGED_OP, f"is unverified ({tag.evidence})")
    if tags.qkv_arguments(called_op(call.node)):
        return _refusal(call, Reason.UNTAGGED_OP, "has no stride tag")
    what = f"({called_op(call.node)}) " if is_functionalized(call.node) else ""
    return _refusal(call, Reason.OPAQUE_CONSUMER, f"{what}may depend on its layout")


def _pending(arguments: Any) -> list[Pending]:
    if isinstance(arguments, Pending):
        return [arguments]
    if isinstance(arguments, dict):
        arguments = list(arguments.values())
    if isinstance(arguments, (list, tuple)):
        return [pending for a in arguments for pending in _pending(a)]
    return []


def _pending_refusal(call: Call, pending: list[Pending]) -> Refused:
    if any(known(stride == 0) for p in pending for dim in p.view.dims for _, stride in dim):
        return _refusal(call, Reason.BROADCAST_STRIDE, "would read elements that repeat (stride 0)")
    why = "needs a tensor, and the views in front of it merge dims with a gap between"
    return _refusal(call, Reason.VIEW_NEEDS_DENSE, why)


def rerun(call: Call) -> Any:
    """The op's fake kernel on the new inputs.

    Raises:
        Refused: if it fails, or would need a guard.
    """
    args, kwargs = call.after
    mode = detect_fake_mode((args, kwargs))
    if mode is None:
        raise _refusal(call, Reason.OPAQUE_CONSUMER, "has no fake values to decide on")
    try:
        with torch.no_grad(), mode, no_new_guards(mode):
            return _op(call.node)(*args, **kwargs)
    except NewGuard as guard:
        raise _refusal(call, Reason.UNBACKED_SHAPE, f"would need the guard {guard}") from guard
    except Exception as fault:
        # The op has no answer for the new layout, whatever the words it finds for that.
        raise _refusal(call, Reason.OPAQUE_CONSUMER, f"rejects the new layout ({fault})") from fault


def _consume_tagged(call: Call, tag: StrideTag) -> Any:
    after = _bind(call, call.after)
    nodes = bound_arguments(call.node)
    names = [n for n, value in nodes.items() if isinstance(value, Node) and value in call.changed]
    loose = [n for n in call.changed if n not in [nodes[name] for name in names]]
    if loose or not set(names) <= set(tag.operands):
        what = ", ".join([n for n in names if n not in tag.operands] + [n.name for n in loose])
        reason = Reason.BACKWARD_NOT_CAPABLE if call.in_backward else Reason.OPAQUE_CONSUMER
        raise _refusal(call, reason, f"is not tagged for {what}")
    if named := [a.name for a in called_op(call.node)._schema.arguments if "stride" in a.name]:
        what = f"takes strides as arguments ({', '.join(named)}), which were fixed when traced"
        raise _refusal(call, Reason.OPAQUE_CONSUMER, what)
    site = _site(call, tag, after)
    if tag.when is not None and (why := tag.when(site)) is not None:
        raise _refusal(call, Reason.TAG_CONDITION, f"is not tagged here ({why})")
    if call.certified_only and tags.certificate_of(site) is None:
        why = f'is {tag.status}, and evidence="certified" asks for a certificate that counts here'
        raise _refusal(call, Reason.TAG_CONDITION, why)
    contracts = [tag, *_check_backward(call, site)]
    for name in names:
        pointer = pointer_of(call.root_of(nodes[name]), after[name])
        for one in contracts:
            _check_contract(call, one, name, after[name], pointer)
    for group in tag.contract.together:
        _check_together(call, group, after)
    return _check_output(call, tag, after, rerun(call))


def _check_backward(call: Call, site: Site) -> list[StrideTag]:
    """Tags of the backward that autograd would run, outside of this graph."""
    if not call.autograd or not has_gradient(called_op(call.node)):
        return []
    capable = tags.backward_tags(called_op(call.node))
    if not any(tag.when is None or tag.when(site) is None for tag in capable):
        why = (
            "has a backward without a stride tag, which autograd may run; "
            "for inference alone, rewrite under torch.no_grad()"
        )
        raise _refusal(call, Reason.BACKWARD_NOT_CAPABLE, why)
    return capable


def _bind(call: Call, arguments: tuple[Any, Any]) -> dict[str, Any]:
    args, kwargs = arguments
    if is_functionalized(call.node):
        return kwargs
    return dict(zip([a.name for a in _op(call.node)._schema.arguments], args)) | kwargs


def _op(node: Node) -> Any:
    """The op that a ``call_function`` node calls."""
    return node.target


def pointer_of(root: Node, value: Tensor) -> Pointer:
    """What is known of the address behind a view of ``root``.

    Nothing guards where a graph input starts in its storage. On CUDA, Inductor copies one
    whose address is no multiple of 16 bytes; elsewhere an element's own alignment is all.
    """
    if root.op not in ("placeholder", "get_attr"):
        return ALLOCATED
    alignment = 16 if value.device.type == "cuda" else value.element_size()
    buffer = root.meta.get("val")
    if not isinstance(buffer, Tensor) or not _share_storage(buffer, value):
        return Pointer(None, alignment)
    return Pointer(buffer.storage_offset(), alignment)


def _share_storage(a: Tensor, b: Tensor) -> bool:
    return a.untyped_storage()._cdata == b.untyped_storage()._cdata


def _check_contract(call: Call, tag: StrideTag, name: str, value: Tensor, pointer: Pointer) -> None:
    fault = tag.contract.violation(Layout.of(value), value.element_size(), pointer)
    if fault is not None:
        reason, detail = fault
        raise Refused(
            reason,
            f"{call.node.name} ({target_name(call.node)}) operand {name}: {detail}",
            call.node,
        )


def _check_together(call: Call, group: tuple[str, ...], after: dict[str, Any]) -> None:
    layouts = {n: Layout.of(after[n]) for n in group if isinstance(after.get(n), Tensor)}
    if all(same(a.stride, b.stride) for a in layouts.values() for b in layouts.values()):
        return
    if all(layout.row_major for layout in layouts.values()):
        return
    text = "; ".join(f"{n} {layout}" for n, layout in layouts.items())
    raise _refusal(
        call, Reason.MIXED_LAYOUT, f"needs one layout for {' and '.join(group)} ({text})"
    )


def _check_output(call: Call, tag: StrideTag, after: dict[str, Any], predicted: Any) -> Any:
    old, rule = call.node.meta["val"], tag.contract.output
    if same_layout_anew(old, predicted) and rule in (None, "fake"):
        return old
    if rule is None:
        raise Refused(
            Reason.OUTPUT_LAYOUT,
            f"the fake kernel of {call.node.name} ({target_name(call.node)}) predicts another "
            f"output layout ({_first(predicted)}), and the tag does not state one",
            call.node,
        )
    if rule != "fake" and not _as_stated(rule, _first_tensor(predicted), after):
        raise Refused(
            Reason.OUTPUT_LAYOUT,
            f'the tag of {call.node.name} states output="{rule}", '
            f"its fake kernel says {_first(predicted)}",
            call.node,
        )
    return predicted


def _as_stated(rule: str, predicted: Tensor | None, after: dict[str, Any]) -> bool:
    if predicted is None:
        return False
    if rule == "dense":
        return Layout.of(predicted).row_major
    like = after.get(rule.removeprefix("like:"))
    if not isinstance(like, Tensor):
        return False
    expected = torch.empty_like(like)
    return same(expected.stride(), predicted.stride())


def _first_tensor(value: Any) -> Tensor | None:
    values = value if isinstance(value, (list, tuple)) else [value]
    return next((v for v in values if isinstance(v, Tensor)), None)


def _first(value: Any) -> str:
    tensor = _first_tensor(value)
    return str(Layout.of(tensor)) if tensor is not None else "nothing"


def _site(call: Call, tag: StrideTag, after: dict[str, Any]) -> Site:
    first = next(after[n] for n in tag.operands if isinstance(after.get(n), Tensor))
    masks = [v for n, v in after.items() if ("mask" in n or "bias" in n) and isinstance(v, Tensor)]
    return tags.site_of(called_op(call.node), first, bool(masks), call.needs_grad)


@dataclass
class Overlay:
    """What a set of removals does to a graph: new values, by node, over the old ones.

    Args:
        below: an accepted overlay that this one stands on.
        removed: copies taken out, cascades among them.
    """

    below: Overlay | None = None
    removed: set[Node] = field(default_factory=set)
    cascaded: set[Node] = field(default_factory=set)
    values: dict[Node, Any] = field(default_factory=dict)
    emitted: dict[Node, tuple[Node, Layout]] = field(default_factory=dict)
    behind: dict[Node, str] = field(default_factory=dict)

    def value(self, node: Node) -> Any:
        if node in self.values:
            return self.values[node]
        return self.below.value(node) if self.below is not None else node.meta.get("val")

    def touches(self, node: Node) -> bool:
        return node in self.values or (self.below is not None and self.below.touches(node))

    def is_removed(self, node: Node) -> bool:
        return node in self.removed or (self.below is not None and self.below.is_removed(node))

    def root_of(self, node: Node, facts: Facts) -> Node:
        """The buffer that a value lies in once the removed copies are gone."""
        root = facts.root[node]
        while self.is_removed(root):
            root = facts.root[facts.sources[root]]
        return root

    def base_of(self, node: Node, facts: Facts) -> Node:
        """The node that views lead from to a value once the removed copies are gone."""
        base = facts.base[node]
        while self.is_removed(base):
            base = facts.base[facts.sources[base]]
        return base

    def behind_attention(self, node: Node) -> str:
        if node in self.values:
            return self.behind.get(node, "")
        return self.below.behind_attention(node) if self.below is not None else ""

    def merge(self) -> None:
        """Take this overlay into the one below it, which then holds both."""
        below = self.below
        assert below is not None
        below.removed |= self.removed
        below.cascaded |= self.cascaded
        for node, value in self.values.items():
            below.values[node] = value
            below.emitted.pop(node, None)
            below.behind.pop(node, None)
        below.emitted |= self.emitted
        below.behind |= self.behind


class Propagation:
    """Re-runs fake propagation from removed copies, in graph order, until layouts settle."""

    def __init__(self, facts: Facts, certified_only: bool = False) -> None:
        self.facts = facts
        self.certified_only = certified_only

    def remove(self, copies: Iterable[Node], below: Overlay) -> Overlay:
        """The overlay in which ``copies`` are gone, on top of ``below``.

        Raises:
            Refused: by the first consumer that must not see what it would see.
        """
        overlay = Overlay(below, removed=set(copies))
        for copy in overlay.removed:
            self._check_memory(copy)
        order = self.facts.order
        queue = sorted((order[n], n.name) for n in overlay.removed)
        queued = {order[n] for n in overlay.removed}
        while queue:
            position, _ = heapq.heappop(queue)
            node = self.facts.nodes[position]
            if not self._update(node, overlay):
                continue
            for user in node.users:
                if order[user] not in queued:
                    queued.add(order[user])
                    heapq.heappush(queue, (order[user], user.name))
        for copy in overlay.removed:
            self._check_saved(copy, overlay)
        return overlay

    def _check_memory(self, copy: Node) -> None:
        for value in (copy, self.facts.sources[copy]):
            if (writer := self.facts.writer_of(value)) is not None:
                inner = f" ({called_op(writer)})" if is_functionalized(writer) else ""
                raise Refused(
                    Reason.MUTATED,
                    f"{writer.name} ({target_name(writer)}){inner} writes the memory of "
                    f"{value.name}",
                    writer,
                )

    def _check_saved(self, copy: Node, overlay: Overlay) -> None:
        """What the backward reads must stay as the forward left it.

        The copy was private. A view of a buffer that the caller holds is not: it may be
        written between forward and backward, and no version counter tells.
        """
        facts = self.facts
        if copy in facts.backward or not (facts.has_backward or facts.autograd):
            return
        root = overlay.root_of(copy, self.facts)
        hooked = saved_tensor_hooks_active()
        shared = root.op in ("placeholder", "get_attr") or root in facts.returned
        if not (hooked or shared) or (reader := self._read_in_backward(copy, overlay)) is None:
            return
        if shared:
            why = (
                f"{copy.name} is kept for {reader.name}, and the caller may write {root.name} first"
            )
            raise Refused(Reason.MUTATED, why, reader)
        why = f"saved-tensor hooks may hand {reader.name} another layout of {copy.name}"
        raise Refused(Reason.BACKWARD_NOT_CAPABLE, why, reader)

    def _read_in_backward(self, copy: Node, overlay: Overlay) -> Node | None:
        """The first backward op that reads a copy, or what may be recomputed from it."""
        stack, seen = [copy], {copy}
        while stack:
            for user in stack.pop().users:
                if user in self.facts.backward or self._saves(user):
                    return user
                again = self.facts.is_view(user) or is_pointwise(user.target)
                if user not in seen and (again or overlay.is_removed(user)):
                    seen.add(user)
                    stack.append(user)
        return None

    def _saves(self, node: Node) -> bool:
        """Whether autograd may keep the inputs of a node for a backward outside of the graph."""
        if not self.facts.autograd or not isinstance(node.target, torch._ops.OpOverload):
            return False
        return not self.facts.is_view(node) and has_gradient(node.target)

    def _update(self, node: Node, overlay: Overlay) -> bool:
        """Recompute one node; whether its users must look again."""
        current = overlay.value(node)
        touched = overlay.touches(node)
        if overlay.is_removed(node):
            value = self._through_copy(node, overlay)
        elif self.facts.is_view(node):
            value = self._through_view(node, overlay)
        else:
            value = self._through_op(node, overlay)
        if value is current and not touched:
            return False
        if touched and value is not node.meta.get("val") and unchanged(current, value):
            return False
        overlay.values[node] = value
        return True

    def _through_copy(self, node: Node, overlay: Overlay) -> Any:
        source = self.facts.sources[node]
        self._carry(source, node, overlay)
        if is_view(node):  # a reshape that copied: now it must be a view
            return self._through_view(node, overlay)
        return overlay.value(source)

    def _through_view(self, node: Node, overlay: Overlay) -> Any:
        source = node.all_input_nodes[0]
        self._carry(source, node, overlay)
        value = overlay.value(source)
        if isinstance(value, (list, tuple)):  # a part of a split or unbind
            return _part(node, overlay)
        if isinstance(value, Tensor) and not (overlay.is_removed(node)):
            done = self._rerun_view(node, overlay, value)
            if done is not None:
                return done
        return self._recompose(node, source, overlay, value)

    def _rerun_view(self, node: Node, overlay: Overlay, value: Tensor) -> Any:
        """The view on its new input, where it is legal there and needs no guard."""
        if regroups(node) and not _viewable(node, value):
            return None  # a copy where it is a reshape; and fake tensors let some views pass
        try:
            return rerun(self._call(node, overlay))
        except Refused:
            return None

    def _recompose(self, node: Node, source: Node, overlay: Overlay, value: Any) -> Any:
        if isinstance(value, Pending):
            root, view = value.root, value.view
        else:
            root, view = overlay.base_of(source, self.facts), StridedView.of(Layout.of(value))
        try:
            parts = recompose(node, view, tuple(source.meta["val"].shape))
        except NotAView as why:
            raise self._view_refusal(node, overlay, str(why)) from why
        out = node.meta["val"]
        if isinstance(parts, list):
            return [
                self._realise(None, p, tuple(o.shape), root, overlay) for p, o in zip(parts, out)
            ]
        return self._realise(node, parts, tuple(out.shape), root, overlay)

    def _realise(
        self,
        node: Node | None,
        view: StridedView,
        size: tuple[Int, ...],
        root: Node,
        overlay: Overlay,
    ) -> Any:
        """A strided tensor re-emitted from the root where there is one, else still pending."""
        layout = view.layout(size)
        base = overlay.value(root)
        if node is None or layout is None or not isinstance(base, Tensor):
            return Pending(view, root)
        radix = radix_view(Layout.of(base), layout)
        mode = detect_fake_mode(base)
        if radix is None or mode is None or not self._has_sizes(radix, node):
            return Pending(view, root)
        try:
            with torch.no_grad(), mode, no_new_guards(mode):
                value = emit(radix, base, layout, run)
        except NewGuard as guard:
            raise self._view_refusal(node, overlay, f"would need the guard {guard}") from guard
        overlay.emitted[node] = (root, layout)
        return value

    def _has_sizes(self, radix: RadixView, node: Node) -> bool:
        """Whether nodes of the graph hold the symbolic sizes; ``view`` works out one itself."""
        extents = [s.extent for s in radix.steps if not self._has_size(s.extent, node)]
        cut = [s for s in radix.steps if not (known(s.start == 0) and known(s.size == s.extent))]
        bounds = [b for s in cut for b in (s.start, s.start + s.size)]
        return len(extents) <= 1 and all(self._has_size(b, node) for b in bounds)

    def _has_size(self, size: Int, node: Node) -> bool:
        return isinstance(size, int) or self.facts.size_node(size, node) is not None

    def _view_refusal(self, node: Node, overlay: Overlay, why: str) -> Refused:
        call = Call(node, ((), {}), node.all_input_nodes[:1], overlay.behind.get(node, ""))
        return _refusal(call, Reason.VIEW_NEEDS_DENSE, f"is no view without the copy ({why})")

    def _through_op(self, node: Node, overlay: Overlay) -> Any:
        call = self._call(node, overlay)
        for source in node.all_input_nodes:
            self._carry(source, node, overlay)
        call.behind = overlay.behind.get(node, "")
        self._check_border(node, overlay, call)
        if node.target is operator.getitem:
            return _part(node, overlay)
        if self._cascades(node, overlay):
            overlay.removed.add(node)
            overlay.cascaded.add(node)
            return overlay.value(self.facts.sources[node])
        value = consume(call)
        if is_attention(node) and not same_layout_anew(node.meta.get("val"), value):
            overlay.behind[node] = f"{node.name} ({target_name(node)})"
        elif same_layout_anew(node.meta.get("val"), value):
            overlay.behind.pop(node, None)
            return node.meta.get("val")
        return value

    def _check_border(self, node: Node, overlay: Overlay, call: Call) -> None:
        """A value that is now a view of another must not leave the graph."""
        if node.op != "output" and not is_hop(node):
            return
        aliased = [n for n in node.all_input_nodes if overlay.touches(n)]
        aliased = [n for n in aliased if overlay.value(n) is not n.meta.get("val")]
        if is_functionalized(node):  # what it only reads may be a view, as for any op
            aliased = [n for n in aliased if n in mutated_inputs(node)]
        aliased = [n for n in aliased if n not in overlay.cascaded]  # nobody else sees its buffer
        if not aliased:
            return
        call.changed = call.changed or aliased
        if triton_tags.tags_of(node):
            return  # it only reads what it is tagged for, and the rule sees to the rest
        if node.op == "output":
            raise _refusal(call, Reason.GRAPH_OUTPUT, "is returned from the graph")
        raise _hop_refusal(call)

    def _cascades(self, node: Node, overlay: Overlay) -> bool:
        """Whether a copy now finds its input in the layout that it was to make."""
        source = self.facts.sources.get(node)
        if source is None or not isinstance(value := overlay.value(source), Tensor):
            return False
        if not Layout.of(value).equivalent(Layout.of(node.meta["val"])):
            return False
        roots = (self.facts.root[node], overlay.root_of(source, self.facts))
        if any(root in self.facts.written for root in roots):
            return False
        return self.facts.borders(node) is None or self._has_buffer_to_itself(node, overlay)

    def _has_buffer_to_itself(self, copy: Node, overlay: Overlay) -> bool:
        """Whether a returned copy is all of a GEMM behind it that nobody else sees.

        Then the caller may as well own the GEMM's buffer.
        """
        if self.facts.has_backward or any(user.op != "output" for user in copy.users):
            return False
        value = self.facts.sources[copy]
        while self.facts.is_view(value) or overlay.is_removed(value):
            if len(value.users) != 1:
                return False
            value = value.all_input_nodes[0]
        whole = known(nbytes(copy.meta["val"]) == nbytes(value.meta["val"]))
        return whole and value.target in MATMULS and len(value.users) == 1

    def _carry(self, source: Node, node: Node, overlay: Overlay) -> None:
        if name := overlay.behind_attention(source):
            overlay.behind[node] = name

    def _call(self, node: Node, overlay: Overlay) -> Call:
        exact = looks_at_every_stride(node)
        changed = [
            n
            for n in node.all_input_nodes
            if not unchanged(n.meta.get("val"), overlay.value(n), exact)
        ]
        return Call(
            node,
            after=arguments(node, overlay.value),
            changed=changed,
            in_backward=node in self.facts.backward,
            needs_grad=self.facts.has_backward,
            certified_only=self.certified_only,
            autograd=self.facts.autograd,
            root_of=lambda n: overlay.root_of(n, self.facts),
        )


def arguments(node: Node, value: Callable[[Node], Any]) -> tuple[Any, Any]:
    """(args, kwargs) of a node with values for nodes."""
    args: Any = map_arg(node.args, value)
    kwargs: Any = map_arg(dict(node.kwargs), value)
    return args, kwargs


def _part(node: Node, overlay: Overlay) -> Any:
    """One of several results."""
    source, index = node.args
    assert isinstance(source, Node)
    return overlay.value(source)[index]


def _viewable(node: Node, value: Tensor) -> bool:
    try:
        view = recompose(node, StridedView.of(Layout.of(value)), tuple(value.shape))
    except NotAView:
        return False
    return isinstance(view, StridedView) and view.layout(tuple(node.meta["val"].shape)) is not None
