"""Whatever the user keeps in a slot of Inductor's config runs as before, and stays there.

Order: the slot's own passes, as the user listed them, then ours.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable
from typing import Any

import pytest
import standins
import torch
from graph_caches import caches_on, events
from torch import Tensor, nn
from torch._inductor import config, custom_graph_pass
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx import Graph

import qkvpass

TOKENS, HEADS, HEAD_DIM = 6, 2, 8
WIDTH = HEADS * HEAD_DIM
STRIDED, DENSE = (3 * WIDTH, HEAD_DIM, 1), (WIDTH, HEAD_DIM, 1)
SLOTS = (
    "joint_custom_pre_pass",
    "joint_custom_post_pass",
    "post_grad_custom_pre_pass",
    "post_grad_custom_post_pass",
)
OURS = "joint_custom_post_pass"
TAKES_LISTS = hasattr(custom_graph_pass, "get_custom_graph_passes")  # torch 2.13 and later


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(x).chunk(3, -1)
        return standins.aware(*(t.view(-1, HEADS, HEAD_DIM).contiguous() for t in parts))


class Users(CustomGraphPass):
    """A pass of the user's: it writes down that it ran, and how many copies it saw."""

    def __init__(self, name: str, ran: list[tuple[str, int]], uuid: Any = "1") -> None:
        self.name, self.ran, self.id = name, ran, uuid

    def __call__(self, graph: Graph) -> None:
        copies = graph.find_nodes(op="call_function", target=torch.ops.aten.clone.default)
        self.ran.append((self.name, len(copies)))

    def uuid(self) -> Any:
        return self.id and (self.name, self.id)


class Failing(Users):
    def __call__(self, graph: Graph) -> None:
        raise RuntimeError(f"{self.name} fails")


HOW: dict[str, Callable[[], dict[str, Any]]] = {
    "backend": lambda: {"backend": qkvpass.backend},
    "options": lambda: {"options": qkvpass.inductor_options()},
}


@pytest.fixture(autouse=True)
def _tagged() -> None:
    standins.tag("aware")


def compiled(model: nn.Module, **options: Any) -> tuple[Tensor, standins.Call, list[Any]]:
    """What came out, what the op received, and the reports, compiled in fresh Dynamo state."""
    torch._dynamo.reset()
    return run(torch.compile(model, **options))


def run(model: Callable[..., Any]) -> tuple[Tensor, standins.Call, list[Any]]:
    generator = torch.Generator().manual_seed(1)
    with qkvpass.capture() as reports, standins.recorded("aware") as calls, torch.no_grad():
        out = model(torch.randn(TOKENS, WIDTH, generator=generator))
    (call,) = calls
    return out, call, reports


def removed(reports: list[Any]) -> list[int]:
    return [len(report.removed) for report in reports]


@pytest.mark.parametrize("set_by", ["patch", "assignment"])
@pytest.mark.parametrize("how", HOW)
def test_every_slot_runs_in_order_and_is_put_back(how: str, set_by: str) -> None:
    """Set behind the call of ``inductor_options``: what counts is the compile."""
    ran: list[tuple[str, int]] = []
    users = {slot: Users(slot, ran) for slot in SLOTS}
    stock, dense, _ = compiled(Layer())
    torch._dynamo.reset()
    model = torch.compile(Layer(), **HOW[how]())
    before = {slot: getattr(config, slot) for slot in SLOTS}
    with config.patch(users if set_by == "patch" else {}):
        for slot, one in users.items():
            setattr(config, slot, one)
        out, call, reports = run(model)
        assert {slot: getattr(config, slot) for slot in SLOTS} == users
        for slot in SLOTS:
            setattr(config, slot, before[slot])
    assert torch.equal(out, stock)
    assert call.strides == (STRIDED,) * 3 and call.one_storage
    assert dense.strides == (DENSE,) * 3
    assert removed(reports) == [3]
    # The user's passes before ours see the copies, and those behind it do not.
    assert ran == [(SLOTS[0], 3), (SLOTS[1], 3), (SLOTS[2], 0), (SLOTS[3], 0)]


def test_the_innermost_of_nested_settings_counts() -> None:
    ran: list[tuple[str, int]] = []
    torch._dynamo.reset()
    model = torch.compile(Layer(), options={**qkvpass.inductor_options(), "max_autotune": False})
    with config.patch({OURS: Users("outer", ran)}), config.patch({OURS: Users("inner", ran)}):
        _, call, _ = run(model)
    assert ran == [("inner", 3)] and call.strides == (STRIDED,) * 3


@pytest.mark.parametrize("how", HOW)
def test_a_cleared_slot_runs_nothing(how: str) -> None:
    """What was there when the options were made does not come back."""
    ran: list[tuple[str, int]] = []
    torch._dynamo.reset()
    with config.patch({OURS: Users("early", ran)}):
        model = torch.compile(Layer(), **HOW[how]())
        with config.patch({OURS: None}):
            _, call, _ = run(model)
    assert ran == [] and call.strides == (STRIDED,) * 3


@pytest.mark.skipif(not TAKES_LISTS, reason="a slot of this torch takes one callable")
@pytest.mark.parametrize("kind", [list, tuple])
@pytest.mark.parametrize("how", HOW)
def test_a_list_of_passes(how: str, kind: type) -> None:
    ran: list[tuple[str, int]] = []
    users = kind([Users("first", ran), Users("second", ran)])
    with config.patch({OURS: users}):
        _, call, _ = compiled(Layer(), **HOW[how]())
        assert getattr(config, OURS) is users
    assert ran == [("first", 3), ("second", 3)] and call.strides == (STRIDED,) * 3


