"""The registry of stride tags, and the built-in table as data."""

from __future__ import annotations

import importlib
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.attention.varlen  # registers torch_attn::*
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    ShapeEnv,
    StatelessSymbolicContext,
)

from qkvpass import tags
from qkvpass.builtin_ops import BUILTIN_OPS, BuiltinOp
from qkvpass.layout import StrideContract
from qkvpass.tags import (
    Site,
    Status,
    StrideTag,
    lookup,
    qkv_arguments,
    register_stride_tag,
    registry_key,
    stride_capable,
    stride_tags,
    unregister_stride_tag,
)

# The registry is put back after each test by conftest.py; ops live as long as the process.
LIBRARY = torch.library.Library("tagtest", "DEF")
LIBRARY.define("attn(Tensor q, Tensor k, Tensor v, float scale=1.0) -> Tensor")
LIBRARY.define("attn.masked(Tensor q, Tensor k, Tensor v, Tensor mask) -> Tensor")
LIBRARY.define("other(Tensor q, Tensor k, Tensor v) -> Tensor")
for tag in ("flexible_layout", "needs_contiguous_strides", "needs_exact_strides"):
    LIBRARY.define(
        f"{tag}(Tensor q, Tensor k, Tensor v, Tensor w) -> Tensor", tags=(getattr(torch.Tag, tag),)
    )
LIBRARY.define("flexible_norm(Tensor x, Tensor w) -> Tensor", tags=(torch.Tag.flexible_layout,))

ATTN = torch.ops.tagtest.attn
OTHER = torch.ops.tagtest.other.default
FLASH = torch.ops.aten._scaled_dot_product_flash_attention.default
QKV = ("q", "k", "v")


@pytest.fixture(autouse=True)
def _no_user_tags(_clean_slate: None) -> None:
    """Nor those that another file registered when it was imported."""
    tags._registry.user = {}
    tags._registry.changed()


def custom_attention(name: str, **options: object) -> torch.library.CustomOpDef:
    @torch.library.custom_op(f"tagtest_custom::{name}", mutates_args=(), **options)
    def attn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return q + k + v

    return attn


def refuse(site: Site) -> str | None:
    return "not here"


def refuse_otherwise(site: Site) -> str | None:
    return "nor here"


# --- Naming an op ---


@pytest.mark.parametrize(
    "spelling",
    [
        "tagtest::attn",
        "tagtest::attn.default",
        "tagtest::at*",
        "tag*::attn",
        ATTN,
        ATTN.default,
        pytest.param("tagt[a-f]st::attn", id="character class"),
    ],
    ids=str,
)
def test_an_op_is_found_by_any_spelling(spelling):
    assert lookup(ATTN.default) is None
    registered = register_stride_tag(spelling, operands=QKV)
    assert lookup(ATTN.default) is registered
    assert registered.by == "user" and registered.status is Status.DECLARED
    assert lookup(OTHER) is None


def test_a_custom_op_is_found_by_its_definition_and_by_name():
    op = custom_attention("by_definition")
    registered = register_stride_tag(op, operands=QKV)
    assert registered.op == "tagtest_custom::by_definition"
    assert lookup(torch.ops.tagtest_custom.by_definition.default) is registered


def test_an_overload_is_tagged_alone_and_a_name_with_all_overloads():
    alone = register_stride_tag(ATTN.default, operands=QKV)
    assert lookup(ATTN.default) is alone and lookup(ATTN.masked) is None
    both = register_stride_tag(ATTN, operands=QKV)
    assert lookup(ATTN.masked) is both
    assert lookup(ATTN.default) is alone, "the overload says more than the name"


def test_a_tag_may_come_before_its_op():
    registered = register_stride_tag("tagtest_late::attn", operands=("a", "b", "c"))
    with torch.library._scoped_library("tagtest_late", "DEF") as library:
        library.define("attn(Tensor q, Tensor k, Tensor v) -> Tensor")
        assert lookup(torch.ops.tagtest_late.attn.default) is registered


