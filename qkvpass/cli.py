"""The command line: ``qkvpass explain``, ``verify``, ``ops``, ``certify``, ``bench``, ``demo``."""

import difflib
import importlib
import json
import os
import sys
from collections.abc import Callable
from typing import Annotated, Any, NoReturn

from . import evidence
from .builtin_ops import BUILTIN_OPS
from .certificate import Certificate
from .layout import StrideContract
from .report import Report
from .tags import StrideTag, stride_tags

OPS_SCHEMA = 1


class TargetError(Exception):
    """A target that cannot be turned into a model; the message says what to give instead."""


def main() -> None:
    """The console script."""
    try:
        app = make_app()
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich"):
            raise
        sys.exit(
            f"qkvpass: {error.name} is not installed; the command line needs "
            'pip install "qkvpass[cli]"'
        )
    app()


def make_app() -> Any:
    """The typer application.

    Raises:
        ModuleNotFoundError: if the ``cli`` extra is not installed.
    """
    import rich  # noqa: F401  # said here rather than in the middle of a command
    import typer

    app = typer.Typer(
        help="Removes the copies in front of attention ops that read strided q, k, v.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_show_locals=False,
    )

    @app.command()
    def explain(
        target: Annotated[
            str,
            typer.Argument(
                help="timm:NAME, or pkg.module:factory, where factory() returns (model, args) "
                "or (model, args, kwargs)."
            ),
        ],
        as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
        diff: Annotated[bool, typer.Option(help="Print the graph before and after, too.")] = False,
        html: Annotated[str, typer.Option(help="Write the report as one page, too.")] = "",
        dynamic: Annotated[bool, typer.Option(help="Compile with dynamic shapes.")] = False,
        train: Annotated[bool, typer.Option(help="Compile forward and backward.")] = False,
    ) -> None:
        """Compile a model and say what became of each copy in front of its attention."""
        if as_json and diff:
            raise typer.BadParameter("--json holds both graphs already; leave --diff out")
        try:
            report = explain_target(target, dynamic=dynamic, train=train)
        except TargetError as error:
            raise typer.BadParameter(str(error)) from error
        typer.echo(report.to_json() if as_json else report)
        if diff:
            print_diff(report)
        if html:
            _write_html(report, html)

    @app.command()
    def verify(
        target: Annotated[
            str, typer.Argument(help="timm:NAME, or pkg.module:factory, as for explain.")
        ],
        dynamic: Annotated[bool, typer.Option(help="Compile with dynamic shapes.")] = False,
        train: Annotated[bool, typer.Option(help="Compare gradients, too.")] = False,
    ) -> None:
        """Compare a model's bits with and without the pass, and name the copy to blame."""
        import qkvpass

        try:
            model, args, kwargs = load_target(target, train=train)
        except TargetError as error:
            raise typer.BadParameter(str(error)) from error
        found = qkvpass.verify(model, *args, train=train, dynamic=dynamic or None, **kwargs)
        typer.echo(found)
        raise typer.Exit(0 if found else 1)

    @app.command()
    def ops(
        as_json: Annotated[bool, typer.Option("--json", help="Print the table as JSON.")] = False,
    ) -> None:
        """List every attention op that is known: whether it reads strides, on what evidence."""
        rows = ops_rows()
        if as_json:
            typer.echo(json.dumps({"schema": OPS_SCHEMA, "ops": rows}, indent=2))
        else:
            print_ops(rows)

    @app.command()
    def certify(
        name: Annotated[str, typer.Argument(help="Name of the op, such as mylib::attn.")],
        module: Annotated[
            str, typer.Option("--import", help="Module to import first, which registers the op.")
        ] = "",
        device: Annotated[str, typer.Option(help="cpu or cuda; CUDA where there is any.")] = "",
        dtypes: Annotated[str, typer.Option(help="Such as bfloat16,float16; by default all.")] = "",
        skip: Annotated[
            str, typer.Option(help="What may kill the process: empty,far,misaligned.")
        ] = "",
        store: Annotated[bool, typer.Option(help="Keep it in the package if it passed.")] = False,
        as_json: Annotated[bool, typer.Option("--json", help="Print it as JSON.")] = False,
    ) -> None:
        """Test what layouts of q, k and v an op reads rightly, and print the certificate."""
        try:
            found = certify_target(name, module, device, dtypes, skip)
        except TargetError as error:
            raise typer.BadParameter(str(error)) from error
        typer.echo(found.to_json() if as_json else found)
        if store and found.passed:
            typer.echo(f"kept as {evidence.store(found)}", err=True)
        raise typer.Exit(0 if found.passed else 1)

    @app.command()
    def bench(
        target: Annotated[
            str,
            typer.Argument(
                help="A named shape (an unknown one lists them), timm:NAME, or "
                "pkg.module:factory as for explain."
            ),
        ],
        attention: Annotated[
            str, typer.Option(help="Some of sdpa,flash,cudnn,efficient,fa3,fa4,triton.")
        ] = "",
        tokens: Annotated[str, typer.Option(help="Token counts, such as 256,4096,131072.")] = "",
        layers: Annotated[int, typer.Option(help="Of a shape: 4 by default, 0 for all.")] = -1,
        part: Annotated[str, typer.Option(help="encoder or attention, of a shape.")] = "encoder",
        batch: Annotated[int, typer.Option(min=0, help="Images, of a shape or timm model.")] = 0,
        scale: Annotated[float, typer.Option(help="Below 1 for a dry run of a shape.")] = 1.0,
        device: Annotated[str, typer.Option(help="cpu or cuda; CUDA where there is any.")] = "",
        dtype: Annotated[str, typer.Option(help="bfloat16, but for a factory's model.")] = "",
        twin: Annotated[
            str, typer.Option(help="pkg.module:factory of the same model, edited by hand.")
        ] = "",
        variants: Annotated[
            str, typer.Option(help="Some of eager,stock,qkvpass,hand,eager hand.")
        ] = "eager,stock,qkvpass,hand",
        rounds: Annotated[int, typer.Option(min=3, help="Alternated rounds.")] = 15,
        seconds: Annotated[float, typer.Option(help="Stop the rounds after so long.")] = 60.0,
        cuda_graphs: Annotated[bool, typer.Option(help="Time replayed CUDA graphs.")] = False,
        deterministic: Annotated[bool, typer.Option(help="Compile deterministically.")] = False,
        as_json: Annotated[bool, typer.Option("--json", help="Print the results as JSON.")] = False,
        plot: Annotated[str, typer.Option(help="Draw them, too: out.png, .svg or .pdf.")] = "",
    ) -> None:
        """Measure what the pass saves: time, memory, kernels, bytes; and say why where nothing."""
        from .bench_cli import BenchError, Settings, bench_command

        try:
            settings = Settings(
                rounds=rounds,
                budget_s=seconds,
                variants=tuple(_listed(variants)),
                cuda_graphs=cuda_graphs,
                deterministic=deterministic,
            )
            bench_command(
                target,
                attention=attention,
                tokens=tokens,
                layers=layers,
                part=part,
                batch=batch,
                scale=scale,
                device=device,
                dtype=dtype,
                twin=twin,
                settings=settings,
                as_json=as_json,
                plot=plot,
            )
        except (BenchError, ValueError) as error:
            raise typer.BadParameter(str(error)) from error

    @app.command()
    def demo(
        layers: Annotated[int, typer.Option(min=1, help="Layers of the encoder.")] = 3,
    ) -> None:
        """Run the main job on a small encoder on the CPU, and check every claim."""
        from . import demo as job

        raise typer.Exit(job.main(layers))

    return app


