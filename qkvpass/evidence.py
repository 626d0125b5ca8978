"""The certificates that come with the package, and when one of them counts.

A certificate speaks for one schema, one version of one library, and one architecture.
Reading them is cheap enough for the middle of a compile: files are read once, and
questions answered from a cache.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import importlib.resources
import importlib.util
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path

import torch

from . import compat
from .certificate import Certificate

# Where the kernels of a namespace come from. ``cudnn`` stands for the one torch has loaded.
LIBRARIES = {
    "aten": "torch",
    "torch_attn": "torch",
    "fa3_fwd": "fa3-fwd",
    "flash_attn": "flash-attn",
    "flash_attn_3": "flash-attn-3",
    "mslk": "mslk",
    "mslk_flash": "mslk",
    "mslk_flash3": "mslk",
    "npu": "torch-npu",
    "sageattention": "sageattention",
    "sgl_kernel": "sgl-kernel",
    "vllm": "vllm",
    "xformers_flash": "xformers",
    "xformers_flash3": "xformers",
}
# The ops of qkvpass.ops; they only call what these hold.
WRAPPED = {"qkvpass::flash_attn_4": "flash-attn-4"}
SCRIPT = "script:"  # a module that no distribution holds; its version is a digest of its source


def invalid_reason(
    certificate: Certificate, op: torch._ops.OpOverload, device: torch.device | str
) -> str | None:
    """Why ``certificate`` does not count for ``op`` on ``device``; None where it does."""
    if certificate.op != plain_name(op):
        return f"it is for {certificate.op}"
    if certificate.schema_hash != schema_hash(op):
        return "the op's schema has changed"
    return _stale(certificate, arch_of(torch.device(device)))


def valid_for(
    certificate: Certificate, op: torch._ops.OpOverload, device: torch.device | str
) -> bool:
    """Whether ``certificate`` passed, and counts for ``op`` on ``device``."""
    return certificate.passed and invalid_reason(certificate, op, device) is None


def _stale(certificate: Certificate, arch: str | None) -> str | None:
    if certificate.arch != arch:
        return f"it was made on {certificate.arch}, and this is {arch}"
    version = library_version(certificate.library)
    if certificate.library_version != version:
        return (
            f"it was made with {certificate.library} {certificate.library_version}, "
            f"and this is {version}"
        )
    return None


@functools.lru_cache(maxsize=1024)
def certificate_for(name: str, arch: str | None) -> Certificate | None:
    """The certificate that counts for an op on an architecture, or None.

    Args:
        name: ``"namespace::name"``, with or without overload.
        arch: what :func:`arch_of` says of the device; None finds nothing.
    """
    name = name.removesuffix(".default")
    for certificate in certificates():
        if certificate.op != name or not certificate.passed or _stale(certificate, arch):
            continue
        op = _registered(name)
        if op is not None and schema_hash(op) == certificate.schema_hash:
            return certificate
    return None


@functools.cache
def certificates() -> tuple[Certificate, ...]:
    """Every certificate in the package, by file name; a file that is none is left out."""
    found = []
    for _, text in _files():
        try:
            found.append(Certificate.from_json(text))
        except ValueError:
            continue
    return tuple(found)


@functools.cache
def key() -> str:
    """Digest of all that :func:`certificate_for` depends on, for cache keys."""
    versions = {c.library: library_version(c.library) for c in certificates()}
    parts = (_files(), sorted(versions.items(), key=str), cpu_arch())
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def store(certificate: Certificate, folder: Path | None = None) -> Path:
    """Keep a certificate, by default in the package; it replaces one for the same facts.

    Raises:
        ValueError: if it did not pass.
        OSError: if the folder cannot be written.
    """
    if not certificate.passed:
        raise ValueError(f"{certificate.op} did not pass; only what passed is kept")
    folder = folder or Path(__file__).with_name("certificates")
    folder.mkdir(parents=True, exist_ok=True)
    library = f"{certificate.library}-{certificate.library_version}"
    name = "--".join((certificate.op.replace("::", "."), certificate.arch, library))
    path = folder / (re.sub(r"[^\w.+-]", "_", name) + ".json")
    path.write_text(certificate.to_json() + "\n")
    forget()
    return path


def forget() -> None:
    """Read the files again when next asked."""
    for cached in (certificate_for, certificates, key, _files):
        cached.cache_clear()


@functools.cache
def _files() -> tuple[tuple[str, str], ...]:
    folder = importlib.resources.files(__package__) / "certificates"
    if not folder.is_dir():
        return ()
    files = (file for file in folder.iterdir() if file.name.endswith(".json"))
    return tuple(sorted((file.name, file.read_text()) for file in files))


def plain_name(op: torch._ops.OpOverload) -> str:
    """``"namespace::name"``, with the overload behind a dot unless it is the default."""
    name = op._schema.name
    return name if op._overloadname == "default" else f"{name}.{op._overloadname}"


def schema_hash(op: torch._ops.OpOverload) -> str:
    return hashlib.sha256(str(op._schema).encode()).hexdigest()[:16]


def _registered(name: str) -> torch._ops.OpOverload | None:
    namespace, _, rest = name.partition("::")
    packet_name, _, overload = rest.partition(".")
    packet = getattr(getattr(torch.ops, namespace), packet_name, None)
    return getattr(packet, overload or "default", None)


def arch_of(device: torch.device) -> str | None:
    """Architecture of a device: ``"sm_90"``, ``"hip"``, or :func:`cpu_arch`.

    None for other devices, and for a CUDA device on a machine that has none.
    """
    if device.type == "cpu":
        return cpu_arch()
    if device.type != "cuda":
        return None
    if torch.version.hip is not None:
        return "hip"
    if not torch.cuda.is_available():
        return None
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


@functools.cache
def cpu_arch() -> str:
    """``"cpu_"`` and what picks torch's kernels: its vector set, and AMX where there is any."""
    capability = torch.backends.cpu.get_cpu_capability().lower().replace(" ", "_")
    amx = getattr(torch.cpu, "_is_amx_tile_supported", lambda: False)()
    # oneDNN, which has the AMX kernels, can be told to leave them.
    limit = os.environ.get("ONEDNN_MAX_CPU_ISA") or os.environ.get("DNNL_MAX_CPU_ISA") or "ALL"
    allowed = limit.upper() in ("ALL", "DEFAULT") or "AMX" in limit.upper()
    return f"cpu_{capability}" + ("_amx" if amx and allowed else "")


