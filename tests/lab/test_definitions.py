"""lab/definitions.py: where a file is cut, and the same text in another order."""

import numpy as np
from conftest import check_dataset

from data.dataset import TokenStream, write_dataset
from data.tokenizer import encode, get_tokenizer
from lab import definitions

PARTS = [
    "import os\n\n",
    "def f(x):\n    y = 1\n    return x\n\n\n",
    "@decorated\nclass A:\n    z = 3\n\n",
    "    @property\n    def name(self):\n        def inner():\n            pass\n\n",
    "    async def run(self):\n        pass\n",
]


def test_where_a_file_is_cut():
    assert definitions.definitions("".join(PARTS)) == PARTS
    assert definitions.definitions("") == definitions.definitions(" \n") == []
    assert definitions.definitions("x = 1\n") == ["x = 1\n"]
    assert definitions.definitions("def f(): ...") == ["def f(): ..."]


def test_a_dataset(tmp_path, call, capsys):
    """Each split has the parts of its own documents, in an order that a second call finds there."""
    tokenizer = get_tokenizer("bytes")
    files = {
        "val": ["a = 1\n" + PARTS[1]],
        "train": ["".join(PARTS[:3]), "".join(PARTS[3:]), PARTS[0] + PARTS[4]],
    }
    tokens = {split: [encode(tokenizer, text) for text in texts] for split, texts in files.items()}
    info = {"dataset": "whole", "source": "", "settings": {}}
    write_dataset(tmp_path / "whole", info, tokens, tokenizer)
    out = tmp_path / "parts"
    for _ in range(2):
        call(definitions, tmp_path / "whole", "--out", out)
        out_text = capsys.readouterr().out
        assert "val      " in out_text and "tokens in the median" in out_text
    check_dataset(out)
    for split, texts in files.items():
        stream = TokenStream(out, split)
        content = stream.read(0, stream.n_tokens)
        parts = np.split(content, stream.document_starts()[1:])
        want = [part for text in texts for part in definitions.definitions(text)]
        got = [tokenizer.decode(part[1:].tolist()) for part in parts]
        assert sorted(got) == sorted(want)
