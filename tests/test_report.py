"""Report: text within its width, JSON that round-trips, sums of bytes, honest about nothing."""

import json
import pickle

import pytest

from qkvpass.reason import Reason
from qkvpass.report import AttentionOp, CopyDecision, Report, add_bytes, human_bytes

CPU_FLASH = "aten::_scaled_dot_product_flash_attention_for_cpu"


def copy(node="clone", operand="q", reason=Reason.REMOVED, nbytes=4096, **changed):
    facts = {
        "kind": "aten.clone",
        "op": "fam::varlen",
        "detail": "",
        "source": "encoder.py:42",
    }
    return CopyDecision(
        node=node, operand=operand, reason=reason, nbytes=nbytes, **(facts | changed)
    )


def attention(node="varlen", op="fam::varlen", status="declared", copies=3, note=""):
    return AttentionOp(node, op, status, copies, note)


def report(copies=(), ops=(), before="a = 1\nb = 2\nc = 3", after="a = 1\nc = 3", **changed):
    return Report(tuple(copies), tuple(ops), before, after, **changed)


def layers(count):
    return [
        copy(f"clone_{3 * layer + i}", operand, detail=f"view_{layer} reads strides (3456, 72, 1)")
        for layer in range(count)
        for i, operand in enumerate("qkv")
    ]


def test_removed_and_kept_split_the_copies_in_order():
    kept = copy("clone_1", "k", Reason.MUTATED)
    made = report([copy(), kept, copy("clone_2", "v", Reason.REMOVED_CASCADE)])
    assert [c.node for c in made.removed] == ["clone", "clone_2"]
    assert made.kept == (kept,)


@pytest.mark.parametrize("reason", Reason)
def test_every_reason_round_trips_and_prints(reason):
    made = report([copy(reason=reason)], [attention()])
    assert Report.from_json(made.to_json()) == made
    assert reason.value in str(made)


def test_json_round_trips_every_field():
    made = report(
        [
            copy(evidence="certificate of 2026-01-01", folded=True),
            copy("clone_1", "k, v", Reason.ALIGNMENT, "4608*s27", detail="stride 5 is 10 bytes"),
        ],
        [attention(), attention("varlen_1", copies=0, note="q, k, v are views already")],
        name="encoder",
        seconds=0.25,
        cached=True,
        fault="KeyError: 'x'",
        notes=("one", "two"),
    )
    assert Report.from_json(made.to_json()) == made


def test_json_is_plain_and_numbered():
    made = report([copy(), copy("clone_1", "k", Reason.MUTATED)])
    data = json.loads(made.to_json())
    assert data["schema"] == 1
    assert data["summary"] == {
        "copies": 2,
        "removed": 1,
        "kept": 1,
        "folded": 0,
        "removed_bytes": 4096,
    }
    assert [c["reason"] for c in data["copies"]] == ["removed", "mutated"]
    assert [c["removed"] for c in data["copies"]] == [True, False]


def test_json_of_a_later_minor_version_is_read():
    data = json.loads(report([copy()]).to_json())
    data["new"] = data["copies"][0]["new"] = 1
    assert Report.from_json(json.dumps(data)) == report([copy()])


@pytest.mark.parametrize("text", ['{"schema": 2}', "[]", "{}", "not json"])
def test_other_json_is_refused(text):
    with pytest.raises(ValueError):
        Report.from_json(text)


def test_missing_field_is_named():
    data = json.loads(report().to_json())
    del data["after"]
    with pytest.raises(ValueError, match="'after'"):
        Report.from_json(json.dumps(data))


def test_pickles():
    made = report([copy()], [attention()])
    assert pickle.loads(pickle.dumps(made)) == made


def test_diff_marks_what_went():
    assert "-b = 2" in report().diff().splitlines()
    assert "+b = 2" not in report().diff()
    assert report(after="a = 1\nb = 2\nc = 3").diff() == ""


