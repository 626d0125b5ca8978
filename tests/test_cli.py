"""The command line: what it prints, and what it says about a target that is none."""

import json
import subprocess
import sys
import types

import pytest
import torch
from typer.testing import CliRunner

import qkvpass
from qkvpass import cli
from qkvpass.report import Report

FACTORIES = """
import torch
import torch.nn.functional as F


class Attention(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = torch.nn.Linear(32, 96)

    def forward(self, x, scale=1.0):
        q, k, v = (t.view(2, -1, 2, 16).transpose(1, 2).contiguous()
                   for t in self.qkv(x).chunk(3, dim=-1))
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).contiguous() * scale


def tiny():
    return Attention().eval(), (torch.randn(2, 10, 32),)


def with_kwargs():
    return Attention().eval(), (torch.randn(2, 10, 32),), {"scale": 2.0}


def wrong():
    return Attention()


not_callable = 3
"""


@pytest.fixture(scope="module")
def factories(tmp_path_factory):
    folder = tmp_path_factory.mktemp("factories")
    (folder / "cli_factories.py").write_text(FACTORIES)
    (folder / "cli_broken.py").write_text("import module_that_nobody_has\n")
    return folder


@pytest.fixture
def run(factories, monkeypatch):
    monkeypatch.chdir(factories)
    monkeypatch.setattr(sys, "path", list(sys.path))

    def invoke(*args):
        return CliRunner().invoke(cli.make_app(), args)

    return invoke


def message(result):
    """All that was printed, without the frame and the line breaks of an error box."""
    return " ".join(result.output.replace("│", " ").split())


def test_explain_prints_the_report(run):
    result = run("explain", "cli_factories:tiny")
    assert result.exit_code == 0, result.output
    assert "attention op" in result.output
    assert "scaled_dot_product" in result.output
    assert max(map(len, result.output.splitlines())) <= 100


def test_explain_json_is_a_report(run):
    result = run("explain", "cli_factories:with_kwargs", "--json")
    assert result.exit_code == 0, result.output
    report = Report.from_json(result.stdout)
    assert {copy.operand for copy in report.removed} >= {"query", "key", "value"}


def test_explain_diff_shows_the_graph(run):
    result = run("explain", "cli_factories:tiny", "--diff")
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert "--- before" in lines
    assert any(line.startswith("-") and "clone" in line for line in lines)


def test_explain_passes_its_options_on(run, monkeypatch):
    seen = {}

    def explain(model, *args, **options):
        seen.update(options)
        return Report((), (), "", "")

    monkeypatch.setattr(qkvpass, "explain", explain)
    assert run("explain", "cli_factories:with_kwargs", "--dynamic", "--train").exit_code == 0
    assert seen == {"dynamic": True, "train": True, "scale": 2.0}
    seen.clear()
    assert run("explain", "cli_factories:tiny").exit_code == 0
    assert seen == {"dynamic": None, "train": False}


def test_explain_of_an_unchanged_graph_says_so(run, monkeypatch):
    monkeypatch.setattr(qkvpass, "explain", lambda *args, **options: Report((), (), "a", "a"))
    result = run("explain", "cli_factories:tiny", "--diff")
    assert "the graph is unchanged" in result.output


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("nothing", "give timm:NAME or pkg.module:factory"),
        ("cli_factories:", "give timm:NAME or pkg.module:factory"),
        ("no_such_module:factory", "there is no module 'no_such_module'"),
        ("cli_broken:factory", "cli_broken needs module_that_nobody_has"),
        ("cli_factories:missing", "has no 'missing'"),
        ("cli_factories:not_callable", "is int; give a function"),
        ("cli_factories:wrong", "returned Attention; return (model, args)"),
    ],
)
def test_wrong_targets_are_named(run, target, said):
    result = run("explain", target)
    assert result.exit_code == 2
    assert said in message(result)


def test_json_and_diff_exclude_each_other(run):
    result = run("explain", "cli_factories:tiny", "--json", "--diff")
    assert result.exit_code == 2
    assert "leave --diff out" in message(result)


def test_timm_target_builds_the_model_and_its_input():
    pytest.importorskip("timm")
    model, (image,), kwargs = cli.load_target("timm:vit_tiny_patch16_224")
    assert image.shape == (2, 3, 224, 224)
    assert kwargs == {}
    assert not model.training
    assert cli.load_target("timm:vit_tiny_patch16_224", train=True)[0].training


