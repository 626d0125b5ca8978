"""The private names of torch that qkvpass cannot do without, all in one place.

Tried on torch 2.11.0, 2.13.0, 2.14.1 and 2.15.0.
"""

from __future__ import annotations

import contextlib
import contextvars
import copy
import inspect
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._guards import detect_fake_mode as detect_fake_mode
from torch._inductor.custom_graph_pass import CustomGraphPass as CustomGraphPass
from torch._inductor.custom_graph_pass import get_hash_for_files as _hash_for_files
from torch._library.triton import triton_ops_to_kernels as _triton_ops
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.passes.shape_prop import _extract_tensor_metadata as extract_tensor_metadata

from .once import log_once

__all__ = [
    "CountedBytes",
    "CustomGraphPass",
    "NewGuard",
    "ORIGIN",
    "add_triton_constants",
    "bisecting",
    "bisector_disables",
    "counters",
    "detect_fake_mode",
    "extract_tensor_metadata",
    "compile_for_eager",
    "compile_with_inductor",
    "config_value",
    "decomposes",
    "function_behind",
    "has_gradient",
    "hash_files",
    "held_before",
    "inductor_cache_folder",
    "is_triton_op",
    "no_new_guards",
    "patches_of_mode",
    "repeatable_compiles",
    "saved_tensor_hooks_active",
    "settings",
    "sort_topologically",
    "stop_after_joint_passes",
    "trace_artifact",
    "tracing",
    "triton_constants",
    "triton_kernel",
    "uncached",
    "with_graph_module",
]


# Keys of a node's meta that say where it comes from, and where the partitioner may put it.
ORIGIN = (
    "stack_trace",
    "nn_module_stack",
    "custom",
    "recompute",
    "ac_graph_id",
    "partitioner_tag",
    "autograd_backward",
)


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


def config_value(key: str) -> Any:
    """What a key of Inductor's config holds now."""
    from torch._inductor import config

    return getattr(config, key)


def held_before(key: str, ours: type) -> Any:
    """What a key of Inductor's config held until a patch put an instance of ``ours`` there.

    A patch keeps what it must put back, under the key object that it was given: that tells
    the patch that was given ``key`` itself from a user's around it.
    """
    priors = [p for p in _priors() if key in p and not isinstance(p[key], ours)]
    exact = [p[key] for p in priors if any(name is key for name in p)]
    return next(iter(exact or [p[key] for p in priors if p[key] is not None]), None)


def _priors() -> Iterator[dict[str, Any]]:
    """What every config patch in force will put back."""
    from torch.utils._config_module import ContextDecorator

    for variable, stack in contextvars.copy_context().items():  # torch 2.13 and later
        if variable.name.startswith("torch._inductor.config.ConfigPatch["):
            yield from stack
        if variable.name.startswith("torch._inductor.config.ImplicationConfigPatch["):
            yield from filter(None, map(_put_back_by, stack))  # torch 2.15
    for patch in ContextDecorator.__subclasses__():  # torch 2.11: one class a patch
        if (prior := _enclosed(patch.__enter__).get("prior")) is not None:
            yield prior


def _put_back_by(revert: Any) -> dict[str, Any]:
    """What the function that takes back a config patch will set again, by key."""
    enclosed = _enclosed(revert)
    invalidate, undo = enclosed.get("invalidate"), enclosed.get("undo")
    if invalidate is None or undo is None:
        log_once("config patches of this torch are unknown: a pass that a slot held may not run")
        return {}
    keys = {
        module._config[key].user_override: key
        for module, key, _ in _enclosed(invalidate).get("targets", ())
        if hasattr(module, "_config")
    }
    found: dict[str, Any] = {}
    for _, callback in undo._exit_callbacks:
        setter = getattr(callback, "__wrapped__", None)
        variable = getattr(setter, "__self__", None)
        if isinstance(variable, contextvars.ContextVar) and variable in keys:
            found[keys[variable]] = next(iter(_enclosed(callback).get("args", ())), None)
    return {key: None if _is_unset(value) else value for key, value in found.items()}


def _is_unset(value: Any) -> bool:
    """Whether a key of Inductor's config was not set; a slot's default is None."""
    from torch.utils._config_module import _UNSET_SENTINEL

    return value is _UNSET_SENTINEL


def _enclosed(function: Any) -> dict[str, Any]:
    """The variables that a function closes over, by name."""
    cells = zip(function.__code__.co_freevars, function.__closure__ or ())
    return {name: cell.cell_contents for name, cell in cells}


def patches_of_mode(mode: str | None) -> dict[str, Any]:
    """The settings of Inductor that a mode of ``torch.compile`` stands for."""
    from torch._inductor import list_mode_options

    return dict(list_mode_options(mode)) if mode and mode != "default" else {}


def settings(patches: dict[str, Any]) -> str:
    """Inductor's config under ``patches`` as text, without passes and what no graph depends on."""
    from torch._inductor import config

    with config.patch(patches):
        return repr(sorted(config.save_config_portable(ignore_private_configs=False).items()))


