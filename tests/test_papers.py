"""The papers' experiments: every config trains, the models have the papers' sizes, weights can be taken over,
and the loss of the NormSoftmax paper is what its formula says."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from config import TrainConfig, expand_sweep, load_config
from data.shards import write_shard
from infra.cli import UserError
from infra.distributed import World
from model import GPT, scale_logits
from train import Trainer
from training.checkpoint import find_checkpoints, load_checkpoint, load_model
from training.run_log import DryLog

ROOT = Path(__file__).parents[1]
CPU = World(0, 1, torch.device("cpu"))
PAPERS = sorted(
    path for folder in ("lssar_paper", "ssmax_paper", "normsoftmax_paper", "small")
    for path in (ROOT / "configs" / folder).glob("*.toml")
)  # fmt: skip
TINY = {
    "model.n_layer": "2", "model.n_head": "2", "model.n_embd": "32", "model.vocab_size": "64",
    "train.max_steps": "20", "train.seq_len": "16", "train.batch_tokens": "256", "train.val_every": "20",
    "train.val_tokens": "320", "train.dtype": "float32", "train.device": "cpu", "data.skip_steps": "0",
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with data in which each token mostly follows from the one before."""
    folder = tmp_path_factory.mktemp("papers")
    (folder / "data").mkdir()
    rng = np.random.default_rng(0)
    follower = rng.permutation(64)
    shards = []
    for split, n in (("val", 1000), ("train", 6000)):
        tokens = [0]
        for noise, other in zip(rng.random(n - 1), rng.integers(64, size=n - 1), strict=True):
            tokens.append(int(other) if noise < 0.2 else int(follower[tokens[-1]]))
        name = f"x_{split}_000000.bin"
        sha256 = write_shard(folder / "data" / name, tokens)
        shards.append({"file": name, "tokens": n, "sha256": sha256})
    info = {"format_version": 1, "dataset": "x", "tokenizer": "bytes", "vocab_size": 64, "source": "a test"}
    counts = {"tokens": 0, "documents": 0, "shards": 0, "sha256": ""}
    splits = {"train": counts, "val": counts}
    (folder / "data/dataset.json").write_text(json.dumps(info | {"splits": splits, "shards": shards}))
    return folder


def tiny(folder: Path, **changes: str) -> list[str]:
    """Overrides for a model that trains in a tenth of a second."""
    values = TINY | {"data.dir": str(folder / "data"), "log.dir": str(folder / "runs")}
    values |= {key.replace("__", "."): value for key, value in changes.items()}
    return [text for key, value in values.items() for text in (f"--{key}", value)]


def train(path: Path, overrides: list[str]) -> Path:
    config = load_config(path, overrides)
    Trainer(config, CPU).run()
    return config.run_dir


def metrics(run: Path, key: str) -> list[float]:
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [record[key] for record in records if key in record]


@pytest.fixture(scope="module")
def softmax_runs(folder: Path) -> dict[bool, Path]:
    """A tiny softmax run of either base model, by whether its embeddings are tied."""
    bases = {True: ROOT / "configs/softmax.toml", False: ROOT / "configs/ssmax_paper/a_softmax_162m.toml"}
    return {
        tied: train(path, tiny(folder, name=f"source_{tied}", optimizer__warmup_steps="2"))
        for tied, path in bases.items()
    }


