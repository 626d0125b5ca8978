"""The contract tester: does an op read its operands by explicit stride, and which layouts?

Every case calls the op on dense inputs and on the same values laid out otherwise, twice with
fresh data, and compares bits. A layout that the op rejects is no wrong number: it narrows the
contract, as does a difference below 16-byte alignment. Any other silent difference fails.
"""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import itertools
import os
import platform
import re
import signal
import time
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from . import questions, tags
from .certificate import Certificate, Verdict, Verdicts, passes
from .evidence import arch_of, library_of, library_version, plain_name, schema_hash
from .known_inputs import Build, import_library, known_inputs, takes_mask
from .layout import StrideContract
from .operands import ARRANGEMENTS, THD
from .questions import failed, not_tried, passed
from .trial import (
    Case,
    Result,
    Status,
    Subject,
    difference,
    first_line,
    names_of,
    prepare,
    run,
)

HEAD_DIMS = (40, 64, 72, 80, 96, 128, 256)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
INT32_LIMIT = 2**31
NATURAL = 16  # bytes; a difference in layouts aligned to this is a wrong number, whatever else
ALIGNMENTS = (1, 2, 4, 8, 16, 32, 64, 128)
DANGEROUS = ("empty", "far", "misaligned")
_AWAY = 257  # rows over which an operand reaches beyond the int32 range: several tiles


class CannotCertify(Exception):
    """An op that no test can be made of; the message says why, and what to give."""


def certify(
    op: tags.OpName,
    *,
    operands: Sequence[str] | None = None,
    inputs: Build | None = None,
    device: torch.device | str | None = None,
    dtypes: Sequence[torch.dtype] | None = None,
    head_dims: Sequence[int] = HEAD_DIMS,
    orders: Sequence[str] | None = None,
    max_offset: int | None = None,
    offset_limit: int = INT32_LIMIT,
    skip: Collection[str] = (),
    library: str | None = None,
) -> Certificate:
    """Test what layouts of its operands an op reads rightly.

    Args:
        op: name, OpOverload, or ``torch.library.custom_op``.
        operands: schema arguments to give strided: q, k, v in this order, then others shaped
            as q. By default those of the op's stride tag, else by name.
        inputs: for an op with unusual arguments: builds (args, kwargs) from a
            :class:`~qkvpass.known_inputs.Spec`. The default goes by the schema.
        device: by default CUDA where there is any.
        dtypes: by default fp32, bf16 and fp16; what dense inputs are rejected in is left out.
        head_dims: head sizes in elements, likewise.
        orders: ``"THD"``, ``"BSHD"``, ``"BHSD"``; by default those the op is known to take,
            or all, likewise.
        max_offset: largest offset in elements that the op claims to read. Offsets are tried
            up to there, and the contract says so.
        offset_limit: offset in elements beyond which int32 arithmetic is found out.
        skip: of :data:`DANGEROUS`, what not to try. These come last, since a kernel that
            faults takes the process's CUDA context with it, if not the process.
        library: what the kernel comes from: names of distributions, joined by ``+``. By
            default found from the op.

    Returns:
        The certificate. Where it passed, its contract can be registered as it is:
        ``register_stride_tag(op, operands=cert.operands, contract=cert.contract)``.

    Raises:
        CannotCertify: if the op is unknown, its arguments cannot be built, or no dense call
            works on this device.
        ValueError: if ``skip`` names something else.
    """
    if unknown := sorted(set(skip) - set(DANGEROUS)):
        raise ValueError(f"skip has {unknown[0]!r}; give some of {', '.join(DANGEROUS)}")
    subject = _subject(op, operands, inputs, device)
    claim = max_offset if max_offset is not None else subject.known.max_offset
    if claim is not None:
        claim = min(claim, offset_limit - 1)
    session = _Session(subject, offset_limit, claim, frozenset(skip))
    known = subject.known
    session.support(
        itertools.product(orders or known.orders, dtypes or known.dtypes or DTYPES, head_dims)
    )
    library = library or library_of(subject.op)
    # Asked now: a device that has died answers nothing.
    version = library_version(library)
    name, arch = _device_name(subject.device), arch_of(subject.device)
    session.ask()
    verdicts, contract = session.verdicts()
    return Certificate(
        op=plain_name(subject.op),
        operands=subject.operands,
        schema_hash=schema_hash(subject.op),
        library=library,
        library_version=version or "",
        torch_version=torch.__version__,
        device=name,
        arch=arch or subject.device.type,
        dtypes=tuple(str(d).removeprefix("torch.") for d in session.dtypes),
        head_dims=tuple(sorted({d for _, _, d in session.supported})),
        orders=session.orders,
        shapes=tuple(dict.fromkeys(r.case.sizes for r in session.results)),
        calls=sum(r.calls for r in session.results),
        verdicts=verdicts,
        contract=contract,
        date=datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
    )