def compile_with_inductor(
    gm: torch.fx.GraphModule, inputs: list[Any], patches: dict[str, Any]
) -> Any:
    """Stock Inductor under ``patches``, which hold for a lazily compiled backward too."""
    from torch._inductor.compile_fx import compile_fx

    return compile_fx(gm, inputs, config_patches=patches)


def compile_for_eager(
    gm: torch.fx.GraphModule, inputs: list[Any], rewrite: Callable[[torch.fx.Graph], None]
) -> Any:
    """What the backend ``aot_eager`` does, with ``rewrite`` run on each inference or joint graph.

    No graph cache is asked: its key would not know of ``rewrite``.
    """
    from torch._dynamo.backends.common import aot_autograd
    from torch._dynamo.backends.debugging import boxed_nop
    from torch._functorch import config as functorch_config
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    def partition(joint: torch.fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        rewrite(joint.graph)
        return min_cut_rematerialization_partition(joint, *args, **kwargs)

    def infer(graph: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
        for part in graph.modules():  # the graph, and the regions that it calls
            if isinstance(part, torch.fx.GraphModule):
                rewrite(part.graph)
                part.recompile()
        return boxed_nop(graph, example_inputs)

    compiler = aot_autograd(
        fw_compiler=boxed_nop,
        bw_compiler=boxed_nop,
        inference_compiler=infer,
        partition_fn=partition,
        keep_inference_input_mutations=True,
    )
    with functorch_config.patch(enable_autograd_cache=False):
        return compiler(gm, inputs)


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


@contextlib.contextmanager
def repeatable_compiles() -> Iterator[None]:
    """Compiles inside depend on nothing kept, choose the same kernels, and never give up."""
    from torch._dynamo import config as dynamo_config
    from torch._functorch import config as functorch_config
    from torch._inductor import config

    with (
        config.patch(deterministic=True, fx_graph_cache=False),
        functorch_config.patch(enable_autograd_cache=False),
        # Where a graph breaks, its parts are found by the user's code: each compile adds one.
        dynamo_config.patch(recompile_limit=1 << 20, accumulated_recompile_limit=1 << 20),
    ):
        yield


def saved_tensor_hooks_active() -> bool:
    """Whether saved tensors go through hooks of the user's, by what is in force now."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def decomposes(op: torch._ops.OpOverload) -> bool:
    """Whether an op is a composite of others, in every respect."""
    return _has_kernel(op, "CompositeImplicitAutograd")


def has_gradient(op: torch._ops.OpOverload) -> bool:
    """Whether autograd has a formula for an op, or for the ops that it is made of."""
    from torch._library.custom_ops import OPDEFS

    if (definition := OPDEFS.get(op._schema.name)) is not None:  # has a kernel in any case
        return definition._backward_fn is not None
    keys = ("Autograd", "AutogradCPU", "AutogradCUDA", "CompositeImplicitAutograd")
    return any(_has_kernel(op, key) for key in keys)


def _has_kernel(op: torch._ops.OpOverload, key: str) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), key)


def with_graph_module(
    program: torch.export.ExportedProgram, gm: torch.fx.GraphModule
) -> torch.export.ExportedProgram:
    """``program`` with another graph of the same signature, verified."""
    gm.meta.update(program.graph_module.meta)
    return program._update(gm, copy.deepcopy(program.graph_signature))


def inductor_cache_folder() -> str:
    """Where Inductor keeps compiled graphs."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return str(cache_dir())


def counters() -> Counter[str]:
    """Dynamo's counters for this package."""
    from torch._dynamo.utils import counters as of_all

    return of_all["qkvpass"]


def tracing() -> bool:
    """Whether a structured trace is written (TORCH_TRACE)."""
    from torch._logging._internal import trace_log

    return bool(trace_log.handlers)


def trace_artifact(name: str, encoding: str, payload: str) -> None:
    """Put a text (``"string"`` or ``"json"``) into the structured trace."""
    from torch._logging import trace_structured

    trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": name, "encoding": encoding},
        payload_fn=lambda: payload,
        expect_trace_id=False,
    )


def bisecting() -> bool:
    """Whether Inductor's CompilerBisector is at work."""
    from torch._inductor.compiler_bisector import CompilerBisector

    return bool(CompilerBisector.bisection_enabled)


def bisector_disables(what: str) -> bool:
    """Count one step of the joint graph's passes; whether the bisector wants it left out.

    The bisector knows a fixed list of subsystems. Inductor counts a pass in a joint slot as one
    step of this one, so its parts belong there.
    """
    from torch._inductor.compiler_bisector import CompilerBisector

    return bool(CompilerBisector.disable_subsystem("inductor", "joint_graph_passes", lambda: what))


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


def function_behind(op: torch._ops.OpOverload) -> Callable[..., Any] | None:
    """What was given to ``torch.library.custom_op`` or ``triton_op``; None for other ops."""
    definition = torch._library.custom_ops.OPDEFS.get(op._schema.name)
    if definition is None:
        return None
    function = definition._init_fn
    # triton_op wraps what it is given in a function of torch's own.
    return inspect.getclosurevars(function).nonlocals.get("fn", function)


def is_triton_op(op: torch._ops.OpOverload) -> bool:
    return op._schema.name in _triton_ops


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
