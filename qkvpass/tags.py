"""Stride tags: which ops read which operands by explicit stride, and on what evidence.

Names resolve when a graph is met, so an op may be tagged before its library is imported,
and may be a pattern (``"_flash_attn3_*::fwd"``), since kernel builders hash namespaces.
A user's tag wins over the built-in table; PyTorch's own layout tags are honoured, and
``needs_contiguous_strides`` wins over everything, because Inductor densifies for it.
"""

from __future__ import annotations

import enum
import fnmatch
import functools
import hashlib
import inspect
import re
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch

from . import evidence
from .builtin_ops import BUILTIN_OPS
from .certificate import Certificate
from .gain import Slower
from .layout import Int, StrideContract, known, product

OpName: TypeAlias = "str | torch._ops.OpOverload | torch._ops.OpOverloadPacket | Any"


class Status(str, enum.Enum):
    """On what a tag rests, or why there is none."""

    CERTIFIED = "certified"  # a certificate that can be made again
    DECLARED = "declared"  # somebody's word: source reading, an op's author, the user
    DENSE_ONLY = "dense-only"  # known to misread strided operands
    UNVERIFIED = "unverified"  # nobody has tried

    def __str__(self) -> str:
        return self.value

    @property
    def capable(self) -> bool:
        return self in (Status.CERTIFIED, Status.DECLARED)


@dataclass(frozen=True)
class Site:
    """One call of an attention op, as a tag's condition sees it.

    Args:
        op: name of the op, ``"namespace::name"``.
        device: device type of the first operand (``"cuda"``, ``"cpu"``, ...).
        arch: ``"sm_90"``-like architecture, ``"hip"`` for a ROCm build of torch, or None.
        dtype: dtype of the first operand.
        head_dim: size of the last dim of the first operand, in elements.
        num_tokens: elements of the first operand over head_dim (tokens times heads times batch).
        has_mask: whether an argument named like a mask or bias is given.
        needs_grad: whether the graph is a joint forward and backward graph.
        torch_version: ``torch.__version__``.
    """

    op: str
    device: str
    arch: str | None
    dtype: torch.dtype
    head_dim: Int
    num_tokens: Int
    has_mask: bool
    needs_grad: bool
    torch_version: str = torch.__version__


Condition: TypeAlias = Callable[[Site], "str | None"]


@dataclass(frozen=True)
class StrideTag:
    """What is known of one op's operands.

    Args:
        op: name or pattern, ``"namespace::name"`` or ``"namespace::name.overload"``.
        operands: names of the schema arguments that are read by explicit stride.
        contract: the layouts that are admitted.
        when: returns None where the tag holds, else the reason why not.
        backward_of: the forward op, where this one is a backward.
        slower: calls that lose by reading strides; there, copies stay under Inductor.
        status: on what the tag rests.
        evidence: the certificate or the source fact.
        by: who tagged it: ``"built-in"``, ``"user"`` or ``"PyTorch tag"``.
        version: stands for ``when`` in cache keys where it is no importable function.
    """

    op: str
    operands: tuple[str, ...]
    contract: StrideContract = StrideContract()
    when: Condition | None = None
    backward_of: str | None = None
    slower: tuple[Slower, ...] = ()
    status: Status = Status.DECLARED
    evidence: str = ""
    by: str = "user"
    version: str | None = None

    def matches(self, name: str, overload: str) -> bool:
        wanted, _, wanted_overload = self.op.partition(".")
        if wanted_overload and wanted_overload != overload:
            return False
        return fnmatch.fnmatchcase(name, wanted)

    @property
    def is_pattern(self) -> bool:
        return any(c in self.op for c in "*?[")

    def key(self) -> str | None:
        """Text that changes whenever the tag's meaning does; None if that can't be told."""
        condition = _condition_key(self.when, self.version)
        if condition is None:
            return None
        return repr((replace(self, when=None), condition))


@functools.cache
def _condition_key(when: Condition | None, version: str | None) -> str | None:
    if when is None or version is not None:
        return repr(version)
    name = f"{getattr(when, '__module__', None)}.{getattr(when, '__qualname__', '')}"
    if not _importable(when):
        return None
    try:
        source = inspect.getsource(when)
    except (OSError, TypeError):
        return None
    return f"{name}:{hashlib.sha256(source.encode()).hexdigest()}"


def _importable(function: Callable[..., Any]) -> bool:
    found: Any = sys.modules.get(getattr(function, "__module__", "") or "")
    for part in getattr(function, "__qualname__", "<none>").split("."):
        found = getattr(found, part, None)
    return found is function


@dataclass
class _Registry:
    user: dict[str, StrideTag] = field(default_factory=dict)
    hidden: set[str] = field(default_factory=set)  # built-in names that the user took away
    lock: threading.Lock = field(default_factory=threading.Lock)
    version: int = 0

    def changed(self) -> None:
        self.version += 1
        lookup_cached.cache_clear()


_registry = _Registry()


