"""DDP, FSDP2 and tensor parallel on two processes: over gloo on the CPU, over NCCL on two GPUs.

The two ranks run this file as a script, all cases in turn, and the test reads what they found.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import standins
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import qkvpass

RANKS = 2
HEADS, HEAD_DIM, TOKENS = 4, 8, 16
WIDTH = HEADS * HEAD_DIM


class Layer(nn.Module):
    """The packed projection by heads, (head, q k v, dim), so that cutting its rows cuts heads."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(x).view(len(x), -1, 3, HEAD_DIM).unbind(2)
        q, k, v = (t.contiguous() for t in parts)
        return x + self.out(standins.aware(q, k, v).view(len(x), -1))


class Crossing(Layer):
    """Another layer's parameters between the copies and the attention: DDP cuts there."""

    def __init__(self) -> None:
        super().__init__()
        self.between = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(x).view(len(x), -1, 3, HEAD_DIM).unbind(2)
        q, k, v = (t.contiguous() for t in parts)
        x = self.between(x)
        return x + self.out(standins.aware(q, k, v).view(len(x), -1))


class Model(nn.Module):
    """Two layers in one frame; of nn.Sequential under DDP, Dynamo compiles each layer alone."""

    def __init__(self, layer: type[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList([layer(), layer()])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


# ---------------------------------------------------------------------------------------------
# What each rank does


def data_parallel(model: nn.Module, backend: Any, device: str) -> Callable[..., Any]:
    # Buckets smaller than any layer: DDPOptimizer cuts the graph at each of them.
    dist._DEFAULT_FIRST_BUCKET_BYTES = 1000
    ids = [torch.cuda.current_device()] if device == "cuda" else None
    wrapped = DistributedDataParallel(model, device_ids=ids, bucket_cap_mb=0.001)
    return torch.compile(wrapped, backend=backend)


def fully_sharded(model: nn.Module, backend: Any, device: str) -> Callable[..., Any]:
    mesh = init_device_mesh(device, (RANKS,))
    for layer in model.layers:
        layer.compile(backend=backend)
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def tensor_parallel(model: nn.Module, backend: Any, device: str) -> Callable[..., Any]:
    mesh = init_device_mesh(device, (RANKS,))
    for layer in model.layers:
        parallelize_module(layer, mesh, {"qkv": ColwiseParallel(), "out": RowwiseParallel()})
    return torch.compile(model, backend=backend)


CASES = {
    "ddp": (data_parallel, Layer),
    "ddp-crossing": (data_parallel, Crossing),
    "fsdp2": (fully_sharded, Layer),
    "tensor-parallel": (tensor_parallel, Layer),
}


def main(rank: int, folder: str, device: str) -> None:
    """Run every case with stock Inductor and with the pass; leave what was found in ``folder``."""
    if device == "cuda":
        torch.cuda.set_device(rank)
    backend = "nccl" if device == "cuda" else "gloo"
    store = f"file://{folder}/store"
    dist.init_process_group(backend, init_method=store, rank=rank, world_size=RANKS)
    torch._inductor.config.deterministic = True
    torch._inductor.config.fx_graph_cache = False
    torch._functorch.config.enable_autograd_cache = False
    standins.tag("aware")
    standins.tag("aware_bwd", backward_of="standin::aware")
    found = {name: compared(*case, rank, device) for name, case in CASES.items()}
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def compared(parallel: Any, layer: type[nn.Module], rank: int, device: str) -> dict[str, Any]:
    runs = [trained(parallel, layer, b, rank, device) for b in ("inductor", qkvpass.backend)]
    (values, stock_calls, _), (ours, calls, reports) = runs
    removed = [sorted(c.operand for c in report.removed) for report in reports]
    reasons = [sorted(str(c.reason) for c in report.kept) for report in reports]
    return {
        "compared": len(values),
        "differ": [n for n, v in values.items() if not same(ours[n], v)],
        "strides": [call.strides for call in calls],
        "stock_strides": [call.strides for call in stock_calls],
        "one_storage": all(call.one_storage for call in calls),
        "graphs": len(reports),
        "removed": [names for names in removed if names],
        "kept": sorted(reason for found in reasons for reason in found),
        "faults": [report.fault for report in reports if report.fault],
    }


def same(ours: Tensor, stock: Tensor) -> bool:
    """Bit for bit on the CPU. On a GPU, what is fused decides how fp32 sums are reduced."""
    if ours.is_cuda:
        return torch.allclose(ours, stock, rtol=1e-4, atol=1e-5)
    return torch.equal(ours, stock)


def trained(
    parallel: Any, layer: type[nn.Module], backend: Any, rank: int, device: str
) -> tuple[dict[str, Tensor], list[standins.Call], list[qkvpass.Report]]:
    """Outputs, gradients and what the ops received, over two steps on this rank's data."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Model(layer).to(device)
    compiled = parallel(model, backend, device)
    values = {}
    with qkvpass.capture() as reports, standins.recorded() as calls:
        for step in range(2):
            # Each rank has data of its own, but where they share the heads of the same tokens.
            torch.manual_seed(step + (0 if parallel is tensor_parallel else 10 * rank))
            x = torch.randn(TOKENS, WIDTH).to(device).requires_grad_()
            y = compiled(x)
            (y**2).sum().backward()
            values |= {f"output {step}": y.detach(), f"input's gradient {step}": x.grad}
            for name, parameter in model.named_parameters():
                gradient = parameter.grad
                local = gradient.to_local() if hasattr(gradient, "to_local") else gradient
                values[f"gradient of {name}, {step}"] = local.clone()
                parameter.grad = None
    return values, calls, reports


# ---------------------------------------------------------------------------------------------
# What they found


def ranks(folder: Path, device: str) -> list[dict[str, Any]]:
    here = Path(__file__)
    paths = [str(here.parent), str(here.parents[1]), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "QKVPASS_STRICT": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, str(here), str(rank), str(folder), device],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(RANKS)
    ]
    try:
        errors = [process.communicate(timeout=500)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert not any(process.returncode for process in processes), "\n".join(errors)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(RANKS)]


# Two layers, two steps, forward and backward.
CALLS = 8


def strides(case: str, dense: bool) -> list[list[list[int]]]:
    heads = HEADS // RANKS if case == "tensor-parallel" else HEADS
    gap = HEAD_DIM if dense else 3 * HEAD_DIM
    return [[[heads * gap, gap, 1]] * 3] * CALLS


def check_bits(case: str, found: dict[str, Any]) -> None:
    """Outputs and gradients are stock's, whose ops were given dense tensors."""
    assert found["compared"] >= 12
    assert found["differ"] == [] and found["faults"] == []
    assert found["stock_strides"] == strides(case, dense=True)


def check_removed(case: str, found: dict[str, Any]) -> None:
    """The ops read the packed projection."""
    assert found["strides"] == strides(case, dense=False)
    assert found["one_storage"]


def check_cut(case: str, found: dict[str, Any]) -> None:
    """DDP cuts the graph into more parts than layers, and each layer's loses its copies."""
    check_removed(case, found)
    assert found["graphs"] > 2
    assert found["removed"] == [["k", "q", "v"]] * 2


def check_kept(case: str, found: dict[str, Any]) -> None:
    """Copies made in one part and read in the next stay: no view crosses."""
    assert found["removed"] == [] and "graph-output" in found["kept"]
    assert found["strides"] == strides(case, dense=True)


CHECKS = {
    "ddp": check_cut,
    "ddp-crossing": check_kept,
    "fsdp2": check_removed,
    "tensor-parallel": check_removed,
}
gpus = pytest.mark.skipif(torch.cuda.device_count() < RANKS, reason=f"needs {RANKS} GPUs")


# One test for all cases, since starting the ranks costs more than they do.
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, gpus])])
def test_two_ranks(device, tmp_path):
    for rank in ranks(tmp_path, device):
        for case, check in CHECKS.items():
            check_bits(case, rank[case])
            check(case, rank[case])


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3])
