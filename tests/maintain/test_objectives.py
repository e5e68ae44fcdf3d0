"""The table of objectives in the support matrix: written from data, each row of ours in it, and nothing else on the page."""

import json
from pathlib import Path

from maintain.objectives import BEGIN, CLOSE, DATA, END, OBJECTIVES, PAGE, section, write_section

ROOT = Path(__file__).parents[2]


def test_the_page_has_what_was_found() -> None:
    page = (ROOT / PAGE).read_text()
    assert "\n".join(section()) in page
    assert page.count(BEGIN) == page.count(END) == 1
    rows = json.loads(DATA.read_text())["rows"]
    assert list(rows) == [row.label for row in OBJECTIVES]
    assert all(len(cells) == 9 and all(float(cell) < CLOSE for cell in cells.values()) for cells in rows.values())


def test_only_the_section_is_written(tmp_path: Path) -> None:
    page, data = tmp_path / "page.md", tmp_path / "data.json"
    data.write_text(json.dumps({"versions": {"torch": "1", "transformers": "2"}, "rows": {"`a`": {"x": 0.0, "y": "differs"}}}))
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    write_section(page, data)
    written = page.read_text()
    assert written.startswith(f"before\n{BEGIN}\n")
    assert written.endswith(f"| `a` | 0e+00 | **differs** |\n\n{END}\nafter\n")
    write_section(page, data)
    assert page.read_text() == written
