"""lm-evaluation-harness on an exported model: its scores are our own loss arithmetic."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import make_byte_run

from hub import export
from positions import RopeScaling
from training.checkpoint import load_model

TASKS = Path(export.__file__).parent / "tasks"
LSSAR = ["--attention.normaliser", "lssa", "--attention.reweight-p", "15", "--train.seq-len", "64"]


@pytest.mark.slow
def test_harness_scores_are_our_losses(tiny_config, call, tmp_path):
    pytest.importorskip("lm_eval")
    run, out = make_byte_run(tiny_config, *LSSAR), tmp_path / "out"
    call(export, run, out)
    texts = [("def f(x):\n    return x + 1\n" * 20)[:512], ("class A:\n    pass\n\n" * 40)[:512]]
    items = [{"ctx": "def f(x", "endings": ["):", "the cat"], "label": 0}]
    items += [{"ctx": "a", "endings": ["b", "c"], "label": 1}]
    (tmp_path / "data").mkdir()
    files = {
        "text": [{"text": text} for text in texts],
        "choice": items,
        "last_word": [{"text": "a b cd"}],
    }
    for name, records in files.items():
        (tmp_path / f"data/{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    model = load_model(run).model
    for length in (64, 256):
        arguments = f"pretrained={out},trust_remote_code=True,rope=ntk,max_length={length}"
        command = [sys.executable, "-m", "lm_eval", "--model", "hf", "--model_args", arguments]
        command += ["--tasks", "local_text,local_choice,local_last_word", "--include_path", TASKS]
        environment = os.environ | {"HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1"}
        command += [
            "--batch_size",
            "1",
            "--device",
            "cpu",
            "--output_path",
            tmp_path / f"scores{length}",
        ]
        subprocess.run(
            command, cwd=tmp_path, env=environment, check=True, stdout=subprocess.DEVNULL
        )
        (file,) = (tmp_path / f"scores{length}").glob("*/results_*.json")
        results = json.loads(file.read_text())["results"]
        stream = torch.tensor([[256, *text.encode()] for text in texts])
        x, y = stream[:, :-1].reshape(-1, length), stream[:, 1:].reshape(-1, length)
        loss = model.token_losses(x, y, rope=RopeScaling("ntk")).mean().item()
        assert results["local_text"]["bits_per_byte,none"] * math.log(2) == pytest.approx(
            loss, abs=1e-4
        )

        def continuation_loss(context, text):  # lm-evaluation-harness puts a space between them
            tokens = torch.tensor([[256, *context.encode(), 32, *text.encode()]])
            losses = model.token_losses(tokens[:, :-1], tokens[:, 1:])[0]
            return losses[-len(text) - 1 :].sum().item()

        scores = [
            [continuation_loss(item["ctx"], ending) for ending in item["endings"]] for item in items
        ]
        right = [s.index(min(s)) == item["label"] for s, item in zip(scores, items, strict=True)]
        assert results["local_choice"]["acc,none"] == sum(right) / len(right)
        perplexity = results["local_last_word"]["perplexity,none"]
        assert math.log(perplexity) == pytest.approx(continuation_loss("a b", "cd"), abs=1e-3)
