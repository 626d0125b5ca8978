"""What the pass saves, measured: eager, stock Inductor, qkvpass and a hand edit, in one process.

A GPU's clock drifts by a few per cent over minutes, so variants are timed in alternated rounds
and compared within a round. The JSON of :meth:`Result.to_json` is stable in the way that a
report's is; ``schema`` is raised when a field changes its meaning.
"""

from __future__ import annotations

import contextlib
import json
import math
import platform
import random
import statistics
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import torch

from . import bench_shapes as shapes
from .backend import backend
from .bench_kernels import kernels_between
from .bench_shapes import BenchError
from .compat import CountedBytes, uncached
from .graph_pass import listen
from .report import Report, human_bytes

SCHEMA = 1
EAGER, STOCK, OURS, HAND, EAGER_HAND = "eager", "stock", "qkvpass", "hand", "eager hand"
VARIANTS = (EAGER, STOCK, OURS, HAND, EAGER_HAND)
# Compared within each round, slower side first where the pass does its job.
PAIRS = ((STOCK, OURS), (OURS, HAND), (STOCK, HAND), (EAGER, OURS), (EAGER, EAGER_HAND))
_LEAST_ROUNDS = 3

Progress = Callable[[str, int, int], None]  # what is being done, steps done, steps in all


@dataclass(frozen=True)
class Subject:
    """What is measured.

    Args:
        name: as the user gave it.
        model, args, kwargs: what is called.
        twin: the same maths edited by hand, called alike; None if there is none.
        attention: a key of :data:`bench_shapes.ATTENTIONS` that is in force during the
            measurement; ``""`` leaves it to the model.
        layers: that the model has; 0 if unknown.
        facts: dims and the like, for the record.
    """

    name: str
    model: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    twin: Callable[..., Any] | None = None
    attention: str = ""
    layers: int = 0
    facts: dict[str, Any] = field(default_factory=dict)

    def using(self) -> contextlib.AbstractContextManager[Any]:
        chosen = shapes.ATTENTIONS.get(self.attention)
        return chosen.using() if chosen else contextlib.nullcontext()


@dataclass(frozen=True)
class Settings:
    """How it is measured.

    Args:
        rounds: alternated rounds; each times every variant once.
        sample_ms: how long one sample of a round lasts at least, by repeated calls.
        budget_s: no round is started past this many seconds of rounds, but for the first 3.
        variants: which of :data:`VARIANTS` to measure; ``stock`` and ``qkvpass`` always are.
        cuda_graphs: time a replayed CUDA graph of each variant.
        deterministic: set Inductor's ``deterministic`` while compiling.
        fresh_kernels: compile every kernel anew, so that compile times compare.

    Raises:
        ValueError: for fewer than 3 rounds, or an unknown variant.
    """

    rounds: int = 15
    sample_ms: float = 30.0
    budget_s: float = math.inf
    variants: tuple[str, ...] = VARIANTS
    cuda_graphs: bool = False
    deterministic: bool = False
    fresh_kernels: bool = True

    def __post_init__(self) -> None:
        if self.rounds < _LEAST_ROUNDS:
            raise ValueError(f"rounds is {self.rounds}; give {_LEAST_ROUNDS} or more")
        if unknown := set(self.variants) - set(VARIANTS):
            raise ValueError(f"{unknown.pop()!r} is no variant; give some of {VARIANTS}")


@dataclass(frozen=True)
class Ratio:
    """A ratio of two variants' times: median over rounds, with its 95 % bootstrap interval."""

    ratio: float
    low: float
    high: float


@dataclass(frozen=True)
class Measured:
    """One variant.

    Args:
        ms: milliseconds a call, one entry a round.
        median_ms, low_ms, high_ms: of these, with the quartiles.
        compile_s: seconds of the first call; 0 in eager.
        peak_mib: peak memory of a call above what was held before; None on a CPU.
        generated_bytes: what generated kernels read and write, by Inductor's own count,
            matmuls and attention left out; None in eager, and where it cannot count.
        kernels: what the profiler saw between projection and output
            (:func:`bench_kernels.kernels_between`).
    """

    ms: tuple[float, ...]
    median_ms: float
    low_ms: float
    high_ms: float
    compile_s: float
    peak_mib: float | None
    generated_bytes: int | None
    kernels: dict[str, Any]


