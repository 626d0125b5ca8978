"""The benchmark: its statistics, its counts, its words; and that it measures what it says."""

import json
import random
import statistics
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import bench_page
import gpu_bench
import pytest
import torch
from test_cli import (
    factories,  # noqa: F401
    message,
    run,  # noqa: F401
)

from qkvpass import bench, bench_cli, bench_kernels, bench_shapes
from qkvpass.bench import BenchError, Settings
from qkvpass.bench_kernels import ATTENTION, COPY, MATMUL, OTHER, Kernel

QUICK = Settings(rounds=3, sample_ms=1.0, variants=("stock", "qkvpass"), fresh_kernels=False)


@pytest.fixture(scope="module")
def result():
    with torch.random.fork_rng():
        subject, paper = bench.named_subject(
            "siglip-so400m", layers=1, part="attention", scale=0.13, dtype=torch.float32
        )
        return bench.measure(subject, QUICK, paper_bytes=paper)


@pytest.mark.slow
def test_a_measurement_adds_up(result):
    stock, ours = result.variants["stock"], result.variants["qkvpass"]
    assert list(result.variants) == ["stock", "qkvpass"]
    assert len(stock.ms) == len(ours.ms) == 3 and min(stock.ms + ours.ms) > 0
    assert stock.low_ms <= stock.median_ms <= stock.high_ms
    assert result.decisions["removed"] == 4
    # Three ways to count the same bytes: on paper, in the graph, in the generated code.
    saved = stock.generated_bytes - ours.generated_bytes
    assert saved == result.decisions["removed_bytes"] == result.paper_bytes > 0
    assert (stock.kernels["attention"], ours.kernels["attention"]) == (1, 1)
    assert stock.kernels["in_front"] >= 1 and stock.kernels["behind"] == 1
    assert (ours.kernels["in_front"], ours.kernels["behind"]) == (0, 0)
    assert result.difference["stock"] < 1e-5
    assert ours.compile_s > result.decisions["seconds"] > 0


@pytest.mark.slow
def test_a_result_survives_json(result):
    assert bench.Result.from_json(result.to_json()) == result
    with pytest.raises(ValueError, match="measure again"):
        bench.Result.from_json(json.dumps({"schema": 0}))


@pytest.mark.slow
def test_a_plot_is_drawn(result, tmp_path):
    pytest.importorskip("matplotlib")
    from qkvpass.bench_plot import draw

    def at(tokens):
        return replace(result, facts={**result.facts, "tokens": tokens})

    for name, results in {
        "rounds.png": [result],
        "curve.png": [at(tokens) for tokens in (256, 1024, 4096)],
    }.items():
        draw(results, tmp_path / name)
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    draw([result], tmp_path / "a.svg")
    draw([result], tmp_path / "b.svg")
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


@pytest.mark.slow
def test_the_docs_page_says_what_was_measured(result, tmp_path):
    (tmp_path / "measured" / "bench").mkdir(parents=True)
    facts = {**result.facts, "sequences": 2}
    one = replace(result, facts=facts)
    (tmp_path / "measured" / "bench" / "one.json").write_text(one.to_json())
    text = bench_page.make(tmp_path, draw_plots=False)
    assert one.sentence in text
    assert f"| {one.variants['stock'].median_ms:.3f} |" in text
    assert "## On a CPU" in text
    on_gpu = {**one.where, "arch": "sm_90"}
    graphs = replace(one, settings={**one.settings, "cuda_graphs": True}, where=on_gpu)
    (tmp_path / "measured" / "bench" / "one.json").write_text(graphs.to_json())
    assert "CUDA graphs" in bench_page.make(tmp_path, draw_plots=False)


def test_the_readme_says_what_was_measured():
    """Each row of its table is one measurement: both times, and both ratios."""
    measured = set()
    for result in bench_page.load(bench_page.DOCS / "measured" / "bench"):
        times = (result.variants[name].median_ms for name in ("stock", "qkvpass"))
        ratios = (result.ratios.get(n) for n in ("stock / qkvpass", "qkvpass / hand"))
        numbers = [*(f"{t:.2f} ms" for t in times), *(f"{r.ratio:.3f}" for r in ratios if r)]
        measured.add(tuple(numbers))
    text = (bench_page.DOCS.parent / "README.md").read_text()
    _, _, table = text.partition("| qkvpass / hand edit |")
    rows = [line.strip("| ").split(" | ") for line in table.partition("\n\n")[0].splitlines()[2:]]
    assert len(rows) > 5
    for name, *numbers in rows:
        assert tuple(numbers) in measured, name


def test_the_committed_page_is_what_the_measurements_say():
    committed = bench_page.DOCS / "benchmarks.md"
    assert committed.read_text() == bench_page.make(bench_page.DOCS, draw_plots=False)