def test_a_miss_is_not_remembered():
    assert lookup(OTHER) is None
    registered = register_stride_tag("tagtest::other", operands=QKV)
    assert lookup(OTHER) is registered
    unregister_stride_tag("tagtest::other")
    assert lookup(OTHER) is None


def test_what_is_no_op_has_no_tag():
    assert lookup(torch.relu) is None and lookup("tagtest::attn") is None
    assert lookup(torch.ops.higher_order.cond) is None


def test_the_decorator_tags_and_returns_the_op():
    op = custom_attention("decorated")
    contract = StrideContract(alignment=4)
    assert stride_capable(*QKV, contract=contract, when=refuse)(op) is op
    registered = lookup(torch.ops.tagtest_custom.decorated.default)
    assert registered.operands == QKV
    assert registered.contract is contract and registered.when is refuse


@pytest.mark.parametrize(
    ("error", "message", "op", "options"),
    [
        (ValueError, "tagtest::attn has no argument 'w'; it has q, k, v", ATTN, {"operands": "qw"}),
        (
            ValueError,
            "tagtest::attn.masked has no argument 'scale'; it has q, k, v, mask",
            ATTN.masked,
            {"operands": ["q", "scale"]},
        ),
        (
            ValueError,
            "has no argument 'key'; it has q, k, v",
            ATTN,
            {"operands": QKV, "contract": StrideContract(together=(("q", "key"),))},
        ),
        (
            ValueError,
            "has no argument 'query'; it has q, k, v",
            ATTN,
            {"operands": QKV, "contract": StrideContract(output="like:query")},
        ),
        (ValueError, "no operands given for tagtest::attn", ATTN, {"operands": ()}),
        (ValueError, "give it as 'namespace::name'", "attn", {"operands": QKV}),
        (ValueError, "give it as 'namespace::name'", "python:attn", {"operands": QKV}),
        (TypeError, "op is 7; give 'namespace::name'", 7, {"operands": QKV}),
        (TypeError, "when is 'never'; give a function", ATTN, {"operands": QKV, "when": "never"}),
        (TypeError, "operands is 'query'; give names", ATTN, {"operands": "query"}),
        (TypeError, "give names, such as", ATTN, {"operands": (0, 1, 2)}),
    ],
)
def test_a_bad_registration_says_what_is_wrong(error, message, op, options):
    if options["operands"] == "qw":
        options = {"operands": list("qw")}
    with pytest.raises(error, match=message.replace("(", r"\(")):
        register_stride_tag(op, **options)
    assert lookup(ATTN.default) is None


def test_a_decorator_without_names_is_an_error():
    with pytest.raises(TypeError, match="stride_capable got no names"):
        stride_capable(custom_attention("bare"))
    with pytest.raises(ValueError, match="no operands given"):
        stride_capable()(custom_attention("empty"))


# --- Which tag is in force ---


def test_the_user_beats_the_table_even_by_a_pattern():
    assert lookup(FLASH).by == "built-in"
    pattern = register_stride_tag("aten::_scaled_dot_product_flash*", operands=("query",))
    assert lookup(FLASH) is pattern
    name = register_stride_tag(FLASH, operands=("value",))
    assert lookup(FLASH) is name


def test_a_name_beats_a_pattern_whatever_came_first():
    pattern = register_stride_tag("tagtest::*", operands=QKV)
    name = register_stride_tag("tagtest::attn", operands=QKV)
    assert lookup(ATTN.default) is name and lookup(OTHER) is pattern


def test_the_last_registration_of_a_name_counts():
    register_stride_tag(ATTN, operands=QKV)
    last = register_stride_tag("tagtest::attn", operands=("v",))
    assert lookup(ATTN.default) is last
    assert [tag for tag in stride_tags() if tag.by == "user"] == [last]


def test_unregistering_takes_the_user_then_the_table_and_then_nothing():
    name = "aten::_scaled_dot_product_flash_attention"
    register_stride_tag(name, operands=("query",))
    unregister_stride_tag(name)
    assert lookup(FLASH).by == "built-in"
    unregister_stride_tag(name)
    assert lookup(FLASH) is None
    assert name not in [tag.op for tag in stride_tags()]
    with pytest.raises(KeyError, match="has no stride tag"):
        unregister_stride_tag(name)
    # Tagging it anew lifts the ban on the row of the table.
    register_stride_tag(name, operands=("query",))
    unregister_stride_tag(name)
    assert lookup(FLASH).by == "built-in"