def test_a_pass_among_the_backends_options() -> None:
    """It takes the place of the slot's, as under stock, and ours runs behind it."""
    ran: list[tuple[str, int]] = []
    with config.patch({OURS: Users("slot", ran)}):
        _, call, reports = compiled(
            Layer(), backend=qkvpass.backend, options={OURS: Users("option", ran)}
        )
    assert ran == [("option", 3)]
    assert removed(reports) == [3] and call.strides == (STRIDED,) * 3


@pytest.mark.parametrize("how", HOW)
def test_ours_in_the_users_slot_runs_once(how: str) -> None:
    with config.patch({OURS: qkvpass.StridedQKVPass()}):
        _, call, reports = compiled(Layer(), **HOW[how]())
    assert removed(reports) == [3] and call.strides == (STRIDED,) * 3


@pytest.mark.parametrize(
    ("how", "slot"), [("backend", OURS), *(("options", slot) for slot in SLOTS)]
)
def test_slots_are_put_back_after_a_failure(how: str, slot: str) -> None:
    ran: list[tuple[str, int]] = []
    users = {name: (Failing if name == slot else Users)(name, ran) for name in SLOTS}
    model = Layer()
    with config.patch(users):
        with pytest.raises(Exception, match=f"{slot} fails"):
            compiled(model, **HOW[how]())
        assert {name: getattr(config, name) for name in SLOTS} == users
    ran.clear()
    _, call, reports = compiled(model, **HOW[how]())
    assert ran == [] and removed(reports) == [3] and call.strides == (STRIDED,) * 3


# Caches


@pytest.mark.parametrize("how", HOW)
def test_the_key_joins_both_ids(how: str) -> None:
    """Another id of the user's pass is another compile; the same one is found again."""
    with caches_on():
        found = []
        for uuid in ("1", "2", "1"):
            ran: list[tuple[str, int]] = []
            with config.patch({OURS: Users("user", ran, uuid)}):
                _, call, _ = compiled(Layer(), **HOW[how]())
            assert call.strides == (STRIDED,) * 3
            cache = events()
            assert not cache["bypass"]
            found.append((bool(cache["miss"]), bool(cache["hit"]), len(ran)))
    assert found == [(True, False, 1), (True, False, 1), (False, True, 0)]


@pytest.mark.parametrize(
    ("how", "users"),
    [("backend", "function"), *(("options", users) for users in ("function", "no id", "empty id"))],
)
def test_a_pass_without_an_id_goes_uncached(how: str, users: str) -> None:
    stock, _, _ = compiled(Layer())
    ran: list[tuple[str, int]] = []
    passes: dict[str, Any] = {
        "function": lambda graph: ran.append(("user", 3)),
        "no id": Users("user", ran, None),
        "empty id": Users("user", ran, ""),
    }
    with caches_on(), config.patch({OURS: passes[users]}):
        for _ in range(2):
            out, call, reports = compiled(Layer(), **HOW[how]())
            cache = events()
            assert cache["bypass"] and not cache["miss"] and not cache["hit"]
            assert torch.equal(out, stock) and call.strides == (STRIDED,) * 3
            assert removed(reports) == [3] and not reports[0].cached
    assert ran == [("user", 3)] * 2


# With and without, in one process


@pytest.mark.parametrize("first", ["stock", "ours"])
@pytest.mark.parametrize(("how", "cached"), [("backend", False), ("options", True)])
def test_with_and_without_in_one_process(how: str, first: str, cached: bool) -> None:
    """The same model object, neither compile changes the other, nor what is compiled later."""
    torch._dynamo.reset()
    model = Layer()
    with caches_on() if cached else config.patch(fx_graph_cache=False):
        both = {"stock": torch.compile(model), "ours": torch.compile(model, **HOW[how]())}
        order = ["stock", "ours"] if first == "stock" else ["ours", "stock"]
        results = [(name, *run(both[name])) for name in order * 2]
    for name, out, call, _ in results:
        assert call.strides == ((STRIDED if name == "ours" else DENSE),) * 3
        assert torch.equal(out, results[0][1])
    assert [removed(reports) for _, _, _, reports in results] == [
        [3] if name == "ours" else [] for name in order
    ] + [[], []]


# Threads


class Two(nn.Module):
    """Two attentions, for a report that is not mistaken for that of :class:`Layer`."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Layer(), Layer()

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x) + self.second(x)


@pytest.mark.parametrize("how", HOW)
def test_threads_do_not_mix(how: str) -> None:
    """Three threads compile at once, one of them stock; each hears of its own graphs alone."""
    torch._dynamo.reset()
    jobs = {
        "stock": (Layer(), {}),
        "one": (Layer(), HOW[how]()),
        "two": (Two(), HOW[how]()),
    }
    start = threading.Barrier(len(jobs))
    heard: dict[str, Any] = {}

    def job(name: str) -> None:
        model, options = jobs[name]
        with qkvpass.capture() as reports, torch.no_grad():
            start.wait()
            heard[name] = torch.compile(model, **options)(torch.ones(TOKENS, WIDTH)), reports

    # The settings of the main thread hold in a thread of torch 2.13 and later only if carried.
    threads = [
        threading.Thread(target=contextvars.copy_context().run, args=(job, name)) for name in jobs
    ]
    with standins.recorded("aware") as calls:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert {name: removed(reports) for name, (_, reports) in heard.items()} == {
        "stock": [],
        "one": [3],
        "two": [6],
    }
    assert sorted(call.strides for call in calls) == sorted([(DENSE,) * 3, *[(STRIDED,) * 3] * 3])
    assert torch.equal(heard["stock"][0], heard["one"][0])