def test_summary_counts_and_adds():
    copies = [copy(f"clone_{i}", nbytes=2**30) for i in range(12)]
    copies += [copy(f"kept_{i}", reason=Reason.UNTAGGED_OP) for i in range(2)]
    last = str(report(copies)).splitlines()[-1]
    assert last == "removed 12 of 14 copies, 12.0 GiB of traffic; kept 2 (2 untagged-op)"


def test_folded_copies_claim_no_traffic():
    made = report([copy(nbytes=1024), copy("clone_1", nbytes=2048, folded=True)])
    assert made.removed_bytes == 1024
    assert [c.node for c in made.folded] == ["clone_1"]
    text = str(made)
    assert "removed 2 of 2 copies, 1.0 KiB of traffic (1 of them Inductor would have fused" in text
    assert "no kernel saved" in text


def test_nothing_removed():
    assert str(report([copy(reason=Reason.UNTAGGED_OP)])).endswith(
        "removed none of 1 copy (1 untagged-op)"
    )


def test_kept_bytes_are_not_counted():
    assert report([copy(reason=Reason.MUTATED, nbytes=7), copy(nbytes=5)]).removed_bytes == 5


@pytest.mark.parametrize(
    ("values", "total"),
    [
        ([], 0),
        ([1, 2], 3),
        (["4608*s27", "4608*s27", "4608*s27"], "13824*s27"),
        (["4608*s27", 10, "2*s0*s1", 5], "4608*s27 + 2*s0*s1 + 15"),
        (["s0", "s0"], "2*s0"),
        (["4*s0 + 8", "4*s0 + 8", 1], "2*(4*s0 + 8) + 1"),
        (["4*(s0//2)"], "(4*(s0//2))"),
    ],
)
def test_bytes_add_up(values, total):
    assert add_bytes(values) == total


@pytest.mark.parametrize("left", ["4608*s27", "4*s0 + 8", "s0", "4*(s0//2)", "s0 - 1", 12])
@pytest.mark.parametrize("right", ["4608*s27", "4*s0 + 8", "s0*s27", "s0**2", 0])
def test_symbolic_sums_are_worth_their_parts(left, right):
    sizes = {"s0": 6, "s27": 11}
    parts = [left, right, left]
    assert eval(str(add_bytes(parts)), sizes) == sum(eval(str(part), sizes) for part in parts)


def test_symbolic_bytes_in_table_and_summary():
    made = report([copy(nbytes="4608*s27"), copy("clone_1", "k", nbytes="4608*s27")])
    assert made.removed_bytes == "9216*s27"
    assert "4608*s27 B" in str(made)
    assert "removed 2 of 2 copies, 9216*s27 B of traffic; kept 0" in str(made)


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1024**2 - 1, "1.0 MiB"),
        (int(3.74 * 2**30), "3.7 GiB"),
        (5 * 2**40, "5.0 TiB"),
        (3000 * 2**40, "3000.0 TiB"),
    ],
)
def test_human_bytes(nbytes, text):
    assert human_bytes(nbytes) == text


def test_layers_share_a_row():
    text = str(report(layers(27)))
    rows = [line for line in text.splitlines() if "removed  " in line]
    assert len(rows) == 3
    assert all(row.startswith("27x") for row in rows)
    assert "clone_0, aten.clone (and 26 more like it): view_0 reads strides" in text


def test_layers_that_differ_have_rows_of_their_own():
    copies = [copy(nbytes=8), copy("clone_1", nbytes=16)]
    assert sum("removed  " in line for line in str(report(copies)).splitlines()) == 2


@pytest.mark.parametrize("width", [60, 80, 100, 160])
def test_text_fits_its_width(width):
    wide = copy(
        op=CPU_FLASH,
        operand="query, key, value",
        reason=Reason.NO_ATTENTION_CONSUMER,
        detail="the view that " + "merges dims " * 30,
        nbytes="2*s0*s1*Max(1, s2)*((s3 + 7)//8) + 4608*s27",
        source="modeling_very_long_file_name_for_a_model.py:12345",
        evidence="a fact " * 40,
    )
    made = report(
        [wide, *layers(2)],
        [attention(op=CPU_FLASH), attention(copies=0, note="n" * 300)],
        name="x " * 90,
        fault="e" * 300,
        notes=("long " * 50,),
    )
    text = made.text(width)
    # Below 95 columns the narrowest table is wider than the page.
    limit = max(width, 96)
    assert max(map(len, text.splitlines())) <= limit
    assert Reason.NO_ATTENTION_CONSUMER.value in text


