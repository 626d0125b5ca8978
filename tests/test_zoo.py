"""One or two encoders of each family, as ``make zoo`` runs all of them.

Every graph runs as it came and as the pass left it, for both targets: bits, strides and metas
agree. What goes and what stays is what the accepted results say.
"""

from __future__ import annotations

import platform
import random

import pytest
import run_zoo
import torch
import zoo

KEYS = [
    "transformers:clip.CLIPVisionModel",
    "transformers:llama4.Llama4VisionModel",
    "transformers:qwen2_5_vl.Qwen2_5_VisionTransformerPretrainedModel",
    "transformers:mlcd.MLCDVisionModel",
    "transformers:sam.SamVisionModel",
    "transformers:bridgetower.BridgeTowerVisionModel",
    "timm:eva02_base_patch14_224",
    "transformers:vjepa2.VJEPA2Model",
    "transformers:blip.BlipVisionModel",
    "timm:coatnet_0_224",
]
ROWS = {row.key: row for row in zoo.ROWS}


@pytest.mark.parametrize("key", KEYS)
def test_encoder(key: str) -> None:
    row = ROWS[key]
    pytest.importorskip(row.library)
    seed = random.randrange(1 << 30)
    try:
        found = run_zoo.examine(row, seed)
    except zoo.NotBuilt as error:
        pytest.skip(str(error))
    assert not run_zoo.faults(row, "ran", found), seed
    expected = run_zoo.found_in(run_zoo.load(zoo.EXPECTED)[key])
    here = ".".join(platform.python_version_tuple()[:2]), ".".join(torch.__version__.split(".")[:2])
    if found.attention != expected.attention and here != zoo.ACCEPTED_ON:
        pytest.skip(
            "Dynamo breaks, or Inductor fuses, another graph of it on this Python and torch"
        )
    assert run_zoo.outcome("ran", found) == run_zoo.outcome("ran", expected)


def test_every_row_has_a_result() -> None:
    """And no result is of a row that is gone; each is free of faults."""
    results = run_zoo.load(zoo.EXPECTED)
    assert set(results) == set(ROWS) and len(ROWS) == len(zoo.ROWS)
    for key, (state, data) in results.items():
        assert not run_zoo.faults(ROWS[key], state, run_zoo.found_in((state, data))), key


def test_faults_are_seen() -> None:
    """A wrong number, a crash, and a change where nothing may change."""
    plain = next(row for row in zoo.ROWS if row.family == "F0")
    clean = run_zoo.Found()
    assert not run_zoo.faults(plain, "ran", clean)
    assert run_zoo.faults(plain, "crash", None) == ["crash"]
    assert run_zoo.faults(plain, "ran", run_zoo.Found(wrong=["eager: off by one"]))
    assert run_zoo.faults(plain, "ran", run_zoo.Found(eager={"query": 1}))
    gone = run_zoo.Copies("query", "removed", 2, detail="said")
    moved = ["op", [[[2], [1], 0]], [[[2], [3], 0]], 2]
    touched = run_zoo.Found(touched=True, copies=[gone], received=[moved])
    assert run_zoo.faults(plain, "ran", touched) == ["the graph was changed"]
    useful = next(row for row in zoo.ROWS if row.family == "F3")
    assert not run_zoo.faults(useful, "ran", touched)
    touched.received = []
    assert run_zoo.faults(useful, "ran", touched)


def test_published_rows_exist() -> None:
    assert set(zoo.PUBLISHED) <= set(ROWS) and set(zoo.COMPILED) <= set(ROWS)
    assert {row.family for row in zoo.ROWS} <= set(zoo.FAMILIES)


def test_page_is_made_from_the_results() -> None:
    text = run_zoo.render(run_zoo.load(zoo.EXPECTED), "")
    body = text.partition("## Families")[2]
    assert body and body in zoo.PAGE.read_text()
