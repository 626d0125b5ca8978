"""The private names of torch that qkvpass cannot do without, all in one place.

Tried on torch 2.11.0, 2.13.0 and 2.14.1.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch._guards import detect_fake_mode as detect_fake_mode
from torch._inductor.custom_graph_pass import CustomGraphPass as CustomGraphPass
from torch._inductor.custom_graph_pass import get_hash_for_files as _hash_for_files
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.passes.shape_prop import _extract_tensor_metadata as extract_tensor_metadata

__all__ = [
    "CountedBytes",
    "CustomGraphPass",
    "NewGuard",
    "add_triton_constants",
    "detect_fake_mode",
    "extract_tensor_metadata",
    "compile_with_inductor",
    "hash_files",
    "inductor_cache_folder",
    "no_new_guards",
    "saved_tensor_hooks_active",
    "sort_topologically",
    "stop_after_joint_passes",
    "triton_constants",
    "triton_kernel",
    "uncached",
]


class NewGuard(RuntimeError):
    """Deciding a layout would have needed a guard."""


@contextlib.contextmanager
def no_new_guards(mode: FakeTensorMode) -> Iterator[None]:
    """Raise :class:`NewGuard` where an op under ``mode`` would specialise a symbol.

    torch 2.14 has ``ShapeEnv.error_on_new_guards``; before it the same check point is
    made to raise.
    """
    env = mode.shape_env
    if env is None:
        yield
        return

    def refuse(expr: Any, concrete: Any) -> None:
        raise NewGuard(f"{expr} == {concrete}")

    env._check_frozen = refuse  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        del env._check_frozen


def sort_topologically(graph: torch.fx.Graph) -> None:
    """Move nodes behind their inputs, keeping the order otherwise."""
    from torch._inductor.pattern_matcher import stable_topological_sort

    stable_topological_sort(graph)


def hash_files(paths: tuple[str, ...]) -> bytes:
    """One digest over the contents of ``paths``."""
    return bytes(_hash_for_files(paths))


def compile_with_inductor(
    gm: torch.fx.GraphModule, inputs: list[Any], patches: dict[str, Any], mode: str | None
) -> Any:
    """Stock Inductor under ``patches``, which hold for a lazily compiled backward too."""
    from torch._inductor import list_mode_options
    from torch._inductor.compile_fx import compile_fx

    if mode and mode != "default":
        patches = {**list_mode_options(mode), **patches}
    return compile_fx(gm, inputs, config_patches=patches)


def stop_after_joint_passes(
    gm: torch.fx.GraphModule, inputs: list[Any], patches: dict[str, Any]
) -> Any:
    """Inductor's graph passes with caches off; the graphs then run without code generation."""
    from torch._functorch import config as functorch_config
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx

    def keep(gm: torch.fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        def run(inputs: list[Any]) -> Any:
            return gm(*inputs)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    with (
        config.patch(fx_graph_cache=False),
        functorch_config.patch(enable_autograd_cache=False),
    ):
        return compile_fx(gm, inputs, inner_compile=keep, config_patches=patches)


def saved_tensor_hooks_active() -> bool:
    """Whether saved tensors go through hooks of the user's, by what is in force now."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def inductor_cache_folder() -> str:
    """Where Inductor keeps compiled graphs."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return str(cache_dir())


def triton_kernel(node: torch.fx.Node) -> Any:
    """The kernel that a ``triton_kernel_wrapper_*`` node launches."""
    from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table

    return kernel_side_table.get_kernel(node.kwargs["kernel_idx"])  # type: ignore[arg-type]


def triton_constants(node: torch.fx.Node) -> dict[str, Any]:
    """The arguments of a launch that were baked in when it was traced."""
    from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table

    return kernel_side_table.get_constant_args(node.kwargs["constant_args_idx"])  # type: ignore[arg-type]


def add_triton_constants(constants: dict[str, Any]) -> int:
    """Index of new baked-in arguments."""
    from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table

    return kernel_side_table.add_constant_args(constants)


@contextlib.contextmanager
def uncached(*, fresh_kernels: bool, deterministic: bool) -> Iterator[None]:
    """Compile anew: neither FxGraph's cache nor AOTAutograd's tells SDPA backends apart.

    Generated CPU kernels are visible to the profiler in here.
    """
    from torch._functorch import config as functorch_config
    from torch._inductor import config

    patches = {
        "fx_graph_cache": False,
        "force_disable_caches": fresh_kernels,
        "deterministic": deterministic,
        "cpp.enable_kernel_profile": True,
    }
    with config.patch(patches), functorch_config.patch(enable_autograd_cache=False):
        yield


class CountedBytes:
    """Counts, while in force, the bytes that generated kernels read and write.

    By Inductor's own count of each, which ``nbytes`` adds up over the graphs that are compiled;
    None where there is something that it cannot count. Calls (matmuls, attention) are left out:
    for a view, it charges them with the whole buffer.
    """

    nbytes: int | None = 0

    def __enter__(self) -> CountedBytes:
        from torch._inductor.graph import GraphLowering

        self._compile = compile_graph = GraphLowering.compile_to_module

        def counting(graph: Any) -> Any:
            module = compile_graph(graph)
            try:
                kernels = [
                    n for n in graph.scheduler.nodes if not (n.is_extern() or n.is_template())
                ]
                sizes = [node.get_read_write_buffers_sizes() for node in kernels]
                self.nbytes = None if self.nbytes is None else self.nbytes + sum(sizes)
            except Exception:  # a benchmark must not break the compile that it watches
                self.nbytes = None
            return module

        GraphLowering.compile_to_module = counting  # type: ignore[method-assign, assignment]
        return self

    def __exit__(self, *fault: object) -> None:
        from torch._inductor.graph import GraphLowering

        GraphLowering.compile_to_module = self._compile  # type: ignore[method-assign]