def resolve(op: tags.OpName) -> torch._ops.OpOverload:
    """The op behind a name, a packet or a ``custom_op``; its library is imported if known.

    Raises:
        CannotCertify: if there is none.
    """
    if isinstance(op, torch._ops.OpOverload):
        return op
    name = tags.op_name(op)
    namespace, _, rest = name.partition("::")
    packet_name, _, overload = rest.partition(".")
    import_library(namespace)
    packet = getattr(getattr(torch.ops, namespace), packet_name, None)
    if packet is None:
        raise CannotCertify(f"{name} is not registered; import what registers it first")
    names = packet.overloads()
    if overload and overload not in names:
        raise CannotCertify(f"{name}: there is no such overload; there are {', '.join(names)}")
    return getattr(packet, overload or ("default" if "default" in names else names[0]))


def _subject(
    op: tags.OpName,
    operands: Sequence[str] | None,
    inputs: Build | None,
    device: torch.device | str | None,
) -> Subject:
    target = resolve(op)
    name = plain_name(target)
    tag = tags.lookup(target)
    known = known_inputs(name)
    given = operands or (tag.operands if tag is not None else tags.qkv_arguments(target))
    if not given:
        raise CannotCertify(f"{name} has no arguments named like q, k, v; give operands=")
    names = names_of(target)
    if missing := [operand for operand in given if operand not in names]:
        raise CannotCertify(f"{name} has no argument {missing[0]!r}; it has {', '.join(names)}")
    forward = known.forward if inputs is None else None
    return Subject(
        target,
        tuple(given),
        torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu")),
        known,
        forward=resolve(forward) if forward else None,
        build=inputs,
        # Backwards add with atomics: equal bits on small inputs say nothing of large ones.
        deterministic=forward is not None,
    )