@dataclass(frozen=True)
class Result:
    """One benchmark.

    Args:
        subject, attention, layers, facts: what was measured.
        where: device, torch and the like.
        settings: how.
        variants: by name.
        ratios: by ``"stock / qkvpass"`` and the like.
        same_bits: whether qkvpass gave the bits of another variant, in this process: without
            ``deterministic`` two compiles need not agree, whatever is compiled.
        difference: largest absolute difference from another variant.
        decisions: what the pass did: ``removed``, ``kept``, ``folded``, ``removed_bytes``,
            ``reasons`` (count by reason, one detail each), ``attention_ops``, ``seconds``.
        paper_bytes: traffic that can be saved, counted by hand; None if unknown.
        sentence: what came out, in words.
    """

    subject: str
    attention: str
    layers: int
    facts: dict[str, Any]
    where: dict[str, Any]
    settings: dict[str, Any]
    variants: dict[str, Measured]
    ratios: dict[str, Ratio]
    same_bits: dict[str, bool]
    difference: dict[str, float]
    decisions: dict[str, Any]
    paper_bytes: int | None = None
    sentence: str = ""
    schema: int = SCHEMA

    def to_json(self) -> str:
        """This result as JSON."""
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> Result:
        """The result that :meth:`to_json` wrote.

        Raises:
            ValueError: for another schema.
        """
        data = json.loads(text)
        if data.get("schema") != SCHEMA:
            raise ValueError(
                f"result has schema {data.get('schema')!r}, this qkvpass reads {SCHEMA}; "
                "measure again with this version"
            )
        known = {f.name: data[f.name] for f in fields(cls)}
        variants = {
            name: Measured(**{**one, "ms": tuple(one["ms"])})
            for name, one in known["variants"].items()
        }
        ratios = {name: Ratio(**one) for name, one in known["ratios"].items()}
        return cls(**{**known, "variants": variants, "ratios": ratios})


def named_subject(
    name: str,
    *,
    attention: str = "sdpa",
    layers: int | None = None,
    part: str = "encoder",
    batch: int | None = None,
    tokens: int | None = None,
    scale: float = 1.0,
    device: str = "cpu",
    dtype: torch.dtype = torch.bfloat16,
) -> tuple[Subject, int]:
    """A shape of :data:`bench_shapes.SHAPES` as a subject, and its copies' bytes on paper.

    Args:
        layers: by default 4; 0 for all that the encoder has.
        part: ``"encoder"``, or ``"attention"`` for the attention modules alone.
        batch: sequences (images, windows), by default the shape's.
        tokens: about how many in all, by more or fewer sequences.
        scale: below 1 for a dry run.

    Raises:
        BenchError: if it cannot be built as asked.
    """
    shape = shapes.SHAPES[name]
    if batch is not None:
        shape = shapes.replace(shape, sequences=batch)
    if tokens is not None:
        shape = shape.with_tokens(tokens)
    shape = shape.scaled(scale) if scale != 1 else shape
    depth = shape.layers if layers == 0 else min(shape.layers, 4 if layers is None else layers)
    model, twin, inputs = shapes.build(shape, attention, depth, part, device, dtype)
    facts = {**asdict(shape), "all layers": shape.layers, "part": part, "scale": scale}
    facts |= {"family": shapes.family_for(shape, attention), "layers": depth}
    facts |= {"dtype": str(dtype).removeprefix("torch."), "tokens": shape.sequences * shape.tokens}
    facts |= {"tokens a sequence": shape.tokens}
    subject = Subject(name, model, inputs, {}, twin, attention, depth, facts)
    return subject, shapes.paper_bytes(shape, attention, depth, dtype.itemsize)


