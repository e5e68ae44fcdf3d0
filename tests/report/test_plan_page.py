"""The page about a plan: what is in it, and in a real browser that all of it works, by mouse and by keyboard."""

import json
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from meshwright.cli.main import app
from meshwright.errors import ConfigError
from meshwright.layout import Layout
from meshwright.plan.show.summary import seconds_text
from meshwright.report.candidates import candidates_section
from meshwright.report.markup import table, ticks
from meshwright.report.mesh_map import groups_of
from meshwright.report.page import page as page_of
from tests.browser import Page, opened, why_not
from tests.harness import run_ranks

ROOT = Path(__file__).parents[2]
QUICKSTART = str(ROOT / "examples" / "quickstart.yaml")
RUN = ["layout.pp=2", "layout.tp=2", "layout.dp_shard=2", "-n", "8", "--gpu", "h100"]
SIZE = 400_000

needs_browser = pytest.mark.skipif(bool(why_not()), reason=why_not() or "there is one")

CANDIDATES = [
    {
        "name": f"tp={tp}", "overrides": f"layout.tp={tp}", "tokens_per_second": 1000.0 * tp, "step_seconds": 1 / tp,
        "peak_bytes": tp * 2**30, "fits": tp < 8, "pareto": tp < 8, "limits": "<script>", "proven": tp == 2, "own": tp == 4,
    }
    for tp in (1, 2, 4, 8)
]  # fmt: skip


