"""How large the repository is, in tokens of Python and words of pages, and that its links hold."""

import ast
import io
import re
import subprocess
import tokenize
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LAYOUT = (
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
)
PARTS = ("hub", "lab", "benchmarks", "tests", "results")
BOUNDS = {"core": 80_900, "lab": 24_000, "hub": 10_500, "benchmarks": 9_250, "tests": 112_700}
LINK = re.compile(r"\]\(([^)\s]+)\)")


@cache
def tracked(ending):
    if not (ROOT / ".git").exists():
        pytest.skip("no git checkout")
    command = ["git", "ls-files", f"*{ending}"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    files = [ROOT / line for line in listed.stdout.splitlines()]
    return [file for file in files if file.exists()]


def docstrings(source):
    """Where the docstrings of a source begin, as line and column."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        if isinstance(node, documented) and ast.get_docstring(node, clean=False) is not None:
            found.add((node.body[0].lineno, node.body[0].col_offset))
    return found


def count_tokens(source):
    """Tokens of Python without comments, docstrings, line ends and indentation."""
    skipped = docstrings(source)
    n = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in LAYOUT and token.start not in skipped:
            n += 1
    return n


def prose(page):
    """A page without code, pictures, tables and the addresses of links."""
    page = re.sub(r"^```.*?^```", "", page, flags=re.DOTALL | re.MULTILINE)
    page = re.sub(r"!\[.*?\]\(.*?\)", "", page)
    page = LINK.sub("]", page)
    return "\n".join(line for line in page.splitlines() if not line.startswith("|"))


def anchors(page):
    """The anchors of a page's headings, as GitHub writes them."""
    found = set()
    for heading in re.findall(r"^#+ (.*)$", page, flags=re.MULTILINE):
        words = re.sub(r"[^\w\- ]", "", LINK.sub("]", heading).lower())
        found.add(words.replace(" ", "-"))
    return found


def test_what_counts_as_a_token_and_as_prose():
    source = 'def f(x):\n    """Doc."""\n    return x + 1  # why\n'
    assert count_tokens(source) == 10  # def f ( x ) : return x + 1
    assert count_tokens('x = """\ntext"""\n') == 3
    page = "# A title\n\n| 1 | 2 |\n\n[One](two/three.md) `four`\n\n```sh\nfive\n```\n"
    assert prose(page).split() == ["#", "A", "title", "[One]", "`four`"]
    assert anchors("## On an H100, p = 15\n") == {"on-an-h100-p--15"}


def test_tokens_of_python():
    sizes: Counter[str] = Counter()
    for file in tracked(".py"):
        part = file.relative_to(ROOT).parts[0]
        key = part if part in PARTS else "core"
        if file.name != "setup.py":
            sizes[key] += count_tokens(file.read_text(encoding="utf-8"))
    print(dict(sizes))
    for key, bound in BOUNDS.items():
        assert sizes[key] <= bound, f"{key}: {sizes[key]:,} tokens of Python, at most {bound:,}"


def test_words_of_pages():
    pages = {file: file.read_text(encoding="utf-8") for file in tracked(".md")}
    words = sum(len(page.split()) for page in pages.values())
    readme = pages[ROOT / "README.md"]
    readme_words = len(prose(readme).split())
    # a number does not begin within a word, as that of H100 does
    numbers = re.findall(r"(?<!\w)\d[\d.,]*", readme)
    print(
        f"README: {readme_words} words of prose, {len(numbers)} numbers; all pages: {words} words"
    )
    assert readme_words <= 1000
    assert len(numbers) <= 80
    assert words <= 30_000
    for name in ("LSSAR", "SSMax", "NormSoftmax", "./demo.sh"):
        assert name in readme


def test_links_between_pages_hold():
    broken = []
    for file in tracked(".md"):
        for link in LINK.findall(file.read_text(encoding="utf-8")):
            address, _, anchor = link.partition("#")
            if "://" in link:
                continue
            target = (file.parent / address).resolve() if address else file
            part = target.relative_to(ROOT).parts[0]
            if part in ("hub", "lab") and not (ROOT / part).is_dir():
                continue  # core alone
            holds = target.exists()
            if holds and anchor:
                holds = anchor in anchors(target.read_text(encoding="utf-8"))
            if not holds:
                broken.append(f"{file.relative_to(ROOT)}: {link}")
    assert not broken
