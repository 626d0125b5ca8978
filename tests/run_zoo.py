"""Run the pass over the zoo: ``python tests/run_zoo.py [--only WORD] [--resume] [--accept]``.

Each encoder runs in a process of its own, with a time limit. Ends with 1 on a wrong number, a
crash, a change to an encoder of a family with nothing to do, and where other copies went or
stayed than tests/zoo.json says. Else, or with ``--accept``, writes that file, and from it
docs/encoders.md.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import sys
import traceback
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields
from importlib import metadata
from pathlib import Path
from typing import Any, TypeAlias

import standins
import torch
import torch.utils._pytree as pytree
import zoo
from torch import Tensor
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config
from torch._inductor.compile_fx import compile_fx
from torch._inductor.pattern_matcher import stable_topological_sort
from torch.fx import Graph, GraphModule, Interpreter, Node

from qkvpass import Report, StridedQKVPass
from qkvpass.graph_pass import Options, listen
from qkvpass.match import attention_name, is_attention

TARGETS = ("inductor", "eager")
LIMIT = 600  # seconds for one encoder


# ---------------------------------------------------------------------------------------------
# One encoder through the pass


@dataclass
class Copies:
    """Copies of one encoder that ended alike.

    Args:
        operand: of the attention op that they reach, ``"behind"`` for those behind it.
        reason: how the decision ended.
        count: how many.
        folded: of them, how many Inductor fuses away whatever is done.
        detail: what decided the first of them.
    """

    operand: str
    reason: str
    count: int = 0
    folded: int = 0
    detail: str = ""

    @property
    def gone(self) -> bool:
        return self.reason.startswith("removed")


@dataclass
class Found:
    """What the pass did to one encoder. Plain data.

    Args:
        graphs: how many Dynamo made of it.
        attention: calls by op.
        copies: that reach attention or lie behind it, under the default target.
        others: how many copies reach no attention.
        eager: what goes under ``target="eager"``, by operand.
        touched: whether a graph changed, under the default target.
        received: distinct (op, layouts before, layouts after, count), a layout being shape,
            strides, and the number of the storage among the op's own operands.
        kernels: that stock Inductor generates, and that are left, for the rows of zoo.COMPILED.
        wrong: differences in outputs, strides or metas; there must be none.
    """

    graphs: int = 0
    attention: dict[str, int] = field(default_factory=dict)
    copies: list[Copies] = field(default_factory=list)
    others: int = 0
    eager: dict[str, int] = field(default_factory=dict)
    touched: bool = False
    received: list[Any] = field(default_factory=list)
    kernels: list[int] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    @property
    def gone(self) -> dict[str, int]:
        """Copies that went, by operand."""
        return _sums((c.operand, c.count) for c in self.copies if c.gone)

    @property
    def stays(self) -> dict[str, int]:
        """Copies that stayed, by operand and reason."""
        return _sums((f"{c.operand}: {c.reason}", c.count) for c in self.copies if not c.gone)

    def add(self, report: Report) -> None:
        self.graphs += 1
        for op in report.attention_ops:
            self.attention[op.op] = self.attention.get(op.op, 0) + 1
        for copy in report.copies:
            if not copy.operand and copy.reason == "no-attention-consumer":
                self.others += 1
                continue
            key = (copy.operand or "behind", str(copy.reason))
            same = [c for c in self.copies if (c.operand, c.reason) == key]
            entry = same[0] if same else Copies(*key, detail=copy.detail)
            self.copies += [] if same else [entry]
            entry.count += 1
            entry.folded += copy.folded

    @classmethod
    def load(cls, data: dict[str, Any]) -> Found:
        known = {f.name: data[f.name] for f in fields(cls) if f.name in data}
        return cls(**known | {"copies": [Copies(**c) for c in data["copies"]]})


def _sums(pairs: Iterable[tuple[str, int]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for key, count in pairs:
        total[key] += count
    return dict(total)


@dataclass
class Watched:
    """One run of a graph."""

    outputs: list[Any]
    received: list[tuple[str, Any]]  # attention ops in their order, and their layouts
    lies: set[str]  # nodes whose meta has another layout than they


def watch(gm: GraphModule, args: Sequence[Any]) -> Watched:
    received: list[tuple[str, Any]] = []
    lies: set[str] = set()

    class Watch(Interpreter):
        def run_node(self, n: Node) -> Any:
            if is_attention(n):
                given, _ = self.fetch_args_kwargs_from_env(n)
                received.append((attention_name(n).rpartition("::")[2], _layouts(given)))
            result = super().run_node(n)
            val = n.meta.get("val")
            if isinstance(result, Tensor) and isinstance(val, Tensor) and n.op != "placeholder":
                claimed = (*val.shape, *val.stride())
                known = all(isinstance(c, int) for c in claimed)
                if known and claimed != (*result.shape, *result.stride()):
                    lies.add(n.name)
            return result

    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # a model that masks at random masks alike
        outputs = Watch(gm).run(*[x.clone() if isinstance(x, Tensor) else x for x in args])
    return Watched(pytree.tree_leaves(outputs), received, lies)


def _layouts(operands: Sequence[Any]) -> list[Any]:
    tensors = [t for t in operands[:3] if isinstance(t, Tensor)]
    storages = [t.untyped_storage().data_ptr() for t in tensors]
    return [[list(t.shape), list(t.stride()), storages.index(s)] for t, s in zip(tensors, storages)]


def twins(found: Found) -> Callable[..., Any]:
    """A backend that runs each graph both as it came and as the pass left it, and compares."""
    arrived: list[GraphModule] = []

    def keep(graph: Graph) -> None:
        stable_topological_sort(graph)
        arrived.append(standins.clone(graph.owning_module))

    def compile_both(gm: GraphModule, example_inputs: Sequence[Any], **_: Any) -> Any:
        before = arrived.pop()
        after, reports = zip(*(_rewritten(before, target) for target in TARGETS))
        found.add(reports[0])
        found.eager = _sums([*found.eager.items(), *_gone(reports[1]).items()])
        found.touched |= str(before.graph) != str(after[0].graph)

        def run(args: list[Any]) -> Any:
            inputs = list(args)
            args.clear()
            stock = watch(before, inputs)
            for target, gm in zip(TARGETS, after):
                ours = watch(gm, inputs)
                found.wrong += [f"{target}: {text}" for text in _differences(ours, stock)]
                if target == "inductor":
                    _note(found, stock, ours)
            return stock.outputs

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    def backend(gm: GraphModule, example_inputs: Sequence[Any]) -> Any:
        patches = {"joint_custom_post_pass": keep, "force_disable_caches": True}
        return compile_fx(gm, example_inputs, inner_compile=compile_both, config_patches=patches)

    return backend


def _rewritten(before: GraphModule, target: str) -> tuple[GraphModule, Report]:
    after = standins.clone(before)
    reports: list[Report] = []
    with listen(reports.append, text=False):
        StridedQKVPass(Options(target=target))(after.graph)
    after.graph.lint()
    after.recompile()
    return after, reports[0]


def _gone(report: Report) -> dict[str, int]:
    return _sums((copy.operand or "behind", 1) for copy in report.removed)


def _differences(ours: Watched, stock: Watched) -> list[str]:
    found = [f"{name} has another layout than its meta" for name in ours.lies - stock.lies]
    try:
        standins.assert_same(ours.outputs, stock.outputs)
    except AssertionError as error:
        found.append(str(error))
    return found


def _note(found: Found, stock: Watched, ours: Watched) -> None:
    # By position: an op that a rewrite gave other dims is another node.
    for (name, before), (_, after) in zip(stock.received, ours.received):
        seen = [name, before, after]
        same = [r for r in found.received if r[:3] == seen]
        if same:
            same[0][3] += 1
        else:
            found.received.append([*seen, 1])


def examine(row: zoo.Row, seed: int = 0) -> Found:
    """Trace an encoder, and run it twice as it came and as the pass leaves it."""
    found = Found()
    torch.manual_seed(seed)
    model, inputs = zoo.build(row)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=twins(found), dynamic=False)
    with torch.no_grad(), zoo.attention_of(row, model):
        for _ in range(2):
            compiled(**inputs())
    return found


def compile_too(row: zoo.Row, found: Found) -> None:
    """Put an encoder through all of Inductor, with the pass and without."""
    model, inputs = zoo.build(row)
    names = list(inputs())

    def call(*args: Any) -> Any:
        return model(**dict(zip(names, args)))

    with (
        inductor_config.patch(deterministic=True, fx_graph_cache=False),
        functorch_config.patch(enable_autograd_cache=False),
        zoo.attention_of(row, model),
    ):
        try:
            stock, ours = standins.compile_pair(call, *inputs().values())
        except AssertionError as error:
            found.wrong.append(f"compiled: {error}")
        else:
            found.kernels = [stock.kernels, ours.kernels]


# ---------------------------------------------------------------------------------------------
# All of them, each in a process of its own


def _child(row: zoo.Row, pipe: Any) -> None:
    warnings.filterwarnings("ignore")
    gc.disable()  # the process is short-lived
    os.environ["QKVPASS_STRICT"] = "1"
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115, for as long as the process lives
    try:
        found = examine(row)
        if row.key in zoo.COMPILED:
            compile_too(row, found)
        pipe.send(("ran", asdict(found)))
    except zoo.NotBuilt as error:
        pipe.send(("not built", str(error)))
    except BaseException as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{Path(last.filename).name}:{last.lineno}"
        pipe.send(("crash", f"{type(error).__name__} at {place}: {str(error)[:500]}"))


def in_own_process(row: zoo.Row) -> tuple[str, Any]:
    """("ran", what was found), or ("not built" or "crash", why)."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(row, theirs))
    process.start()
    theirs.close()
    try:
        if not ours.poll(LIMIT):
            return "crash", f"not done within {LIMIT} s"
        return ours.recv()
    except EOFError:
        return "crash", "the process died"
    finally:
        process.kill()
        process.join()