def test_ratio_finds_a_small_saving_under_drift():
    """Stock 2 % slower, under half a per cent of noise and a drift of 30 % that both share."""
    draw = random.Random()
    drift = [1 + 0.3 * i / 20 for i in range(21)]
    stock = [1.02 * d * draw.gauss(1, 0.005) for d in drift]
    ours = [d * draw.gauss(1, 0.005) for d in drift]
    found = bench.ratio_of(stock, ours)
    assert 1.0 < found.low <= found.ratio <= found.high < 1.04
    assert found.ratio == pytest.approx(1.02, abs=0.01)
    assert bench.ratio_of([1.0, 2.0, 4.0], [1.0, 1.0, 1.0]).low == 1.0


def made(stock, ours, **decisions):
    """A result of these rounds, for its sentence."""

    def variant(times):
        low, median, high = statistics.quantiles(times, n=4)
        return bench.Measured(tuple(times), median, low, high, 1.0, None, 1000, {})

    base = {
        "removed": 0,
        "kept": 0,
        "folded": 0,
        "removed_bytes": 0,
        "reasons": {},
        "attention_ops": [{"op": "x::attn", "status": "declared", "count": 1}],
        "seconds": 0.01,
        "fault": "",
    }
    return bench.Result(
        subject="x",
        attention="",
        layers=2,
        facts={},
        where={},
        settings={},
        variants={"stock": variant(stock), "qkvpass": variant(ours)},
        ratios={"stock / qkvpass": bench.ratio_of(stock, ours)},
        same_bits={},
        difference={},
        decisions={**base, **decisions},
    )


SAME = [1.0, 1.1, 0.9, 1.0, 1.05]


def test_sentence_of_a_saving():
    slow = [53.9, 54.1, 53.8, 53.9, 54.0]
    result = made(slow, [t * 0.983 for t in slow], removed=6, removed_bytes=2**20 * 4 * 72)
    assert (
        bench.sentence(result) == "saves 0.92 ms of 53.9 (1.7 % ± 0.0), 72.0 MiB of copies a layer"
    )


@pytest.mark.parametrize(
    ("decisions", "said"),
    [
        ({"attention_ops": []}, "no graph holds an attention op"),
        ({}, "there was no copy in front of attention"),
        (
            {"kept": 3, "reasons": {"untagged-op": {"count": 3, "detail": "x has no stride tag"}}},
            "no copy was removed: 3 untagged-op (x has no stride tag)",
        ),
        ({"removed": 2, "folded": 2}, "Inductor would have fused all 2"),
        (
            {"removed": 1, "removed_bytes": 200},
            "1 copy went, 200 B of traffic (20% of what generated kernels move)",
        ),
        ({"fault": "KeyError: 1"}, "left the graph as it was (KeyError: 1)"),
    ],
)
def test_sentence_says_why_nothing_is_gained(decisions, said):
    sentence = bench.sentence(made(SAME, list(reversed(SAME)), **decisions))
    assert sentence.startswith("gains nothing that can be told from noise")
    assert said in sentence


def test_sentence_of_a_loss_and_of_luck():
    worse = [t * 1.1 for t in SAME]
    lost = bench.sentence(made(SAME, worse, removed=1))
    assert lost.startswith("slower than stock by 0.10 ms (-10.0 %")
    assert bench.sentence(made(SAME, worse)).startswith("gains nothing")
    assert "although no copy went" in bench.sentence(made(worse, SAME))


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("triton_poi_fused_clone_view_2", COPY),
        ("triton_poi_fused__scaled_dot_product_flash_attention_3", COPY),
        ("triton_per_fused__to_copy_native_layer_norm_0", OTHER),
        ("triton_tem_fused_addmm_1", MATMUL),
        ("graph_3_cpp_fused_add_clone_1", COPY),
        ("void cutlass::device_kernel<flash::FlashAttnFwdSm90<...>>(...)", ATTENTION),
        ("flash::prepare_varlen_num_blocks_kernel", ATTENTION),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma", ATTENTION),
        ("fmha_cutlassF_bf16_aligned_64x64_rf_sm80", ATTENTION),
        ("varlen_attention_kernel", ATTENTION),
        ("nvjet_tst_128x256_64x4_1x2_h_bz_coopA_bias_TNT", MATMUL),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n", MATMUL),
        ("void at::native::elementwise_kernel<direct_copy_kernel_cuda>", COPY),
        ("Memcpy DtoD (Device -> Device)", COPY),
        ("void at::native::vectorized_elementwise_kernel<4, GeluCUDA>", OTHER),
    ],
)
def test_kernels_are_told_apart_by_name(name, kind):
    assert bench_kernels.kind_of(name) == kind


