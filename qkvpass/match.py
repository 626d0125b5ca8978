"""Find the copies that feed attention, and the facts about a graph that decisions need.

Nothing here depends on how a model spells its split or its reshape: a candidate is a node
that copies into another layout and reaches an attention operand without crossing a matmul.
"""

from __future__ import annotations

import functools
from collections.abc import Container
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from . import tags, triton_tags
from .certificate import Certificate
from .compat import decomposes
from .layout import Int, Layout, NotAView, StridedView, known, product, same
from .tags import StrideTag
from .views import is_view, recompose

aten = torch.ops.aten

# A value computed by one of these is a buffer of its own, and what lies in front of it
# belongs to another layer.
MATMULS = frozenset(
    {
        aten.mm.default,
        aten.addmm.default,
        aten.bmm.default,
        aten.baddbmm.default,
        aten.convolution.default,
        aten.linear.default,
        aten.matmul.default,
    }
)

# Ops that write an operand by moving elements alone. They are no layout copies: the result
# has other elements than any one input.
MOVES = frozenset(
    {
        aten.cat.default,
        aten.constant_pad_nd.default,
        aten._to_copy.default,
        torch.ops.prims.convert_element_type.default,
        aten.repeat.default,
        aten.index.Tensor,
        aten.index_select.default,
        aten.gather.default,
        aten.roll.default,
        aten.flip.default,
    }
)

FRESH = frozenset(
    {
        aten.empty.memory_format,
        aten.empty_strided.default,
        aten.empty_like.default,
        aten.new_empty.default,
        aten.new_empty_strided.default,
        aten.zeros.default,
        aten.full.default,
    }
)

# Attention that is a higher-order op: seen, never tagged.
HOP_ATTENTION = frozenset({"flex_attention", "flex_attention_backward"})

# Marks a copy that a rewrite put there for its layout: it is no candidate.
WANTED = "qkvpass_wanted"

# Higher-order ops that may write any of their operands, or return them.
WRITING_HOPS = frozenset(
    {
        "triton_kernel_wrapper_mutation",
        "with_effects",
        "wrap_with_autocast",
        "wrap_with_set_grad_enabled",
    }
)


@dataclass(frozen=True)
class Operand:
    """One operand of one attention op."""

    node: Node
    name: str
    value: Node


@dataclass
class Candidate:
    """A copy and the attention operands that it reaches."""

    node: Node
    source: Node
    sinks: list[Operand] = field(default_factory=list)


def is_hop(node: Node) -> bool:
    return node.op == "call_function" and isinstance(node.target, torch._ops.HigherOrderOperator)


def target_name(node: Node) -> str:
    """The op's qualified name, ``"namespace::name"``, for people."""
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.name
    return getattr(target, "__name__", None) or str(target)


def tensor_of(node: Node) -> Tensor | None:
    value = node.meta.get("val")
    return value if isinstance(value, Tensor) else None


def copy_source(node: Node) -> Node | None:
    """The node whose elements ``node`` copies into another layout; None if it does not."""
    if node.op != "call_function" or tensor_of(node) is None or WANTED in node.meta:
        return None
    source = _COPIES[node.target](node) if node.target in _COPIES else None
    return source if isinstance(source, Node) and tensor_of(source) is not None else None


def _relaid(node: Node) -> Any:
    """``clone`` and ``contiguous``, where the layout changes."""
    source = node.args[0]
    value = tensor_of(source) if isinstance(source, Node) else None
    if value is None or value.dtype != node.meta["val"].dtype:
        return None
    return None if Layout.of(value).equivalent(Layout.of(node.meta["val"])) else source


def _reshaped(node: Node) -> Any:
    """A ``reshape`` that had to copy, because no view reaches its sizes."""
    source = node.args[0]
    value = tensor_of(source) if isinstance(source, Node) else None
    if value is None:
        return None
    try:
        view = recompose(node, StridedView.of(Layout.of(value)), value.shape)
    except NotAView:
        return source
    is_strided = isinstance(view, StridedView) and view.layout(tuple(node.meta["val"].shape))
    return None if is_strided else source