@pytest.mark.parametrize("path", PAPERS, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_every_config_loads_and_trains(path: Path, folder: Path, softmax_runs: dict[bool, Path]):
    """Each run that the file describes loads; the first and the last of them train 20 steps."""
    runs = expand_sweep(path)
    configs = [load_config(path, chosen) for chosen in runs]
    assert len({config.run_dir for config in configs}) == len(runs)
    for chosen, config in {0: (runs[0], configs[0]), 1: (runs[-1], configs[-1])}.values():
        # Adam's rates of a large model change little in 20 steps.
        keep = {"optimizer.lr": str((1 if config.optimizer.name == "sgd" else 10) * config.optimizer.lr)}
        keep["optimizer.warmup_steps"] = str(min(2, config.optimizer.warmup_steps))
        if config.init_from is not None:
            keep["init_from"] = str(softmax_runs[config.model.tie_embeddings])
        trainer = Trainer(load_config(path, chosen + tiny(folder, **keep)), CPU)
        trainer.initialise()
        log = DryLog(trainer.config, CPU, trainer.flops_per_step)
        for _ in range(20):
            trainer.train_step(log)
        losses = [record["loss"] for record in log.pending]
        assert all(loss is not None and math.isfinite(loss) for loss in losses)
        assert np.mean(losses[-3:]) < np.mean(losses[:3]) - 0.02, losses
        assert trainer.config.attention == config.attention
        assert trainer.config.train.loss == config.train.loss


@pytest.mark.parametrize(
    ("name", "n_params", "more"),
    [("gpt2_124m.toml", 123_689_472, 0)]
    + [(f"ssmax_paper/{row}_{size}.toml", n, more)
       for size, n in (("124m", 123_689_472), ("162m", 162_220_800))
       for row, more in (("a_softmax", 0), ("b_ssmax", 144), ("c_ssmax_s1", 0), ("d_ssmax_bias", 288))],
)  # fmt: skip
def test_parameters_of_the_papers_models(name: str, n_params: int, more: int):
    """124M and 162M; SSMax adds one parameter for each of 12 x 12 heads, with the bias two."""
    with torch.device("meta"):
        assert GPT(load_config(ROOT / "configs" / name)).n_params() == n_params + more


@pytest.mark.parametrize("train_len", [1024, 128])
def test_scale_init_of_replaced_softmax(train_len: int):
    """SSMax (e), (f): the reciprocal of the mean of ln n."""
    mean = sum(map(math.log, range(1, train_len + 1))) / train_len
    folder = {1024: "ssmax_paper/{}_during_pretraining_162m", 128: "small/ssmax_{}"}[train_len]
    config = load_config(ROOT / f"configs/{folder.format('f')}.toml")
    assert config.train.seq_len == train_len
    assert config.attention.scale_init == pytest.approx(1 / mean, rel=3e-4)


def test_sweep_expands_to_the_product(tmp_path: Path):
    path = tmp_path / "s.toml"
    path.write_text(
        '[sweep]\nseed = [1, 2]\n"attention.normaliser" = ["softmax", "lssa"]\n"optimizer.lr" = [1e-3]\n'
    )
    configs = [load_config(path, chosen) for chosen in expand_sweep(path)]
    assert [(c.seed, c.attention.normaliser) for c in configs] == [
        (1, "softmax"), (1, "lssa"), (2, "softmax"), (2, "lssa")
    ]  # fmt: skip
    assert configs[1].name == "s_seed=1_normaliser=lssa_lr=0.001"
    with pytest.raises(UserError, match="describes a sweep: python sweep.py .*--attention.normaliser"):
        load_config(path, ["--seed", "1", "--optimizer.lr", "0.1"])
    heir = tmp_path / "heir.toml"
    heir.write_text('base = "s.toml"\n')
    assert load_config(heir).seed == 1337 and expand_sweep(heir) == [[]]
    path.write_text('[sweep]\n"attention.reweight_p" = 3\n')
    with pytest.raises(UserError, match=r"sweep: attention.reweight_p = 3: expected a list of values"):
        expand_sweep(path)


# ---------------------------------------------------------------- init_from


def parameters(run: Path) -> dict[str, torch.Tensor]:
    return load_model(run).model.state_dict()


def test_init_from_takes_weights_bit_for_bit_and_nothing_else(
    folder: Path, softmax_runs: dict[bool, Path], capsys: pytest.CaptureFixture[str]
):
    source = softmax_runs[False]
    path = ROOT / "configs/ssmax_paper/e_after_pretraining_162m.toml"
    overrides = tiny(folder, name="e", init_from=str(source), train__max_steps="0")
    run = train(path, overrides)
    out = capsys.readouterr().out
    old, new = parameters(source), parameters(run)
    assert all(torch.equal(old[name], new[name]) for name in old)
    added = new.keys() - old.keys()
    assert added == {f"blocks.{i}.attention.normaliser.s" for i in (0, 1)}
    assert all(torch.equal(new[name], torch.full((2,), 0.1685)) for name in added)
    assert "new         blocks.*.attention.normaliser.s (2 tensors); the optimiser's state" in out
    assert "dropped     nothing" in out and "attention.normaliser 'softmax' -> 'ssmax'" in out
    assert (run / "init_from.txt").read_text() in out
    state = load_checkpoint(find_checkpoints(run)[0])
    assert state["step"] == 0 and not state["optimizers"][0]["state"]
    assert len(metrics(run, "val_loss")) == 1 and not metrics(run, "loss")
    train(path, overrides)
    assert "finished" in capsys.readouterr().out
    assert len(metrics(run, "val_loss")) == 1

    back = train(ROOT / "configs/ssmax_paper/a_softmax_162m.toml",
                 tiny(folder, name="back", init_from=str(run), train__max_steps="0",
                      optimizer__warmup_steps="0"))  # fmt: skip
    assert "dropped     blocks.*.attention.normaliser.s (2 tensors)" in capsys.readouterr().out
    assert all(torch.equal(old[name], tensor) for name, tensor in parameters(back).items())


def test_init_from_starts_a_run_that_resumes_by_itself(folder: Path, softmax_runs: dict[bool, Path]):
    """Step 1 comes from the other run's weights with a fresh optimiser; resuming does not read them again."""
    path = ROOT / "configs/lssar.toml"
    source = softmax_runs[True]
    overrides = tiny(folder, name="tuned", init_from=str(find_checkpoints(source)[0]), train__max_steps="6",
                     train__checkpoint_every="3", optimizer__warmup_steps="2")  # fmt: skip
    run = train(path, overrides)
    fresh = Trainer(load_config(path, [*overrides, "--name", "fresh"]), CPU)
    fresh.raw_model.load_state_dict(parameters(source))
    batch = fresh.read_batch(0)
    loss = np.mean([fresh.raw_model(x, y).item() for x, y in batch])
    whole = metrics(run, "loss")
    assert whole[0] == pytest.approx(loss, rel=1e-6)
    find_checkpoints(run)[0].unlink()  # as if killed after step 3
    hidden = source.rename(source.with_name("hidden"))
    try:
        train(path, overrides)
    finally:
        hidden.rename(source)
    assert metrics(run, "loss") == whole


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"model__n_embd": "64"}, r"embedding.weight is \(128, 64\) here, \(128, 32\) there"),
        ({"model__mlp_hidden": "8"}, r"blocks.\*.mlp.up.weight is .*model.mlp_hidden None -> 8"),
        ({"init_from": "nowhere"}, "nowhere: no such run folder or checkpoint"),
    ],
)
def test_init_from_refuses_what_does_not_fit(
    changes: dict[str, str], expected: str, folder: Path, softmax_runs: dict[bool, Path]
):
    changes = {
        "init_from": str(softmax_runs[True]),
        "name": "refused",
        "optimizer__warmup_steps": "2",
    } | changes
    with pytest.raises(UserError, match=expected) as e:
        train(ROOT / "configs/softmax.toml", tiny(folder, **changes))
    assert len(str(e.value).splitlines()) == 1
    assert not (folder / "runs/refused").exists()


