"""results/: its tables are what its rows give, and its prose has no number that no table has."""

import re

import pytest
from conftest import one_line

from infra.files import read_text
from lab import page, results
from lab.results import FIGURES, FOLDER, PAGES, redraw
from measure import read_runs

# 0.09 as .09; no sizes, versions and arXiv numbers
DECIMAL = re.compile(r"(?<![\w.])0?(\d*\.\d+)(?![\w.]|M\b)")
CODE = re.compile(r"```.*?```|`[^`]*`|\]\([^)]*\)|\[\d{4}\.\d{5}|Section [\d.]+", re.DOTALL)
ELSEWHERE = {
    "results/README.md": {".2", "1.02"},  # the share of 32-grams, the bound of parameters
    "results/context.md": {".02", ".12", ".26"},  # Muon's rate, tokens a parameter
    "results/papers.md": {".06", ".09"},  # two standard deviations over seeds
}


@pytest.fixture(scope="module")
def records():
    return results.read_records()


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_pages_have_the_tables_that_the_rows_give(page, records):
    text = read_text(page)
    assert redraw(text, records) == text


def test_each_table_stands_in_one_page():
    names = [name for page in PAGES for _, name, _ in results.MARKED.findall(read_text(page))]
    assert sorted(names) == sorted(results.TABLES)


@pytest.mark.parametrize("name", ELSEWHERE)
def test_each_decimal_number_of_the_prose_stands_in_a_table(name):
    text = read_text(FOLDER.parent / name)
    tables = "".join(match[0] for match in results.MARKED.finditer(text))
    known = {*DECIMAL.findall(tables)} | ELSEWHERE[name]
    prose = CODE.sub("", results.MARKED.sub("", text))
    assert {*DECIMAL.findall(prose)} <= known


def test_figures_and_the_interactive_page(records, tmp_path):
    for name, draw in FIGURES.items():
        draw(records, tmp_path / name)
        assert (FOLDER / "figures" / name).exists()
    html = page.page(records)
    assert (FOLDER / "index.html").read_text(encoding="utf-8") == html
    assert not re.search(r'(src|href)="?(https?:)?//', html)  # nothing is fetched


def test_each_run_of_the_rows_is_in_the_table_of_runs(records):
    runs = [run for rows in records.models.values() for run in rows["run"].unique()]
    known = read_runs(FOLDER)["run"]
    assert sorted(runs) == sorted(known) and known.is_unique


def test_an_unknown_table(records):
    with one_line("table bord: expected one of"):
        redraw("<!-- table bord -->\n<!-- end -->\n", records)