@dataclass
class _Session:
    """Cases and their results, from the harmless ones to those that may kill the device."""

    subject: Subject
    offset_limit: int
    claim: int | None
    skip: frozenset[str]
    supported: list[tuple[str, torch.dtype, int]] = field(default_factory=list)
    results: list[Result] = field(default_factory=list)
    offsets: list[Result] = field(default_factory=list)
    noise: str = ""
    dies: str = ""
    answers: dict[str, Verdict] = field(default_factory=dict)

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        return tuple(dict.fromkeys(d for _, d, _ in self.supported))

    @property
    def orders(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(o for o, _, _ in self.supported))

    def head_dim(self, order: str, dtype: torch.dtype) -> int:
        """The head size at which everything but head sizes is tried."""
        sizes = [d for o, t, d in self.supported if (o, t) == (order, dtype)]
        return 64 if 64 in sizes else sizes[0]

    def pairs(self) -> list[tuple[str, torch.dtype]]:
        return list(dict.fromkeys((o, t) for o, t, _ in self.supported))

    def support(self, wanted: Iterable[tuple[str, torch.dtype, int]]) -> None:
        """Find what dense calls work, and whether two of them give the same bits.

        Raises:
            CannotCertify: if none works.
        """
        why = ""
        for order, dtype, head_dim in wanted:
            try:
                self._repeat(Case(order, dtype, head_dim, "dense", lengths=_usual(order)))
            except Exception as error:
                why = first_line(error)
                if self.subject.lost(error):
                    break
                continue
            self.supported.append((order, dtype, head_dim))
        if not self.supported:
            name = plain_name(self.subject.op)
            raise CannotCertify(f"no dense call of {name} works on {self.subject.device}: {why}")

    def _repeat(self, case: Case) -> None:
        """Two calls on the same dense inputs, by deterministic algorithms where they must be."""
        noise = self._noise(case)
        if noise and not self.subject.deterministic:
            self.subject.deterministic = True
            try:
                noise = self._noise(case)
            except RuntimeError:  # it has none
                self.subject.deterministic = False
        self.noise = noise or self.noise

    def _noise(self, case: Case) -> str:
        """The difference between two calls on the same dense inputs; "" for none."""
        subject = self.subject
        pair = prepare(subject, case, seed=2)
        assert pair is not None
        one, other = subject.call(pair[0]), subject.call(pair[0])
        shapes = {t.shape for t in pair[0].operands.values()}
        differ = [i for i in range(len(one)) if difference(one[i : i + 1], other[i : i + 1])]
        # A statistic with memory that nobody wrote says nothing.
        subject.loose |= {i for i in differ if one[i].shape not in shapes}
        found = difference(one, other, subject.loose)
        return f"{case}: {found}" if found else ""

    def ask(self) -> None:
        """Put every question, the dangerous ones last."""
        self.results += self._run(self._cases())
        few = list(self._few_cases())
        self.answers["no_hidden_copy"] = self._answer(questions.hidden_copy, self._long_cases())
        self.answers["fake_layout"] = self._answer(questions.fake_layout, few)
        self.answers["backward"] = self._answer(questions.backward, [*few, *self._sized_cases()])
        self.answers["opcheck"] = self._answer(questions.opcheck, few)
        if "empty" not in self.skip:
            self.results += self._run(self._empty_cases())
        if "far" not in self.skip:
            self.offsets += self._run(self._offset_cases())
        self.results += self._run(self._misaligned_cases())

    def _answer(
        self, question: Callable[[Subject, Sequence[Case]], Verdict], cases: Iterable[Case]
    ) -> Verdict:
        if self.subject.dead:
            return not_tried(f"the device died before: {self.subject.dead}")
        called = {r.case for r in self.results if r.status in (Status.SAME, Status.DIFFERENT)}
        return question(self.subject, [case for case in cases if case in called])

    def _run(self, cases: Iterable[Case]) -> list[Result]:
        found = (run(self.subject, case) for case in cases)
        return [r for r in found if r is not None and r.status is not Status.UNSUPPORTED]

    def _sized_cases(self) -> Iterator[Case]:
        for order, dtype, head_dim in self.supported:
            yield Case(order, dtype, head_dim, lengths=_usual(order))

    def _few_cases(self) -> Iterator[Case]:
        """Every layout at one head size, the packed one first."""
        for order, dtype in self.pairs():
            case = Case(order, dtype, self.head_dim(order, dtype), lengths=_usual(order))
            for layout in self._layouts():
                yield replace(case, layout=layout)
            yield replace(case, heads=4, kv_heads=2)

    def _long_cases(self) -> list[Case]:
        return [
            Case(order, dtype, self.head_dim(order, dtype), layout, lengths=(257,))
            for order, dtype in self.pairs()
            for layout in ("packed", "rows")
        ]

    def _layouts(self) -> Iterator[str]:
        yield from ARRANGEMENTS
        yield from (f"only {name}" for name in self.subject.operands)

    def _cases(self) -> Iterator[Case]:
        for case in self._sized_cases():
            for layout in self._layouts():
                yield replace(case, layout=layout)
        for order, dtype in self.pairs():
            case = Case(order, dtype, self.head_dim(order, dtype), lengths=_usual(order))
            yield from _other_sizes(case)
            if takes_mask(self.subject.op) or self.subject.build is not None:
                for layout in ("packed", "rows", "head-major"):
                    yield replace(case, layout=layout, lengths=(40, 40), mask=True)

    def _empty_cases(self) -> Iterator[Case]:
        for order, dtype in self.pairs():
            case = Case(order, dtype, self.head_dim(order, dtype))
            for lengths in ((), (0, 7) if order == THD else (0, 0)):
                dense = replace(case, layout="dense", lengths=lengths)
                if self.subject.device.type == "cpu" and not _survives(self.subject, dense):
                    self.dies = f"dies on dense empty inputs ({dense.sizes})"
                    continue
                yield replace(case, layout="packed", lengths=lengths)
                yield replace(case, layout="rows", lengths=lengths)

    def _misaligned_cases(self) -> Iterator[Case]:
        smallest = NATURAL if "misaligned" in self.skip else 1
        for unit in (64, 32, 16, 8, 4, 2, 1):
            for order, dtype in self.pairs():
                if unit < max(dtype.itemsize, smallest):
                    continue
                case = Case(order, dtype, self.head_dim(order, dtype), lengths=_usual(order))
                for part in ("base", "token stride", "head stride"):
                    yield replace(case, layout=f"{part} aligned to {unit} bytes")
                # A head size may be the reason, and then the gaps cannot help it.
                for odd in (3, 5, 7):
                    yield replace(case, head_dim=odd * unit // dtype.itemsize)

    def _offset_cases(self) -> Iterator[Case]:
        limit = self.offset_limit if self.claim is None else self.claim
        for order in self.orders:
            # A claim may hold in bytes, and then for the widest elements least of all.
            narrowest = min if self.claim is None else max
            dtypes = (d for o, d, _ in self.supported if o == order)
            dtype = narrowest(dtypes, key=lambda d: d.itemsize)
            case = Case(
                order, dtype, self.head_dim(order, dtype), heads=1, kv_heads=1, rounds=1,
                limit=limit, beyond=self.claim is None,
            )  # fmt: skip
            if not _enough_memory(self.subject.device, 2 * limit * dtype.itemsize):
                continue
            for group in self._groups():
                names = "+".join(group)
                lengths = (_AWAY - 100, 100) if order == THD else (_AWAY,)
                yield replace(case, layout=f"far tokens {names}", lengths=lengths)
                if order != THD:
                    yield replace(case, layout=f"far batch {names}", lengths=(17, 17, 17))

    def _groups(self) -> list[tuple[str, ...]]:
        """The operands, those together that must share a layout."""
        contract = _widest(self.subject, self.results)
        together = contract.together if contract is not None else ()
        alone = [n for n in self.subject.operands if all(n not in group for group in together)]
        return [*((n,) for n in alone), *together]

    def verdicts(self) -> tuple[Verdicts, StrideContract | None]:
        """The answers, and the contract that they amount to."""
        subject, results = self.subject, self.results
        if self.noise:  # bits mean nothing then
            verdicts = Verdicts(
                deterministic=failed(f"two calls on the same dense inputs: {self.noise}"),
                bit_identical=not_tried(_within(results)),
                inputs_untouched=_untouched(subject, results),
                **self.answers,
            )
            return verdicts, None
        contract = _widest(subject, results, NATURAL if "misaligned" in self.skip else 1)
        alignment = _alignment(results, contract)
        if contract is not None:
            wanted = subject.known.alignment
            if wanted is not None and (contract.alignment or 1) < wanted:
                alignment = passed(f"{alignment.detail} here; {wanted} asked for")
                contract = replace(contract, alignment=wanted)
        offset_range, max_offset = self._offset_range()
        how = "under torch.use_deterministic_algorithms" if subject.deterministic else ""
        verdicts = Verdicts(
            deterministic=passed(how),
            bit_identical=_bit_identical(results),
            mixed_layouts=_mixed(results, contract),
            storage_offset=_storage_offset(results),
            alignment=alignment,
            accepts=_accepts(results, contract, self.dies),
            inputs_untouched=_untouched(subject, [*results, *self.offsets]),
            offset_range=offset_range,
            **self.answers,
        )
        if contract is None or not passes(verdicts):
            return verdicts, None
        output = "fake" if verdicts.fake_layout else None
        return verdicts, replace(contract, max_offset=max_offset, output=output)

    def _offset_range(self) -> tuple[Verdict, int | None]:
        """The verdict on far offsets, and the bound that it leaves."""
        within = self.offset_limit - 1 if self.claim is None else self.claim
        for result in self.offsets:
            if result.status in (Status.DIFFERENT, Status.FAULT):
                hint = "" if self.claim is not None else f"; max_offset={within} may hold"
                return failed(f"{result.case.layout}: {result.detail}{hint}"), within
        if not self.offsets:
            return not_tried(f"there is no memory for offsets of {within + 1}"), within
        if rejected := _first(self.offsets, Status.REJECTED):
            return passed(f"beyond {within} it raises: {rejected.detail}"), within
        if self.claim is not None:
            return passed(f"right up to the {within} that is claimed"), within
        return passed(f"right beyond {within}"), None


def _usual(order: str) -> tuple[int, ...]:
    return (33, 1, 20) if order == THD else (33, 33)


def _other_sizes(case: Case) -> Iterator[Case]:
    """One, odd, many; other keys than queries; fewer heads of keys."""
    for layout in ("packed", "rows", "head-major"):
        case = replace(case, layout=layout)
        for lengths, heads in (
            ((1,), 1), ((1, 1), 3), ((33,), 1), ((257,), 3), ((800,), 2)
        ):  # fmt: skip
            yield replace(case, lengths=lengths, heads=heads, kv_heads=heads)
        yield replace(case, lengths_k=tuple(2 * n + 1 for n in case.lengths))
        yield replace(case, heads=4, kv_heads=2)
        yield replace(case, heads=4, kv_heads=1)


def _survives(subject: Subject, case: Case) -> bool:
    """Whether a call on dense inputs leaves the process alive, found out in a copy of it."""
    if not hasattr(os, "fork"):
        return False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python warns of forks while threads run
        child = os.fork()
    if child == 0:
        faulthandler.disable()
        torch.set_num_threads(1)  # the threads of the pool did not come along
        with contextlib.suppress(BaseException):
            run(subject, replace(case, rounds=1))
        os._exit(0)
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return status == 0
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return False


def _enough_memory(device: torch.device, nbytes: int) -> bool:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] > nbytes * 1.3
    return device.type == "cpu"  # pages are found when written, and few are


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type != "cpu":
        return device.type
    try:
        found = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    except OSError:
        found = None
    return found.group(1).strip() if found else platform.processor() or platform.machine()


