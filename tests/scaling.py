"""What the pass itself costs: its share of a compile, and its growth with the graph.

Run as a script for the numbers; ``tests/test_scaling.py`` holds the bounds.
"""

from __future__ import annotations

import sys
import time

import torch
from torch._inductor import config
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph

import qkvpass
from qkvpass.graph_pass import Options, run

aten = torch.ops.aten


def layered_graph(layers: int, tokens: int = 32, heads: int = 4, head_dim: int = 16) -> Graph:
    """A hand-built encoder: packed projection, split, three copies, SDPA, copy, projection."""
    width = heads * head_dim
    graph = Graph()
    mode = FakeTensorMode()

    def call(op, *args, **kwargs):
        node = graph.call_function(op, args, kwargs)
        value = torch.fx.node.map_arg((args, kwargs), lambda n: n.meta["val"])
        with mode:
            node.meta["val"] = op(*value[0], **value[1])
        return node

    def given(name, *shape):
        node = graph.placeholder(name)
        with mode:
            node.meta["val"] = torch.empty(shape)
        return node

    inputs = [given("x", tokens, width)]
    for i in range(layers):
        inputs += [given(f"wqkv{i}", width, 3 * width), given(f"wo{i}", width, width)]
    x = inputs[0]
    for i in range(layers):
        packed = call(aten.mm.default, x, inputs[1 + 2 * i])
        qkv = []
        for part in range(3):
            piece = call(aten.slice.Tensor, packed, 1, part * width, (part + 1) * width)
            piece = call(aten.view.default, piece, [1, tokens, heads, head_dim])
            piece = call(aten.permute.default, piece, [0, 2, 1, 3])
            qkv.append(call(aten.clone.default, piece, memory_format=torch.contiguous_format))
        out = call(aten._scaled_dot_product_flash_attention_for_cpu.default, *qkv)
        out = graph.call_function(__import__("operator").getitem, (out, 0))
        out.meta["val"] = out.args[0].meta["val"][0]
        out = call(aten.permute.default, out, [0, 2, 1, 3])
        out = call(aten.clone.default, out, memory_format=torch.contiguous_format)
        out = call(aten.view.default, out, [tokens, width])
        x = call(aten.add.Tensor, x, call(aten.mm.default, out, inputs[2 + 2 * i]))
    graph.output((x,))
    return graph


def pass_seconds(layers: int) -> float:
    """Wall time of the pass over a hand-built graph of so many layers."""
    graph = layered_graph(layers)
    start = time.perf_counter()
    report = run(graph, Options())
    seconds = time.perf_counter() - start
    assert len(report.removed) == 4 * layers
    return seconds


def compile_share(layers: int = 27) -> tuple[float, float]:
    """(seconds of the pass, seconds of the whole compile) of an encoder, caches off."""
    from qkvpass import demo

    torch.manual_seed(0)
    model = demo.Encoder(layers).eval()
    qkvpass.register_stride_tag(demo.varlen_attention, operands=("q", "k", "v"))
    inputs = torch.randn(64, demo.WIDTH), torch.tensor([0, 40, 64])
    with (
        torch.no_grad(),
        config.patch(force_disable_caches=True),
        qkvpass.capture() as reports,
    ):
        start = time.perf_counter()
        torch.compile(model, backend=qkvpass.backend)(*inputs)
        whole = time.perf_counter() - start
    assert sum(len(report.removed) for report in reports) == 3 * layers
    return sum(report.seconds for report in reports), whole


if __name__ == "__main__":
    pass_seconds(2)  # warm
    for count in (10, 100, 1000):
        print(f"{count} layers: {pass_seconds(count) / count * 1e3:.2f} ms a layer")
    if "--compile" in sys.argv:
        spent, whole = compile_share()
        print(f"27-layer compile: pass {spent * 1e3:.0f} ms of {whole:.1f} s ({spent / whole:.2%})")
