"""Removes the q/k/v copies that attention kernels never needed, from torch.compile graphs."""

from .backend import backend, configured, explain, inductor_options
from .certificate import Certificate
from .certify import certify
from .exported import rewrite
from .gain import Slower
from .graph_pass import Options, StridedQKVPass, capture
from .layout import StrideContract
from .reason import Reason
from .report import CopyDecision, Report
from .tags import (
    Site,
    StrideTag,
    register_stride_tag,
    stride_capable,
    stride_tags,
    unregister_stride_tag,
)
from .triton_tags import TritonTag, register_triton_stride_tag, unregister_triton_stride_tag
from .verify import Difference, Verification, verify

__version__ = "0.1.0"

__all__ = [
    "Certificate",
    "CopyDecision",
    "Difference",
    "Options",
    "Reason",
    "Report",
    "Site",
    "Slower",
    "StrideContract",
    "StrideTag",
    "StridedQKVPass",
    "TritonTag",
    "Verification",
    "backend",
    "capture",
    "certify",
    "configured",
    "explain",
    "inductor_options",
    "register_stride_tag",
    "register_triton_stride_tag",
    "rewrite",
    "stride_capable",
    "stride_tags",
    "unregister_stride_tag",
    "unregister_triton_stride_tag",
    "verify",
]