# The verdicts, each from results alone.


def _first(results: Iterable[Result], *statuses: Status) -> Result | None:
    return next((r for r in results if r.status in statuses), None)


def _is_misaligned(result: Result) -> bool:
    return result.granule < NATURAL


def _is_mixed(result: Result) -> bool:
    return result.case.layout.startswith("only ")


def _bit_identical(results: Sequence[Result]) -> Verdict:
    """No silent difference in any layout of natural alignment that is all of one kind."""
    judged = [r for r in results if not _is_misaligned(r) and not _is_mixed(r)]
    judged = [r for r in judged if r.case.layout != "offset"]
    if wrong := _first(judged, Status.DIFFERENT):
        return failed(f"{wrong.case}: {wrong.detail}")
    same = [r for r in judged if r.status is Status.SAME]
    if not same:
        return not_tried("every strided call was rejected")
    return passed(f"{sum(r.calls for r in same)} calls in {len(same)} cases")


def _mixed(results: Sequence[Result], contract: StrideContract | None) -> Verdict:
    """Whether each operand may be strided alone."""
    judged = [r for r in results if _is_mixed(r) and not _is_misaligned(r)]
    if wrong := _first(judged, Status.DIFFERENT):
        return failed(f"{wrong.case}: {wrong.detail}")
    if not judged:
        return not_tried("no such case")
    if contract is not None and contract.together:
        rejected = _first(judged, Status.REJECTED)
        why = rejected.detail if rejected is not None else ""
        return passed(f"{' and '.join(contract.together[0])} must share a layout: {why}")
    return passed("each operand may be strided alone")


