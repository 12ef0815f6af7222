"""The names of the normalisers and of their options, read from the text of the files beside this one.

A command line is checked against them at once. Importing the classes takes torch, and that seconds.
"""

import ast
from functools import cache
from pathlib import Path


@cache
def written_options() -> dict[str, list[str]]:
    """Name of each registered normaliser -> its options, inherited ones first."""
    classes: dict[str, ast.ClassDef] = {}
    for path in sorted(Path(__file__).parent.glob("*.py")):
        statements = ast.parse(path.read_text(encoding="utf-8")).body
        classes |= {each.name: each for each in statements if isinstance(each, ast.ClassDef)}

    def options(name: str) -> list[str]:
        if name not in classes:
            return []
        own = (each for each in classes[name].body if isinstance(each, ast.AnnAssign))
        names = [ast.unparse(each.target) for each in own if "ClassVar" not in ast.unparse(each.annotation)]
        inherited = [each for base in classes[name].bases for each in options(ast.unparse(base))]
        return [*inherited, *names]

    return {
        ast.literal_eval(word.value): list(dict.fromkeys(options(name)))
        for name, each in classes.items()
        for word in each.keywords
        if word.arg == "name"  # class Softmax(Phi, name="softmax")
    }
