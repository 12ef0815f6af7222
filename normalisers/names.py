"""The names of the normalisers and of their options, read from the text of the files beside this one.

A command line is checked against them at once. Importing the classes takes torch, and that seconds.
"""

import ast
from functools import cache
from pathlib import Path


@cache
def written_options() -> dict[str, list[str] | None]:
    """Name of each registered normaliser -> its options, inherited ones first; None: a base is not found.

    A name that is not written out is "*".
    """
    classes: dict[str, ast.ClassDef] = {}
    for path in sorted(Path(__file__).parent.glob("*.py")):
        statements = ast.parse(path.read_text(encoding="utf-8")).body
        classes |= {each.name: each for each in statements if isinstance(each, ast.ClassDef)}

    def options(name: str) -> list[str] | None:
        if name == "BaseModel":
            return []
        if name not in classes:
            return None
        own = (each for each in classes[name].body if isinstance(each, ast.AnnAssign))
        names = [ast.unparse(each.target) for each in own if "ClassVar" not in ast.unparse(each.annotation)]
        for base in reversed(classes[name].bases):
            inherited = options(ast.unparse(base).rpartition(".")[2])
            if inherited is None:
                return None
            names = [*inherited, *names]
        return list(dict.fromkeys(names))

    return {
        str(word.value.value) if isinstance(word.value, ast.Constant) else "*": options(name)
        for name, each in classes.items()
        for word in each.keywords
        if word.arg == "name"  # class Softmax(Phi, name="softmax")
    }