def _storage_offset(results: Sequence[Result]) -> Verdict:
    """Whether operands inside a storage are read from where they start."""
    judged = [r for r in results if r.case.layout == "offset"]
    if wrong := _first(judged, Status.DIFFERENT):
        return failed(f"{wrong.case}: {wrong.detail}")
    if rejected := _first(judged, Status.REJECTED):
        return passed(f"must be 0: {rejected.detail}")
    return passed("honoured") if judged else not_tried("no such case")


def _alignment(results: Sequence[Result], contract: StrideContract | None) -> Verdict:
    """The smallest alignment that works, and what happens below it."""
    if contract is None:
        return failed("no alignment up to 128 bytes explains what is wrong")
    below = [r for r in results if r.granule < (contract.alignment or 1)]
    if fault := _first(below, Status.FAULT):
        return passed(f"{contract.alignment} bytes; below, the device faults: {fault.detail}")
    if wrong := _first(below, Status.DIFFERENT, Status.REJECTED):
        return passed(f"{contract.alignment} bytes; below, {wrong.case}: {wrong.detail}")
    return passed(f"{contract.alignment} bytes")


def _accepts(results: Sequence[Result], contract: StrideContract | None, dies: str) -> Verdict:
    """Whether nothing that the contract admits was rejected."""
    if contract is not None:
        return passed(dies)
    rejected = _first([r for r in results if not _is_misaligned(r)], Status.REJECTED, Status.FAULT)
    if rejected is None:
        return not_tried("there is no contract")
    return failed(f"{rejected.case}: {rejected.detail}")