def test_init_from_refuses_to_tie_what_was_untied(folder: Path, softmax_runs: dict[bool, Path]):
    overrides = tiny(folder, name="tied", init_from=str(softmax_runs[False]), model__tie_embeddings="true",
                     optimizer__warmup_steps="2")  # fmt: skip
    with pytest.raises(UserError, match="lm_head.weight is tied to the embedding here, not there"):
        train(ROOT / "configs/ssmax_paper/a_softmax_162m.toml", overrides)


def test_no_steps_need_a_source():
    with pytest.raises(
        UserError, match="train.max_steps = 0: expected at least 1, or a run named by init_from"
    ):
        load_config(
            ROOT / "configs/softmax.toml", ["--train.max-steps", "0", "--optimizer.warmup-steps", "0"]
        )


def test_skipped_steps_are_the_batches_of_later_steps(folder: Path):
    path = ROOT / "configs/softmax.toml"
    whole = Trainer(load_config(path, tiny(folder, optimizer__warmup_steps="2")), CPU)
    late = Trainer(load_config(path, tiny(folder, optimizer__warmup_steps="2", data__skip_steps="5")), CPU)
    for (a, b), (c, d) in zip(whole.read_batch(7), late.read_batch(2), strict=True):
        assert torch.equal(a, c) and torch.equal(b, d)


