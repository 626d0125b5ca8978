"""The attention ops that are known, as data. A row states facts; the pass has none of its own.

Facts were read in PyTorch 2.11 and 2.14, flash-attention, vLLM, SGLang, MSLK, xformers, aiter,
SageAttention and the kernel-builder repositories as of late 2026. Reading is no proof: a row is
``declared`` until a certificate stands behind it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from .gain import Slower
from .known_inputs import EFFICIENT_OFFSET
from .layout import StrideContract, known

if TYPE_CHECKING:
    from .tags import Site


INT32 = 2**31 - 1

# The fakes of packages follow q where the kernel may not: there, a copy stays wherever the
# predicted output would move. For aten, fakes were compared with what the sources allocate, and
# on the CPU with what came out.
FLASH = StrideContract(alignment=16)
FLASH_INT32 = StrideContract(alignment=16, max_offset=INT32)
ATEN = StrideContract(alignment=16, output="fake")
# A CPU reads rows from any address; it is their distance that decides how they are rounded.
ATEN_CPU = StrideContract(output="fake")
EFFICIENT = StrideContract(alignment=16, output="fake", max_offset=EFFICIENT_OFFSET)


@dataclass(frozen=True)
class BuiltinOp:
    """One row: an op (or a pattern of ops), what it reads by stride, and the fact behind it.

    Args:
        name: ``"namespace::name"`` or a pattern. ``"python:..."`` names a function that is no
            registered op, so that no graph can hold a call of it.
        operands: schema arguments that are q, k, v (and what else a backward reads).
        status: ``"declared"``, ``"certified"``, ``"dense-only"`` or ``"unverified"``.
        fact: the source or measurement that the status rests on; for unverified rows
            what would verify it.
        contract: admitted layouts (tagged rows).
        when: condition on the call site; returns why the tag does not hold, or None.
        backward_of: name of the forward op.
        slower: calls that were measured to lose by reading strides. None was: on an H200 each
            kernel gained at every size tried (docs/measured/gain-h200.json).
        known_as: what serving engines call the backend that ends in this op.
    """

    name: str
    operands: tuple[str, ...]
    status: str
    fact: str
    contract: StrideContract = FLASH
    when: Callable[[Site], str | None] | None = None
    backward_of: str | None = None
    slower: tuple[Slower, ...] = ()
    known_as: tuple[str, ...] = ()


# Conditions. What cannot be proven is a reason; head_dim may be a symbol, and takes no guard.


def on_cpu(site: Site) -> str | None:
    """CPU kernels."""
    return None if site.device == "cpu" else f"device is {site.device}; this is a CPU kernel"


def on_cuda(site: Site) -> str | None:
    """NVIDIA GPUs: under the same op names, ROCm runs other kernels."""
    if site.arch == "hip":
        return (
            "ROCm build of torch (torch.version.hip): attention there was wrong on strided q, k, v"
            " (vllm#27744, ROCm/pytorch#3230)"
        )
    if site.device != "cuda":
        return f"device is {site.device}; known to read strides on cuda only"
    return None


def half_on_cuda(site: Site) -> str | None:
    """FlashAttention: float8 takes other kernels, with rules of their own for v."""
    if (why := on_cuda(site)) is not None:
        return why
    if site.dtype not in (torch.float16, torch.bfloat16):
        return f"dtype is {site.dtype}; known to read strides in float16 and bfloat16 only"
    return None


def recent_cudnn(site: Site) -> str | None:
    """Where SDPA may end in cuDNN: 9.10.2 and older want dense q and k."""
    if (why := on_cuda(site)) is not None:
        return why
    version = torch.backends.cudnn.version()
    if version is None or version <= 91002:
        return f"cuDNN is {version}; 9.10.2 and older need dense q and k"
    return None


def cudnn_attention(site: Site) -> str | None:
    if (why := half_on_cuda(site) or recent_cudnn(site)) is not None:
        return why
    if not known(site.head_dim % 8 == 0):
        return f"head size {site.head_dim} is not known to be a multiple of 8, which cuDNN needs"
    return None


def varlen_by_flash(site: Site) -> str | None:
    """After 2.11, ``varlen_attn`` runs cuDNN's ragged kernel on Hopper and Blackwell."""
    if (why := half_on_cuda(site)) is not None:
        return why
    release = tuple(int(part) for part in site.torch_version.split(".")[:2])
    if release > (2, 11) and (site.arch is None or site.arch.startswith(("sm_9", "sm_10"))):
        return (
            f"torch {site.torch_version} may run cuDNN's ragged attention on {site.arch},"
            " which nobody has tried on strided operands"
        )
    return None


