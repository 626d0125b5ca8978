"""The HTML report: what it says, and how a browser shows it."""

import re
import shutil
import sys

import families
import pytest
import torch
from test_cli import (
    factories,  # noqa: F401
    run,  # noqa: F401  # the command line, with factories to explain
)

import qkvpass
from qkvpass import html
from qkvpass.reason import Reason
from qkvpass.report import CopyDecision, Report


class Both(torch.nn.Module):
    """Copies that go (F3), then copies that an in-place norm keeps (F6)."""

    def __init__(self):
        super().__init__()
        self.goes, self.stays = families.F3(), families.F6()

    def forward(self, x):
        return self.stays(self.goes(x)[0])


@pytest.fixture(scope="module")
def report():
    with torch.random.fork_rng():
        return qkvpass.explain(Both(), torch.randn(2, 16, families.DIM))


def copy(node="clone", nbytes=2048, reason=Reason.REMOVED, attention="attn", **more):
    given = {"kind": "aten.clone", "op": "x::attn", "operand": "q", "detail": "", "source": ""}
    return CopyDecision(
        node=node, nbytes=nbytes, reason=reason, attention=attention, **(given | more)
    )


def test_every_copy_has_its_row_and_marks_its_line(report, tmp_path):
    report.to_html(tmp_path / "out.html")
    text = (tmp_path / "out.html").read_text()
    assert report.removed and report.kept
    for number, one in enumerate(report.copies, 1):
        row = re.search(rf'<tr id="copy-{number}".*?</tr>', text, re.S)[0]
        assert f"<code>{one.reason.value}</code>" in row
        assert f"<code>{one.source}</code>" in row
        line = re.search(rf'<tr id="line-{number}" class="(.*?)">(.*?)</tr>', text, re.S)
        assert ("removed" if one.removed else "kept") in line[1]
        assert f" {one.node}: " in line[2]


def test_a_removed_line_has_none_beside_it_and_the_others_do(report):
    rows = list(html.side_by_side(report))
    assert [row.before for row in rows if row.before is not None] == report.before.splitlines()
    assert [row.after for row in rows if row.after is not None] == report.after.splitlines()
    marked = {row.number: row for row in rows if row.number}
    assert sorted(marked) == list(range(1, len(report.copies) + 1))
    for number, row in marked.items():
        gone = report.copies[number - 1].removed
        assert (row.after is None) == gone
        assert row.verdict == ("removed" if gone else "kept")


def test_names_that_two_graphs_share_are_marked_once_in_each():
    line = '    clone: "f32[2][1]cpu" = torch.ops.aten.clone.default(x)'
    one = Report((copy(),), (), line, "")
    two = Report((copy(reason=Reason.MUTATED),), (), line, line)
    merged = Report.merge([one, two])
    marked = [(row.number, row.verdict) for row in html.side_by_side(merged) if row.number]
    assert marked == [(1, "removed"), (2, "kept")]
    assert [label for label, _ in html.layers(merged)] == ["attn", "graph 1: attn"]


def test_chart_adds_up_what_went_and_what_stayed(report):
    chart = html.chart_of(report)
    assert len(chart.bars) == len(report.attention_ops)
    gone = sum(c.nbytes for c in report.removed)
    assert f"{gone / 1024:.1f} KiB removed" == chart.bars[0].text
    assert "kept" in chart.bars[1].text and not chart.bars[1].removed
    ratio = chart.bars[0].removed / chart.bars[1].kept
    assert ratio == pytest.approx(gone / sum(c.nbytes for c in report.kept))


@pytest.mark.parametrize(
    ("sizes", "texts"),
    [
        (("4*s0", "8*s0"), ["12*s0 B removed"]),
        (("4*s0*s1", "2*s0*s1*3"), ["10*s0*s1 B removed"]),
        (("4*s0", "8*s1"), None),
        (("4*s0", 8), None),
    ],
)
def test_chart_of_dynamic_sizes(sizes, texts):
    copies = tuple(copy(node=f"clone_{i}", nbytes=size) for i, size in enumerate(sizes))
    chart = html.chart_of(Report(copies, (), "", ""))
    assert (None if chart is None else [bar.text for bar in chart.bars]) == texts


def test_folded_copies_are_not_drawn():
    copies = (copy(), copy(node="clone_1", folded=True))
    chart = html.chart_of(Report(copies, (), "", ""))
    assert [bar.text for bar in chart.bars] == ["2.0 KiB removed"]
    assert "1 fused" in chart.rest


def test_text_is_escaped_and_empty_reports_have_a_page():
    hostile = copy(detail="<script>alert(1)</script>", source="<b>.py:1")
    text = html.page(Report((hostile,), (), "a < b", "a < b", name="<i>"))
    assert "<script" not in text and "<b>.py" not in text and "<i>" not in text
    assert "a &lt; b" in text
    text = html.page(Report((), (), "", "", fault="ValueError: no"))
    assert "No copy was found" in text and "ValueError: no" in text


def test_missing_jinja_names_the_extra(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(ModuleNotFoundError, match=r'pip install "qkvpass\[html\]"'):
        Report((), (), "", "").to_html(tmp_path / "out.html")
    assert not (tmp_path / "out.html").exists()


def test_explain_writes_the_page(run, tmp_path):  # noqa: F811
    path = tmp_path / "out.html"
    result = run("explain", "cli_factories:tiny", "--html", str(path))
    assert result.exit_code == 0, result.output
    assert "attention op" in result.output  # the text is printed as well
    assert 'id="copy-1"' in path.read_text()
    result = run("explain", "cli_factories:tiny", "--html", str(tmp_path / "no" / "out.html"))
    assert result.exit_code == 2


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api")
    names = ("chromium", "chromium-browser", "google-chrome")
    found = next((path for name in names if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip(f"no browser: none of {', '.join(names)} is on the PATH")
    quiet = ("--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-sync")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=found, args=list(quiet))
        yield browser
        browser.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_browser_shows_the_page(browser, report, tmp_path, scheme):
    path = tmp_path / "out.html"
    report.to_html(path)
    page = browser.new_page(color_scheme=scheme, viewport={"width": 1300, "height": 900})
    requests, said = [], []
    page.on("request", lambda request: requests.append(request.url))
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.goto(path.as_uri())

    assert page.title() == f"qkvpass: {report.name}"
    assert page.locator("#copies tbody tr").count() == len(report.copies)
    assert page.locator("#copies tr.removed").count() == len(report.removed)
    assert (
        page.locator("#summary .card")
        .first.inner_text()
        .startswith(f"{len(report.removed)} of {len(report.copies)}")
    )
    gone = page.locator(".graph tr.removed td:first-child").first
    assert "line-through" in gone.evaluate("e => getComputedStyle(e).textDecoration")
    bars = page.locator("#bytes svg rect.removed")
    assert bars.first.bounding_box()["width"] > 50

    shown = page.locator(".graph tbody tr:visible")
    everything = shown.count()
    page.check("#changed-only")
    assert 0 < shown.count() < everything
    page.click("#copy-1 a")  # leads to the line of the graph
    assert page.locator("#line-1").is_visible()

    back = page.evaluate("getComputedStyle(document.body).backgroundColor")
    light = sum(int(part) for part in re.findall(r"\d+", back)[:3]) > 3 * 128
    assert light == (scheme == "light")
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    picture = page.screenshot(path=tmp_path / f"{scheme}.png", full_page=True)
    assert len(picture) > 20_000
    assert requests == [path.as_uri(), *[url for url in requests[1:] if url.startswith("data:")]]
    assert not said
    page.close()