@functools.cache
def builtin_tags() -> tuple[StrideTag, ...]:
    """The built-in table as tags, in the order of the table."""
    return tuple(
        StrideTag(
            op=op.name,
            operands=op.operands,
            contract=op.contract,
            when=op.when,
            backward_of=op.backward_of,
            slower=op.slower,
            status=Status(op.status),
            evidence=op.fact,
            by="built-in",
        )
        for op in BUILTIN_OPS
    )


def op_name(op: OpName) -> str:
    """``"namespace::name[.overload]"`` of an op given in any form.

    Raises:
        TypeError: if it is no name, OpOverload, OpOverloadPacket or custom op.
        ValueError: if the name has no namespace.
    """
    if isinstance(op, torch._ops.OpOverload):
        return f"{op.namespace}::{op._schema.name.split('::')[1]}.{op._overloadname}"
    if isinstance(op, torch._ops.OpOverloadPacket):
        return op._qualified_op_name
    if hasattr(op, "_qualname"):  # torch.library.CustomOpDef
        return op._qualname
    if not isinstance(op, str):
        raise TypeError(
            f"op is {op!r}; give 'namespace::name', an OpOverload or a torch.library.custom_op"
        )
    if not re.fullmatch(r"[^:\s]+::[^:\s]+", op):
        raise ValueError(
            f"op is {op!r}; give it as 'namespace::name', with an overload behind a dot if need be"
        )
    return op


def register_stride_tag(
    op: OpName,
    *,
    operands: Sequence[str],
    contract: StrideContract | None = None,
    when: Condition | None = None,
    backward_of: str | None = None,
    slower: Sequence[Slower] = (),
    version: str | None = None,
) -> StrideTag:
    """State that ``op`` reads ``operands`` by explicit stride, within ``contract``.

    Args:
        op: name, pattern of names, OpOverload, or ``torch.library.custom_op``. A name need
            not exist yet.
        operands: names of schema arguments that are tensors. An op that also takes strides as
            numbers, under whatever name, must not be tagged: they were fixed when traced.
        contract: admitted layouts; the default asks for strides of 16 bytes and a last
            stride of 1, and keeps the copy where the output's layout would change.
        when: called with a :class:`Site`; None means the tag holds, a string is why not.
        backward_of: name of the forward op, for a backward.
        slower: calls that were measured to lose by reading strides; there, copies stay.
        version: stands for ``when`` in cache keys where it is a lambda or a closure;
            without it such a tag makes compiles go uncached.

    Returns:
        The tag, also listed by :func:`stride_tags`. It replaces an earlier one for the op.

    Raises:
        ValueError: for a malformed name, no operands, or operands that the op lacks.
        TypeError: if ``op`` is no op, operands are no names, or ``when`` is not callable.
    """
    name = op_name(op)
    if isinstance(operands, str) or not all(isinstance(o, str) for o in operands):
        raise TypeError(f"operands is {operands!r}; give names, such as ('q', 'k', 'v')")
    operands = tuple(operands)
    if not operands:
        raise ValueError(
            f"no operands given for {name}; name the arguments that are read by stride"
        )
    if when is not None and not callable(when):
        raise TypeError(f"when is {when!r}; give a function from a Site to None or a reason")
    tag = StrideTag(
        op=name,
        operands=operands,
        contract=contract or StrideContract(),
        when=when,
        backward_of=backward_of,
        slower=tuple(slower),
        evidence="registered by the user",
        version=version,
    )
    _check_operands(tag)
    with _registry.lock:
        _registry.user[name] = tag
        _registry.hidden.discard(name)
        _registry.changed()
    return tag


def _check_operands(tag: StrideTag) -> None:
    if tag.is_pattern:
        return
    namespace, _, rest = tag.op.partition("::")
    packet = getattr(getattr(torch.ops, namespace), rest.partition(".")[0], None)
    if packet is None:
        return
    for overload in packet.overloads():
        target = getattr(packet, overload)
        if not tag.matches(*qualified(target)):
            continue
        names = [argument.name for argument in target._schema.arguments]
        for group in (tag.operands, *tag.contract.together, _followed(tag.contract)):
            if missing := [operand for operand in group if operand not in names]:
                raise ValueError(
                    f"{tag.op} has no argument {missing[0]!r}; it has {', '.join(names)}"
                )


def _followed(contract: StrideContract) -> tuple[str, ...]:
    prefix, _, operand = (contract.output or "").partition(":")
    return (operand,) if prefix == "like" else ()


def stride_capable(*operands: str, **options: Any) -> Callable[[Any], Any]:
    """Decorator over ``torch.library.custom_op``: the op reads ``operands`` by stride.

    Takes the options of :func:`register_stride_tag` and returns the op as it was.
    """
    if not all(isinstance(o, str) for o in operands):
        raise TypeError("stride_capable got no names; write @stride_capable('q', 'k', 'v')")

    def tag(op: Any) -> Any:
        register_stride_tag(op, operands=operands, **options)
        return op

    return tag