def measure(
    subject: Subject,
    settings: Settings | None = None,
    *,
    paper_bytes: int | None = None,
    progress: Progress = lambda what, done, total: None,
) -> Result:
    """Compile, warm up, time, profile and compare the variants of ``subject``.

    Resets Dynamo, and compiles with caches off: they do not tell SDPA backends apart.

    Raises:
        BenchError: for CUDA graphs without CUDA.
    """
    settings = settings or Settings()
    device = _device_of(subject.args)
    if settings.cuda_graphs and device != "cuda":
        raise BenchError(f"CUDA graphs need inputs on a CUDA device; these are on {device}")
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(subject.using())
        stack.enter_context(warnings.catch_warnings())
        for said in ("dynamo_pgo force disabled", "Warning: Profiler clears events"):
            warnings.filterwarnings("ignore", message=said)
        stack.enter_context(
            uncached(fresh_kernels=settings.fresh_kernels, deterministic=settings.deterministic)
        )
        torch._dynamo.reset()
        runs, first = _compile(subject, settings, device, progress)
        calls = {name: (lambda run=run: _call(run, subject)) for name, run in runs.items()}
        outputs = {name: call() for name, call in calls.items()}
        same_bits, difference = _compare(outputs)
        outputs.clear()
        peaks = {name: _peak(call, device) for name, call in calls.items()}
        timed = {
            name: replayed(call) if settings.cuda_graphs else call for name, call in calls.items()
        }
        times = alternated(timed, settings, device, progress)
        known = {op["op"] for op in first.decisions["attention_ops"]}
        kernels = {}
        for done, (name, call) in enumerate(calls.items()):
            progress("profile", done, len(calls))
            kernels[name] = kernels_between(call, device, known, _itemsize(subject.args))
        progress("profile", len(calls), len(calls))
    variants = {
        name: _measured(times[name], first, peaks[name], kernels[name], name) for name in calls
    }
    result = Result(
        subject=subject.name,
        attention=subject.attention,
        layers=subject.layers,
        facts=subject.facts,
        where=where(device),
        settings=_plain(settings),
        variants=variants,
        ratios={
            f"{a} / {b}": ratio_of(times[a], times[b])
            for a, b in PAIRS
            if a in times and b in times
        },
        same_bits=same_bits,
        difference=difference,
        decisions=first.decisions,
        paper_bytes=paper_bytes,
    )
    return Result(**{**_shallow(result), "sentence": sentence(result)})


def _plain(settings: Settings) -> dict[str, Any]:
    """As JSON gives it back; it has no infinity and no tuple."""
    plain = {k: v for k, v in asdict(settings).items() if v != math.inf}
    return {**plain, "variants": list(settings.variants)}


def _shallow(result: Result) -> dict[str, Any]:
    return {f.name: getattr(result, f.name) for f in fields(result)}


def _device_of(args: Sequence[Any]) -> str:
    return next((a.device.type for a in args if isinstance(a, torch.Tensor)), "cpu")


def _itemsize(args: Sequence[Any]) -> int:
    floats = (a for a in args if isinstance(a, torch.Tensor) and a.is_floating_point())
    return next((a.itemsize for a in floats), 4)


def _call(run: Callable[..., Any], subject: Subject) -> Any:
    return run(*subject.args, **subject.kwargs)


@dataclass
class _First:
    """What the compiles told."""

    seconds: dict[str, float]
    nbytes: dict[str, int | None]
    decisions: dict[str, Any]


def _compile(
    subject: Subject, settings: Settings, device: str, progress: Progress
) -> tuple[dict[str, Callable[..., Any]], _First]:
    wanted = {*settings.variants, STOCK, OURS}
    if subject.twin is None:
        wanted -= {HAND, EAGER_HAND}
    runs: dict[str, Callable[..., Any]] = {
        EAGER: subject.model,
        STOCK: torch.compile(subject.model, dynamic=False),
        OURS: torch.compile(subject.model, backend=backend, dynamic=False),
    }
    if subject.twin is not None:
        runs[HAND] = torch.compile(subject.twin, dynamic=False)
        runs[EAGER_HAND] = subject.twin
    runs = {name: runs[name] for name in VARIANTS if name in wanted}
    # Imports, worker processes and the compiler's own start belong to no variant.
    torch.compile(lambda x: x.sin() + 1)(torch.ones(8, device=device))
    seconds: dict[str, float] = {}
    nbytes: dict[str, int | None] = {}
    reports: list[Report] = []
    for done, (name, run) in enumerate(runs.items()):
        progress(f"first call: {name}", done, len(runs))
        with listen(reports.append, text=False), CountedBytes() as counted:
            start = time.perf_counter()
            _call(run, subject)
            _wait(device)
            seconds[name] = time.perf_counter() - start
        nbytes[name] = counted.nbytes
    progress("first calls", len(runs), len(runs))
    return runs, _First(seconds, nbytes, _decisions(Report.merge(reports)))


