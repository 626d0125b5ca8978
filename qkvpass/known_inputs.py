"""How known attention ops are called, as data, and how unknown ones are guessed from their schema.

An argument is found by its name: among the operands, among what the forward op was given and
returned (for a backward), in the row's constants, and by the rules at the end. What has a
default keeps it.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .operands import BHSD, BSHD, ORDERS, THD

# Efficient attention counts rows times stride in int32 (mem_eff_attention/kernel_forward.h); this
# leaves room for whole tiles of rows.
EFFICIENT_OFFSET = 2**30 - 1
HALF = (torch.float16, torch.bfloat16)


class CannotBuild(Exception):
    """An op whose arguments cannot be guessed; the message names the one."""


@dataclass(frozen=True)
class Spec:
    """One call to build.

    Args:
        operands: tensors by schema name, laid out as they must be given.
        order: ``"THD"``, ``"BSHD"`` or ``"BHSD"``: the dims of q, k and v.
        lengths: tokens of each sequence of q.
        lengths_k: tokens of each sequence of k and v.
        mask: additive mask (B, H, S, S_k) in the dtype of q, or None.
        made: for a backward, what its forward was given and returned, by name.
    """

    operands: Mapping[str, Tensor]
    order: str
    lengths: tuple[int, ...]
    lengths_k: tuple[int, ...]
    mask: Tensor | None = None
    made: Mapping[str, Any] = field(default_factory=dict)

    @property
    def q(self) -> Tensor:
        return next(iter(self.operands.values()))

    @property
    def k(self) -> Tensor:
        return list(self.operands.values())[1]

    @property
    def v(self) -> Tensor:
        return list(self.operands.values())[2]

    @property
    def scale(self) -> float:
        return float(self.q.shape[-1]) ** -0.5

    @property
    def max_seqlen_q(self) -> int:
        return max(self.lengths, default=0)

    @property
    def max_seqlen_k(self) -> int:
        return max(self.lengths_k, default=0)

    @property
    def cu_seqlens_q(self) -> Tensor:
        """(sequences + 1,) int32: where each sequence of q starts, in tokens."""
        return _starts(self.lengths, self.q.device)

    @property
    def cu_seqlens_k(self) -> Tensor:
        return _starts(self.lengths_k, self.q.device)


def _starts(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    starts = torch.tensor((0, *lengths), dtype=torch.int32, device=device)
    return torch.cumsum(starts, 0, dtype=torch.int32)


Build = Callable[[Spec], tuple[tuple[Any, ...], dict[str, Any]]]


@dataclass(frozen=True)
class KnownInputs:
    """How one op is called.

    Args:
        orders: orders of dims that it takes.
        constants: arguments by name.
        forward: for a backward, the op whose outputs it needs.
        returns: names of the forward's outputs, where its schema names none.
        max_offset: largest offset in elements that the op's source allows for.
        dtypes: what its tag is for, where that is not every dtype that it takes.
        alignment: bytes to ask for even where less works on the machine of the test.
    """

    orders: tuple[str, ...] = ORDERS
    constants: Mapping[str, Any] = field(default_factory=dict)
    forward: str | None = None
    returns: tuple[str, ...] = ()
    max_offset: int | None = None
    dtypes: tuple[torch.dtype, ...] = ()
    alignment: int = 1


_SDPA = "aten::_scaled_dot_product_"
_LSE = {"compute_log_sumexp": True}
_FLASH = {"return_debug_mask": False}
_EFFICIENT = {"custom_mask_type": 0, "compute_log_sumexp": True, "bias_requires_grad": False}
_NO_BIAS_GRADIENT = {"grad_input_mask": [True, True, True, False]}
_FA2_RETURNS = ("out", "softmax_lse", "S_dmask", "rng_state")

KNOWN_INPUTS: Mapping[str, KnownInputs] = {
    f"{_SDPA}flash_attention": KnownInputs((BHSD,)),
    f"{_SDPA}flash_attention_backward": KnownInputs((BHSD,), forward=f"{_SDPA}flash_attention"),
    f"{_SDPA}efficient_attention": KnownInputs((BHSD,), _LSE, max_offset=EFFICIENT_OFFSET),
    f"{_SDPA}efficient_attention_backward": KnownInputs(
        (BHSD,),
        _NO_BIAS_GRADIENT,
        forward=f"{_SDPA}efficient_attention",
        max_offset=EFFICIENT_OFFSET,
    ),
    # In fp32 with head size 256 it answers with what was in memory, on dense inputs too.
    f"{_SDPA}cudnn_attention": KnownInputs((BHSD,), _LSE, dtypes=HALF),
    f"{_SDPA}cudnn_attention_backward": KnownInputs(
        (BHSD,), forward=f"{_SDPA}cudnn_attention", dtypes=HALF
    ),
    # In fp32 its GEMM rounded otherwise on some CPU for rows that were not 16-byte aligned.
    f"{_SDPA}flash_attention_for_cpu": KnownInputs((BHSD,), alignment=16),
    f"{_SDPA}flash_attention_for_cpu_backward": KnownInputs(
        (BHSD,), forward=f"{_SDPA}flash_attention_for_cpu", alignment=16
    ),
    f"{_SDPA}fused_attention_overrideable": KnownInputs((BHSD,)),
    "aten::_flash_attention_forward": KnownInputs((THD, BSHD), _FLASH),
    "aten::_flash_attention_backward": KnownInputs(
        (THD, BSHD), forward="aten::_flash_attention_forward"
    ),
    "aten::_efficient_attention_forward": KnownInputs(
        (BSHD,), _EFFICIENT, max_offset=EFFICIENT_OFFSET
    ),
    "aten::_efficient_attention_backward": KnownInputs(
        (BSHD,),
        _EFFICIENT,
        forward="aten::_efficient_attention_forward",
        max_offset=EFFICIENT_OFFSET,
    ),
    "aten::_cudnn_attention_forward": KnownInputs((THD,), _LSE, dtypes=HALF),
    "aten::_cudnn_attention_backward": KnownInputs(
        (THD,), forward="aten::_cudnn_attention_forward", dtypes=HALF
    ),
    "torch_attn::_varlen_attn": KnownInputs((THD,)),
    "torch_attn::_varlen_attn_backward": KnownInputs(
        (THD,), forward="torch_attn::_varlen_attn", returns=("out", "lse", "rng_state")
    ),
    "fa3_fwd::_flash_attn_forward": KnownInputs((THD, BSHD)),
    "fa3_fwd::fwd": KnownInputs((THD, BSHD)),
    "flash_attn_3::_flash_attn_forward": KnownInputs((THD, BSHD)),
    "flash_attn_3::fwd": KnownInputs((THD, BSHD)),
    "flash_attn::_flash_attn_forward": KnownInputs((BSHD,)),
    "flash_attn::_flash_attn_varlen_forward": KnownInputs((THD,)),
    # It makes a copy itself of what is not aligned.
    "qkvpass::flash_attn_4": KnownInputs((THD, BSHD), alignment=16),
    "flash_attn::_flash_attn_backward": KnownInputs(
        (BSHD,), forward="flash_attn::_flash_attn_forward", returns=_FA2_RETURNS
    ),
    "flash_attn::_flash_attn_varlen_backward": KnownInputs(
        (THD,), forward="flash_attn::_flash_attn_varlen_forward", returns=_FA2_RETURNS
    ),
}

# What registers the ops of a namespace.
MODULES: Mapping[str, tuple[str, ...]] = {
    "torch_attn": ("torch.nn.attention.varlen",),
    "flash_attn": ("flash_attn",),
    "fa3_fwd": ("fa3_fwd_interface",),
    "flash_attn_3": ("flash_attn_interface", "flash_attn_3.flash_attn_interface"),
    "qkvpass": ("qkvpass.ops",),
    "qkvpass_example": ("triton_varlen",),
}

# The same thing by the names that a forward returns it under and a backward takes it under.
_ALIASES: Mapping[str, tuple[str, ...]] = {
    "out": ("output",),
    "logsumexp": ("log_sumexp", "softmax_logsumexp", "softmax_lse", "lse"),
    "lse": ("logsumexp",),
    "softmax_lse": ("lse", "logsumexp"),
    "philox_seed": ("rng_state",),
    "philox_offset": ("unused",),
    "max_seqlen_q": ("max_seqlen_batch_q",),
    "max_seqlen_k": ("max_seqlen_batch_k",),
}


def import_library(namespace: str) -> None:
    """Import what registers the ops of a known namespace, where it is installed."""
    for module in MODULES.get(namespace, ()):
        try:
            importlib.import_module(module)
        except ImportError:
            continue


def known_inputs(name: str) -> KnownInputs:
    """The row of an op; for an op that has none, one that tries every order."""
    return KNOWN_INPUTS.get(name, KnownInputs())


def takes_mask(op: torch._ops.OpOverload) -> bool:
    """Whether an argument is an additive mask, by its name."""
    return any(re.fullmatch(_MASK, argument.name) for argument in op._schema.arguments)


def arguments(
    op: torch._ops.OpOverload, spec: Spec, constants: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """(args, kwargs) of a call of ``op``.

    Raises:
        CannotBuild: for an argument without a default that nothing says how to fill.
    """
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for argument in op._schema.arguments:
        value = _value(argument, spec, constants)
        if argument.kwarg_only:
            kwargs[argument.name] = value
        else:
            args.append(value)
    return tuple(args), kwargs


def _value(argument: Any, spec: Spec, constants: Mapping[str, Any]) -> Any:
    name = argument.name
    for source in (spec.operands, constants, spec.made):
        for alias in (name, *_ALIASES.get(name, ())):
            if alias in source:
                return source[alias]
    kind = str(argument.type)
    for pattern, value in _RULES:
        if re.fullmatch(pattern, name) and (found := value(spec, kind)) is not _SKIP:
            return found
    if argument.has_default_value():
        return argument.default_value
    if kind.startswith("Optional"):
        return None
    raise CannotBuild(f"no value is known for the argument {name!r} ({kind}); give inputs=")


_SKIP = object()
_MASK = r"attn_(mask|bias)|mask|bias"


def _mask(spec: Spec, kind: str) -> Any:
    # Where a mask is no option, as in aten's backwards, None stands for an undefined tensor.
    return spec.mask if spec.mask is not None or "Tensor" in kind else _SKIP


def _starts_of(side: str) -> Callable[[Spec, str], Any]:
    def value(spec: Spec, kind: str) -> Any:
        if spec.order != THD:
            # A backward takes what its forward did; None stands for an undefined tensor.
            return None if spec.made and kind == "Tensor" else _SKIP
        return spec.cu_seqlens_q if side == "q" else spec.cu_seqlens_k

    return value


def _longest(side: str) -> Callable[[Spec, str], Any]:
    def value(spec: Spec, kind: str) -> Any:
        if spec.order != THD and kind.startswith("Optional"):
            return _SKIP
        length = spec.max_seqlen_q if side == "q" else spec.max_seqlen_k
        return torch.tensor(length, dtype=torch.int32) if "Tensor" in kind else length

    return value


def _window(spec: Spec, kind: str) -> Any:
    if "List" in kind:
        return _SKIP if kind.startswith("Optional") else [-1, -1]
    return -1 if kind == "int" else _SKIP


def _constant(value: Any) -> Callable[[Spec, str], Any]:
    return lambda spec, kind: value


# (pattern of the name, value or _SKIP for the default); the first that answers counts.
_RULES: tuple[tuple[str, Callable[[Spec, str], Any]], ...] = (
    (r"cu_?m?_?seq(len)?s?(_q)?", _starts_of("q")),
    (r"cu_?m?_?seq(len)?s?_kv?", _starts_of("k")),
    (r"max_(seq_?len_?)?(s_)?q?|max_seq_?len", _longest("q")),
    (r"max_(seq_?len_?)?(s_)?kv?", _longest("k")),
    (_MASK, _mask),
    (
        r"(softmax_|sm_)?scale",
        lambda spec, kind: _SKIP if kind.startswith("Optional") else spec.scale,
    ),
    (r"batch(_size)?", lambda spec, kind: len(spec.lengths)),
    (r"window_size(_left|_right)?", _window),
    (r"dropout(_p)?|p_dropout|softcap", _constant(0.0)),
    (r"(is_)?causal|return_debug_mask|return_softmax", _constant(False)),
    (r"compute_log_?sumexp|return_(softmax_)?lse", _constant(True)),
    (r"deterministic", _constant(True)),
)