def library_of(op: torch._ops.OpOverload) -> str:
    """Name of what holds an op's kernel: a distribution, or a script. "" where unknown."""
    if op.namespace == "aten" and "cudnn" in op._schema.name:
        return "torch+cudnn"
    if op._schema.name in WRAPPED:
        return WRAPPED[op._schema.name]
    if op.namespace in LIBRARIES:
        return LIBRARIES[op.namespace]
    function = compat.function_behind(op)
    if function is None:
        return ""
    distributions = _distributions().get(function.__module__.partition(".")[0])
    library = distributions[0] if distributions else f"{SCRIPT}{function.__module__}"
    return f"{library}+triton" if compat.is_triton_op(op) else library


@functools.cache
def _distributions() -> Mapping[str, list[str]]:
    return importlib.metadata.packages_distributions()  # reads the files of every one


@functools.cache
def library_version(library: str) -> str | None:
    """Versions of the parts of ``library``, joined by ``+``; None if one cannot be told.

    A local version such as ``+cu130`` is left out: it names a build of the same source.
    """
    versions = [_version(part) for part in library.split("+")]
    return None if None in versions else "+".join(str(v) for v in versions)


def _version(part: str) -> str | None:
    if part == "torch":
        return torch.__version__.partition("+")[0]
    if part == "cudnn":
        version = torch.backends.cudnn.version()
        return None if version is None else str(version)
    if part.startswith(SCRIPT):
        return _source_digest(part.removeprefix(SCRIPT))
    try:
        return importlib.metadata.version(part).partition("+")[0]
    except (importlib.metadata.PackageNotFoundError, ValueError):
        return None


def _source_digest(module: str) -> str | None:
    file = getattr(sys.modules.get(module), "__file__", None)
    if file is None:
        try:
            spec = importlib.util.find_spec(module)
        except (ImportError, ValueError):
            return None
        file = spec.origin if spec is not None else None
    try:
        return hashlib.sha256(Path(file).read_bytes()).hexdigest()[:16] if file else None
    except OSError:
        return None