def warm_up() -> None:
    """Import and initialise here what each process would otherwise have to."""
    import timm  # noqa: F401
    import transformers.masking_utils
    import transformers.modeling_utils

    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)

    def attention(q: Tensor) -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, q, q)

    with torch.no_grad():
        torch.compile(attention, backend=twins(Found()))(torch.randn(2, 4, 8, 8))


# ---------------------------------------------------------------------------------------------
# What must hold


def faults(row: zoo.Row, state: str, found: Found | None) -> list[str]:
    """What is wrong with a result, whatever the pass is expected to gain."""
    if found is None:
        return [state] if state == "crash" else []
    bad = list(found.wrong)
    if row.family in zoo.UNTOUCHED:
        bad += ["the graph was changed"] if found.touched else []
        bad += ["copies would go under target eager"] if found.eager else []
    if found.touched != bool(found.gone):
        bad.append("the graph was changed without a removal, or not changed with one")
    if found.gone and not any(before != after for _, before, after, _ in found.received):
        bad.append("every kernel received what it received before, yet copies were removed")
    if found.kernels and found.kernels[1] > found.kernels[0]:
        bad.append(f"{found.kernels[1]} kernels instead of {found.kernels[0]}")
    bad += [f"{c.operand}: {c.reason} without a detail" for c in found.copies if not c.detail]
    return bad