def test_an_overload_unregisters_the_tag_that_applies_to_it():
    unregister_stride_tag(FLASH)
    assert lookup(FLASH) is None
    register_stride_tag("tagtest::attn", operands=QKV)
    unregister_stride_tag(ATTN.default)
    assert lookup(ATTN.default) is None
    register_stride_tag(ATTN.masked, operands=QKV)
    with pytest.raises(KeyError, match=r"tagtest::attn\.default"):
        unregister_stride_tag(ATTN.default)


def test_the_list_holds_the_user_first_and_each_name_once():
    mine = register_stride_tag("aten::_scaled_dot_product_flash_attention", operands=("query",))
    listed = stride_tags()
    assert listed[0] is mine
    assert len({tag.op for tag in listed}) == len(listed) == len(BUILTIN_OPS)
    assert {tag.by for tag in listed[1:]} == {"built-in"}


# --- PyTorch's own layout tags ---


def test_flexible_layout_is_the_authors_word():
    tag = lookup(torch.ops.tagtest.flexible_layout.default)
    assert tag.status is Status.DECLARED and tag.status.capable and tag.by == "PyTorch tag"
    assert tag.operands == QKV and "flexible_layout" in tag.evidence
    assert tag.contract == StrideContract(alignment=1)
    assert lookup(torch.ops.tagtest.flexible_norm.default).operands == ("x", "w")


def test_the_user_knows_better_than_flexible_layout():
    mine = register_stride_tag("tagtest::flexible_layout", operands=("q",))
    assert lookup(torch.ops.tagtest.flexible_layout.default) is mine


def test_needs_contiguous_strides_beats_everybody():
    # Inductor makes such operands dense whatever anybody says.
    op = torch.ops.tagtest.needs_contiguous_strides.default
    register_stride_tag(op, operands=QKV)
    tag = lookup(op)
    assert tag.status is Status.DENSE_ONLY and not tag.status.capable
    assert tag.by == "PyTorch tag" and "needs_contiguous_strides" in tag.evidence


def test_other_layout_tags_say_nothing():
    assert lookup(torch.ops.tagtest.needs_exact_strides.default) is None


def test_tags_of_a_custom_op_count():
    custom_attention("flexible", tags=(torch.Tag.flexible_layout,))
    custom_attention("contiguous", tags=(torch.Tag.needs_contiguous_strides,))
    ops = torch.ops.tagtest_custom
    assert lookup(ops.flexible.default).status is Status.DECLARED
    assert lookup(ops.contiguous.default).status is Status.DENSE_ONLY


# --- Cache keys ---

PLAIN = StrideTag("tagtest::attn", QKV)


