"""lab/page.py: the page has the numbers of the tables, and a browser draws them."""

import json
import re
import shutil
import subprocess

import pytest

from infra.cli import UserError
from lab.page import page
from lab.report import RESULTS

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome-headless-shell")


@pytest.fixture(scope="module")
def html() -> str:
    return page(RESULTS)


def test_the_committed_page_has_the_numbers_of_the_committed_tables(html: str):
    assert (RESULTS / "index.html").read_text(encoding="utf-8") == html
    match = re.search(r'type="application/json">(.*?)</script>', html)
    assert match
    data = json.loads(match[1])
    text = (RESULTS / "README.md").read_text(encoding="utf-8")
    for name, scale in data["scales"].items():
        table = text.partition(f"## Scale {name}\n")[2].partition("![")[0]
        rows = [
            line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| ")
        ]
        shown = []
        for each in scale["variants"]:
            pairs = zip(each["losses"], each["spreads"], strict=True)
            losses = [
                "–" if m is None else f"{m:.3f}" + (f" ±{s:.3f}" if s is not None else "")
                for m, s in pairs
            ]
            shown.append([each["name"], each["rope"], str(each["seeds"]), each["lr"], *losses])
        assert shown == [row[: 4 + len(scale["lengths"])] for row in rows[2:]]
    assert not re.search(r'(src|href)="?(https?:)?//', html)  # nothing is fetched


def test_a_browser_draws_it(html: str, tmp_path):
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        pytest.skip(f"no browser: none of {', '.join(BROWSERS)}")
    (tmp_path / "index.html").write_text(html, encoding="utf-8")
    options = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        f"--user-data-dir={tmp_path}",
        "--dump-dom",
    ]
    command = [browser, *options, (tmp_path / "index.html").as_uri()]
    dom = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    # whose source has both tags once
    drawn = re.sub("<script.*?</script>", "", dom, flags=re.DOTALL)
    assert drawn.count("<tr data-name=") == 61 and drawn.count('<g class="line"') == 7


def test_a_folder_without_records(tmp_path):
    with pytest.raises(UserError, match="expected the records of a scale"):
        page(tmp_path)
    (tmp_path / "notes.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(UserError, match=r"notes.jsonl: expected the records of a scale"):
        page(tmp_path)