QKV = ("q", "k", "v")
QUERY_KEY_VALUE = ("query", "key", "value")


BUILTIN_OPS: tuple[BuiltinOp, ...] = (
    # PyTorch: scaled_dot_product_attention, (B, H, S, D).
    BuiltinOp(
        "aten::_scaled_dot_product_flash_attention",
        QUERY_KEY_VALUE,
        "declared",
        "gate asks for last stride 1 only (cuda/sdp_utils.cpp); int64 strides; bit-identical on an"
        " H200 with strided and mixed operands",
        contract=ATEN,
        when=half_on_cuda,
        known_as=("sdpa",),
    ),
    BuiltinOp(
        "aten::_scaled_dot_product_flash_attention_backward",
        (*QUERY_KEY_VALUE, "grad_out", "out"),
        "declared",
        "takes strides of q, k, v; makes grad_out and out dense in (B, S, H, D) itself; gradients"
        " are empty_like (cuda/attention_backward.cu)",
        contract=ATEN,
        when=half_on_cuda,
        backward_of="aten::_scaled_dot_product_flash_attention",
    ),
    BuiltinOp(
        "aten::_scaled_dot_product_efficient_attention",
        QUERY_KEY_VALUE,
        "declared",
        "last stride 1 and aligned pointers (cuda/sdp_utils.cpp); counts keys times token stride"
        " in int32 (mem_eff_attention/kernel_forward.h); bit-identical on an H200",
        contract=EFFICIENT,
        when=on_cuda,
        known_as=("sdpa",),
    ),
    BuiltinOp(
        "aten::_scaled_dot_product_efficient_attention_backward",
        QUERY_KEY_VALUE,
        "declared",
        "reads q, k, v by stride; wrong gradients where out alone is strided otherwise, so that out"
        " is no operand",
        contract=EFFICIENT,
        when=on_cuda,
        backward_of="aten::_scaled_dot_product_efficient_attention",
    ),
    BuiltinOp(
        "aten::_scaled_dot_product_cudnn_attention",
        QUERY_KEY_VALUE,
        "declared",
        "hands all strides to cuDNN, output in the order of q (cudnn/MHA.cpp, pytorch#138354);"
        " bit-identical on an H200 with torch 2.11",
        contract=ATEN,
        when=cudnn_attention,
        known_as=("sdpa",),
    ),
    BuiltinOp(
        "aten::_scaled_dot_product_cudnn_attention_backward",
        (*QUERY_KEY_VALUE, "grad_out", "out"),
        "unverified",
        "segfaults on an H200 with torch 2.11 and cuDNN 9.19 for one token and one head in strided"
        " rows; certify it with a newer cuDNN",
        contract=ATEN,
        when=cudnn_attention,
        backward_of="aten::_scaled_dot_product_cudnn_attention",
    ),
    BuiltinOp(
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        QUERY_KEY_VALUE,
        "declared",
        "bit-identical on strided and mixed operands, output layout as its fake, with AMX and"
        " AVX-512; fp32 may round otherwise where rows are not 16-byte aligned; wrong for a last"
        " stride other than 1 (pytorch#187506)",
        contract=ATEN_CPU,
        when=on_cpu,
        known_as=("sdpa",),
    ),
    BuiltinOp(
        "aten::_scaled_dot_product_flash_attention_for_cpu_backward",
        (*QUERY_KEY_VALUE, "grad_out", "out"),
        "declared",
        "bit-identical on strided and mixed operands, gradients always token-major as its fake"
        " says, in fp32, bf16 and fp16",
        contract=ATEN_CPU,
        when=on_cpu,
        backward_of="aten::_scaled_dot_product_flash_attention_for_cpu",
    ),
    BuiltinOp(
        "aten::_scaled_dot_product_fused_attention_overrideable",
        QUERY_KEY_VALUE,
        "unverified",
        "each out-of-tree backend brings its own kernel; one was wrong on views (torch-spyre#4331);"
        " certify it on that backend",
    ),
    BuiltinOp(
        "aten::_scaled_dot_product_attention_math_for_mps",
        QUERY_KEY_VALUE,
        "unverified",
        "was wrong on permuted q, k, v (pytorch#181133); certify it on an Apple GPU with torch"
        " 2.12 or later",
    ),
    BuiltinOp(
        "aten::scaled_dot_product_attention",
        QUERY_KEY_VALUE,
        "unverified",
        "picks its kernel when it runs; decompose the graph, and the kernel's own row applies",
    ),
    # PyTorch: the kernels below it, (B, S, H, D) or (T, H, D).
    BuiltinOp(
        "aten::_flash_attention_forward",
        QUERY_KEY_VALUE,
        "declared",
        "FlashAttention 2 with int64 strides, or 3 where registered, which copies for last stride"
        " only (nn/attention/_fa3.py) and returns a dense output",
        when=half_on_cuda,
    ),
    BuiltinOp(
        "aten::_flash_attention_backward",
        (*QUERY_KEY_VALUE, "grad_out", "out"),
        "declared",
        "takes strides of q, k, v; makes grad_out and out dense (cuda/attention_backward.cu)",
        when=half_on_cuda,
        backward_of="aten::_flash_attention_forward",
    ),
    BuiltinOp(
        "aten::_efficient_attention_forward",
        QUERY_KEY_VALUE,
        "declared",
        "the kernel of efficient SDPA: last stride 1, int32 token offsets"
        " (mem_eff_attention/kernel_forward.h), output always dense",
        contract=EFFICIENT,
        when=on_cuda,
    ),
    BuiltinOp(
        "aten::_efficient_attention_backward",
        QUERY_KEY_VALUE,
        "unverified",
        "certifying it on an H200 with torch 2.11 found gradients that are dense where its fake"
        " follows q; certify it with a newer torch",
        when=on_cuda,
        backward_of="aten::_efficient_attention_forward",
    ),
    BuiltinOp(
        "aten::_cudnn_attention_forward",
        QUERY_KEY_VALUE,
        "unverified",
        "ragged cuDNN: offsets are int32 products with the token stride (cudnn/MHA.cpp), and an"
        " engine of cuDNN took strides for packed (cudnn-frontend#526); certify it on sm_90",
    ),
    BuiltinOp(
        "aten::_cudnn_attention_backward",
        (*QUERY_KEY_VALUE, "grad_out", "out"),
        "unverified",
        "ragged cuDNN, as its forward; certify it on sm_90",
        backward_of="aten::_cudnn_attention_forward",
    ),
    BuiltinOp(
        "aten::_flash_attention_forward_no_dropout_inplace",
        QUERY_KEY_VALUE,
        "unverified",
        "writes an operand; certify it together with what aliases out",
    ),
    BuiltinOp(
        "torch_attn::_varlen_attn",
        QUERY_KEY_VALUE,
        "declared",
        "calls aten::_flash_attention_forward (nn/attention/varlen.py); bit-identical on an H200"
        " with torch 2.11",
        when=varlen_by_flash,
    ),
    BuiltinOp(
        "torch_attn::_varlen_attn_backward",
        (*QUERY_KEY_VALUE, "grad_out", "out"),
        "declared",
        "calls aten::_flash_attention_backward (nn/attention/varlen.py)",
        when=varlen_by_flash,
        backward_of="torch_attn::_varlen_attn",
    ),
    BuiltinOp(
        "torch_attn::_varlen_attn_out",
        QUERY_KEY_VALUE,
        "unverified",
        "writes an operand; certify it together with what aliases out",
    ),
    # FlashAttention 2 and 3.
    BuiltinOp(
        "flash_attn::_flash_attn_forward",
        QKV,
        "declared",
        "copies for a last stride other than 1 only (flash_attn_interface.py); int64 strides;"
        " aten's flash attention is the same kernel",
        when=half_on_cuda,
    ),
    BuiltinOp(
        "flash_attn::_flash_attn_varlen_forward",
        QKV,
        "declared",
        "copies for a last stride other than 1 only (flash_attn_interface.py); int64 strides;"
        " wrong on a huge strided v on ROCm only (flash-attention#1562)",
        when=half_on_cuda,
    ),
    BuiltinOp(
        "flash_attn::_flash_attn_backward",
        (*QKV, "dout", "out"),
        "declared",
        "copies for a last stride other than 1 only (flash_attn_interface.py); writes dq, dk, dv",
        when=half_on_cuda,
        backward_of="flash_attn::_flash_attn_forward",
    ),
    BuiltinOp(
        "flash_attn::_flash_attn_varlen_backward",
        (*QKV, "dout", "out"),
        "declared",
        "copies for a last stride other than 1 only (flash_attn_interface.py); writes dq, dk, dv",
        when=half_on_cuda,
        backward_of="flash_attn::_flash_attn_varlen_forward",
    ),
    BuiltinOp(
        "flash_attn_3::_flash_attn_forward",
        QKV,
        "declared",
        "copies for a last stride other than 1 only (hopper/flash_attn_interface.py); fake and"
        " kernel both return a dense output",
        when=half_on_cuda,
        known_as=("fa3",),
    ),
    BuiltinOp(
        "flash_attn_3::_flash_attn_backward",
        (*QKV, "dout", "out"),
        "declared",
        "copies for a last stride other than 1 only (hopper/flash_attn_interface.py); writes dq,"
        " dk, dv",
        when=half_on_cuda,
        backward_of="flash_attn_3::_flash_attn_forward",
    ),
    BuiltinOp(
        "flash_attn_3::fwd",
        QKV,
        "declared",
        "checks for last stride 1 (hopper/flash_api.cpp); writes out, k_new, v_new where given;"
        " has no fake, so it rarely gets into a graph",
        when=half_on_cuda,
        known_as=("fa3",),
    ),
    BuiltinOp(
        "fa3_fwd::_flash_attn_forward",
        QKV,
        "declared",
        "the wheel fa3-fwd 0.0.3 of FlashAttention 3; bit-identical on an H200 with strided and"
        " mixed operands",
        when=half_on_cuda,
        known_as=("fa3",),
    ),
    BuiltinOp(
        "fa3_fwd::fwd",
        QKV,
        "declared",
        "the kernel under fa3_fwd::_flash_attn_forward; writes out, k_new, v_new where given; has"
        " no fake, so it rarely gets into a graph",
        when=half_on_cuda,
        known_as=("fa3",),
    ),
    # The same from huggingface.co/kernels-community: the builder puts a hash into the namespace.
    BuiltinOp(
        "_flash_attn2_*::_flash_attn_forward",
        QKV,
        "declared",
        "kernel-builder build of FlashAttention 2, same wrapper (torch-ext/flash_attn2)",
        when=half_on_cuda,
    ),
    BuiltinOp(
        "_flash_attn2_*::_flash_attn_varlen_forward",
        QKV,
        "declared",
        "kernel-builder build of FlashAttention 2, same wrapper (torch-ext/flash_attn2)",
        when=half_on_cuda,
    ),
    BuiltinOp(
        "_flash_attn2_*::_flash_attn_backward",
        (*QKV, "dout", "out"),
        "declared",
        "kernel-builder build of FlashAttention 2, same wrapper; writes dq, dk, dv",
        when=half_on_cuda,
        backward_of="_flash_attn2_*::_flash_attn_forward",
    ),
    BuiltinOp(
        "_flash_attn2_*::_flash_attn_varlen_backward",
        (*QKV, "dout", "out"),
        "declared",
        "kernel-builder build of FlashAttention 2, same wrapper; writes dq, dk, dv",
        when=half_on_cuda,
        backward_of="_flash_attn2_*::_flash_attn_varlen_forward",
    ),
    BuiltinOp(
        "_flash_attn2_*::fwd",
        QKV,
        "dense-only",
        "its schema says that it writes q (torch-ext/torch_binding.cpp)",
    ),
    BuiltinOp(
        "_flash_attn2_*::varlen_fwd",
        QKV,
        "dense-only",
        "its schema says that it writes q (torch-ext/torch_binding.cpp)",
    ),
    BuiltinOp(
        "_flash_attn3_*::_flash_attn_forward",
        QKV,
        "declared",
        "kernel-builder build of FlashAttention 3, same wrapper (torch-ext/flash_attn3)",
        when=half_on_cuda,
        known_as=("fa3",),
    ),
    BuiltinOp(
        "_flash_attn3_*::_flash_attn_backward",
        (*QKV, "dout", "out"),
        "declared",
        "kernel-builder build of FlashAttention 3, same wrapper; writes dq, dk, dv",
        when=half_on_cuda,
        backward_of="_flash_attn3_*::_flash_attn_forward",
    ),
    BuiltinOp(
        "_flash_attn3_*::fwd",
        QKV,
        "declared",
        "kernel-builder build of flash_attn_3::fwd (flash-attn/flash_api.cpp); has no fake",
        when=half_on_cuda,
        known_as=("fa3",),
    ),
    BuiltinOp(
        "_sgl_flash_attn3_*::fwd",
        QKV,
        "declared",
        "kernel-builder build of SGLang's FlashAttention 3 (torch-ext/torch_binding.cpp); has no"
        " fake",
        when=half_on_cuda,
        known_as=("fa3",),
    ),
    BuiltinOp(
        "_vllm_flash_attn3_*::fwd",
        QKV,
        "declared",
        "kernel-builder build of vLLM's FlashAttention 3 (flash-attn/flash_api_stable.cpp); has no"
        " fake",
        when=half_on_cuda,
        known_as=("fa3",),
    ),
    BuiltinOp(
        "qkvpass::flash_attn_4",
        QKV,
        "declared",
        "FlashAttention 4 as a registered op (qkvpass.ops); copies what is not 16-byte aligned"
        " (cute_dsl_utils.py); output dense (interface.py)",
        when=half_on_cuda,
        known_as=("fa4",),
    ),
    BuiltinOp(
        "python:flash_attn.cute",
        QKV,
        "unverified",
        "FlashAttention 4 is plain Python, so a graph cannot see it: call"
        " torch.ops.qkvpass.flash_attn_4 (import qkvpass.ops), whose own row applies",
        known_as=("fa4",),
    ),
    # vLLM.
    BuiltinOp(
        "vllm::flash_attn_maxseqlen_wrapper",
        QKV,
        "declared",
        "flattens batch and tokens, a view of packed rows, and calls FlashAttention"
        " (v1/attention/ops/vit_attn_wrappers.py)",
        when=half_on_cuda,
    ),
    BuiltinOp(
        "vllm::triton_attn_wrapper",
        QKV,
        "declared",
        "hands token and head strides to its kernel, which multiplies in int32"
        " (v1/attention/ops/triton_prefill_attention.py)",
        contract=FLASH_INT32,
        when=on_cuda,
        known_as=("triton_attn",),
    ),
    BuiltinOp(
        "vllm::torch_sdpa_wrapper",
        QKV,
        "declared",
        "permutes and calls SDPA, whichever kernel that picks; makes q, k, v dense on ROCm itself"
        " (v1/attention/ops/vit_attn_wrappers.py)",
        contract=FLASH_INT32,
        when=recent_cudnn,
    ),
    BuiltinOp(
        "vllm::flashinfer_wrapper",
        QKV,
        "dense-only",
        "batch offsets count elements of dense q, k, v (v1/attention/ops/vit_attn_wrappers.py)",
        known_as=("flashinfer_cudnn",),
    ),
    BuiltinOp(
        "vllm::aiter_fp8_attn_wrapper",
        QKV,
        "unverified",
        "gets dense tensors from the quantizer in front of it; certify it on ROCm",
    ),
    BuiltinOp(
        "vllm::unified_attention_with_output",
        QUERY_KEY_VALUE,
        "unverified",
        "writes an operand, and reads k and v from a cache; certify each backend behind it",
    ),
    BuiltinOp(
        "_vllm_fa2_C::varlen_fwd",
        QKV,
        "dense-only",
        "its schema says that it writes q (csrc/flash_attn/flash_api_torch_lib.cpp)",
    ),
    BuiltinOp(
        "_vllm_fa3_C::fwd",
        QKV,
        "dense-only",
        "its schema says that it writes q (hopper/flash_api_torch_lib.cpp)",
    ),
    # MSLK and its xformers twins.
    BuiltinOp(
        "mslk_flash::flash_fwd",
        QUERY_KEY_VALUE,
        "declared",
        "calls aten::_flash_attention_forward or FlashAttention 2 (attention/fmha/flash.py)",
        when=half_on_cuda,
    ),
    BuiltinOp(
        "mslk_flash::flash_bwd",
        (*QUERY_KEY_VALUE, "grad", "out"),
        "declared",
        "calls aten::_flash_attention_backward or FlashAttention 2 (attention/fmha/flash.py)",
        when=half_on_cuda,
        backward_of="mslk_flash::flash_fwd",
    ),
    BuiltinOp(
        "mslk_flash3::flash_fwd",
        QUERY_KEY_VALUE,
        "declared",
        "copies for a last stride other than 1 only (attention/fmha/flash3.py)",
        when=half_on_cuda,
    ),
    BuiltinOp(
        "mslk_flash3::flash_bwd",
        (*QUERY_KEY_VALUE, "dout", "out"),
        "declared",
        "hands its operands to FlashAttention 3 as they are (attention/fmha/flash3.py)",
        when=half_on_cuda,
        backward_of="mslk_flash3::flash_fwd",
    ),
    BuiltinOp(
        "mslk::memory_efficient_attention_forward",
        QKV,
        "declared",
        "picks flash or aten::_efficient_attention_forward, and rejects a last stride other than 1"
        " (attention/fmha/common.py)",
        contract=FLASH_INT32,
        when=on_cuda,
    ),
    BuiltinOp(
        "mslk::memory_efficient_attention_forward_with_bias",
        QKV,
        "declared",
        "mslk::memory_efficient_attention_forward with a bias (attention/fmha/__init__.py)",
        contract=FLASH_INT32,
        when=on_cuda,
    ),
    BuiltinOp(
        "xformers_flash::flash_fwd",
        QUERY_KEY_VALUE,
        "declared",
        "mslk_flash::flash_fwd by another name (xformers/ops/fmha/flash.py)",
        when=half_on_cuda,
    ),
    BuiltinOp(
        "xformers_flash::flash_bwd",
        (*QUERY_KEY_VALUE, "grad", "out"),
        "declared",
        "mslk_flash::flash_bwd by another name (xformers/ops/fmha/flash.py)",
        when=half_on_cuda,
        backward_of="xformers_flash::flash_fwd",
    ),
    BuiltinOp(
        "xformers_flash3::flash_fwd",
        QUERY_KEY_VALUE,
        "declared",
        "mslk_flash3::flash_fwd by another name (xformers/ops/fmha/flash3.py)",
        when=half_on_cuda,
    ),
    BuiltinOp(
        "xformers_flash3::flash_bwd",
        (*QUERY_KEY_VALUE, "dout", "out"),
        "declared",
        "mslk_flash3::flash_bwd by another name (xformers/ops/fmha/flash3.py)",
        when=half_on_cuda,
        backward_of="xformers_flash3::flash_fwd",
    ),
    # SGLang.
    BuiltinOp(
        "sgl_kernel::fwd",
        QKV,
        "unverified",
        "writes an operand, and is another kernel on XPU than on CUDA; certify it on each",
        known_as=("fa3", "xpu_attn"),
    ),
    BuiltinOp(
        "sgl_kernel::flash_attn_varlen_func",
        QKV,
        "unverified",
        "checks for last stride 1, and counts in int (csrc/cpu/flash_attn.cpp); certify it on a"
        " CPU with AMX",
        known_as=("amx_attn",),
    ),
    BuiltinOp(
        "python:sglang.context_attention_fwd",
        QKV,
        "unverified",
        "Triton, no registered op: a trace bakes the strides into constants, so a graph cannot"
        " change them; wrap it in a custom op and certify that",
        known_as=("triton_attn",),
    ),
    # Other libraries and vendors.
    BuiltinOp(
        "python:flashinfer.cudnn_batch_prefill_with_kv_cache",
        ("q", "k_cache", "v_cache"),
        "dense-only",
        "no registered op, so a graph cannot see it; batch offsets count elements, and its graph"
        " cache leaves strides out of the key (flashinfer/cudnn/prefill.py)",
        known_as=("flashinfer_cudnn",),
    ),
    BuiltinOp(
        "npu::npu_fused_infer_attention_score",
        QUERY_KEY_VALUE,
        "dense-only",
        "Ascend kernels need dense k and v since CANN 9.1",
        known_as=("ascend_attn",),
    ),
    BuiltinOp(
        "npu::npu_fused_infer_attention_score_v2",
        QUERY_KEY_VALUE,
        "dense-only",
        "Ascend kernels need dense k and v since CANN 9.1",
        known_as=("ascend_attn",),
    ),
    BuiltinOp(
        "aiter::mha_*",
        QKV,
        "unverified",
        "registered as if it wrote every operand (jit/utils/torch_guard.py); CK takes token and"
        " head strides; certify it on an AMD GPU",
        known_as=("aiter_attn",),
    ),
    BuiltinOp(
        "aiter::fmha_*",
        QKV,
        "unverified",
        "registered as if it wrote every operand (jit/utils/torch_guard.py), and some of its paths"
        " make q, k, v dense themselves (ops/mha.py); certify it on an AMD GPU",
        known_as=("aiter_attn",),
    ),
    BuiltinOp(
        "sageattention*::qk_int8_sv_*",
        QUERY_KEY_VALUE,
        "unverified",
        "writes an operand; SageAttention counts in int32 (#386) and gets q, k dense from its"
        " quantizer; certify it with that in front",
    ),
)
