"""torch, imported where it is first used: a formula's options are read without it, which saves seconds."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    import torch.nn.functional as F
else:

    class LazyModule(ModuleType):
        def __getattr__(self, name: str) -> Any:
            value = getattr(import_module(self.__name__), name)
            setattr(self, name, value)  # the next time it is an attribute
            return value

    torch = LazyModule("torch")
    F = LazyModule("torch.nn.functional")