@pytest.mark.parametrize(
    "change",
    [
        {"op": "tagtest::other"},
        {"operands": ("q", "k")},
        {"contract": StrideContract(alignment=8)},
        {"contract": StrideContract(output="dense")},
        {"contract": StrideContract(together=(("k", "v"),))},
        {"when": refuse},
        {"when": refuse_otherwise},
        {"backward_of": "tagtest::other"},
        {"status": Status.UNVERIFIED},
        {"version": "2"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_the_key_follows_the_meaning(change):
    assert PLAIN.key() == replace(PLAIN).key()
    assert replace(PLAIN, **change).key() not in (None, PLAIN.key())


def test_the_key_tells_conditions_apart():
    keys = [replace(PLAIN, when=when).key() for when in (None, refuse, refuse_otherwise)]
    assert len(set(keys)) == 3


def test_the_key_follows_the_source_of_a_condition(tmp_path: Path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    source = tmp_path / "tagtest_condition.py"
    source.write_text("def when(site):\n    return None\n")
    module = importlib.import_module("tagtest_condition")
    monkeypatch.setitem(sys.modules, "tagtest_condition", module)
    before = replace(PLAIN, when=module.when).key()
    source.write_text("def when(site):\n    return 'not any more'\n")
    importlib.reload(module)
    assert replace(PLAIN, when=module.when).key() not in (None, before)


def test_a_condition_without_a_name_needs_a_version():
    assert replace(PLAIN, when=lambda site: None).key() is None
    first, second = (replace(PLAIN, when=lambda site: None, version=v).key() for v in "12")
    assert None not in (first, second) and first != second

    def closure(site: Site) -> str | None:
        return None

    assert replace(PLAIN, when=closure).key() is None


def test_the_registrys_key_follows_it():
    at_first = registry_key()
    assert at_first is not None and len(at_first) == len(BUILTIN_OPS) + 1  # and the certificates
    register_stride_tag(ATTN, operands=QKV)
    tagged = registry_key()
    assert tagged not in (None, at_first)
    register_stride_tag(ATTN, operands=QKV, when=lambda site: None)
    assert registry_key() is None
    register_stride_tag(ATTN, operands=QKV, when=lambda site: None, version="1")
    assert registry_key() not in (None, at_first, tagged)
    unregister_stride_tag(ATTN)
    assert registry_key() == at_first
    unregister_stride_tag("vllm::flashinfer_wrapper")
    assert registry_key() not in (None, at_first)


# --- Telling attention ops by their arguments ---


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ("Tensor q, Tensor k, Tensor v", "q k v"),
        ("Tensor query, Tensor key, Tensor value, Tensor? mask", "query key value"),
        ("Tensor out, Tensor xq, Tensor xk, Tensor xv", "xq xk xv"),
        ("Tensor query_states, Tensor key_states, Tensor value_states", None),
        ("Tensor queries, Tensor keys, Tensor values", None),
        ("Tensor q_nope, Tensor k_cache, Tensor v_cache", None),
        ("Tensor v, Tensor k, Tensor q", "q k v"),
        ("Tensor q_scale, Tensor q, Tensor k, Tensor v", "q k v"),
        ("Tensor key_padding_mask, Tensor query, Tensor key, Tensor value", "query key value"),
        ("Tensor q, Tensor? k, Tensor? v", "q k v"),
        ("Tensor q, Tensor k", ""),
        ("Tensor qkv", ""),
        ("Tensor x, Tensor weight, Tensor bias", ""),
        ("Tensor quantized, Tensor kernel, Tensor variance", ""),
        ("Tensor q, Tensor k, int v", ""),
        ("int q, int k, int v", ""),
    ],
)
def test_q_k_and_v_are_told_by_name(schema, expected):
    with torch.library._scoped_library("tagtest_names", "DEF") as library:
        library.define(f"op({schema}) -> Tensor")
        found = qkv_arguments(torch.ops.tagtest_names.op.default)
    everything = [argument.split()[1] for argument in schema.split(", ")]
    assert " ".join(found) == (" ".join(everything) if expected is None else expected)


def test_only_a_resolved_op_has_arguments():
    assert qkv_arguments(ATTN) == qkv_arguments("tagtest::attn") == qkv_arguments(len) == ()


# --- The table ---

ROWS = {op.name: op for op in BUILTIN_OPS}
ON_H200 = Site(
    op="aten::attn",
    device="cuda",
    arch="sm_90",
    dtype=torch.bfloat16,
    head_dim=72,
    num_tokens=1024,
    has_mask=False,
    needs_grad=False,
    torch_version="2.11.0",
)


def overloads(row: BuiltinOp) -> list[torch._ops.OpOverload]:
    namespace, _, name = row.name.partition("::")
    packet = getattr(getattr(torch.ops, namespace), name, None)
    return [getattr(packet, overload) for overload in packet.overloads()] if packet else []


def parametrize_rows(rows):
    return pytest.mark.parametrize("row", [pytest.param(row, id=row.name) for row in rows])


def test_names_are_unique():
    assert len(ROWS) == len(BUILTIN_OPS)


@parametrize_rows(BUILTIN_OPS)
def test_a_row_is_complete(row):
    status = Status(row.status)
    assert row.operands and len(row.fact) > 20 and "\n" not in row.fact
    assert row.backward_of is None or row.backward_of in ROWS
    if status.capable:
        assert row.when is not None, "every kernel was read or tried on some platform only"
        asked = None if "_for_cpu" in row.name else 16  # a CPU reads from any address
        assert row.contract.alignment == asked and not row.contract.allow_broadcast
    elif status is Status.UNVERIFIED:
        assert "certify" in row.fact or "row applies" in row.fact
    assert StrideTag(row.name, row.operands, row.contract, row.when).key() is not None


BOTH = ("", "_backward")
OURS = [row for row in BUILTIN_OPS if row.name.startswith(("aten::", "torch_attn::"))]


@parametrize_rows(OURS)
def test_a_row_of_pytorch_fits_the_schema(row):
    found = overloads(row)
    if not found:
        pytest.skip(f"torch {torch.__version__} lacks it")
    for op in found:
        arguments = {a.name: a for a in op._schema.arguments}
        assert set(row.operands) <= set(arguments)
        assert all("Tensor" in str(arguments[name].type) for name in row.operands)
        assert not any(arguments[name].is_write for name in row.operands)
        assert ("writes an operand" in row.fact) == any(a.is_write for a in arguments.values())
        assert lookup(op).op == row.name


def test_the_common_ops_of_pytorch_are_there():
    kinds = ("flash", "efficient", "cudnn")
    for name in [
        *(f"aten::_scaled_dot_product_{kind}_attention{end}" for kind in kinds for end in BOTH),
        *(f"aten::_scaled_dot_product_flash_attention_for_cpu{end}" for end in BOTH),
        "torch_attn::_varlen_attn",
        "torch_attn::_varlen_attn_backward",
    ]:
        status = "unverified" if name.endswith("cudnn_attention_backward") else "declared"
        assert ROWS[name].status == status and overloads(ROWS[name]), name


@parametrize_rows(row for row in BUILTIN_OPS if row.status == "declared")
def test_a_declared_row_stands_up_for_a_platform(row, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91900)  # a CPU build has none
    where = replace(ON_H200, device="cpu", arch=None) if "_for_cpu" in row.name else ON_H200
    assert row.when(where) is None
    # B08, B09: the same op on another platform is another kernel, and the reason says which.
    for device, arch, word in [("mps", None, "mps"), ("xpu", None, "xpu"), ("cuda", "hip", "ROCm")]:
        why = row.when(replace(ON_H200, device=device, arch=arch))
        assert why is not None and (word in why or "CPU kernel" in why)


def test_the_cpu_kernel_is_for_the_cpu():
    when = ROWS["aten::_scaled_dot_product_flash_attention_for_cpu"].when
    assert when(replace(ON_H200, device="cpu", arch=None, head_dim=5)) is None
    assert when(replace(ON_H200, device="cpu", arch="hip")) is None
    assert "device is cuda" in when(ON_H200)


def test_flash_attention_is_for_half_precision():
    for name in ("aten::_scaled_dot_product_flash_attention", "flash_attn_3::_flash_attn_forward"):
        when = ROWS[name].when
        assert when(replace(ON_H200, dtype=torch.float16)) is None
        assert "float8_e4m3fn" in when(replace(ON_H200, dtype=torch.float8_e4m3fn))
    when = ROWS["aten::_scaled_dot_product_efficient_attention"].when
    assert when(replace(ON_H200, dtype=torch.float32)) is None


CUDNN = "aten::_scaled_dot_product_cudnn_attention"


@pytest.mark.parametrize("name", [CUDNN + end for end in BOTH])
def test_cudnn_needs_head_sizes_in_eights(name, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91900)
    when = ROWS[name].when
    assert when(replace(ON_H200, head_dim=64)) is None
    assert "head size 4 " in when(replace(ON_H200, head_dim=4))

    env = ShapeEnv()
    context = StatelessSymbolicContext([DimDynamic.DYNAMIC])
    symbol = FakeTensorMode(shape_env=env).from_tensor(torch.ones(64), symbolic_context=context)
    size = symbol.shape[0]
    assert f"head size {size} " in when(replace(ON_H200, head_dim=size))
    assert when(replace(ON_H200, head_dim=8 * size)) is None
    assert not env.guards


@pytest.mark.parametrize("name", [CUDNN, "vllm::torch_sdpa_wrapper"])
@pytest.mark.parametrize("version", [91002, 90100, None])
def test_old_cudnn_wants_dense_operands(name, version, monkeypatch):
    when = ROWS[name].when
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91100)
    assert when(ON_H200) is None
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: version)
    assert f"cuDNN is {version}" in when(ON_H200)