def explain_target(target: str, *, dynamic: bool = False, train: bool = False) -> Report:
    """The report on the model that ``target`` names.

    Raises:
        TargetError: if there is no such model.
    """
    import qkvpass

    model, args, kwargs = load_target(target, train=train)
    # None lets torch.compile decide, as it does for a user who says nothing.
    return qkvpass.explain(model, *args, dynamic=dynamic or None, train=train, **kwargs)


def load_target(target: str, *, train: bool = False) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """(model, args, kwargs) of ``timm:NAME`` or ``pkg.module:factory``.

    Raises:
        TargetError: if the target is malformed, or does not lead to a model.
    """
    source, colon, name = target.partition(":")
    if not (source and colon and name):
        raise TargetError(f"{target!r} is no target; give timm:NAME or pkg.module:factory")
    model, args, kwargs = _timm_model(name) if source == "timm" else _factory_model(source, name)
    if source == "timm":
        model.train(train)
    return model, args, kwargs


def _timm_model(name: str) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    import torch

    try:
        import timm
    except ModuleNotFoundError as error:
        raise TargetError(
            f'{error.name} is not installed; timm models need pip install "qkvpass[encoders]"'
        ) from error
    if not timm.is_model(name.partition(".")[0]):
        close = difflib.get_close_matches(name, timm.list_models(), n=3)
        hint = f"; did you mean {', '.join(close)}?" if close else ""
        raise TargetError(f"timm has no model {name!r}{hint}")
    model = timm.create_model(name, pretrained=False)
    size = timm.data.resolve_model_data_config(model)["input_size"]
    # Two images: with one, dims of size 1 make some copies views.
    return model, (torch.randn(2, *size),), {}


def _factory_model(module: str, name: str) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    made = _factory(module, name)()
    if not (isinstance(made, tuple) and len(made) in (2, 3) and callable(made[0])):
        _wrong_result(module, name, made)
    model, args, kwargs = (*made, {})[:3]
    if not (isinstance(args, (tuple, list)) and isinstance(kwargs, dict)):
        _wrong_result(module, name, made)
    return model, tuple(args), kwargs


def _factory(module: str, name: str) -> Callable[[], Any]:
    found = _import(module)
    for part in name.split("."):
        if not hasattr(found, part):
            raise TargetError(f"{module} has no {name!r}; give the name of a function in it")
        found = getattr(found, part)
    if not callable(found):
        raise TargetError(f"{module}:{name} is {type(found).__name__}; give a function")
    return found


