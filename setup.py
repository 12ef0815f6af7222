"""Build the package attention_normalisers: the files that a model of one's own can use, under one
name, and eval_length.py as the command length-eval.

    from attention_normalisers import attend, make_normaliser

The files import each other as `from normalisers.base import ...`. In the package such an import
becomes `from ..normalisers.base import ...`, so that nobody's own model.py or config.py is in its
way. The formulas of configs/variants come with it. The other commands, lab/ and the other configs
stay in the checkout.
"""

import ast
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

NAME = "attention_normalisers"
FILES = {
    "attention",
    "config",
    "eval_length",
    "evaluation",
    "generation",
    "loss",
    "measure",
    "model",
    "positions",
    "schema",
}
FOLDERS = [
    "data",
    "engines",
    "infra",
    "normalisers",
    "training",
    *map(str, Path().glob("hub")),
]


class BuildPackage(build_py):
    def run(self) -> None:
        super().run()
        init = Path(self.build_lib, NAME, "__init__.py")
        init.write_text("from .attention import attend, make_normaliser\n", encoding="utf-8")

    def find_package_modules(self, package: str, package_dir: str) -> list[tuple[str, str, str]]:
        modules = super().find_package_modules(package, package_dir)
        return [module for module in modules if package != NAME or module[1] in FILES]

    def build_module(self, module: str, module_file: str, package: str) -> object:
        built, copied = super().build_module(module, module_file, package)
        dots = "." * (1 + package.count("."))
        lines = Path(module_file).read_text(encoding="utf-8").splitlines()
        ours = FILES | {*FOLDERS}
        for node in ast.walk(ast.parse("\n".join(lines))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in ours:
                lines[node.lineno - 1] = lines[node.lineno - 1].replace("from ", f"from {dots}", 1)
            elif isinstance(node, ast.Import) and node.names[0].name.split(".")[0] in ours:
                parent, _, name = node.names[0].name.rpartition(".")
                indent = lines[node.lineno - 1][: node.col_offset]
                lines[node.lineno - 1] = f"{indent}from {dots}{parent} import {name}"
        Path(built).write_text("\n".join([*lines, ""]), encoding="utf-8")
        return built, copied


setup(
    packages=[NAME, *(f"{NAME}.{folder}" for folder in FOLDERS)],
    package_dir={NAME: ".", **{f"{NAME}.{folder}": folder for folder in FOLDERS}},
    package_data={NAME: ["configs/variants/*.py"]},
    cmdclass={"build_py": BuildPackage},
)