def _copied_over(node: Node) -> Any:
    """``aten.copy`` into a buffer that holds nothing else."""
    buffer, source = node.args[:2]
    if not (isinstance(buffer, Node) and buffer.target in FRESH and isinstance(source, Node)):
        return None
    value, into = tensor_of(source), tensor_of(buffer)
    if value is None or into is None or (value.dtype, value.device) != (into.dtype, into.device):
        return None
    if not same(value.shape, into.shape) or Layout.of(value).equivalent(
        Layout.of(node.meta["val"])
    ):
        return None
    return source


_COPIES = {
    aten.clone.default: _relaid,
    aten.contiguous.default: _relaid,
    aten.reshape.default: _reshaped,
    aten.copy.default: _copied_over,
}


def source_argument(copy: Node) -> Node:
    """What a copy reads, as the graph has it by now."""
    source = copy.args[1 if copy.target is aten.copy.default else 0]
    assert isinstance(source, Node)
    return source


def nbytes(tensor: Tensor) -> Int:
    return product(tensor.shape) * tensor.element_size()


def bound_arguments(node: Node) -> dict[str, Any]:
    """Arguments of a resolved op by the names of its schema.

    Of an op that is wrapped because it writes, those that it may write are left out.
    """
    if is_functionalized(node):
        return {name: value for name, value in node.kwargs.items() if not name.startswith("_")}
    assert isinstance(node.target, torch._ops.OpOverload)
    names = [argument.name for argument in node.target._schema.arguments]
    return dict(zip(names, node.args)) | node.kwargs


class Facts:
    """What the decisions need to know of a graph, read once, in time linear in its size.

    The graph is not changed here, and these facts describe it as it was.

    Args:
        graph: functional or not.
        autograd: whether autograd may run over it.
    """

    def __init__(self, graph: Graph, autograd: bool = False) -> None:
        self.graph = graph
        self.autograd = autograd
        self.nodes = list(graph.nodes)
        self.order = {node: i for i, node in enumerate(self.nodes)}
        self.root: dict[Node, Node] = {}  # the node whose buffer a value lies in
        self.base: dict[Node, Node] = {}  # the node that only known views lead from to a value
        self.written: dict[Node, Node] = {}  # root -> an op that writes it
        self.backward: set[Node] = set()
        self.sources: dict[Node, Node] = {}  # copy -> what it copies
        self.sizes: list[Node] = []  # nodes that hold a symbolic size
        self.attention: list[Node] = []
        for node in self.nodes:
            self._read(node)

    def _read(self, node: Node) -> None:
        inputs = node.all_input_nodes
        if (source := copy_source(node)) is not None:
            self.sources[node] = source
        aliases = bool(inputs) and source is None and (is_view(node) or aliases_input(node))
        base = inputs[0] if aliases else returned_operand(node)
        self.root[node] = self.root[base] if base is not None else node
        self.base[node] = self.base[inputs[0]] if aliases and is_view(node) else node
        if str(node.target).startswith("tangents") or any(n in self.backward for n in inputs):
            self.backward.add(node)
        for mutated in mutated_inputs(node):
            for root in self.roots_of(mutated):
                self.written.setdefault(root, node)
        if is_attention(node):
            self.attention.append(node)
        if isinstance(node.meta.get("val"), torch.SymInt):
            self.sizes.append(node)

    def roots_of(self, node: Node) -> set[Node]:
        """Every buffer that a value may lie in."""
        stack, found = [self.root[node]], {self.root[node]}
        while stack:
            if not may_return_input(node := stack.pop()):
                continue
            roots = {self.root[source] for source in node.all_input_nodes} - found
            found |= roots
            stack.extend(roots)
        return found

    def writer_of(self, node: Node) -> Node | None:
        """The first op that writes memory in which a value may lie, if there is one."""
        writers = [self.written[r] for r in self.roots_of(node) if r in self.written]
        return min(writers, key=self.order.__getitem__, default=None)

    @functools.cached_property
    def attention_set(self) -> frozenset[Node]:
        return frozenset(self.attention)

    @functools.cached_property
    def returned(self) -> frozenset[Node]:
        """Buffers of which the caller gets all or a part."""
        outputs = [n for node in self.nodes if node.op == "output" for n in node.all_input_nodes]
        return frozenset(self.root[n] for n in outputs)

    @property
    def has_backward(self) -> bool:
        return bool(self.backward)

    def is_view(self, node: Node) -> bool:
        """Whether the node aliases its first input; a ``reshape`` that copies does not."""
        return is_view(node) and node not in self.sources

    def size_node(self, size: Int, before: Node) -> Node | None:
        """A node in front of another that holds a symbolic size, if there is one."""
        for node in self.sizes:
            if self.order[node] < self.order[before] and known(node.meta["val"] == size):
                return node
        return None

    def borders(self, node: Node) -> Node | None:
        """The first output, higher-order op or writer that a value reaches through views."""
        for user in sorted(node.users, key=self.order.__getitem__):
            if user.op == "output" or is_hop(user) or node in mutated_inputs(user):
                return user
            aliases = self.is_view(user) or aliases_input(user) or may_return_input(user)
            if aliases and (found := self.borders(user)) is not None:
                return found
        return None


