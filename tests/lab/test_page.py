"""lab/page.py: a browser draws the page."""

import re
import shutil
import subprocess

import pytest

from lab.page import page
from lab.results import read_records

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome-headless-shell")


def test_a_browser_draws_it(tmp_path):
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        pytest.skip(f"no browser: none of {', '.join(BROWSERS)}")
    records = read_records()
    for name in ("<!-- x", "</script>x"):  # no tags
        records.models[f"/{name}"] = records.models["softmax_muon_lr=0.04"]
    html = page(records)
    (tmp_path / "index.html").write_text(html, encoding="utf-8")
    options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}"]
    command = [browser, *options, "--dump-dom", (tmp_path / "index.html").as_uri()]
    dom = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    drawn = re.sub("<script.*?</script>", "", dom, flags=re.DOTALL)  # its source has both tags
    assert drawn.count("<tr data-name=") > 10 and drawn.count('<g class="line"') >= 5
    assert "&lt;!-- x</td>" in drawn and "&lt;/script&gt;x</td>" in drawn
