"""matplotlib's Figure for files, whatever backend and fonts the settings of its user name."""

import os
from contextlib import suppress

backend = os.environ.pop("MPLBACKEND", "")  # a notebook's may not be installed here

import matplotlib  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402

with suppress(ValueError):
    if backend:
        matplotlib.rcParams["backend"] = backend
        os.environ["MPLBACKEND"] = backend
matplotlib.rcParams["text.usetex"] = False  # LaTeX may not be there

__all__ = ["Figure"]