def _decisions(report: Report) -> dict[str, Any]:
    reasons: dict[str, Any] = {}
    for copy in report.copies:
        entry = reasons.setdefault(copy.reason.value, {"count": 0, "detail": copy.detail})
        entry["count"] += 1
    ops = Counter((op.op, op.status) for op in report.attention_ops)
    return {
        "removed": len(report.removed),
        "kept": len(report.kept),
        "folded": len(report.folded),
        "removed_bytes": report.removed_bytes,
        "reasons": reasons,
        "attention_ops": [
            {"op": op, "status": status, "count": count} for (op, status), count in ops.items()
        ],
        "seconds": report.seconds,
        "fault": report.fault,
    }


def _compare(outputs: dict[str, Any]) -> tuple[dict[str, bool], dict[str, float]]:
    same, difference = {}, {}
    for name in (STOCK, HAND):
        if name not in outputs:
            continue
        pairs = list(zip(_tensors(outputs[OURS]), _tensors(outputs[name])))
        same[name] = all(torch.equal(a, b) for a, b in pairs)
        gaps = [(a.double() - b.double()).abs().max().item() for a, b in pairs if a.numel()]
        difference[name] = max(gaps, default=0.0)
    return same, difference


def _tensors(value: Any) -> list[torch.Tensor]:
    return [t for t in torch.utils._pytree.tree_leaves(value) if isinstance(t, torch.Tensor)]


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _peak(call: Callable[[], Any], device: str) -> float | None:
    if device != "cuda":
        return None
    _wait(device)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    _wait(device)
    return round((torch.cuda.max_memory_allocated() - before) / 2**20, 2)