def outcome(state: str, found: Found | None) -> Any:
    """What is expected to be the same the next time: the part of a result to compare."""
    return [state, found.gone, found.stays] if found is not None else [state]


# ---------------------------------------------------------------------------------------------
# Results on disk, one encoder a line

Results: TypeAlias = dict[str, tuple[str, Any]]


def load(path: Path) -> Results:
    if not path.exists():
        return {}
    return {key: (state, data) for key, (state, data) in json.loads(path.read_text()).items()}


def save(path: Path, results: Results) -> None:
    path.parent.mkdir(exist_ok=True, parents=True)
    lines = (f"{json.dumps(key)}: {json.dumps(results[key])}" for key in sorted(results))
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def found_in(result: tuple[str, Any]) -> Found | None:
    state, data = result
    return Found.load(data) if state == "ran" else None


# ---------------------------------------------------------------------------------------------
# docs/encoders.md

INTRO = """# Encoders

What the pass does to {total} vision encoders, each the real class of its library ({versions})
with a small random configuration. Made by `make zoo`; do not edit.

Each encoder is traced as Inductor traces it, on a CPU, through SDPA or, where images of several
sizes are packed into one sequence, through a varlen stand-in ("varlen"). Every graph runs as it
came and as the pass left it, for `target="inductor"` and for `"eager"`, on two sets of data:
outputs agree in every bit and stride, and every node has the layout that its meta claims. In the
families F0 and F0r (views straight to the op, with or without rope) no graph may change at all.

"Copies" are those that reach q, k or v of an attention op, and those behind it that go with
them. What is written in another way, such as a `cat` in (B, H, S, D) order, counts as well:
`not-a-layout-copy`. "Folded" copies are gone, but Inductor had fused them into a kernel
that runs anyway. Bytes are those of the removed, unfolded copies in bf16, read and written, in
one forward of the published configuration.
"""