def _import(module: str) -> Any:
    # A console script does not have the working directory on its path; python -m does.
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise TargetError(f"{module} needs {error.name}, which is not installed") from error
        raise TargetError(
            f"there is no module {error.name!r}; run from the directory that holds it, "
            "or install it"
        ) from error


def _wrong_result(module: str, name: str, made: Any) -> NoReturn:
    shape = type(made).__name__
    if isinstance(made, tuple):
        shape = f"({', '.join(type(part).__name__ for part in made)})"
    raise TargetError(
        f"{module}:{name}() returned {shape}; return (model, args) or (model, args, kwargs), "
        "with args a tuple and kwargs a dict"
    )


def print_diff(report: Report) -> None:
    """The graph's diff, in colour on a terminal."""
    from rich.console import Console
    from rich.syntax import Syntax

    diff = report.diff() or "the graph is unchanged"
    console = Console()
    if console.is_terminal:
        console.print(Syntax(diff, "diff", background_color="default", word_wrap=True))
    else:
        print(diff)


def _write_html(report: Report, path: str) -> None:
    import typer

    try:
        report.to_html(path)
    except (ModuleNotFoundError, OSError) as error:
        raise typer.BadParameter(str(error)) from error
    typer.echo(f"written: {path}", err=True)


def certify_target(name: str, module: str, device: str, dtypes: str, skip: str) -> Certificate:
    """The certificate of the op called ``name``.

    Raises:
        TargetError: if there is no such op, module or dtype, or no test can be made of it.
    """
    import torch

    from .certify import CannotCertify, certify

    if module:
        _import(module)
    unknown = [d for d in _listed(dtypes) if not isinstance(getattr(torch, d, 0), torch.dtype)]
    if unknown:
        raise TargetError(f"{unknown[0]!r} is no dtype; give names such as bfloat16,float16")
    try:
        return certify(
            name,
            device=device or None,
            dtypes=[getattr(torch, d) for d in _listed(dtypes)] or None,
            skip=_listed(skip),
        )
    except (CannotCertify, ValueError) as error:
        raise TargetError(str(error)) from error


def _listed(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def ops_rows() -> list[dict[str, Any]]:
    """What is known of every attention op, as plain data."""
    aliases = {op.name: _strings(getattr(op, "known_as", ())) for op in BUILTIN_OPS}
    return [_ops_row(tag, aliases.get(tag.op, [])) for tag in stride_tags()]


def _ops_row(tag: StrideTag, known_as: list[str]) -> dict[str, Any]:
    return {
        "op": tag.op,
        "known_as": known_as,
        "status": tag.status.value,
        "operands": list(tag.operands),
        "contract": contract_text(tag.contract) if tag.status.capable else "",
        "condition": getattr(tag.when, "__name__", repr(tag.when)) if tag.when else "",
        "backward_of": tag.backward_of or "",
        "evidence": tag.evidence,
        "certificates": [
            f"{c.arch}, {c.library} {c.library_version}, {c.date}"
            for c in evidence.certificates()
            if c.passed and c.op == tag.op
        ],
        "by": tag.by,
    }


def _strings(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value] if value else []
    return list(value)


def contract_text(contract: StrideContract) -> str:
    """A contract in a few words."""
    unit = contract.alignment
    facts = ["16-byte strides" if unit is None else f"{unit}-byte alignment"]
    if contract.max_offset is not None:
        facts.append(f"offsets up to {contract.max_offset}")
    if contract.allow_broadcast:
        facts.append("stride 0 is fine")
    if not contract.allow_storage_offset:
        facts.append("no storage offset")
    facts += [f"{' and '.join(group)} alike" for group in contract.together]
    if contract.output is not None:
        facts.append(f"output {contract.output}")
    return ", ".join(facts)


def print_ops(rows: list[dict[str, Any]]) -> None:
    """The rows of :func:`ops_rows` as a table."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(show_lines=True)
    widths = {
        "op": 44,
        "status": 10,
        "operands": 18,
        "contract": 24,
        "condition": 16,
        "evidence": 36,
    }
    for title, width in widths.items():
        table.add_column(title, overflow="fold", max_width=width)
    colours = {"certified": "green", "declared": "cyan", "dense-only": "red"}
    for row in rows:
        # Text, since evidence may hold brackets that rich would take for markup.
        table.add_row(
            Text("\n".join([row["op"], *(f"known as {alias}" for alias in row["known_as"])])),
            Text(row["status"], style=colours.get(row["status"], "yellow")),
            Text(", ".join(row["operands"])),
            Text(row["contract"]),
            Text(row["condition"]),
            Text("\n".join([row["evidence"], *(f"certified: {c}" for c in row["certificates"])])),
        )
    console = Console()
    if not console.is_terminal:
        # A pipe has no width; 80 columns would break every cell.
        console.width = 160
    console.print(table)
    capable = sum(row["status"] in ("certified", "declared") for row in rows)
    console.print(f"{len(rows)} entries, {capable} of them read strides", highlight=False)