def replayed(call: Callable[[], Any]) -> Callable[[], Any]:
    """A call that replays a CUDA graph of ``call``, and returns the graph's own output."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = call()

    def replay() -> Any:
        graph.replay()
        return output

    return replay


def alternated(
    calls: dict[str, Callable[[], Any]],
    settings: Settings,
    device: str,
    progress: Progress = lambda what, done, total: None,
) -> dict[str, list[float]]:
    """Milliseconds a call of each variant, one entry a round."""
    repeats = {}
    for name, call in calls.items():
        _sample(call, 1, device)
        once = max(_sample(call, 2, device), 1e-3)
        repeats[name] = max(1, min(500, math.ceil(settings.sample_ms / once)))
    times: dict[str, list[float]] = {name: [] for name in calls}
    start = time.perf_counter()
    for done in range(settings.rounds):
        if done >= _LEAST_ROUNDS and time.perf_counter() - start > settings.budget_s:
            break
        progress("rounds", done, settings.rounds)
        # Each variant follows each other one as often: order turned round every other time.
        names = list(calls)
        for name in names if done % 2 else reversed(names):
            times[name].append(_sample(calls[name], repeats[name], device))
    progress("rounds", settings.rounds, settings.rounds)
    return times


def _sample(call: Callable[[], Any], repeats: int, device: str) -> float:
    """Milliseconds a call."""
    if device != "cuda":
        start = time.perf_counter()
        for _ in range(repeats):
            call()
        return (time.perf_counter() - start) * 1e3 / repeats
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    for _ in range(repeats):
        call()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / repeats


def _measured(
    times: list[float], first: _First, peak: float | None, kernels: dict[str, Any], name: str
) -> Measured:
    low, median, high = statistics.quantiles(times, n=4)
    eager = name in (EAGER, EAGER_HAND)
    return Measured(
        ms=tuple(round(t, 5) for t in times),
        median_ms=round(median, 5),
        low_ms=round(low, 5),
        high_ms=round(high, 5),
        compile_s=0.0 if eager else round(first.seconds[name], 3),
        peak_mib=peak,
        generated_bytes=None if eager else first.nbytes[name],
        kernels=kernels,
    )


def ratio_of(one: Sequence[float], other: Sequence[float]) -> Ratio:
    """``one / other`` round by round: its median, and the 95 % bootstrap interval of that.

    >>> ratio_of([2.0, 2.0, 2.0], [1.0, 1.0, 1.0])
    Ratio(ratio=2.0, low=2.0, high=2.0)
    """
    ratios = [a / b for a, b in zip(one, other)]
    draw = random.Random(0)
    medians = sorted(
        statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(_RESAMPLES)
    )
    tail = round(_RESAMPLES * 0.025)
    found = (statistics.median(ratios), medians[tail], medians[-1 - tail])
    return Ratio(*(round(value, 5) for value in found))


_RESAMPLES = 2000


def where(device: str) -> dict[str, Any]:
    """What a measurement was made on."""
    cuda = device == "cuda"
    return {
        "device": torch.cuda.get_device_name() if cuda else _cpu_name(),
        "arch": "sm_{}{}".format(*torch.cuda.get_device_capability()) if cuda else "cpu",
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "cudnn": torch.backends.cudnn.version(),
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }


def _cpu_name() -> str:
    capability = torch.backends.cpu.get_cpu_capability()
    amx = getattr(torch.cpu, "_is_amx_tile_supported", lambda: False)()
    return f"CPU, {capability}{', AMX' if amx else ''}"


def saving_of(result: Result) -> tuple[float, float, float]:
    """(per cent saved over stock Inductor, lower and upper end of its interval)."""
    found = result.ratios[f"{STOCK} / {OURS}"]
    return tuple((1 - 1 / r) * 100 for r in (found.ratio, found.low, found.high))  # type: ignore[return-value]


def sentence(result: Result) -> str:
    """What came out, for somebody who reads nothing else."""
    stock = result.variants[STOCK].median_ms
    saved, low, high = saving_of(result)
    spread = f"{saved:.1f} % ± {(high - low) / 2:.1f}"
    if low > 0:
        facts = [f"saves {_ms(stock * saved / 100)} of {_ms(stock, unit=False)} ({spread})"]
        facts += [_a_layer(result)] if result.decisions["removed"] else []
        if not result.decisions["removed"]:
            facts.append("although no copy went: other compiles differ by as much")
        return ", ".join(fact for fact in facts if fact)
    if high < 0 and result.decisions["removed"]:
        return f"slower than stock by {_ms(-stock * saved / 100)} ({spread}): {why_not(result)}"
    return f"gains nothing that can be told from noise ({spread}): {why_not(result)}"


def _ms(value: float, unit: bool = True) -> str:
    if value < 0.1:
        return f"{value * 1e3:.1f} µs" if unit else f"{value:.4f} ms"
    return f"{value:.2f}" + (" ms" if unit else "") if value < 10 else f"{value:.1f}"


def _a_layer(result: Result) -> str:
    """The dense tensors that are not made any more: half of their traffic is their size."""
    nbytes = result.decisions["removed_bytes"]
    if not isinstance(nbytes, int) or not nbytes:
        return ""
    if not result.layers:
        return f"{human_bytes(nbytes)} of traffic"
    return f"{human_bytes(nbytes // 2 // result.layers)} of copies a layer"


def why_not(result: Result) -> str:
    """Why nothing was gained, from the pass's own decisions."""
    decisions = result.decisions
    if decisions["fault"]:
        return f"the pass left the graph as it was ({decisions['fault']})"
    if not decisions["attention_ops"]:
        return "no graph holds an attention op that the pass knows"
    kept = {r: e for r, e in decisions["reasons"].items() if not r.startswith("removed")}
    said = "; ".join(f"{e['count']} {r} ({e['detail']})" for r, e in kept.items())
    removed, folded = decisions["removed"], decisions["folded"]
    if not removed:
        if not kept:
            return "there was no copy in front of attention"
        return f"no copy was removed: {said}"
    if removed == folded:
        return f"Inductor would have fused all {removed} removed copies into their neighbours"
    nbytes, total = decisions["removed_bytes"], result.variants[STOCK].generated_bytes
    share = (
        f" ({nbytes / total:.0%} of what generated kernels move)"
        if isinstance(nbytes, int) and total
        else ""
    )
    real = f"{removed - folded} {'copy' if removed - folded == 1 else 'copies'}"
    return f"{real} went, {human_bytes(nbytes)} of traffic{share}, which does not show here"


@contextlib.contextmanager
def bar() -> Iterator[Progress]:
    """A progress bar on stderr; needs rich.

    Raises:
        ModuleNotFoundError: if rich is not installed.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bars

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Bars(*columns, TimeElapsedColumn(), console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task("", total=1)

        def progress(what: str, done: int, total: int) -> None:
            bars.update(task, description=what, completed=done, total=total)

        yield progress
