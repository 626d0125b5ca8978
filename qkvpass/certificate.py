"""What a certificate says: verdicts on one op, and the contract that they amount to."""

from __future__ import annotations

import enum
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from typing import Any

from .layout import StrideContract

SCHEMA = 1


class Outcome(str, enum.Enum):
    """How one question to an op was answered."""

    PASS = "pass"
    FAIL = "fail"
    NOT_TRIED = "not tried"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class Verdict:
    """One answer, and the fact behind it."""

    outcome: Outcome = Outcome.NOT_TRIED
    detail: str = ""

    def __bool__(self) -> bool:
        return self.outcome is Outcome.PASS

    def __str__(self) -> str:
        return f"{self.outcome}: {self.detail}" if self.detail else str(self.outcome)


@dataclass(frozen=True)
class Verdicts:
    """The questions, one a field.

    Args:
        deterministic: two identical calls on dense inputs gave the same bits.
        bit_identical: strided inputs gave the bits of dense ones, on every call.
        mixed_layouts: each operand alone may be strided, or says which must go together.
        storage_offset: the operands may start inside their storage.
        alignment: the smallest alignment that works.
        accepts: no layout within the contract was rejected.
        inputs_untouched: no byte of the inputs changed, nor of the gaps between their rows.
        offset_range: elements beyond the int32 range of offsets were read rightly.
        no_hidden_copy: strided inputs cost no memory and no copy that dense ones do not.
        fake_layout: outputs have the sizes and strides that the fake kernel says.
        backward: gradients on strided inputs equal those on dense ones.
        opcheck: ``torch.library.opcheck`` on strided inputs, schema and fake kernel.
    """

    deterministic: Verdict = Verdict()
    bit_identical: Verdict = Verdict()
    mixed_layouts: Verdict = Verdict()
    storage_offset: Verdict = Verdict()
    alignment: Verdict = Verdict()
    accepts: Verdict = Verdict()
    inputs_untouched: Verdict = Verdict()
    offset_range: Verdict = Verdict()
    no_hidden_copy: Verdict = Verdict()
    fake_layout: Verdict = Verdict()
    backward: Verdict = Verdict()
    opcheck: Verdict = Verdict()

    def __iter__(self) -> Iterator[tuple[str, Verdict]]:
        """(name, verdict) of each."""
        for field in fields(self):
            yield field.name, getattr(self, field.name)


# Without an answer to these, nothing is known.
NEEDED = ("deterministic", "bit_identical", "storage_offset", "alignment", "inputs_untouched")


@dataclass(frozen=True)
class Certificate:
    """Evidence that an op reads operands by explicit stride, or that it does not.

    It counts while the op's schema, its library's version and the architecture stay as
    they were: see :func:`qkvpass.evidence.invalid_reason`.

    Args:
        op: ``"namespace::name"``, with the overload behind a dot unless it is the default.
        operands: schema arguments that were given strided.
        schema_hash: digest of the op's schema.
        library: what the kernel comes from: names of distributions, joined by ``+``.
        library_version: their versions, joined likewise.
        torch_version: ``torch.__version__``.
        device: name of the device.
        arch: ``"sm_90"``, ``"hip"``, ``"cpu_avx512_amx"``: what else must be equal.
        dtypes: dtypes that the op took.
        head_dims: head sizes that it took, in elements.
        orders: orders of dims that it took: ``"THD"``, ``"BSHD"``, ``"BHSD"``.
        shapes: sizes that it took, in words.
        calls: calls compared.
        verdicts: the answers.
        contract: the layouts that it admits; None unless the op passed.
        date: day of the test, ISO 8601, UTC.
    """

    op: str
    operands: tuple[str, ...]
    schema_hash: str
    library: str
    library_version: str
    torch_version: str
    device: str
    arch: str
    dtypes: tuple[str, ...]
    head_dims: tuple[int, ...]
    orders: tuple[str, ...]
    shapes: tuple[str, ...]
    calls: int
    verdicts: Verdicts
    contract: StrideContract | None
    date: str

    @property
    def passed(self) -> bool:
        """Whether nothing failed, and what must be known is known."""
        return passes(self.verdicts)

    def to_json(self) -> str:
        return json.dumps({"schema": SCHEMA, **asdict(self)}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Certificate:
        """The certificate that :meth:`to_json` wrote.

        Raises:
            ValueError: if ``text`` is no certificate of this version.
        """
        try:
            data = json.loads(text)
            if data.pop("schema") != SCHEMA:
                raise ValueError(f"a certificate of another version than {SCHEMA}")
            data["verdicts"] = Verdicts(
                **{
                    name: Verdict(Outcome(verdict["outcome"]), verdict["detail"])
                    for name, verdict in data["verdicts"].items()
                }
            )
            if (contract := data["contract"]) is not None:
                contract["together"] = tuple(tuple(group) for group in contract["together"])
                data["contract"] = StrideContract(**contract)
            return cls(**{name: _frozen(value) for name, value in data.items()})
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"no certificate: {error!r}") from error

    def __str__(self) -> str:
        state = "passed" if self.passed else "FAILED"
        lines = [
            f"{self.op}: {state}",
            f"  {self.library} {self.library_version}, torch {self.torch_version}, "
            f"{self.arch} ({self.device}), {self.date}",
            f"  operands {', '.join(self.operands)}; {', '.join(self.dtypes)}; "
            f"head sizes {', '.join(map(str, self.head_dims))}; {', '.join(self.orders)}; "
            f"{self.calls} calls",
        ]
        width = max(len(name) for name, _ in self.verdicts)
        lines += [f"  {name:<{width}}  {verdict}" for name, verdict in self.verdicts]
        lines.append(f"  contract: {self.contract or 'none'}")
        return "\n".join(lines)


def passes(verdicts: Verdicts) -> bool:
    """Whether nothing failed, and what must be known is known."""
    return all(v.outcome is not Outcome.FAIL for _, v in verdicts) and all(
        bool(getattr(verdicts, name)) for name in NEEDED
    )


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