def render(results: Results, versions: str) -> str:
    rows = [row for row in zoo.ROWS if row.key in results]
    parts = [INTRO.format(total=len(rows), versions=versions), _families(rows, results)]
    for library in dict.fromkeys(row.library for row in rows):
        parts.append(f"## {library}\n\n" + _encoders(rows, results, library))
    parts += [
        _received(rows, results),
        _kernels(rows, results),
        _reasons(rows, results),
        _not_built(rows, results),
    ]
    return "\n".join(part for part in parts if part)


def _table(head: Sequence[str], lines: Iterable[Sequence[Any]]) -> str:
    rows = [head, ["---"] * len(head), *lines]
    return "".join(f"| {' | '.join(str(cell) for cell in row)} |\n" for row in rows)


def _families(rows: Sequence[zoo.Row], results: Results) -> str:
    groups: dict[str, list[Found]] = defaultdict(list)
    for row in rows:
        if (found := found_in(results[row.key])) is not None:
            groups[row.family].append(found)
    order = sorted(groups, key=lambda name: (int(name[1:].rstrip("r")), name))
    lines = [
        [
            family,
            zoo.FAMILIES[family],
            len(groups[family]),
            sum(c.count for f in groups[family] for c in f.copies),
            sum(c.count for f in groups[family] for c in f.copies if not c.gone),
            sum(not f.touched for f in groups[family]),
        ]
        for family in order
    ]
    head = ["family", "what", "encoders", "copies before", "after", "graphs unchanged"]
    return "## Families\n\n" + _table(head, lines)


def _encoders(rows: Sequence[zoo.Row], results: Results, library: str) -> str:
    lines = []
    for row in rows:
        found = found_in(results[row.key])
        if row.library != library or found is None:
            continue
        before = sum(c.count for c in found.copies)
        name = f"{row.name} (varlen)" if row.flash else row.name
        after = sum(c.count for c in found.copies if not c.gone)
        lines.append([name, row.family, before, after, _saved(row, found), _stays(found)])
    return _table(["encoder", "family", "before", "after", "saved", "what stays"], lines)


def _saved(row: zoo.Row, found: Found) -> str:
    if not found.gone:
        return ""
    folded = " (folded)" if all(c.folded == c.count for c in found.copies if c.gone) else ""
    published = zoo.PUBLISHED.get(row.key)
    if published is None:
        return f"{sum(found.gone.values())} copies{folded}"
    return f"{saved_bytes(published, found) / 2**30:.2f} GiB, {published.name}"


def saved_bytes(published: zoo.Published, found: Found) -> int:
    """Bytes read and written for the copies that go, in one forward in bf16.

    An operand's copy that went most often went once a layer.
    """
    most = max(found.gone.values())
    operands = sum(
        len(c.operand.split(", ")) * (c.count - c.folded) / most for c in found.copies if c.gone
    )
    return int(2 * 2 * operands * published.elements * published.layers)


def _stays(found: Found) -> str:
    if not found.attention and not found.stays:
        return "no attention op in its graphs"
    return "; ".join(f"{count}x {what}" for what, count in found.stays.items())


def _received(rows: Sequence[zoo.Row], results: Results) -> str:
    lines = []
    for row in rows:
        found = found_in(results[row.key])
        for op, before, after, _ in found.received if found is not None else ():
            if before != after:
                lines.append([row.name, op, _layout(before), _layout(after)])
                break
    if not lines:
        return ""
    text = "What q, k and v were when the op ran: shape, then the strides of each.\n\n"
    head = ["encoder", "op", "before", "after"]
    return "## Strides received\n\n" + text + _table(head, lines)


def _layout(operands: Sequence[Any]) -> str:
    shape, strides = operands[0][0], [tuple(stride) for _, stride, _ in operands]
    one = len({storage for *_, storage in operands}) == 1
    shown = strides[:1] if len(set(strides)) == 1 else strides
    return f"{tuple(shape)}: {', '.join(map(str, shown))}{', one storage' if one else ''}"


def _kernels(rows: Sequence[zoo.Row], results: Results) -> str:
    found = [(row, found_in(results[row.key])) for row in rows]
    lines = [[row.name, row.family, *f.kernels] for row, f in found if f is not None and f.kernels]
    text = "Kernels that Inductor generates for a CPU, GEMMs and attention aside.\n\n"
    head = ["encoder", "family", "stock", "with qkvpass"]
    return "## Through all of Inductor\n\n" + text + _table(head, lines) if lines else ""


