"""Stride tags for Triton kernels that a model launches itself.

Such a launch is in the graph as a higher-order op whose integer arguments were baked in
when it was traced, the strides among them. A tag tells which argument is which stride of
which operand; a copy in front may then go, and the constants change with the layout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.fx import Node

from .compat import add_triton_constants, triton_constants, triton_kernel
from .gain import Slower
from .layout import Int, Layout, Pointer, StrideContract, known
from .reason import Reason

HOP = "triton_kernel_wrapper_functional"


@dataclass(frozen=True)
class TritonTag:
    """How one operand of a kernel gets its strides.

    Args:
        kernel: ``"module.function"`` of the kernel.
        operand: name of the pointer argument.
        strides: dim of the tensor to the argument that holds its stride, in elements.
        contract: admitted layouts.
        slower: calls that lose by reading strides; there, copies stay under Inductor.
    """

    kernel: str
    operand: str
    strides: tuple[tuple[int, str], ...]
    contract: StrideContract
    slower: tuple[Slower, ...] = ()


_tags: dict[tuple[str, str], TritonTag] = {}


def register_triton_stride_tag(
    kernel: Any,
    *,
    operand: str,
    strides: Mapping[int, str],
    contract: StrideContract | None = None,
    slower: Sequence[Slower] = (),
) -> TritonTag:
    """State which arguments of a Triton kernel are the strides of one of its operands.

    Args:
        kernel: the ``@triton.jit`` function, autotuned or not.
        operand: name of the pointer argument, as ``"Q"``.
        strides: dim to argument name, as ``{0: "stride_qt", 1: "stride_qh"}``. A dim that is
            left out must keep its stride, so the last is left out where the kernel takes it
            for 1.
        contract: admitted layouts; the default asks for 16-byte alignment, which a Triton
            kernel does not need, but under which it was compiled.
        slower: calls that were measured to lose by reading strides; there, copies stay.

    Raises:
        ValueError: if the kernel has no such arguments.
    """
    function = _function(kernel)
    names = list(getattr(kernel, "arg_names", ())) or list(function.__code__.co_varnames)
    if missing := [name for name in (operand, *strides.values()) if name not in names]:
        raise ValueError(
            f"{_name(kernel)} has no argument {missing[0]!r}; it has {', '.join(names)}"
        )
    tag = TritonTag(
        _name(kernel),
        operand,
        tuple(sorted(strides.items())),
        contract or StrideContract(),
        tuple(slower),
    )
    _tags[tag.kernel, operand] = tag
    return tag


def unregister_triton_stride_tag(kernel: Any, *, operand: str) -> None:
    """Take a tag away.

    Raises:
        KeyError: if there is none for this operand.
    """
    del _tags[_name(kernel), operand]


def _function(kernel: Any) -> Any:
    while not hasattr(kernel, "__code__") and hasattr(kernel, "fn"):
        kernel = kernel.fn
    return kernel


def _name(kernel: Any) -> str:
    function = _function(kernel)
    return f"{function.__module__}.{function.__qualname__}"


def tags_of(node: Node) -> list[TritonTag]:
    """Tags of the operands of a launch that the kernel only reads."""
    if not _tags or getattr(node.target, "__name__", "") != HOP:
        return []
    name = _name(triton_kernel(node))
    return [t for (k, operand), t in _tags.items() if k == name and operand not in written(node)]


def written(node: Node) -> list[str]:
    """Names of the operands that a launch writes, by PyTorch's own analysis of the kernel."""
    names: Any = node.kwargs.get("tensors_to_clone", ())
    return list(names)


def _described(node: Node) -> set[str]:
    """Operands that a launch reads through a TMA descriptor."""
    descriptors: Any = node.kwargs.get("tma_descriptor_metadata") or {}
    return set(descriptors)


def pointers(node: Node) -> dict[str, Any]:
    """Arguments of a launch that are in the graph, by name: tensors, and sizes in line."""
    given: Any = node.kwargs["kwargs"]
    return dict(given)


