"""Caches: warm starts hit and report, whatever a decision depends on is in the key.

``python test_caches.py JOB FILE`` is one process of the tests below.
"""

from __future__ import annotations

import copy
import functools
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import standins
import torch
import torch._inductor.config as inductor_config
from graph_caches import caches_on, events
from torch import Tensor, nn
from torch._dynamo.utils import counters

import qkvpass
from qkvpass import evidence, graph_pass, triton_tags

TOKENS, HEADS, HEAD_DIM = 6, 2, 8
WIDTH = HEADS * HEAD_DIM
STRIDED, DENSE = (3 * WIDTH, HEAD_DIM, 1), (WIDTH, HEAD_DIM, 1)
NOT_KEPT = "from a cache; no report was kept for it"


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(x).chunk(3, -1)
        return standins.aware(*(t.view(-1, HEADS, HEAD_DIM).contiguous() for t in parts))


def tag() -> None:
    standins.tag("aware")
    standins.tag("aware_bwd", backward_of="standin::aware")


@pytest.fixture(autouse=True)
def _tagged() -> None:
    tag()


# ---------------------------------------------------------------------------------------------
# Processes


WAYS: dict[str, tuple[bool, Callable[[], dict[str, Any]]]] = {
    "backend": (False, lambda: {"backend": qkvpass.backend}),
    "options": (False, lambda: {"options": qkvpass.inductor_options()}),
    "training": (True, lambda: {"backend": qkvpass.backend}),
}
JOBS: dict[str, Callable[[Path], None]] = {
    "compile": lambda file: None,
    "save": lambda file: file.write_bytes(torch.compiler.save_cache_artifacts()[0]),
    "load": lambda file: torch.compiler.load_cache_artifacts(file.read_bytes()) and None,
}


def main(job: str, file: Path) -> None:
    tag()
    inductor_config.deterministic = True
    inductor_config.cpp_cache_precompile_headers = False  # costs more than the few kernels here
    if job != "save":
        JOBS[job](file)
    results = {name: compiled(train, make()) for name, (train, make) in WAYS.items()}
    if job == "save":
        JOBS[job](file)
    print(json.dumps(results))


def compiled(train: bool, options: dict[str, Any]) -> dict[str, Any]:
    """What one compile in this process did, as plain data."""
    torch._dynamo.reset()
    counters.clear()
    model, x = Layer(), torch.linspace(-1, 1, TOKENS * WIDTH).view(TOKENS, WIDTH)
    with qkvpass.capture() as reports, standins.recorded() as calls, torch.set_grad_enabled(train):
        out = torch.compile(model, **options)(x)
        grads = torch.autograd.grad(out.sum(), list(model.parameters())) if train else ()
    return {
        "events": {
            cache: {name: counters[group][f"{cache}_{name}"] for name in ("hit", "miss", "bypass")}
            for group, cache in (
                ("inductor", "fxgraph_cache"),
                ("aot_autograd", "autograd_cache"),
            )
        },
        "strides": [[call.op, *map(list, call.strides[-3:])] for call in calls],
        "outputs": [t.tolist() for t in (out, *grads)],
        "reports": [[r.cached, [str(c.reason) for c in r.copies], list(r.notes)] for r in reports],
    }


