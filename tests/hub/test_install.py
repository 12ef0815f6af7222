"""`pip install .` in a fresh environment: a model of one's own that uses the package from elsewhere,
and length-eval.
"""

import os
import shutil
import subprocess
import sysconfig
import venv
from pathlib import Path

import pytest
import tokenizers

from normalisers.own import identify

transformers = pytest.importorskip("transformers")

ROOT = Path(__file__).parents[2]
OWN_FILES = {
    "model.py": "WIDTH = 32\n",
    "config.py": "N_HEAD = 2\n",
    "notebook.py": """
import torch
from torch import nn

from attention_normalisers import attend, make_normaliser
from attention_normalisers.engines import rows
from attention_normalisers.hub.register import register
from attention_normalisers.normalisers.family import Softmax
from attention_normalisers.schema import AttentionConfig
from config import N_HEAD
from model import WIDTH

class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        lssar = AttentionConfig(normaliser="lssa", reweight_p=15)
        self.normaliser = make_normaliser(lssar, N_HEAD, WIDTH // N_HEAD, train_len=16)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, N_HEAD, -1)).permute(2, 0, 3, 1, 4)  # (B, H, T, D) each
        return attend(q, k, v, self.normaliser).transpose(1, 2).flatten(2)

class Mine(Softmax, name="mine"):
    pass

x = torch.randn(2, 16, WIDTH)
attention = Attention()
attention(x).square().mean().backward()
assert attention.qkv.weight.grad.isfinite().all()
register("mine", AttentionConfig(normaliser="mine"))
from attention_normalisers.normalisers.own import identify
make_normaliser(AttentionConfig(normaliser="fox"), 2, 16, 16, "none", width=32)
print(identify("fox"))
print(AttentionConfig(normaliser="mine").definition, rows.__name__)
""",
}


@pytest.mark.slow
def test_the_package_is_used_beside_files_of_ones_own(tmp_path):
    folders = shutil.ignore_patterns(
        ".*", "runs", "results", "tests", "*.bin", "build", "*.egg-info"
    )
    shutil.copytree(ROOT, tmp_path / "source", ignore=folders)
    environment = tmp_path / "venv"
    venv.create(environment, with_pip=True)
    python = environment / "bin/python"
    (site,) = environment.glob("lib/python*/site-packages")
    ours = sysconfig.get_path("purelib")  # torch and so on: nothing is downloaded
    (site / "ours.pth").write_text(f"import sys; sys.path.insert(0, {ours!r})")
    install = ["-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([python, *install, tmp_path / "source"], check=True)
    notebook = tmp_path / "notebook"
    notebook.mkdir()
    for name, text in OWN_FILES.items():
        (notebook / name).write_text(text)
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [python, "notebook.py"], cwd=notebook, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{identify('fox')}\n")  # the same file as here
    assert done.stdout.endswith("attention_normalisers.engines.rows\n")
    # length-eval, on a model of transformers
    text = "The same words again. " * 40
    (notebook / "text.txt").write_text(text)
    tokenizer = tokenizers.ByteLevelBPETokenizer()
    tokenizer.train_from_iterator([text], 300, special_tokens=["</s>"], show_progress=False)
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer._tokenizer, eos_token="</s>"
    ).save_pretrained(notebook / "llama")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    config = transformers.LlamaConfig(
        vocab_size=300, num_attention_heads=2, max_position_embeddings=16, **sizes
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(notebook / "llama")
    command = [environment / "bin/length-eval", "llama", "--files", "text.txt", "--device", "cpu"]
    command += ["--lengths", "16", "32"]
    done = subprocess.run(
        command, cwd=notebook, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "Loss in bits a byte of the last 16 tokens" in done.stdout
    assert (notebook / "llama" / "rows.csv").exists()
    missing = subprocess.run(
        [*command[:1], "nowhere"],
        cwd=notebook,
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert missing.returncode == 2 and missing.stderr.startswith("error: nowhere: no readable")