@pytest.mark.parametrize("name", ["torch_attn::_varlen_attn" + end for end in BOTH])
def test_varlen_attention_is_known_where_flash_attention_runs_it(name):
    when = ROWS[name].when
    for version, arch, runs_flash in [
        ("2.11.0+cu130", "sm_90", True),
        ("2.14.1", "sm_80", True),
        ("2.14.1", "sm_89", True),
        ("2.14.1", "sm_120", True),
        ("2.14.1", "sm_90", False),
        ("2.15.0a0+git1234", "sm_100", False),
        ("2.14.1", None, False),
    ]:
        why = when(replace(ON_H200, torch_version=version, arch=arch))
        assert (why is None) == runs_flash, (version, arch)


def test_kernels_that_count_in_int32_are_bounded():
    bounded = {row.name for row in BUILTIN_OPS if (row.contract.max_offset or 2**31) < 2**31}
    assert bounded == {
        "aten::_scaled_dot_product_efficient_attention",
        "aten::_scaled_dot_product_efficient_attention_backward",
        "aten::_efficient_attention_forward",
        "vllm::triton_attn_wrapper",
        "vllm::torch_sdpa_wrapper",
        "mslk::memory_efficient_attention_forward",
        "mslk::memory_efficient_attention_forward_with_bias",
    }