# ---------------------------------------------------------------- the loss


def z_values() -> torch.Tensor:
    return torch.randn(3, 5, 40, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 3 + 1


@pytest.mark.parametrize(("gamma", "tau"), [(None, None), ("inf", 0.5), (2.0, 1.5), (100.0, None)])
def test_norm_softmax_of_the_vocabulary(gamma: float | None, tau: float | None):
    z = z_values()
    config = TrainConfig(loss="norm_softmax", loss_gamma=gamma, loss_tau=tau)
    bound = math.inf if gamma in (None, "inf") else gamma
    for row, scaled in zip(
        z.flatten(0, 1).numpy(), scale_logits(z, config).flatten(0, 1).numpy(), strict=True
    ):
        assert scaled == pytest.approx(row / ((tau or 1.0) * min(row.std(), bound)), rel=1e-12)


@pytest.mark.parametrize("tau", [None, 0.3])
def test_logit_norm_of_the_vocabulary(tau: float | None):
    z = z_values()
    scaled = scale_logits(z, TrainConfig(loss="logit_norm", loss_tau=tau))
    for row, got in zip(z.flatten(0, 1).numpy(), scaled.flatten(0, 1).numpy(), strict=True):
        assert got == pytest.approx(row / ((tau or 40**-0.5) * np.linalg.norm(row)), rel=1e-12)


@pytest.mark.parametrize("loss", ["norm_softmax", "logit_norm"])
def test_equal_logits_have_a_uniform_distribution_and_finite_gradients(loss: str):
    for value in (0.0, 7.0):
        z = torch.full((2, 9), value, requires_grad=True)
        out = F.cross_entropy(scale_logits(z, TrainConfig(loss=loss)), torch.tensor([1, 2]))  # type: ignore[arg-type]
        out.backward()
        assert out.item() == pytest.approx(math.log(9), rel=1e-6) and z.grad is not None
        assert z.grad.isfinite().all()


def test_validation_reports_both_losses(folder: Path):
    path = ROOT / "configs/softmax.toml"
    overrides = tiny(folder, name="both", train__loss="norm_softmax", optimizer__warmup_steps="2")
    run = train(path, overrides)
    trainer = Trainer(load_config(path, overrides), CPU)
    trainer.raw_model.load_state_dict(parameters(run))
    stream = trainer.val_stream.read(0, 321)
    tokens = torch.from_numpy(stream.astype(np.int64))
    x, y = tokens[:-1].view(20, 16), tokens[1:].view(20, 16)
    with torch.no_grad():
        bare = trainer.raw_model(x, plain=True).flatten(0, 1).double()
        own = trainer.raw_model.token_losses(x, y).mean().item()
    assert metrics(run, "val_cross_entropy")[-1] == pytest.approx(F.cross_entropy(bare, y.flatten()).item())
    sigma = bare.std(-1, correction=0, keepdim=True)
    loss = F.cross_entropy(bare / sigma, y.flatten()).item()
    assert metrics(run, "val_loss")[-1] == pytest.approx(loss) == pytest.approx(own)
    assert not metrics(folder / "runs/source_True", "val_cross_entropy")


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ("--train.loss-gamma 1.0", "train.loss_gamma = 1.0: only read by train.loss = norm_softmax"),
        ("--train.loss-tau 1.0", "train.loss_tau = 1.0: not read by train.loss = softmax"),
        (
            "--train.loss norm_softmax --train.loss-gamma -1.0",
            "train.loss_gamma = -1.0: expected a number above",
        ),
    ],
)
def test_loss_options_that_do_not_fit(overrides: str, expected: str):
    with pytest.raises(UserError, match=expected):
        load_config(ROOT / "configs/softmax.toml", overrides.split())
