"""Programs of ``torch.export``, rewritten without Inductor."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import Graph, GraphModule, Node

from .compat import with_graph_module
from .editor import name_alike
from .graph_pass import Options, StridedQKVPass


def rewrite(program: ExportedProgram, **options: Any) -> ExportedProgram:
    """A program without the copies in front of attention that nobody needs.

    Takes the IR that ``torch.export.export`` returns as well as a decomposed one. Under grad
    mode autograd may run over the result, so that copies stay where an attention op's backward
    has no stride tag; call this under ``torch.no_grad()`` for a program that only infers.

    Args:
        program: left as it is. The result shares its parameters, buffers and constants, and
            has the same signature, verifiers and shape constraints.
        options: fields of :class:`Options`. The target is ``"eager"`` unless it is given:
            give ``"inductor"`` for a program that AOTInductor compiles next.

    Returns:
        A new program. Its report goes to :func:`capture`.

    Raises:
        TypeError: if ``program`` is no ``ExportedProgram``.
    """
    if not isinstance(program, ExportedProgram):
        raise TypeError(
            f"program is a {type(program).__name__}; give what torch.export.export returns"
        )
    graph = copy.deepcopy(program.graph)
    name_alike(graph, program.graph)
    defaults: dict[str, Any] = {"target": "eager", "autograd": torch.is_grad_enabled()}
    with _returned(graph, _named_by_submodules(program)):
        StridedQKVPass(Options(**(defaults | options)))(graph)
    return with_graph_module(program, GraphModule(program.graph_module, graph))


def _named_by_submodules(program: ExportedProgram) -> set[str]:
    """Values that ``torch.export.unflatten`` will look for, at borders that were preserved."""
    signatures = [e.signature for e in program.module_call_graph if e.fqn and e.signature]
    return {
        argument.name
        for signature in signatures
        for argument in (*signature.inputs, *signature.outputs)
        if hasattr(argument, "name")
    }


@contextmanager
def _returned(graph: Graph, names: set[str]) -> Iterator[None]:
    """Return these values too while the graph is rewritten: the rule keeps what is returned."""
    output = graph.find_nodes(op="output")[0]
    outputs = list(_values(output))
    output.args = ((*outputs, *(node for node in graph.nodes if node.name in names)),)
    try:
        yield
    finally:
        output.args = (tuple(_values(output)[: len(outputs)]),)


def _values(output: Node) -> Any:
    return output.args[0]