def process(job: str, cache: Path, file: Path) -> dict[str, Any]:
    folders = [str(Path(qkvpass.__file__).parents[1]), *sys.path]
    done = subprocess.run(
        [sys.executable, __file__, job, str(file)],
        env={
            **os.environ,
            "QKVPASS_STRICT": "1",
            "PYTHONPATH": os.pathsep.join(folders),
            "TORCHINDUCTOR_CACHE_DIR": str(cache),
        },
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def cold(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path, Path]:
    """What a first process did, its cache folder, and the artifacts that it saved."""
    folder = tmp_path_factory.mktemp("caches")
    cache, file = folder / "cache", folder / "artifacts"
    return process("save", cache, file), cache, file


def check_strides(result: dict[str, Any]) -> None:
    for name, (train, _) in WAYS.items():
        ops = ["aware", "aware_bwd"] if train else ["aware"]
        assert result[name]["strides"] == [[op, *[list(STRIDED)] * 3] for op in ops]


def is_hit(counted: dict[str, int]) -> bool:
    return counted["hit"] >= 1 and not counted["miss"] and not counted["bypass"]


def test_a_first_process_misses(cold: Any) -> None:
    """Without a bypass, and with fresh reports."""
    result, _, _ = cold
    check_strides(result)
    for one in result.values():
        assert all(c["miss"] and not c["hit"] and not c["bypass"] for c in one["events"].values())
        assert one["reports"] == [[False, ["removed"] * 3, []]]


def test_a_second_process_hits(cold: Any) -> None:
    """Both caches, without a miss or bypass; the kept reports come back, or it is said."""
    first, cache, file = cold
    result = process("compile", cache, file)
    check_strides(result)
    for name, one in result.items():
        assert one["outputs"] == first[name]["outputs"]
        assert is_hit(one["events"]["autograd_cache"])
        fx = one["events"]["fxgraph_cache"]
        assert fx["hit"] and not fx["miss"] and not fx["bypass"]
    assert result["backend"]["reports"] == [[True, ["removed"] * 3, []]]
    assert result["training"]["reports"] == [[True, ["removed"] * 3, []]]
    assert result["options"]["reports"] == [[True, [], [NOT_KEPT]]]


def test_artifacts_carry_over(cold: Any, tmp_path: Path) -> None:
    """Into an empty cache folder; reports do not travel with them, and that is said."""
    first, _, file = cold
    result = process("load", tmp_path / "empty", file)
    check_strides(result)
    for name, one in result.items():
        assert one["outputs"] == first[name]["outputs"]
        assert is_hit(one["events"]["autograd_cache"])
        assert one["reports"] == [[True, [], [NOT_KEPT]]]


# ---------------------------------------------------------------------------------------------
# The key


def odd(site: qkvpass.Site) -> str | None:
    return None


def even(site: qkvpass.Site) -> str | None:
    return None


def other_certificate(patch: pytest.MonkeyPatch) -> None:
    files = (*evidence._files(), ("another.json", "{}"))
    patch.setattr(evidence, "_files", lambda: files)
    evidence.key.cache_clear()


def other_library(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(evidence, "library_version", lambda name: "1000.0")
    evidence.key.cache_clear()


def other_triton_tag(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(triton_tags, "key", lambda: "another")


# What it does, and the options to compile with then.
CHANGES: dict[str, Callable[[pytest.MonkeyPatch], Any]] = {
    "tag": lambda patch: standins.tag("aware", "q", "k"),
    "contract": lambda patch: standins.tag(
        "aware", contract=qkvpass.StrideContract(allow_storage_offset=False)
    ),
    "condition": lambda patch: standins.tag("aware", when=even),
    "version of a condition": lambda patch: standins.tag("aware", when=lambda s: None, version="2"),
    "evidence": lambda patch: {"evidence": "certified"},
    "numerics": lambda patch: {"numerics": "bitwise"},
    "fold_bias": lambda patch: {"fold_bias": False},
    "enabled": lambda patch: {"enabled": False},
    "certificate": other_certificate,
    "version of a library": other_library,
    "version of torch": lambda patch: patch.setattr(torch, "__version__", "1000.0"),
    "source": lambda patch: patch.setattr(graph_pass, "_source_hash", lambda: b"another"),
    "Triton tag": other_triton_tag,
    "switch": lambda patch: patch.setenv("QKVPASS_MAX_REWRITES", "1"),
    "another op's tag": lambda patch: standins.tag("blind", when=odd),
}


@functools.cache
def model() -> Layer:
    return Layer()


def found(options: dict[str, Any] | None) -> dict[str, int]:
    """Cache events of a compile with these options."""
    torch._dynamo.reset()
    counters.clear()
    with torch.no_grad():
        backend = qkvpass.configured(**(options or {}))
        torch.compile(model(), backend=backend)(torch.randn(TOKENS, WIDTH))
    return events()


def test_what_a_decision_depends_on_is_in_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each change makes the next compile miss; once all are undone, the first one is found."""
    miss = {"miss": 2, "hit": 0, "bypass": 0}
    missed = {}
    with caches_on():
        assert found({}) == miss
        for change, make in CHANGES.items():
            with monkeypatch.context() as patch:
                missed[change] = found(make(patch))
            evidence.key.cache_clear()
            tag()
        qkvpass.unregister_stride_tag("standin::blind")
        after = found({})
    assert missed == dict.fromkeys(CHANGES, miss)
    assert after["hit"] and not after["miss"] and not after["bypass"]


def hooked_gradient(hooks: bool) -> tuple[Tensor, list[str]]:
    """The weight's gradient, perhaps under hooks that hand back dense tensors."""
    torch._dynamo.reset()
    one, x = Layer(), torch.linspace(-1, 1, TOKENS * WIDTH).view(TOKENS, WIDTH)
    dense = torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone().contiguous(), lambda t: t)
    with qkvpass.capture() as reports:
        if hooks:
            with dense:
                out = torch.compile(one, backend=qkvpass.backend)(x)
        else:
            out = torch.compile(one, backend=qkvpass.backend)(x)
    (grad,) = torch.autograd.grad(out.sin().sum(), one.qkv.weight)
    return grad, [str(copy.reason) for report in reports for copy in report.copies]


def test_hooks_on_saved_tensors_are_in_the_key() -> None:
    """Compiled without them, the backward expects views, and hooks hand it dense tensors."""
    with caches_on():
        expected, free = hooked_gradient(hooks=False)
        grad, bound = hooked_gradient(hooks=True)
    assert torch.equal(grad, expected)
    assert (free, bound) == (["removed"] * 3, ["backward-not-capable"] * 3)


# ---------------------------------------------------------------------------------------------
# Reports on a warm cache


def report_of(autocast: bool, **options: Any) -> qkvpass.Report:
    torch._dynamo.reset()
    with (
        qkvpass.capture() as reports,
        torch.no_grad(),
        torch.autocast("cpu", torch.bfloat16, enabled=autocast),
    ):
        torch.compile(model(), backend=qkvpass.backend, **options)(torch.randn(TOKENS, WIDTH))
    (report,) = reports
    return report


def test_a_kept_report_is_of_the_graph_that_was_found() -> None:
    """Autocast around the call is in the graph that Inductor sees, not in Dynamo's."""
    with caches_on():
        fresh = {autocast: report_of(autocast) for autocast in (True, False)}
        again = {autocast: report_of(autocast) for autocast in (True, False)}
    for autocast in (True, False):
        assert not fresh[autocast].cached and again[autocast].cached
        assert again[autocast].before == fresh[autocast].before
    assert "bf16" in fresh[True].before and "bf16" not in fresh[False].before


def test_users_passes_have_reports_of_their_own() -> None:
    class Dropping(qkvpass.compat.CustomGraphPass):
        """Takes q's copy away before the pass sees it."""

        def __call__(self, graph: torch.fx.Graph) -> None:
            clone = graph.find_nodes(op="call_function", target=torch.ops.aten.clone.default)[0]
            sibling = graph.find_nodes(op="call_function", target=torch.ops.aten.clone.default)[1]
            clone.replace_all_uses_with(sibling)
            graph.erase_node(clone)

        def uuid(self) -> str:
            return "dropping"

    with caches_on():
        counts = []
        for _ in range(2):
            counts.append(len(report_of(False).copies))
            with inductor_config.patch(joint_custom_post_pass=Dropping()):
                counts.append(len(report_of(False).copies))
    assert counts == [3, 2, 3, 2]


def test_nothing_is_claimed_where_nothing_was_compiled() -> None:
    """No report for a run of what is compiled already, nor where the pass is off."""
    with caches_on(), torch.no_grad():
        for options in ({}, {"enabled": False}):
            run = torch.compile(Layer(), options=qkvpass.inductor_options(**options))
            run(torch.randn(TOKENS, WIDTH))
            with qkvpass.capture() as reports:
                run(torch.randn(TOKENS, WIDTH))
            assert reports == []
            torch._dynamo.reset()
        with qkvpass.capture() as reports:
            torch.compile(Layer(), options=qkvpass.inductor_options(enabled=False))(
                torch.randn(TOKENS, WIDTH)
            )
        assert reports == []


# ---------------------------------------------------------------------------------------------
# The pass object


def test_options_hold_nothing_of_the_users() -> None:
    """They pickle and deep-copy beside a pass that does neither, and stay equal."""
    with inductor_config.patch(joint_custom_post_pass=lambda graph: None):
        options = qkvpass.inductor_options(evidence="certified")
        twins = [pickle.loads(pickle.dumps(options)), copy.deepcopy(options)]
    assert twins == [options, options] and qkvpass.inductor_options() != options
    (one,) = options.values()
    assert vars(one) == {"ours": qkvpass.StridedQKVPass(qkvpass.Options(evidence="certified"))}
    assert {type(held) for held in vars(one.ours.options).values()} == {str, bool}


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