def test_unknown_timm_model_gets_a_suggestion(run):
    pytest.importorskip("timm")
    result = run("explain", "timm:vit_tiny_patch16_225")
    assert result.exit_code == 2
    assert "did you mean" in message(result)
    assert "vit_tiny_patch16_224" in message(result)


def test_missing_timm_names_the_extra(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    result = run("explain", "timm:vit_tiny_patch16_224")
    assert result.exit_code == 2
    assert 'pip install "qkvpass[encoders]"' in message(result)


def tag(name, **options):
    contract = qkvpass.StrideContract(alignment=32, together=(("k", "v"),), output="dense")
    return qkvpass.register_stride_tag(name, operands=("q", "k", "v"), contract=contract, **options)


@pytest.fixture
def tagged():
    tag("test_cli::attn", when=never)
    yield
    qkvpass.unregister_stride_tag("test_cli::attn")


def never(site):
    return "never [on Sundays]"


def test_ops_json_holds_every_tag(run, tagged):
    result = run("ops", "--json")
    assert result.exit_code == 0, result.output
    data = json.loads(result.stdout)
    assert data["schema"] == 1
    assert [row["op"] for row in data["ops"]] == [tag.op for tag in qkvpass.stride_tags()]
    mine = next(row for row in data["ops"] if row["op"] == "test_cli::attn")
    assert mine == {
        "op": "test_cli::attn",
        "known_as": [],
        "status": "declared",
        "operands": ["q", "k", "v"],
        "contract": "32-byte alignment, k and v alike, output dense",
        "condition": "never",
        "backward_of": "",
        "evidence": "registered by the user",
        "certificates": [],
        "by": "user",
    }
    fa3 = next(row for row in data["ops"] if row["op"] == "fa3_fwd::_flash_attn_forward")
    assert any(c.startswith("sm_90, fa3-fwd 0.0.3") for c in fa3["certificates"])


def test_ops_table_shows_every_tag(run, tagged):
    result = run("ops")
    assert result.exit_code == 0, result.output
    flat = "".join(result.output.split())
    assert "test_cli::attn" in flat
    assert f"{len(qkvpass.stride_tags())} entries" in result.output


@pytest.mark.parametrize(
    ("contract", "text"),
    [
        ({}, "16-byte strides"),
        (
            {"max_offset": 2**31 - 1, "allow_broadcast": True, "allow_storage_offset": False},
            "16-byte strides, offsets up to 2147483647, stride 0 is fine, no storage offset",
        ),
    ],
)
def test_contract_in_words(contract, text):
    assert cli.contract_text(qkvpass.StrideContract(**contract)) == text


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_missing_cli_extra_is_named(monkeypatch, missing):
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(SystemExit, match=r'pip install "qkvpass\[cli\]"'):
        cli.main()


def test_package_does_not_import_the_extras():
    code = "import sys, qkvpass; print([m for m in ('typer', 'rich', 'timm') if m in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_demo_exits_with_the_demo_s_verdict(run, monkeypatch):
    fake = types.ModuleType("qkvpass.demo")
    fake.main = lambda layers: 1 if layers == 5 else 0
    monkeypatch.setitem(sys.modules, "qkvpass.demo", fake)
    monkeypatch.setattr(qkvpass, "demo", fake, raising=False)
    assert run("demo").exit_code == 0
    assert run("demo", "--layers", "5").exit_code == 1
    assert run("demo", "--layers", "0").exit_code == 2


@pytest.mark.slow
def test_demo_holds_its_claims(capfd):
    from qkvpass import demo

    with torch.random.fork_rng():
        assert demo.main(layers=1) == 0, capfd.readouterr().out
    out = capfd.readouterr().out
    assert "NO " not in out
    assert "removed 3 of 3 copies" in out


def test_verify_says_that_the_bits_are_the_same(run):
    result = run("verify", "cli_factories:tiny")
    assert result.exit_code == 0, result.output
    assert result.output.startswith("ok: ") and "copies removed" in result.output


def test_verify_fails_where_they_are_not(run, monkeypatch):
    found = qkvpass.Verification(
        ok=False,
        differences=(qkvpass.Difference(0, "output 0", "other values"),),
        culprit=None,
        unstable=(),
        compared=4,
        report=Report((), (), "", ""),
    )
    monkeypatch.setattr(qkvpass, "verify", lambda *args, **kwargs: found)
    result = run("verify", "cli_factories:tiny")
    assert result.exit_code == 1
    assert "run 0, output 0: other values" in result.output