def test_default_width_is_100_and_keeps_both_ends_of_an_op():
    text = str(report([copy(op=CPU_FLASH)]))
    assert max(map(len, text.splitlines())) <= 100
    assert CPU_FLASH[:6] in text and CPU_FLASH[-10:] in text


def test_details_are_indented_under_their_row():
    lines = str(report([copy(reason=Reason.MUTATED, detail="norm writes it")])).splitlines()
    row = next(i for i, line in enumerate(lines) if "mutated" in line)
    assert lines[row + 1] == "    clone, aten.clone: norm writes it"


def test_copies_far_from_attention_are_one_line():
    far = {"reason": Reason.NO_ATTENTION_CONSUMER, "op": "", "operand": "", "nbytes": 1024}
    copies = [copy(), copy("a", source="m.py:1", **far), copy("b", source="m.py:2", **far)]
    text = str(report(copies))
    assert "elsewhere: 2 copies (2.0 KiB) reach no attention op: m.py:1, m.py:2" in text
    assert "aten.clone" in text and "\n    a, aten.clone" not in text
    assert text.endswith("kept 2 (2 no-attention-consumer)")


def test_evidence_is_said_once():
    copies = [copy(f"clone_{i}", name, evidence="a fact") for i, name in enumerate("qkv")]
    assert str(report(copies)).count("evidence for fam::varlen: a fact") == 1


def test_nothing_matched_without_attention():
    text = str(report())
    assert "nothing matched: no attention op in the graph" in text
    assert "stride tag" in text


def test_nothing_matched_with_attention_says_why():
    ops = [
        attention(f"sdpa_{i}", CPU_FLASH, copies=0, note="q, k, v are views already")
        for i in range(12)
    ]
    text = " ".join(str(report(ops=ops)).split())
    assert f"12x {CPU_FLASH} (declared): q, k, v are views already" in text
    assert "nothing matched: 12 attention ops seen, none with a copy in front" in text


def test_attention_ops_are_listed_with_their_copies():
    text = str(report([copy()], [attention(copies=1), attention("varlen_1", copies=1)]))
    assert "attention: 2x fam::varlen (declared): 1 copy each" in text


def test_cached_fault_and_notes_are_said():
    text = str(report(cached=True, fault="KeyError: 'val'", notes=("epilogue changed",)))
    assert "cached" in text.splitlines()[0]
    assert "fault: KeyError: 'val'" in text
    assert "left as it was" in text
    assert "note: epilogue changed" in text
    assert "fault" not in str(report())
    assert "cached" not in str(report())


def test_merge_joins_graphs():
    one = report([copy()], [attention()], name="one", seconds=1.0, notes=("a",), cached=True)
    two = report([copy("x")], [attention("y")], name="two", seconds=2.0, fault="oops")
    merged = Report.merge([one, two])
    assert [c.node for c in merged.copies] == ["clone", "x"]
    assert [op.node for op in merged.attention_ops] == ["varlen", "y"]
    assert merged.before.startswith("# graph one\na = 1")
    assert "# graph two\n" in merged.after
    assert merged.seconds == 3.0
    assert merged.fault == "two: oops"
    assert merged.notes == ("one: a", "one: cached")
    assert not merged.cached
    assert "-b = 2" in merged.diff()


def test_merge_of_one_or_none():
    one = report([copy()])
    assert Report.merge([one]) is one
    assert Report.merge([]).copies == ()
    assert not Report.merge([]).cached
    assert "nothing matched" in str(Report.merge([]))


def test_merge_of_cached_reports_is_cached():
    assert Report.merge([report(cached=True), report(cached=True)]).cached
