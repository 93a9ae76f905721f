"""The report as a page, in a real browser: it loads without errors and shows the JSON's figures."""

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser

import pytest
import report_models

from shardwise.cli.model import explain_step
from shardwise.comm.collectives import show_bytes
from shardwise.planner.costs import Constants
from shardwise.report import Case, Mesh, write_html
from shardwise.report.html import write_page

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    folder = tmp_path_factory.mktemp("page")
    (folder / "plan.toml").write_text(report_models.TENSOR_PLAN)
    case = Case("report_models:mlp", str(folder / "plan.toml"))
    report = explain_step(case, Mesh.parse("dp=2,tp=2"), "adamw")
    report.facts["odd"] = "</script><script>document.title = 'broken'</script>"
    write_html(report, folder / "report.html")
    return folder / "report.html"


class Elements(HTMLParser):
    """All elements' attributes, and the text of the element `data`."""

    def __init__(self, text):
        super().__init__()
        self.found, self.shown, self.data, self._inside = [], [], "", False
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.found.append((tag, dict(attributes)))
        self._inside = dict(attributes).get("id") == "data"

    def handle_endtag(self, tag):
        self._inside = False

    def handle_data(self, data):
        if self._inside:
            self.data += data
        else:
            self.shown.append(data)


def check_figures(elements):
    content = json.loads(elements.data)
    bars = {
        (int(a["data-rank"]), a["data-kind"]): int(a["data-bytes"])
        for _, a in elements.found
        if "data-kind" in a
    }
    for rank, memory in zip(content["ranks"], content["memory"], strict=True):
        assert memory == {kind: bars[rank, kind] for kind in memory}
        assert f"peak {show_bytes(memory['peak'])}" in elements.shown
    flames = {
        a["data-module"]: int(a["data-bytes"]) for _, a in elements.found if "data-module" in a
    }
    assert flames[""] == content["totals"]["bytes"]
    for module, size in flames.items():
        inside = [
            each["num_bytes"]
            for each in content["collectives"]
            if not module or each["module"] == module or each["module"].startswith(f"{module}.")
        ]
        assert size == sum(inside)
    boxes = [(a["data-box"], a["data-ranks"]) for _, a in elements.found if "data-box" in a]
    assert boxes == [
        (
            ", ".join(f"{start}:{stop}" for start, stop in part["box"]),
            " ".join(map(str, part["ranks"])),
        )
        for parameter in content["parameters"]
        for part in parameter["parts"]
    ]
    lanes = {a["data-lane"]: int(a["data-number"]) for _, a in elements.found if "data-lane" in a}
    assert lanes["collectives"] == len(content["collectives"])


def test_nothing_is_loaded_from_elsewhere(page):
    elements = Elements(page.read_text())
    for tag, attributes in elements.found:
        assert tag not in ("link", "img", "iframe")
        assert not {"src", "href"} & attributes.keys(), (tag, attributes)
    assert "url(" not in page.read_text()


def test_figures_equal_the_json(page):
    check_figures(Elements(page.read_text()))


@pytest.mark.skipif(BROWSER is None, reason="no chromium on this machine")
@pytest.mark.parametrize("width", [390, 1200], ids=["phone", "desk"])
def test_in_a_browser(page, width, tmp_path):
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--v=0"]
    flags += [f"--user-data-dir={tmp_path / 'profile'}", f"--window-size={width},2000"]
    ran = subprocess.run(
        [BROWSER, *flags, "--dump-dom", page.as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert not re.search(r"CONSOLE.*(error|refused|failed)", ran.stderr, re.IGNORECASE)
    elements = Elements(ran.stdout)
    check_figures(elements)
    assert "<title>report_models:mlp</title>" in ran.stdout


def test_no_link_beside_the_page_is_followed(tmp_path):
    """Of the name that the half-written page once had: anybody could guess it."""
    (tmp_path / "precious").write_text("mine")
    (tmp_path / ".report.html.half").symlink_to(tmp_path / "precious")
    write_page("<p>new</p>", tmp_path / "report.html")
    assert (tmp_path / "precious").read_text() == "mine"
    assert (tmp_path / "report.html").read_text() == "<p>new</p>"
    assert not (tmp_path / "report.html").is_symlink()
    Constants.of("cpu").save(tmp_path / "own.json")
    assert sorted(p.name for p in tmp_path.glob(".*")) == [".report.html.half"]