def _reasons(rows: Sequence[zoo.Row], results: Results) -> str:
    examples: dict[str, str] = {}
    for row in rows:
        found = found_in(results[row.key])
        for c in found.copies if found is not None else ():
            if not c.gone:
                examples.setdefault(c.reason, f"{row.name}, {c.operand}: {c.detail}")
    lines = [f"- `{reason}`: {examples[reason]}" for reason in sorted(examples)]
    return "## Why copies stay, by example\n\n" + "\n".join(lines) + "\n" if lines else ""


def _not_built(rows: Sequence[zoo.Row], results: Results) -> str:
    missing = [(row, results[row.key][1]) for row in rows if results[row.key][0] != "ran"]
    if not missing:
        return ""
    lines = [f"- {row.key}: {why}" for row, why in missing]
    return "## Not built here\n\n" + "\n".join(lines) + "\n"


# ---------------------------------------------------------------------------------------------
# The command


def _versions() -> str:
    names = ("torch", "transformers", "timm", "torchvision", "open_clip_torch", "diffusers")
    found = []
    for name in names:
        try:
            found.append(f"{name} {metadata.version(name).split('+')[0]}")
        except metadata.PackageNotFoundError:
            continue
    return ", ".join(found)


def _work(tasks: Any, done: Any) -> None:
    rows = {row.key: row for row in zoo.ROWS}
    warm_up()
    while (key := tasks.get()) is not None:
        done.put((key, in_own_process(rows[key])))


def run_all(rows: Sequence[zoo.Row], jobs: int, results: Results) -> None:
    """Fill ``results``, showing progress. Workers have one thread, so that they can fork."""
    from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn

    context = multiprocessing.get_context("spawn")
    tasks, done = context.SimpleQueue(), context.SimpleQueue()
    workers = [context.Process(target=_work, args=(tasks, done)) for _ in range(jobs)]
    for worker in workers:
        worker.start()
    for key in [row.key for row in rows] + [None] * jobs:
        tasks.put(key)
    columns = (*Progress.get_default_columns(), MofNCompleteColumn(), TimeElapsedColumn())
    known = {row.key: row for row in rows}
    with Progress(*columns) as progress:
        for _ in progress.track(rows, description="encoders"):
            key, (state, data) = done.get()
            results[key] = state, data
            save(zoo.RESULTS, results)
            for fault in faults(known[key], state, found_in((state, data))):
                progress.console.print(key, fault, data if state == "crash" else "")
    for worker in workers:
        worker.join()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="rows whose key has this in it")
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time")
    parser.add_argument("--resume", action="store_true", help="only rows without a result yet")
    parser.add_argument("--page", action="store_true", help="only make the page anew")
    parser.add_argument("--accept", action="store_true", help="new counts are what is expected")
    args = parser.parse_args()

    if args.page:
        zoo.PAGE.write_text(render(load(zoo.EXPECTED), _versions()))
        return 0
    accepted, results = load(zoo.EXPECTED), load(zoo.RESULTS) if args.resume else {}
    results = {key: result for key, result in results.items() if result[0] != "crash"}
    rows = [row for row in zoo.ROWS if args.only in row.key and row.key not in results]
    warm_up()
    run_all(rows, args.jobs, results)
    save(zoo.RESULTS, results)

    bad = False
    for row in zoo.ROWS:
        if row.key not in results:
            continue
        state, data = results[row.key]
        found = found_in((state, data))
        for fault in faults(row, state, found):
            bad = True
            print(f"{row.key}: {fault}{': ' + data if found is None else ''}")
        was = accepted.get(row.key)
        if was is not None and outcome(was[0], found_in(was)) != outcome(state, found):
            print(f"{row.key}: was {outcome(was[0], found_in(was))}, is {outcome(state, found)}")
            bad |= not args.accept
    if bad:
        return 1
    merged = {row.key: r for row in zoo.ROWS if (r := results.get(row.key, accepted.get(row.key)))}
    save(zoo.EXPECTED, merged)
    zoo.PAGE.write_text(render(merged, _versions()))
    print(f"{len(results)} encoders; {zoo.PAGE.name} and {zoo.EXPECTED.name} are written")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