def _untouched(subject: Subject, results: Sequence[Result]) -> Verdict:
    """Whether any input was written, or is declared to be."""
    written = [
        argument.name
        for argument in subject.op._schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    if declared := [name for name in subject.operands if name in written]:
        return failed(f"its schema says that it writes {', '.join(declared)}")
    if touched := next((r for r in results if r.touched), None):
        return failed(f"{touched.case}: {touched.touched}")
    tried = any(r.status is Status.SAME for r in results)
    return passed("gaps and all") if tried else not_tried("no strided call worked")


def _within(results: Sequence[Result]) -> str:
    wrong = _first(results, Status.DIFFERENT)
    return f"bits cannot be judged; {wrong.case}: {wrong.detail}" if wrong else "all agreed"


def _widest(
    subject: Subject, results: Sequence[Result], smallest: int = 1
) -> StrideContract | None:
    """The widest contract within which every call was right; None if there is none.

    Args:
        smallest: alignment in bytes below which nothing was tried.
    """
    pairs = ((), (subject.operands[1:3],))
    # More than natural alignment is the last thing to blame a rejection on.
    natural = [a for a in ALIGNMENTS if smallest <= a <= NATURAL]
    for alignments in (natural, [a for a in ALIGNMENTS if a > NATURAL]):
        for offset, together, alignment in itertools.product((True, False), pairs, alignments):
            contract = StrideContract(
                alignment=alignment, allow_storage_offset=offset, together=together
            )
            admitted = [r for r in results if admits(contract, r)]
            right = all(r.status is Status.SAME for r in admitted)
            if right and any(r.granule >= NATURAL for r in admitted):
                return contract
    return None


def admits(contract: StrideContract, result: Result) -> bool:
    """Whether every operand of a trial had a layout that ``contract`` admits."""
    itemsize = result.case.dtype.itemsize
    if any(contract.violation(layout, itemsize) for layout in result.layouts.values()):
        return False
    return all(
        len({result.layouts[name].stride for name in group}) <= 1
        for group in contract.together
        if all(name in result.layouts for name in group)
    )