def test_kernels_are_counted_between_projection_and_output():
    def kernels(*kinds):
        return [Kernel(kind, i, 1.0, kind) for i, kind in enumerate(kinds)]

    layer = (OTHER, MATMUL, COPY, OTHER, COPY, ATTENTION, ATTENTION, COPY, MATMUL, OTHER, MATMUL)
    found = bench_kernels.around_attention(kernels(*layer, *layer))
    assert found["attention"] == 2
    assert (found["in_front"], found["behind"], found["copies"]) == (6, 2, 6)
    none = bench_kernels.around_attention(kernels(MATMUL, COPY, MATMUL))
    assert (none["attention"], none["in_front"], none["behind"]) == (0, 0, 0)


@pytest.mark.parametrize("name", bench_shapes.SHAPES)
def test_a_hand_edited_twin_is_the_same_maths(name):
    subject, paper = bench.named_subject(name, layers=2, scale=0.13, dtype=torch.float32)
    with torch.no_grad():
        ours, theirs = subject.model(*subject.args), subject.twin(*subject.args)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    assert ours.shape == subject.args[0].shape
    for one, other in zip(subject.model.parameters(), subject.twin.parameters()):
        assert one.data_ptr() == other.data_ptr()
    assert paper > 0


def test_bytes_on_paper_are_those_of_the_encoders():
    """ENCODERS: PaddleOCR-VL's page has 3.74 GiB, 1.25 where rope lies between."""
    page = bench_shapes.SHAPES["paddleocr-vl-page"]
    assert bench_shapes.paper_bytes(page, "fa3", 27, 2) / 2**30 == pytest.approx(3.74, abs=0.01)
    rope = bench_shapes.SHAPES["paddleocr-vl-page-rope"]
    assert bench_shapes.paper_bytes(rope, "fa3", 27, 2) / 2**30 == pytest.approx(1.25, abs=0.01)


def test_tokens_change_the_number_of_sequences_or_their_length():
    window = bench_shapes.SHAPES["qwen2.5-vl-windows"]
    assert window.with_tokens(4096).sequences == 64
    assert (window.with_tokens(32).sequences, window.with_tokens(32).tokens) == (1, 32)
    page = bench_shapes.SHAPES["paddleocr-vl-page"].with_tokens(131072)
    assert (page.sequences, page.tokens) == (1, 131072)


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["nothing"], "is no shape; give one of paddleocr-vl-page"),
        (["siglip-b", "--attention", "fa9"], "'fa9' is no attention"),
        (["siglip-b", "--attention", "fa3"], "fa3 needs a CUDA device"),
        (["siglip-b", "--tokens", "many"], "give numbers such as 256,1024,4096"),
        (["siglip-b", "--dtype", "int"], "'int' is no floating-point dtype"),
        (["siglip-b", "--variants", "fast"], "'fast' is no variant"),
        (["siglip-b", "--cuda-graphs", "--scale", "0.1"], "CUDA graphs need inputs on a CUDA"),
        (["cli_factories:tiny", "--tokens", "16"], "--tokens needs a named shape"),
        (["cli_factories:tiny", "--attention", "fa3"], "an op that the model calls itself"),
        (["cli_factories:tiny", "--batch", "2"], "a factory sets its own"),
        (["cli_factories:missing"], "has no 'missing'"),
    ],
)
def test_wrong_options_are_named(run, args, said):  # noqa: F811
    result = run("bench", *args, "--device", "cpu")
    assert result.exit_code == 2, result.output
    assert said in message(result)


@pytest.mark.parametrize("missing", ["rich", "matplotlib"])
def test_a_missing_package_names_its_extra(monkeypatch, missing):
    monkeypatch.setattr(
        bench_cli.importlib.util, "find_spec", lambda name: None if name == missing else True
    )
    options = {"layers": 1, "part": "", "batch": 0, "scale": 1.0, "device": "", "dtype": ""}
    with pytest.raises(BenchError, match=rf'{missing} is not .*pip install "qkvpass\[bench\]"'):
        bench_cli.bench_command(
            "siglip-b",
            attention="",
            tokens="",
            twin="",
            settings=QUICK,
            as_json=False,
            plot="x.png",
            **options,
        )


@pytest.mark.slow
def test_bench_of_a_factory_prints_json(run, tmp_path):  # noqa: F811
    result = run(
        "bench", "cli_factories:tiny", "--device", "cpu", "--rounds", "3", "--json",
        "--variants", "stock,qkvpass", "--twin", "cli_factories:tiny",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    (data,) = json.loads(result.stdout)
    assert data["decisions"]["removed"] >= 3
    assert data["sentence"] and data["paper_bytes"] is None


def test_the_gpu_script_knows_its_jobs(tmp_path):
    names = [job.name for job in gpu_bench.JOBS]
    assert len(set(names)) == len(names)
    for job in gpu_bench.JOBS:
        shape = bench_shapes.SHAPES[job.shape]
        assert bench_shapes.family_for(shape, job.attention)
        Settings(**job.settings)
    # Without time, every job is left out and said so; none is begun.
    command = [sys.executable, gpu_bench.__file__, str(tmp_path), "0.01", names[0]]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert not list(Path(tmp_path).glob("*.json")), done.stdout