def misfit(
    node: Node,
    changed: list[Node],
    after: Callable[[Node], Tensor],
    pointer: Callable[[Node], Pointer],
) -> tuple[Reason, str] | None:
    """Why a launch may not get operands in new layouts; None if its constants can follow."""
    tags = tags_of(node)
    named = {tag.operand: tag for tag in tags}
    arguments = pointers(node)
    for name, source in arguments.items():
        if isinstance(source, Node) and source in changed and name not in named:
            return Reason.OPAQUE_CONSUMER, f"is not tagged for {name}"
    for source in changed:
        if source not in arguments.values():
            return Reason.OPAQUE_CONSUMER, f"takes {source.name} in another way than as a pointer"
    wanted: dict[str, Int] = {}
    for tag in tags:
        source = arguments.get(tag.operand)
        if not isinstance(source, Node):
            continue
        value = after(source)
        new = Layout.of(value)
        fault = _unfollowed(node, tag, Layout.of(source.meta["val"]), new)
        fault = fault or tag.contract.violation(new, value.element_size(), pointer(source))
        if tag.operand in _described(node):
            fault = Reason.OPAQUE_CONSUMER, "a TMA descriptor was made for its old layout"
        if fault is not None:
            return fault[0], f"operand {tag.operand}: {fault[1]}"
        for dim, argument in tag.strides:
            if argument in wanted and not known(wanted[argument] == new.stride[dim]):
                return Reason.MIXED_LAYOUT, f"has one argument {argument} for two strides"
            wanted[argument] = new.stride[dim]
    return None


def _unfollowed(node: Node, tag: TritonTag, old: Layout, new: Layout) -> tuple[Reason, str] | None:
    told = dict(tag.strides)
    for dim, (size, was, now) in enumerate(zip(new.size, old.stride, new.stride)):
        if known(was == now) or known(size == 1):
            continue
        if dim not in told:
            return Reason.OPAQUE_CONSUMER, f"no argument holds the stride of dim {dim}"
        held = _held(node, told[dim])
        if not isinstance(held, int) or not known(was == held):
            return (
                Reason.OPAQUE_CONSUMER,
                f"argument {told[dim]} is {held}, not the stride {was} of dim {dim}",
            )
        if not isinstance(now, int):
            return Reason.UNBACKED_SHAPE, f"the stride {now} of dim {dim} is no constant"
    return None


def restated(node: Node) -> dict[str, Any]:
    """Keyword arguments of a launch that must change to say its operands' strides of now."""
    wanted = {
        argument: stride for argument, stride in _told(node) if _held(node, argument) != stride
    }
    constants, given = triton_constants(node) if wanted else {}, pointers(node) if wanted else {}
    changes: dict[str, Any] = {}
    if baked := {a: s for a, s in wanted.items() if a in constants}:
        changes["constant_args_idx"] = add_triton_constants({**constants, **baked})
    if literal := {a: s for a, s in wanted.items() if a in given}:
        changes["kwargs"] = {**given, **literal}
    return changes


def _told(node: Node) -> Iterator[tuple[str, Int]]:
    """(stride argument, the stride that it is to hold) of every tagged operand."""
    for tag in tags_of(node):
        source = pointers(node).get(tag.operand)
        if isinstance(source, Node):
            value = source.meta["val"]
            for dim, argument in tag.strides:
                if not known(value.shape[dim] == 1) and isinstance(_held(node, argument), int):
                    yield argument, value.stride(dim)


def _held(node: Node, argument: str) -> Any:
    """What a launch has for an argument: baked in, or in line where an op was opened up."""
    given = pointers(node)
    return given[argument] if argument in given else triton_constants(node).get(argument)


def key() -> str:
    """Text of all tags, for cache keys."""
    return repr(sorted(_tags.items(), key=lambda item: item[0]))