def unregister_stride_tag(op: OpName) -> None:
    """Take a tag away, the user's first, else the built-in one of that name.

    Raises:
        KeyError: if nothing is tagged under that name.
    """
    name = op_name(op)
    plain = name.removesuffix(".default")  # an OpOverload names one; most tags name none
    with _registry.lock:
        built_in = {tag.op for tag in builtin_tags()} - _registry.hidden
        if found := next((n for n in (name, plain) if n in _registry.user), None):
            del _registry.user[found]
        elif found := next((n for n in (name, plain) if n in built_in), None):
            _registry.hidden.add(found)
        else:
            raise KeyError(f"{name} has no stride tag; stride_tags() lists those there are")
        _registry.changed()


def stride_tags() -> list[StrideTag]:
    """Every tag in force, the user's first: what is tagged, by whom, on what evidence.

    Ops known as dense-only or unverified are listed too; their ``status`` says so.
    """
    with _registry.lock:
        user = list(_registry.user.values())
        hidden = set(_registry.hidden)
    shadowed = {tag.op for tag in user} | hidden
    return user + [tag for tag in builtin_tags() if tag.op not in shadowed]


def qualified(target: torch._ops.OpOverload) -> tuple[str, str]:
    """(``"namespace::name"``, overload) of a resolved op."""
    return target._schema.name, target._overloadname


def lookup(target: Any) -> StrideTag | None:
    """The tag in force for a call target, whatever its status; None for an op nobody knows."""
    return lookup_cached(target) if isinstance(target, torch._ops.OpOverload) else None


@functools.lru_cache(maxsize=4096)
def lookup_cached(target: torch._ops.OpOverload) -> StrideTag | None:
    name, overload = qualified(target)
    if torch.Tag.needs_contiguous_strides in target.tags:
        return _torch_tag(target, Status.DENSE_ONLY, "needs_contiguous_strides")
    # The user beats the table; a name beats a pattern; one with an overload beats one without.
    for tag in sorted(stride_tags(), key=_rank):
        if tag.matches(name, overload):
            return tag
    if torch.Tag.flexible_layout in target.tags:
        return _torch_tag(target, Status.DECLARED, "flexible_layout")
    return None


def _rank(tag: StrideTag) -> tuple[bool, bool, bool]:
    return tag.by != "user", tag.is_pattern, "." not in tag.op


def backward_tags(target: torch._ops.OpOverload) -> list[StrideTag]:
    """Capable tags of what may run as the backward of an op."""
    name, _ = qualified(target)
    return [
        tag
        for tag in stride_tags()
        if tag.status.capable and fnmatch.fnmatchcase(name, tag.backward_of or "")
    ]


def _torch_tag(target: torch._ops.OpOverload, status: Status, tag: str) -> StrideTag:
    return StrideTag(
        op=qualified(target)[0],
        operands=qkv_arguments(target) or _tensor_arguments(target),
        contract=StrideContract(alignment=1),
        status=status,
        evidence=f"declared with torch.Tag.{tag}",
        by="PyTorch tag",
    )


def _tensor_arguments(target: torch._ops.OpOverload) -> tuple[str, ...]:
    return tuple(a.name for a in target._schema.arguments if "Tensor" in str(a.type))


_QKV = tuple(
    re.compile(rf"x?{letter}|{word}.*|x?{letter}_.*")
    for letter, word in (("q", "quer(?:y|ies)"), ("k", "key"), ("v", "value"))
)


@functools.cache
def qkv_arguments(target: Any) -> tuple[str, ...]:
    """Names of the q, k and v arguments of an op, or () if it takes none of that kind."""
    if not isinstance(target, torch._ops.OpOverload):
        return ()
    names = [a.name for a in target._schema.arguments if "Tensor" in str(a.type)]
    # The shortest: "key" is the key, "key_padding_mask" in front of it is not.
    found = [min(filter(pattern.fullmatch, names), key=len, default="") for pattern in _QKV]
    return tuple(found) if all(found) else ()


def site_of(target: Any, operand: torch.Tensor, has_mask: bool, needs_grad: bool) -> Site:
    """The call site of an op whose first operand is ``operand``."""
    return Site(
        op=qualified(target)[0],
        device=operand.device.type,
        arch=evidence.arch_of(operand.device),
        dtype=operand.dtype,
        head_dim=operand.shape[-1] if operand.dim() else 1,
        num_tokens=product(operand.shape[:-1]),
        has_mask=has_mask,
        needs_grad=needs_grad,
    )


def certificate_of(site: Site) -> Certificate | None:
    """The certificate that counts for a call: same op, library, arch, a dtype and size tried."""
    certificate = evidence.certificate_for(site.op, site.arch)
    if certificate is None or str(site.dtype).removeprefix("torch.") not in certificate.dtypes:
        return None
    largest = max(certificate.head_dims, default=0)
    return certificate if known(site.head_dim <= largest) else None


def registry_key() -> tuple[str, ...] | None:
    """Text of everything that tags can change in a graph, for cache keys; None if unknowable."""
    keys = [evidence.key(), *(tag.key() for tag in stride_tags())]
    return None if None in keys else tuple(str(key) for key in keys)
