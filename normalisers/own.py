"""A normaliser's class by its name in a config: a registered one, or one of a file.

    normaliser = "lssa"                       a class of normalisers/
    normaliser = "my_softmax.py:MySoftmax"    a class of a file, found from the file that names it
    normaliser = "fox"                        the class of that name in configs/variants/*.py

A formula is its file and class. A resolved config names the file with the first 12 digits of its
sha256, `my_softmax-0123456789ab.py:MySoftmax`, and a run folder keeps a copy under that name.
"""

import hashlib
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

from infra.cli import suggest
from normalisers import adaptive, family, others  # noqa: F401  (their classes register themselves)
from normalisers.base import NORMALISERS, OWN_MODULE, Normaliser

VARIANTS = Path(__file__).parents[1] / "configs/variants"
PACKAGE = __name__.removesuffix("normalisers.own")  # "", or of an installed package
MODULES: dict[str, ModuleType] = {}  # by the file's name with its digits
SOURCES: dict[str, bytes] = {}


def list_variants() -> dict[str, str]:
    """FILE.py:CLASS of each class in configs/variants, by its name."""
    pattern = re.compile(r'^class (\w+)\(\w+, name="(\w+)"\)', re.MULTILINE)
    return {
        name: f"{path}:{cls}"
        for path in sorted(VARIANTS.glob("*.py"))
        for cls, name in pattern.findall(path.read_text(encoding="utf-8"))
    }


def list_normalisers() -> list[str]:
    """All names that need no file."""
    return [*NORMALISERS, *list_variants()]


def identify(name: str) -> str:
    """The name that says which formula it is, whose file is imported.

    Raises ValueError: no such name, or the file cannot be imported.
    """
    if name in NORMALISERS:
        return name
    if ":" not in name:
        variants = list_variants()
        if name not in variants:
            raise ValueError(f"unknown; {suggest(name, [*NORMALISERS, *variants])}")
        name = variants[name]
    file, _, class_name = name.rpartition(":")
    if not file.endswith(".py"):
        raise ValueError("expected FILE.py:CLASS")
    path = Path(file)
    return f"{path.name if path.name in MODULES else _import(path)}:{class_name}"


def find_normaliser(name: str) -> type[Normaliser]:
    """The class of that name. Raises ValueError: see `identify`, or the file has no such class."""
    if name in NORMALISERS:
        return NORMALISERS[name]
    file, _, class_name = identify(name).rpartition(":")
    cls = getattr(MODULES[file], class_name, None)
    if not (isinstance(cls, type) and issubclass(cls, Normaliser) and "name" in vars(cls)):
        expected = f'expected `class {class_name}(Softmax, name="...")` or the like'
        raise ValueError(f"{expected} in {file}")
    return cls


def files_of(names: Iterable[str]) -> dict[str, bytes]:
    """The files of these normalisers, which a run folder keeps, by name."""
    files = [name.rpartition(":")[0] for name in map(identify, names)]
    return {file: SOURCES[file] for file in files if file}


def _import(path: Path) -> str:
    """Import a file, once for its content. Returns its name with the digits of its sha256."""
    try:
        source = path.read_bytes()
    except (OSError, ValueError) as e:
        raise ValueError(f"cannot be imported here: {type(e).__name__}: {e}") from None
    digits = hashlib.sha256(source).hexdigest()[:12]
    stem, _, named = path.stem.rpartition("-")
    if not re.fullmatch("[0-9a-f]{12}", named):
        stem = path.stem
    elif named != digits:
        raise ValueError(f"is not the file that it was: its sha256 begins with {digits} now")
    file = f"{stem}-{digits}.py"
    if file not in MODULES:
        module = ModuleType(f"{OWN_MODULE}{digits}_{re.sub(r'[^a-zA-Z0-9]', '_', stem)}")
        module.__file__ = str(path)
        # an installed package has our modules under its own name
        ours = rb"^(\s*(?:from|import) )(?=(?:attention|engines|infra|normalisers|positions)\b)"
        text = re.sub(ours, rb"\1" + PACKAGE.encode(), source, flags=re.MULTILINE)
        sys.modules[module.__name__] = module  # where pydantic looks for types
        try:
            exec(compile(text, str(path), "exec"), module.__dict__)
        except (Exception, SystemExit) as e:
            raise ValueError(f"cannot be imported here: {type(e).__name__}: {e}") from None
        MODULES[file] = module
        SOURCES[file] = source
    return file