def aliases_input(node: Node) -> bool:
    """Whether an op that is no view known here may return its input's memory."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or is_view(node):
        return False
    return any(
        r.alias_info is not None and not r.alias_info.is_write for r in target._schema.returns
    )


def returned_operand(node: Node) -> Node | None:
    """The operand that an in-place op writes and returns; None for any other."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return None
    writes = any(r.alias_info is not None and r.alias_info.is_write for r in target._schema.returns)
    return next(iter(mutated_inputs(node)), None) if writes else None


def may_return_input(node: Node) -> bool:
    """Whether an op may return its input although its schema does not say so.

    A composite may: dropout that is off does, and einsum that only permutes.
    """
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or target in MATMULS or is_view(node):
        return False
    return decomposes(target) and not _is_attention_op(target)


def mutated_inputs(node: Node) -> list[Node]:
    """Inputs whose memory the node may write."""
    if node.op != "call_function":
        return []
    if is_hop(node):
        return _written_by_hop(node)
    if not isinstance(node.target, torch._ops.OpOverload) or not node.target._schema.is_mutable:
        return []
    return _written_arguments(node.target, bound_arguments(node))


def _written_by_hop(node: Node) -> list[Node]:
    name = target_name(node)
    if name == "auto_functionalized_v2":
        return _nodes_in(node.kwargs.get("_all_bases"))
    if name == triton_tags.HOP:
        given = triton_tags.pointers(node)
        return [n for name in triton_tags.written(node) for n in _nodes_in(given.get(name))]
    if name == "auto_functionalized":
        return _written_arguments(called_op(node), node.kwargs)
    return node.all_input_nodes if name in WRITING_HOPS else []


def _written_arguments(target: Any, given: dict[str, Any]) -> list[Node]:
    return [
        value
        for argument in target._schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write
        for value in _nodes_in(given.get(argument.name))
    ]


def called_op(node: Node) -> Any:
    """The op that a node calls, also where ``auto_functionalized*`` wraps it."""
    return node.args[0] if is_functionalized(node) else node.target


def _nodes_in(arg: Any) -> list[Node]:
    found: list[Node] = []
    torch.fx.node.map_arg(arg, found.append)
    return found


def is_attention(node: Node) -> bool:
    """An op that somebody tagged, one of the table, or one that takes q, k and v by name.

    PyTorch's own layout tags alone make no attention op: collectives carry them too.
    """
    if node.op != "call_function":
        return False
    if is_hop(node):
        return (
            target_name(node) in HOP_ATTENTION
            or bool(triton_tags.tags_of(node))
            or (is_functionalized(node) and _is_attention_op(called_op(node)))
        )
    return _is_attention_op(node.target)


def _is_attention_op(target: Any) -> bool:
    if tags.qkv_arguments(target):
        return True
    tag = tags.lookup(target)
    return tag is not None and tag.by != "PyTorch tag"