def test_only_fakes_of_pytorch_are_trusted():
    trusted = {row.name for row in BUILTIN_OPS if row.contract.output == "fake"}
    assert trusted and all(name.startswith("aten::") for name in trusted)
    assert {row.contract.output for row in BUILTIN_OPS} == {"fake", None}


def test_the_backends_it_grew_from_are_found():
    ancestors = {alias for row in BUILTIN_OPS for alias in row.known_as}
    assert ancestors == {
        "fa3",
        "fa4",
        "triton_attn",
        "amx_attn",
        "sdpa",
        "flashinfer_cudnn",
        "ascend_attn",
        "aiter_attn",
        "xpu_attn",
    }


def test_ops_whose_schema_writes_q_are_dense_only():
    for name in ("_vllm_fa2_C::varlen_fwd", "_vllm_fa3_C::fwd", "_flash_attn2_*::fwd"):
        assert ROWS[name].status == "dense-only" and "writes q" in ROWS[name].fact


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("_flash_attn3_688051e::_flash_attn_forward", "_flash_attn3_*::_flash_attn_forward"),
        ("_flash_attn3_688051e_dirty::fwd", "_flash_attn3_*::fwd"),
        ("_flash_attn2_cuda_1a2b3c4::varlen_fwd", "_flash_attn2_*::varlen_fwd"),
        ("_sgl_flash_attn3_9f8e7d6::fwd", "_sgl_flash_attn3_*::fwd"),
        ("sageattention_sm90::qk_int8_sv_f8_accum_f32_attn", "sageattention*::qk_int8_sv_*"),
        ("aiter::mha_varlen_fwd", "aiter::mha_*"),
        ("_flash_attn_ops_1a2b3c4::rotary", None),
        ("_flash_attn3_688051e::get_scheduler_metadata", None),
        ("_flash_attn3_688051e::fwd_combine", None),
        ("aiter::gemm_a8w8", None),
        ("python::flash_attn", None),
    ],
)
def test_patterns_match_their_own_ops_only(name, row):
    found = [tag.op for tag in tags.builtin_tags() if tag.matches(name, "default")]
    assert found == ([row] if row else [])
