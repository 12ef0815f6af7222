"""Training: the same losses however it is split, resumed or restarted, and what a run leaves behind."""

import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from attention import NORMALISERS
from config import Config, OptimizerConfig, load_config
from data.batches import train_batch, val_batch
from data.dataset import TokenStream
from data.shards import write_shard
from infra.cli import UserError
from infra.distributed import World
from model import GPT
from train import Trainer, lr_factor, make_optimizers, split_batch
from training.checkpoint import find_checkpoints, load_checkpoint, load_model, load_newest
from training.run_log import DryLog

ROOT = Path(__file__).parents[1]
CPU = World(0, 1, torch.device("cpu"))
TINY = """
[model]
n_layer = 2
n_head = 2
n_embd = 32
vocab_size = 64
[data]
dir = "{data}"
[train]
max_steps = 6
seq_len = 16
batch_tokens = 256
micro_batch = 4
dtype = "float32"
val_every = 3
val_tokens = 640
checkpoint_every = 3
[optimizer]
lr = 1e-2
warmup_steps = 2
[log]
dir = "{runs}"
every = 2
"""


@pytest.fixture(scope="session")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tokens with something to learn: each follows from the one before, mostly."""
    folder = tmp_path_factory.mktemp("data")
    rng = np.random.default_rng(0)
    follower = rng.permutation(64)
    shards = []
    for index, (split, n) in enumerate([("val", 1000), ("train", 3000), ("train", 2500)]):
        tokens = [0]
        for noise, other in zip(rng.random(n - 1), rng.integers(64, size=n - 1), strict=True):
            tokens.append(int(other) if noise < 0.2 else int(follower[tokens[-1]]))
        name = f"x_{split}_{index:06d}.bin"
        shards.append({"file": name, "tokens": n, "sha256": write_shard(folder / name, tokens)})
    counts = {"tokens": 0, "documents": 0, "shards": 0, "sha256": ""}
    info = {
        "format_version": 1,
        "dataset": "x",
        "tokenizer": "bytes",
        "vocab_size": 64,
        "source": "a test",
        "splits": {"train": counts, "val": counts},
        "shards": shards,
    }
    (folder / "dataset.json").write_text(json.dumps(info))
    return folder


@pytest.fixture
def config_path(tmp_path: Path, data_dir: Path) -> Path:
    path = tmp_path / "tiny.toml"
    path.write_text(TINY.format(data=data_dir, runs=tmp_path / "runs"))
    return path


def train(path: Path, *overrides: str) -> Path:
    """Train in this process; returns the run folder."""
    config = load_config(path, list(overrides))
    Trainer(config, CPU).run()
    return config.run_dir


def run_script(*args: object, processes: int = 1, **env: str) -> subprocess.CompletedProcess[str]:
    launcher = [sys.executable]
    if processes > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    return subprocess.run(
        [*launcher, "train.py", *map(str, args)],
        cwd=ROOT, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1", **env},
    )  # fmt: skip


def metrics(run: Path, key: str) -> dict[int, float]:
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [record["step"] for record in records if key in record]
    assert steps == sorted(set(steps)), "each step once, in order"
    return {record["step"]: record[key] for record in records if key in record}


def test_a_run_and_its_folder(config_path: Path, capsys: pytest.CaptureFixture[str]):
    run = train(config_path)
    assert list(metrics(run, "loss")) == [1, 2, 3, 4, 5, 6]
    assert list(metrics(run, "val_loss")) == [3, 6]
    assert [path.name for path in find_checkpoints(run)] == ["step_000006.pt", "step_000003.pt"]
    assert load_config(run / "config.toml") == load_config(config_path)
    assert "step 6/6 | loss" in capsys.readouterr().out

    train(config_path)
    assert "finished" in capsys.readouterr().out
    assert list(metrics(run, "loss")) == [1, 2, 3, 4, 5, 6]


def test_first_loss_and_gradient_are_those_of_the_whole_batch(config_path: Path):
    """Accumulated over micro-batches, the step is one step on the whole batch."""
    config = load_config(config_path)
    trainer = Trainer(config, CPU)
    reference = Trainer(config, CPU).raw_model
    x, y = train_batch(trainer.train_stream, 0, 16, 16, "sequential", config.seed)
    loss = reference(torch.from_numpy(x), torch.from_numpy(y))
    loss.backward()
    norm = torch.stack([p.grad.norm() for p in reference.parameters() if p.grad is not None]).norm()
    log = DryLog(config, CPU, trainer.flops_per_step)
    trainer.train_step(log)
    assert log.pending[0]["loss"] == pytest.approx(loss.item(), rel=1e-6)
    assert log.pending[0]["grad_norm"] == pytest.approx(norm.item(), rel=1e-5)


def test_validation_is_the_mean_over_the_first_val_tokens(config_path: Path):
    trainer = Trainer(load_config(config_path), CPU)
    x, y = val_batch(trainer.val_stream, 0, 40, 16)
    losses = trainer.raw_model.token_losses(torch.from_numpy(x), torch.from_numpy(y))
    trainer.validate(DryLog(trainer.config, CPU, trainer.flops_per_step))
    assert trainer.validation["loss"] == pytest.approx(losses.mean().item(), rel=1e-6)


@pytest.mark.parametrize("processes", [2])
def test_processes_give_the_same_losses_as_one(config_path: Path, processes: int):
    alone = train(config_path, "--name", "one")
    result = run_script(config_path, "--name", "several", processes=processes)
    assert result.returncode == 0, result.stderr
    together = alone.parent / "several"
    for key in ("loss", "val_loss", "grad_norm"):
        a, b = metrics(alone, key), metrics(together, key)
        assert a.keys() == b.keys()
        assert max(abs(a[step] - b[step]) for step in a) <= 1e-4
    # A checkpoint of two processes goes on in one, and has plain parameter names.
    assert load_model(together)[0].state_dict().keys() == load_model(alone)[0].state_dict().keys()


def test_fused_engine_in_two_processes(config_path: Path):
    """The Triton kernels (interpreted here: conftest.py) under DistributedDataParallel, against `rows`."""
    pytest.importorskip("triton", reason="triton is not installed (it exists for Linux only)")
    flags = ["--attention.normaliser", "lssa", "--attention.reweight-p", "3", "--train.max-steps", "2"]
    flags += ["--train.micro-batch", "8", "--train.val-tokens", "16", "--train.batch-tokens", "256"]
    want = train(config_path, *flags, "--name", "rows")
    result = run_script(config_path, *flags, "--attention.engine", "triton", "--name", "fused", processes=2)
    assert result.returncode == 0, result.stderr
    assert "engine triton (self-check: relative error" in result.stdout
    assert metrics(want.parent / "fused", "loss") == pytest.approx(metrics(want, "loss"), rel=1e-5)


def test_resumed_run_is_the_same_run(config_path: Path, capsys: pytest.CaptureFixture[str]):
    whole = train(config_path, "--name", "whole")
    resumed = train(config_path, "--name", "resumed")
    find_checkpoints(resumed)[0].unlink()  # as if killed after step 5: metrics are ahead of step 3
    capsys.readouterr()
    train(config_path, "--name", "resumed")
    assert "resumed from" in capsys.readouterr().out
    for key in ("loss", "grad_norm", "val_loss"):
        assert metrics(whole, key) == metrics(resumed, key)
    a, b = (load_checkpoint(find_checkpoints(run)[0]) for run in (whole, resumed))
    assert all(torch.equal(a["model"][name], b["model"][name]) for name in a["model"])


@pytest.mark.parametrize("damage", ["truncated", "zeros", "random", "bit", "empty", "folder", "pickle"])
def test_a_damaged_newest_checkpoint_is_named_and_the_previous_used(
    config_path: Path, damage: str, capsys: pytest.CaptureFixture[str]
):
    run = train(config_path)
    newest, previous = find_checkpoints(run)
    content = newest.read_bytes()
    if damage == "folder":
        newest.unlink()
        newest.mkdir()
    elif damage == "pickle":
        torch.save({"format": CPU}, newest)  # an object of a class: not plain tensors and values
    else:
        newest.write_bytes(
            {
                "truncated": content[: len(content) // 2],
                "zeros": bytes(len(content)),
                "random": np.random.default_rng(0).bytes(len(content)),
                "bit": content[:9000] + bytes([content[9000] ^ 1]) + content[9001:],
                "empty": b"",
            }[damage]
        )
    found = load_newest(run)
    assert found is not None and found[0] == previous
    assert str(newest) in capsys.readouterr().err
    shutil.rmtree(previous.parent)
    previous.parent.mkdir()
    (previous.parent / "step_000006.pt").write_bytes(b"x")
    with pytest.raises(UserError, match="none of the 1 checkpoints loads"):
        load_newest(run)


def test_another_config_in_the_same_folder_is_refused(config_path: Path):
    run = train(config_path)
    assert train(config_path, "--train.micro-batch", "2", "--log.every", "1") == run
    with pytest.raises(UserError, match=r"optimizer.lr was 0.01, now 0.02.*choose another --name"):
        train(config_path, "--optimizer.lr", "0.02")


def test_another_corpus_is_refused(config_path: Path, data_dir: Path, tmp_path: Path):
    train(config_path)
    other = shutil.copytree(data_dir, tmp_path / "other")
    info = json.loads((other / "dataset.json").read_text())
    info["splits"]["train"]["sha256"] = "f00"
    (other / "dataset.json").write_text(json.dumps(info))
    with pytest.raises(UserError, match="data: train was sha256 , now sha256 f00"):
        train(config_path, "--data.dir", str(other))


def test_a_run_without_checkpoints_keeps_its_old_metrics(config_path: Path):
    run = train(config_path)
    old = (run / "metrics.jsonl").read_text()
    shutil.rmtree(run / "checkpoints")
    train(config_path)
    assert (run / "metrics.jsonl.old").read_text() == old
    assert list(metrics(run, "loss")) == [1, 2, 3, 4, 5, 6]


def test_pruning_spares_the_new_checkpoint_when_a_later_one_is_damaged(config_path: Path):
    run = train(config_path)
    (run / "checkpoints" / "step_000099.pt").write_bytes(b"damaged")
    (run / "checkpoints" / "step_000006.pt").unlink()
    train(config_path, "--train.keep-last", "1")
    assert {path.name for path in find_checkpoints(run)} == {"step_000099.pt", "step_000006.pt"}


@pytest.mark.parametrize("normaliser", NORMALISERS)
def test_every_normaliser_trains(normaliser: str, config_path: Path):
    run = train(config_path, "--attention.normaliser", normaliser, "--train.max-steps", "20")
    losses = list(metrics(run, "loss").values())
    assert all(map(math.isfinite, losses)) and losses[-1] < losses[0] - 0.3


@pytest.mark.parametrize("optimizer", ["adamw", "muon", "sgd"])
def test_optimisers_lower_the_loss(optimizer: str, config_path: Path):
    lr = "0.3" if optimizer == "sgd" else "0.01"
    run = train(
        config_path, "--optimizer.name", optimizer, "--optimizer.lr", lr, "--train.max-steps", "20"
    )  # fmt: skip
    losses = list(metrics(run, "loss").values())
    assert losses[-1] < losses[0] - 0.5


@pytest.mark.parametrize("optimizer", ["adamw", "muon", "sgd"])
@pytest.mark.parametrize("tied", [True, False])
def test_every_parameter_is_in_one_group(optimizer: str, tied: bool, config_path: Path):
    config = load_config(
        config_path,
        [
            "--optimizer.name",
            optimizer,
            "--model.tie_embeddings",
            str(tied),
            "--attention.normaliser",
            "ssmax",
        ],
    )
    model = GPT(config)
    groups = [g for o in make_optimizers(model, config.optimizer, CPU.device) for g in o.param_groups]
    ids = [id(p) for group in groups for p in group["params"]]
    assert len(ids) == len(set(ids)) and set(ids) == {id(p) for p in model.parameters()}
    for group in groups:
        assert all((p.ndim >= 2) == (group["weight_decay"] > 0) for p in group["params"])


def test_schedules():
    def factors(schedule: str, **kw: float) -> list[float]:
        options = OptimizerConfig(schedule=schedule, warmup_steps=10, **kw)  # type: ignore[arg-type]
        return [lr_factor(options, step, 110) for step in range(110)]

    for schedule in ("constant", "cosine", "linear", "wsd"):
        assert factors(schedule)[:10] == pytest.approx([(i + 1) / 10 for i in range(10)])
        assert factors(schedule)[10] == 1
    assert factors("constant")[-1] == 1
    assert factors("cosine")[60] == pytest.approx(0.5)
    assert factors("cosine", min_lr_ratio=0.2)[60] == pytest.approx(0.6)
    assert factors("linear")[35] == pytest.approx(0.75)
    wsd = factors("wsd", decay_fraction=0.2)
    assert wsd[88] == 1 and wsd[99] == pytest.approx(0.5)
    assert 0 < factors("cosine")[-1] < factors("linear")[-1] < 0.02


def test_bfloat16_and_shuffled_windows(config_path: Path):
    run = train(config_path, "--train.dtype", "bfloat16", "--data.order", "shuffled")
    assert all(map(math.isfinite, metrics(run, "loss").values()))
    assert all(t.dtype == torch.float32 for t in load_checkpoint(find_checkpoints(run)[0])["model"].values())


def test_batch_that_cannot_be_split(config_path: Path):
    config = load_config(config_path)
    assert split_batch(config, 2) == (8, 4) and split_batch(config, 16) == (1, 1)
    with pytest.raises(UserError, match="train.batch_tokens = 256: 16 sequences cannot be shared by 3"):
        split_batch(config, 3)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["--data.dir", "nowhere"], "nowhere"),
        (["--model.vocab_size", "60"], "model.vocab_size = 60"),
        (["--train.device", "cuda"], "no CUDA device"),
        (["--train.seq_len", "1024", "--train.batch_tokens", "1024", "--train.micro_batch", "1",
          "--train.val_tokens", "1024"], "1024"),  # longer than the validation stream
    ],
)  # fmt: skip
def test_mistakes_give_one_line_and_status_2(config_path: Path, overrides: list[str], expected: str):
    if "cuda" in overrides and torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    result = run_script(config_path, *overrides)
    assert result.returncode == 2
    assert expected in result.stderr and len(result.stderr.splitlines()) == 1, result.stderr


def test_a_broken_shard_stops_the_run_with_its_name(config_path: Path, data_dir: Path, tmp_path: Path):
    broken = shutil.copytree(data_dir, tmp_path / "broken")
    shard = next(broken.glob("*train*.bin"))
    shard.write_bytes(shard.read_bytes()[:-2])
    result = run_script(config_path, "--data.dir", broken)
    assert result.returncode == 2 and str(shard) in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_stream_is_what_the_batches_come_from(data_dir: Path):
    stream = TokenStream(data_dir, "train")
    x, y = train_batch(stream, 3, 4, 16, "sequential", 0)
    assert np.array_equal(x.ravel(), stream.read(3 * 64, 64))
    assert np.array_equal(y.ravel(), stream.read(3 * 64 + 1, 64))


def test_config_type():
    assert isinstance(load_config(ROOT / "configs/demo_lssar.toml"), Config)