def is_functionalized(node: Node) -> bool:
    """A writing op as functionalization leaves it."""
    return is_hop(node) and target_name(node).startswith("auto_functionalized")


def attention_name(node: Node) -> str:
    """Name of the attention op, also where it is wrapped because it writes."""
    return called_op(node)._schema.name if is_functionalized(node) else target_name(node)


def standing(node: Node) -> tuple[bool, str, str]:
    """(whether an attention op may read strides at all, its tag's status, the evidence)."""
    if tagged := triton_tags.tags_of(node):
        told = "; ".join(f"{tag.operand} by {dict(tag.strides)}" for tag in tagged)
        return True, str(tags.Status.DECLARED), f"stride arguments told by the user: {told}"
    tag = tags.lookup(called_op(node))
    if tag is None:
        return False, "untagged", ""
    first = next((tensor_of(o.value) for o in operands(node)), None)
    if tag.status.capable and first is not None:
        site = tags.site_of(called_op(node), first, has_mask=False, needs_grad=False)
        if (certificate := tags.certificate_of(site)) is not None:
            return True, str(tags.Status.CERTIFIED), _named(certificate)
    return tag.status.capable, str(tag.status), tag.evidence


def _named(certificate: Certificate) -> str:
    library = f"{certificate.library} {certificate.library_version}"
    return f"{certificate.calls} calls on {certificate.device}, {library}, {certificate.date}"


def _ends_layer(node: Node) -> bool:
    """An attention op proper; a tagged op of one operand (a norm, say) is looked through."""
    return is_attention(node) and (is_hop(node) or len(operand_names(node.target)) > 1)


def operands(node: Node) -> list[Operand]:
    """The operands of an attention op that are tensors of the graph."""
    if is_hop(node):
        return _operands_of_hop(node)
    given = bound_arguments(node)
    return [
        Operand(node, name, given[name])
        for name in operand_names(node.target)
        if isinstance(given.get(name), Node)
    ]


def _operands_of_hop(node: Node) -> list[Operand]:
    if tagged := triton_tags.tags_of(node):
        given = triton_tags.pointers(node)
        named = [(tag.operand, given.get(tag.operand)) for tag in tagged]
    elif is_functionalized(node):
        named = [(name, _wrapped_argument(node, name)) for name in operand_names(called_op(node))]
    else:
        named = list(zip("qkv", node.args))
    return [Operand(node, name, value) for name, value in named if isinstance(value, Node)]


def _wrapped_argument(node: Node, name: str) -> Any:
    """An argument of a wrapped op: given as it is, or, where it is written, by its base."""
    if name in node.kwargs:
        return node.kwargs[name]
    bases, index = _nodes_in(node.kwargs.get("_all_bases")), node.kwargs.get(f"_{name}_base_index")
    return bases[index] if isinstance(index, int) and index < len(bases) else None


def operand_names(target: Any) -> tuple[str, ...]:
    tag: StrideTag | None = tags.lookup(target)
    named = tag.operands if tag is not None else ()
    return named or tags.qkv_arguments(target)


def find_candidates(facts: Facts) -> list[Candidate]:
    """Copies that reach an attention operand, in graph order."""
    found: dict[Node, Candidate] = {}
    for attention in facts.attention:
        for operand in operands(attention):
            for node in _in_front(operand.value, facts.sources):
                found.setdefault(node, Candidate(node, facts.sources[node])).sinks.append(operand)
    return sorted(found.values(), key=lambda c: facts.order[c.node])


def _in_front(value: Node, copies: Container[Node]) -> list[Node]:
    """Copies between an operand and the matmuls, attention ops and inputs in front of it."""
    found, seen, stack = [], {value}, [value]
    while stack:
        node = stack.pop()
        if node in copies:
            found.append(node)
        if node.op != "call_function" or node.target in MATMULS or _ends_layer(node):
            continue
        for source in node.all_input_nodes:
            if source not in seen and not isinstance(source.meta.get("val"), torch.SymInt):
                seen.add(source)
                stack.append(source)
    return found
