"""Imported before all else by each command: one line where what it needs is not installed, or where
torch cannot be imported for want of a temporary folder.
"""

import sys
import tempfile
from importlib.util import find_spec

NEEDED = ("torch", "numpy", "pandas", "pydantic", "tiktoken", "tokenizers", "matplotlib", "tqdm")

lacking = [name for name in NEEDED if find_spec(name) is None]
if lacking:
    how = "expected `. .venv/bin/activate`, or `pip install -r requirements.txt`"
    print(f"error: {sys.executable} has no {', '.join(lacking)}: {how}", file=sys.stderr)
    sys.exit(2)
try:
    tempfile.gettempdir()
except FileNotFoundError as e:
    print(f"error: {e.strerror}: expected TMPDIR=FOLDER that can be written", file=sys.stderr)
    sys.exit(2)