def invoked(*arguments: str) -> str:
    """The output of `plan`, in a process of its own: a forecast makes process groups."""

    def on_rank(_: int) -> str:
        result = CliRunner().invoke(app, ["plan", *arguments])
        assert result.exit_code == 0, result.output + repr(result.exception)
        return result.output

    (output,) = run_ranks(on_rank, 1, group=False)
    return output


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page about a plan on stages, with another plan beside it and candidates."""
    folder = tmp_path_factory.mktemp("page")

    def on_rank(_: int) -> None:
        from meshwright.cli import plan_files

        (folder / "other.json").write_text(CliRunner().invoke(app, ["plan", QUICKSTART, "--json"]).output)
        write = plan_files.PlanFiles.write

        def with_candidates(*arguments: Any, **more: Any) -> list[str]:
            return write(*arguments, **{**more, "candidates": candidates_section(CANDIDATES, limit_bytes=6 * 2**30)})

        plan_files.PlanFiles.write = with_candidates  # type: ignore[method-assign]
        arguments = ["plan", QUICKSTART, *RUN, f"--diff={folder / 'other.json'}", f"--html={folder / 'plan.html'}"]
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 0, result.output + repr(result.exception)

    run_ranks(on_rank, 1, group=False)
    return folder / "plan.html"


class Outline(HTMLParser):
    """The elements of a page: whether they are closed, and what is inside of which."""

    EMPTY = frozenset(("meta", "link", "input", "br", "path", "line", "rect", "circle", "polyline"))

    def __init__(self) -> None:
        super().__init__()
        self.open: list[tuple[str, dict[str, str | None]]] = []
        self.elements: list[tuple[str, dict[str, str | None], list[str]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs), [name for name, _ in self.open]))
        if tag not in self.EMPTY:
            self.open.append((tag, dict(attrs)))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs), [name for name, _ in self.open]))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop()[0] == tag, (tag, self.getpos())


def outline(text: str) -> Outline:
    found = Outline()
    found.feed(text)
    assert not found.open
    return found


def check_markup(text: str) -> Outline:
    """What every page of ours keeps: closed elements, no address of the network, names for readers of the screen."""
    found = outline(text)
    for name, values, _ in found.elements:
        for key in ("src", "href", "action", "data"):
            assert (values.get(key) or "#").startswith(("#", "data:")), (name, values)
        if name == "th":
            assert values.get("scope") in ("row", "col"), values
        if name in ("svg", "nav", "section") or values.get("role") in ("region", "application", "group"):
            assert values.get("aria-label") or values.get("aria-labelledby"), (name, values)
    for svg in re.findall(r"<svg.*?</svg>", text, re.DOTALL):
        assert re.search(r"<title>[^<]+</title><desc>[^<]+</desc>", svg)
    for one in re.findall(r"<figure.*?</figure>", text, re.DOTALL):
        assert "<figcaption" in one
        assert "<table" in one
    identifiers = [values["id"] for _, values, _ in found.elements if "id" in values]
    assert len(identifiers) == len(set(identifiers))
    described = [values["aria-describedby"] for _, values, _ in found.elements if "aria-describedby" in values]
    assert set(described) <= set(identifiers)
    return found


def test_the_page_says_what_the_plan_says(file: Path) -> None:
    text = file.read_text()
    check_markup(text)
    assert len(text.encode()) < SIZE
    for words in ("Verdict", "A step in time", "Memory over a step", "Ranks and groups", "Units and parameters", "Differences"):
        assert f">{words}</h2>" in text
    assert "fits" in text
    assert re.search(r"[0-9,]+ differences from .*other\.json", text)
    assert "unproven: no audit on record" in text
    assert "&lt;script&gt;" in text  # what others say is text
    data = json.loads(re.search(r'id="data">(.*?)</script>', text, re.DOTALL)[1])  # type: ignore[index]
    assert {group["axis"] for group in data["mesh"]["groups"]} == {"pp", "tp", "dp_shard_cp"}
    assert all(len(row) == len(data["memory"]["times"]) for row in data["memory"]["bytes"])


def test_a_page_without_a_device_says_what_is_missing(tmp_path: Path) -> None:
    output = invoked(QUICKSTART, "-n", "2", f"--html={tmp_path / 'plan.html'}")
    text = (tmp_path / "plan.html").read_text()
    assert f"{tmp_path / 'plan.html'}: open it in a browser" in output.replace("\n", "")
    check_markup(text)
    assert "add --gpu with the name of a device" in text
    assert "Units and parameters" in text


def test_what_cannot_be_written_is_refused(tmp_path: Path) -> None:
    def refused(*arguments: str) -> str:
        result = CliRunner().invoke(app, ["plan", QUICKSTART, *arguments])
        assert isinstance(result.exception, ConfigError), result.output
        return str(result.exception)

    page = f"--html={tmp_path / 'plan.html'}"
    assert "--html and --program: give one of them" in refused(page, "--program")
    assert "is a directory" in refused(f"--html={tmp_path}")
    assert "about one number of ranks" in refused(page, "--search", "--gpu", "h100", "-n", "2,4")
    search = (f"--trace-out={tmp_path / 'step.json'}", "--search", "--gpu", "h100")
    assert "leave --search out" in refused(*search)


@pytest.mark.thorough
def test_the_page_of_a_large_mixture_is_small(tmp_path: Path) -> None:
    shape = str(ROOT / "examples" / "shapes" / "deepseek_v3.yaml")
    invoked(shape, "-n", "2048", "--gpu", "h100", f"--html={tmp_path / 'plan.html'}")
    text = (tmp_path / "plan.html").read_text()
    check_markup(text)
    assert len(text.encode()) < SIZE


def test_groups_are_those_of_the_mesh() -> None:
    layout = Layout(pp=2, dp_replicate=2, dp_shard=2, cp=2, tp=2, ep=4).resolve(32)
    groups = {group.axis: group for group in groups_of(layout)}
    assert groups["tp"].members(5) == [4, 5]
    assert groups["cp"].members(5) == [5, 7]
    assert groups["dp_shard_cp"].members(5) == [1, 3, 5, 7]
    assert groups["dp_replicate"].members(5) == [5, 13]
    assert groups["pp"].members(5) == [5, 21]
    assert groups["ep"].members(5) == [4, 5, 6, 7]
    assert groups["ep_shard"].members(5) == [1, 5]
    for group in groups.values():
        found = {tuple(group.members(rank)) for rank in range(32)}
        assert sorted(rank for members in found for rank in members) == list(range(32))


def test_times_and_scales_are_round() -> None:
    assert ticks(4.12, 10) == [0, 0.5, 1, 1.5, 2, 2.5, 3, 3.5, 4]
    assert [seconds_text(value) for value in (0, 1e-6, 0.0123, 1.5, 1234.5)] == ["0", "1 µs", "12.3 ms", "1.5 s", "1,230 s"]
    assert '<td class="n" data-key="3">x</td>' in table(("a", "b"), [("r", ("x", 3))], numeric=[1])


def test_no_text_ends_the_data_of_a_page() -> None:
    from meshwright.report.markup import Section

    text = page_of("</title>", "<b>", [Section("x", "<i>", "", {"y": "</script><script>"})])
    assert "</script><script>" not in text.replace("</script>\n<script>", "")
    assert "&lt;/title&gt;" in text
    check_markup(text)


# -- in a browser ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser() -> Iterator[Page]:
    with opened() as page:
        yield page


@pytest.fixture
def shown(browser: Page, file: Path) -> Iterator[Page]:
    """The page, afresh; nothing went wrong in the end, and the network was not asked."""
    browser.open(file)
    yield browser
    assert browser.problems == []
    assert browser.requests == []


@needs_browser
def test_a_timeline_can_be_read_by_mouse_and_keyboard(shown: Page) -> None:
    shown.point("#overview svg", 0.02, 0.3)
    assert re.search(r"pp 0: forward; stage 0; microbatch 1; .* from ", shown.text("#overview-readout"))
    shown.run("document.querySelector('#detail .pane').focus()")
    shown.press("Home")
    first = shown.text("#detail-readout")
    assert first.startswith("compute: ")
    shown.press("ArrowRight")
    assert shown.text("#detail-readout") not in (first, "Point at an event.")
    shown.press("ArrowDown")
    assert shown.text("#detail-readout").startswith("fsdp: ")
    inside = (  # the frame is around an event of the second lane
        "(() => { const frame = document.querySelector('#detail .cursor').getBoundingClientRect(); "
        "const all = document.querySelector('#detail svg').getBoundingClientRect(); "
        "const lanes = document.querySelectorAll('#detail [data-lane]').length; "
        "return (frame.top + frame.height / 2 - all.top) / all.height * lanes; })()"
    )
    assert 1 < shown.run(inside) < 2
    shown.press("End", "ArrowRight")  # there is no further one
    assert shown.text("#detail-readout").startswith("fsdp: ")

    def wide() -> float:
        width: float = shown.run("document.querySelector('#detail .wide').clientWidth")
        return width

    before = wide()
    shown.press("+")
    assert wide() == pytest.approx(2 * before, abs=2)
    shown.click('[data-of="detail"][data-zoom="in"]')
    assert wide() == pytest.approx(4 * before, abs=4)
    assert shown.run("document.querySelectorAll('#detail .ticks span').length") > 10
    shown.click('[data-of="detail"][data-zoom="out"]')
    assert wide() == pytest.approx(2 * before, abs=2)
    shown.click('[data-of="detail"][data-zoom="all"]')
    assert wide() == pytest.approx(before, abs=2)


@needs_browser
def test_events_of_the_drawing_are_those_of_the_forecast(shown: Page) -> None:
    """What the script reads from the paths: events of a lane, one behind the other, up to the end of the step."""
    ends = shown.run(
        "[...document.querySelectorAll('#detail [data-lane]')].map((lane) => eventsOf(lane, data.timeline))"
        ".map((events) => [events.length, events.every((one) => one.begin < one.end && one.name !== undefined),"
        " events[events.length - 1].end])"
    )
    assert all(count > 0 and whole for count, whole, _ in ends)
    assert max(end for *_, end in ends) == pytest.approx(1e6, abs=2)


@needs_browser
def test_memory_can_be_read_by_mouse_and_keyboard(shown: Page) -> None:
    shown.point("#memory-chart svg", 0.5, 0.5)
    assert re.search(r": [0-9.]+ [KMG]iB = .*allocator, reserved", shown.text("#memory-chart-readout"))
    shown.run("document.querySelector('#memory-chart .pane').focus()")
    shown.press("Home")
    assert shown.text("#memory-chart-readout").startswith("0, begin: ")
    shown.press("ArrowRight")
    assert not shown.text("#memory-chart-readout").startswith("0, begin: ")
    shown.press("End")
    assert ", update: " in shown.text("#memory-chart-readout")


@needs_browser
def test_groups_light_up(shown: Page) -> None:
    assert "the group of rank 0 is 0, 1 (2 ranks of one node)" in shown.text("#mesh-readout")
    shown.click('input[name="axis"][value="1"]')
    assert "dp_shard_cp" in shown.text("#mesh-readout")
    assert "the group of rank 0 is 0, 2 " in shown.text("#mesh-readout")
    shown.click('[data-group="1"]')
    assert "the group of rank 1 is 1, 3 " in shown.text("#mesh-readout")
    shown.click('[data-group="1"]')
    assert "the group of rank 4 is 4, 6 " in shown.text("#mesh-readout")
    shown.click('[data-group="-1"]')
    assert "the group of rank 1 is 1, 3 " in shown.text("#mesh-readout")
    shown.run("(() => { const one = document.getElementById('rank'); one.focus(); one.select(); })()")
    shown.press("7")
    assert "the group of rank 7 is 5, 7 " in shown.text("#mesh-readout")
    assert shown.run("document.querySelector('#mesh-map .chosen').getAttribute('d').match(/M/g).length") == 2
    shown.press("9")  # 79 is no rank: nothing changes
    assert "the group of rank 7 " in shown.text("#mesh-readout")
    shown.click("#mesh-map", 0.1, 0.2)
    assert "the group of rank 0 " in shown.text("#mesh-readout")


@needs_browser
def test_units_unfold(shown: Page) -> None:
    opened_units = "[...document.querySelectorAll('#units-list > details')].filter((one) => one.open).length"
    shown.run("document.querySelector('#units-list summary').focus()")
    shown.press("Enter")
    assert shown.run(opened_units) == 1
    assert "placements" in shown.text("#units-list details[open]")
    shown.click('[data-unfold="units-list"]')
    assert shown.run(opened_units) == shown.run("document.querySelectorAll('#units-list > details').length") > 1
    shown.click('[data-fold="units-list"]')
    assert shown.run(opened_units) == 0


@needs_browser
def test_candidates_sort_and_filter(shown: Page) -> None:
    rows = "[...document.querySelectorAll('#candidate-table tbody tr')]"
    visible = f"{rows}.filter((row) => !row.hidden).map((row) => row.dataset.row).join()"
    assert shown.run(visible) == "0,1,2,3"
    shown.click('[data-sort="1"]')
    assert shown.run(visible) == "3,2,1,0"
    assert shown.run("document.querySelector('[data-sort=\"1\"]').parentElement.getAttribute('aria-sort')") == "descending"
    shown.click('[data-sort="1"]')
    assert shown.run(visible) == "0,1,2,3"
    shown.click('[data-only="fits"]')
    assert shown.run(visible) == "0,1,2"
    assert shown.text("#candidate-count") == "3 of 4"
    shown.click('[data-only="proven"]')
    assert shown.run(visible) == "1"
    shown.click('[data-only="proven"]')
    shown.run("document.getElementById('candidate-text').focus()")
    shown.press("t", "p", "=", "4")
    assert shown.run(visible) == "2"
    assert shown.run("document.querySelectorAll('#candidate-plot circle.hidden').length") == 3
    shown.point('#candidate-plot circle[data-row="2"]')
    assert shown.text("#candidate-readout").startswith("tp=4 (as it is): 4,000 tokens/s, a step of 250 ms, peak 4.0 GiB")
    assert shown.run("document.querySelector('tr.on').dataset.row") == "2"


@needs_browser
def test_every_control_is_reached_with_the_tabulator(shown: Page) -> None:
    wanted = shown.run(
        "[...document.querySelectorAll('a[href], button, input, summary, [tabindex=\"0\"]')]"
        ".filter((one) => one.checkVisibility() && !(one.type === 'radio' && !one.checked))"
        ".map((one, place) => { one.dataset.place = place; return place; }).length"
    )
    reached = set()
    for _ in range(wanted + 30):
        shown.press("Tab")
        reached.add(shown.run("document.activeElement.dataset.place"))
    assert {str(place) for place in range(wanted)} <= reached


@needs_browser
def test_every_button_can_be_pressed(shown: Page) -> None:
    for place in range(shown.run("document.querySelectorAll('button, summary').length")):
        shown.run(f"document.querySelectorAll('button, summary')[{place}].click()")


@needs_browser
def test_pages_on_a_phone_in_the_dark_and_printed(shown: Page, file: Path) -> None:
    ground = "getComputedStyle(document.body).backgroundColor"
    light = shown.run(ground)
    shown.open(file, width=390, height=844, phone=True)
    assert shown.run("document.documentElement.scrollWidth") <= 390
    shown.open(file, dark=True)
    assert shown.run(ground) != light
    shown.call("Emulation.setEmulatedMedia", media="print")
    assert not shown.run("document.querySelector('nav').checkVisibility()")
    assert not shown.run("document.querySelector('.controls').checkVisibility()")
    shown.call("Emulation.setEmulatedMedia", media="")
    shown.run("dispatchEvent(new Event('beforeprint'))")
    assert shown.run("[...document.querySelectorAll('details')].every((one) => one.open)")
