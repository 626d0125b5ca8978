"""Reports beside Inductor's cache: on a warm cache the pass does not run, its report does."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from dataclasses import replace
from typing import Any

import torch
from torch.fx import GraphModule

from .compat import inductor_cache_folder, settings
from .report import Report


def key_of(gm: GraphModule, inputs: list[Any], uuid: Any, patches: dict[str, Any]) -> str | None:
    """Names what a compile of ``gm`` would decide; None where a pass has no identity.

    Args:
        gm: as Dynamo traced it.
        inputs: to call it with.
        uuid: of all passes in the slot.
        patches: of Inductor's config, for this compile.
    """
    if uuid is None:
        return None
    parts = [repr(uuid), _ambient(), settings(patches), *(_describe(value) for value in inputs)]
    parts += [
        f"{name} {module.code}"
        for name, module in gm.named_modules()
        if isinstance(module, GraphModule)
    ]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _ambient() -> str:
    """Switches of torch that change the graph which a pass meets."""
    devices = [d for d in ("cpu", "cuda") if torch.is_autocast_enabled(d)]
    autocast = [(device, torch.get_autocast_dtype(device)) for device in devices]
    return repr((torch.is_grad_enabled(), torch.get_default_dtype(), autocast))


def _describe(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return str(value)
    layout = (tuple(value.shape), tuple(value.stride()), value.storage_offset())
    return f"{layout} {value.dtype} {value.device} {value.requires_grad}"


def save(key: str, reports: list[Report]) -> None:
    """Keep the reports of one compile. A folder that can't be written is no fault."""
    folder = _folder()
    try:
        os.makedirs(folder, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=folder, delete=False) as file:
            json.dump([report.to_json() for report in reports], file)
        os.replace(file.name, os.path.join(folder, f"{key}.json"))
    except OSError:
        return


def load(key: str) -> list[Report]:
    """The reports kept under ``key``, marked as cached; [] if there are none."""
    try:
        with open(os.path.join(_folder(), f"{key}.json")) as file:
            texts = json.load(file)
    except (OSError, ValueError):
        return []
    return [replace(Report.from_json(text), cached=True) for text in texts]


def _folder() -> str:
    return os.path.join(inductor_cache_folder(), "qkvpass")
