"""Give an attention op over merged batch and heads its two dims back.

Attention written out with ``bmm`` merges batch and heads, and Inductor's fusion makes SDPA of it as
it is: over (1, B*H, N, D). No strided view of a packed projection has B*H as one dim.

Before, and after::

    q = unsqueeze(view(clone(q), [B*H, N, D]), 0)      q = view(unsqueeze(...), [B, H, N, D])
    o = sdpa(q, k, v)                                  o = view(sdpa(q, k, v), [1, B*H, N, D])

Every head is computed as before, and the rule then sees through the views. A library may pick
another kernel for the other sizes, so that nothing is claimed of the last bit.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from .editor import Editor, NotPossible
from .layout import Int, Layout, known
from .match import Facts, bound_arguments, operands, tensor_of
from .speculate import FAILED, Edited, Rewrite, State

aten = torch.ops.aten

# Ops over (batch, heads, tokens, head size) whose heads and batches are alike and independent of
# each other. Deliberately not on it: ops whose batches have lengths or masks of their own.
HEADS_ALIKE = frozenset(
    {
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_cudnn_attention.default,
    }
)


def find(state: State) -> list[str]:
    """Names of the attention ops over merged heads that keep copies in front."""
    return list(_sites(state))


def _sites(state: State) -> dict[str, tuple[Int, Int]]:
    """(batch, heads) by attention op, as the copies in front have them."""
    found: dict[str, tuple[Int, Int]] = {}
    for candidate in state.decisions.candidates:
        for sink in candidate.sinks:
            value = candidate.node.meta["val"]
            if candidate.node.name in state.removed or value.dim() != 4:
                continue
            if _is_merged(sink.node, value.shape[0], value.shape[1]):
                found.setdefault(sink.node.name, (value.shape[0], value.shape[1]))
    return found


def _is_merged(attention: Node, batch: Int, heads: Int) -> bool:
    """Whether an op has all heads of all batches in dim 1, and looks at nothing but them."""
    if attention.target not in HEADS_ALIKE or any(
        u.target is not operator.getitem for u in attention.users
    ):
        return False
    if any(user.args[1] != 0 for user in attention.users):
        return False
    if bound_arguments(attention).get("dropout_p"):
        return False
    values = [tensor_of(operand.value) for operand in operands(attention)]
    return len(values) == 3 and all(
        v is not None
        and v.dim() == 4
        and known(v.shape[0] == 1)
        and known(v.shape[1] == batch * heads)
        for v in values
    )


def edit(graph: Graph, state: State, sites: frozenset[str]) -> dict[str, Edited]:
    """Split the heads of the attention ops named."""
    facts = Facts(graph)
    editor = Editor(graph, facts)
    nodes = {node.name: node for node in graph.nodes}
    edited = {}
    for name, split in _sites(state).items():
        if name not in sites:
            continue
        try:
            _split(nodes[name], split, editor)
        except NotPossible:
            edited[name] = FAILED
            continue
        note = f"{name} computes batch and heads as two dims, as they were before they were merged"
        edited[name] = Edited(note, _pays(name, state))
    editor.journal.commit()
    return edited


def _split(attention: Node, split: tuple[Int, Int], editor: Editor) -> None:
    outputs = list(attention.users)
    editor.in_place_of(attention)
    views: dict[Node, Node] = {}
    for value in dict.fromkeys(operand.value for operand in operands(attention)):
        tail = value.meta["val"].shape[2:]
        views[value] = editor.view(attention, value, [*split, *tail])
    if (mask := _mask(attention)) is not None:
        views[mask] = _split_mask(attention, mask, split, editor)
    args: Any
    kwargs: Any
    args, kwargs = map_arg((attention.args, attention.kwargs), lambda n: views.get(n, n))
    anchor = attention.next
    new = editor.call(anchor, attention.target, *args, **kwargs)
    for output in outputs:
        value = editor.call(anchor, operator.getitem, new, 0)
        for same in _split_again(output, value, editor.facts):
            editor.redirect(list(same.users), same, value)
        editor.journal.dead.append(attention)
        editor.replace(output, editor.view(anchor, value, list(output.meta["val"].shape)))


def _mask(attention: Node) -> Node | None:
    """What is added to the scores, broadcast to (batch, heads, queries, keys)."""
    given = bound_arguments(attention)
    return next((given[n] for n in ("attn_mask", "attn_bias") if given.get(n) is not None), None)


def _split_mask(attention: Node, mask: Node, split: tuple[Int, Int], editor: Editor) -> Node:
    """The mask of the split op: one for all heads as it is, one for each head split like q."""
    size = list(mask.meta["val"].shape)
    if len(size) < 3 or all(known(s == 1) for s in size[:-2]):
        return mask
    if len(size) != 4 or not known(size[0] == 1) or not known(size[1] == split[0] * split[1]):
        raise NotPossible(f"the mask of {attention.name} has sizes {size}")
    return editor.view(attention, mask, [*split, *size[2:]])


def _split_again(output: Node, value: Node, facts: Facts) -> list[Node]:
    """Views of the merged output that are the split one: all of it, dense, in the same sizes."""
    found: list[Node] = []
    stack, layout = [output], Layout.of(value.meta["val"])
    if not (layout.row_major and Layout.of(output.meta["val"]).row_major):
        return []
    while stack:
        for user in stack.pop().users:
            if not facts.is_view(user) or not isinstance(user.meta["val"], Tensor):
                continue
            alike = Layout.of(user.meta["val"]).same(layout)
            (found if alike else stack).append(user)
    return found


def _pays(name: str, before: State) -> Callable[[State], bool]:
    """Whether a copy in front of the op goes that stayed before."""
    kept = {
        candidate.node.name
        for candidate in before.decisions.candidates
        if any(sink.node.name == name for sink in candidate.sinks)
    } - before.removed
    return lambda after: bool(kept & after.removed)


REWRITE = Rewrite("split_heads", find, edit, numerics=("default",))
