"""The papers' experiments through train.py: every config trains, models have the papers' sizes,
init_from copies weights, and the losses of the NormSoftmax paper are what their formulas say."""

import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import train
from config import expand_sweep, load_config
from data.batches import train_batch
from data.dataset import TokenStream
from infra.cli import UserError
from infra.files import read_jsonl
from loss import scale_logits
from measure import count_parameters
from model import GPT
from schema import TrainConfig
from training.checkpoint import find_checkpoints, load_checkpoint, load_model

CONFIGS = Path(__file__).parents[2] / "configs"
EXPERIMENTS = sorted(CONFIGS.glob("*/*.toml"))
# embeddings are tied: file
SSMAX = CONFIGS / "papers/ssmax.toml"
BASES = {True: (CONFIGS / "softmax.toml", []), False: (SSMAX, ["--attention.normaliser=softmax"])}
AFTER = CONFIGS / "papers/ssmax_after.toml"
TINY = {
    "model.n_layer": "2", "model.n_head": "2", "model.n_embd": "32", "model.vocab_size": "64",
    "train.max_steps": "20", "train.seq_len": "16", "train.batch_tokens": "256", "train.val_every": "20",
    "train.val_tokens": "320", "train.dtype": "float32", "train.device": "cpu", "data.skip_steps": "0",
    "train.checkpoint_every": "1000", "optimizer.warmup_steps": "2",
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tiny_dataset):
    folder = tmp_path_factory.mktemp("papers")
    (folder / "data").symlink_to(tiny_dataset)
    return folder


def tiny(folder, **changes):
    """Overrides for a model that trains in a tenth of a second."""
    values = TINY | {"data.dir": str(folder / "data"), "log.dir": str(folder / "runs")}
    values |= {key.replace("__", "."): value for key, value in changes.items()}
    return [text for key, value in values.items() for text in (f"--{key}", value)]


def run_train(path, overrides):
    """Train in this process; returns the run folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["train.py", str(path), *overrides])
        train.main()
    return load_config(path, overrides).run_dir


def metrics(run, key):
    return [record[key] for record in read_jsonl(run / "metrics.jsonl") if key in record]


@pytest.fixture(scope="module")
def softmax_runs(folder):
    return {
        tied: run_train(path, [*chosen, *tiny(folder, name=f"source_{tied}")])
        for tied, (path, chosen) in BASES.items()
    }


@pytest.mark.slow
@pytest.mark.parametrize("path", EXPERIMENTS, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_every_config_trains(path, folder, softmax_runs):
    """The loss of the first and the last run that the file describes falls in 20 steps."""
    runs = expand_sweep(path)
    for chosen in runs[:1] if len(runs) == 1 else (runs[0], runs[-1]):
        config = load_config(path, chosen.overrides)
        # Adam's rates of a large model change little in 20 steps.
        lr = (1 if config.optimizer.name == "sgd" else 10) * config.optimizer.lr
        changes = {"name": f"{path.parent.name}-{config.name}", "optimizer.lr": str(lr)}
        changes["optimizer.warmup_steps"] = str(min(2, config.optimizer.warmup_steps))
        if config.layers:
            changes["model.n_layer"] = "4"
        if config.init_from:
            changes["init_from"] = str(softmax_runs[config.model.tie_embeddings])
        overrides = chosen.overrides + tiny(folder, **changes)
        run = run_train(path, overrides)
        losses = metrics(run, "loss")
        assert len(losses) == 20 and all(
            loss is not None and math.isfinite(loss) for loss in losses
        )
        assert np.mean(losses[-3:]) < np.mean(losses[:3]) - 0.02, losses
        trained = load_config(run / "config.toml")
        assert trained == load_config(path, overrides)
        assert trained.attention.normaliser == config.attention.normaliser
        assert trained.train.loss == config.train.loss


@pytest.mark.parametrize(
    ("path", "n_params"), [(SSMAX, 162_220_800), (CONFIGS / "softmax.toml", 123_689_472)]
)
def test_parameters_of_the_papers_models(path, n_params):
    """SSMax adds one parameter for each of 12 x 12 heads, with the bias two."""
    rows = expand_sweep(SSMAX)
    for row, more in zip(rows[:4], (0, 144, 0, 288), strict=True):
        options = [f"--{key}={value}".lower() for key, value in row.swept.items()]
        config = load_config(path, options)
        assert count_parameters(config) == n_params + more


@pytest.mark.parametrize("name", ["ssmax_after", "ssmax_during"])
def test_scale_init_of_replaced_softmax(name):
    """SSMax (e), (f): the reciprocal of the mean of ln n."""
    config = load_config(CONFIGS / f"papers/{name}.toml")
    mean = np.log(np.arange(1, config.train.seq_len + 1)).mean()
    assert config.attention.model_dump()["scale_init"] == pytest.approx(1 / mean, rel=3e-4)


# ---------------------------------------------------------------- init_from


def parameters(run):
    return load_model(run).model.state_dict()


def test_init_from_copies_weights_bit_for_bit_and_nothing_else(folder, softmax_runs, capsys):
    source = softmax_runs[False]
    path = AFTER
    zero_steps = {"train__max_steps": "0", "optimizer__warmup_steps": "0"}
    overrides = tiny(folder, name="e", init_from=str(source), **zero_steps)
    run = run_train(path, overrides)
    out = capsys.readouterr().out
    old, new = parameters(source), parameters(run)
    assert all(torch.equal(old[name], new[name]) for name in old)
    added = new.keys() - old.keys()
    assert added == {f"blocks.{i}.attention.normaliser.s" for i in (0, 1)}
    assert all(torch.equal(new[name], torch.full((2,), 0.1685)) for name in added)
    assert "new         blocks.*.attention.normaliser.s; the optimiser's state" in out
    assert "\n  normaliser  softmax -> ssmax" in out
    assert "dropped     nothing" in out and "attention.normaliser 'softmax' -> 'ssmax'" in out
    assert (run / "init_from.txt").read_text() in out
    state = load_checkpoint(find_checkpoints(run)[0])
    assert state["step"] == 0 and not state["optimizers"][0]["state"]
    assert len(metrics(run, "val_loss")) == 1 and not metrics(run, "loss")
    run_train(path, overrides)
    assert "finished" in capsys.readouterr().out
    assert len(metrics(run, "val_loss")) == 1

    again = tiny(folder, name="back", init_from=str(run), **zero_steps)
    back = run_train(SSMAX, [*BASES[False][1], *again])
    assert "dropped     blocks.*.attention.normaliser.s\n" in capsys.readouterr().out
    assert all(torch.equal(old[name], tensor) for name, tensor in parameters(back).items())


def test_init_from_says_what_it_keeps_of_a_normaliser(folder, softmax_runs, capsys):
    path = AFTER
    source = str(softmax_runs[False])
    for name, scale in (("s", "0.5"), ("t", "2.0")):
        zero_steps = {"train__max_steps": "0", "optimizer__warmup_steps": "0"}
        capsys.readouterr()
        overrides = tiny(
            folder, name=name, init_from=source, attention__scale_init=scale, **zero_steps
        )
        source = str(find_checkpoints(run_train(path, overrides))[0])
    out = capsys.readouterr().out
    assert " tensors; of normalisers blocks.*.attention.normaliser.s\n" in out
    assert torch.equal(
        parameters(Path(source))["blocks.0.attention.normaliser.s"], torch.full((2,), 0.5)
    )


def test_init_from_a_model_of_transformers_says_what_takes_it(folder, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    overrides = tiny(folder, name="theirs", init_from=str(tmp_path))
    with pytest.raises(UserError, match="a model of transformers: expected a run; eval_length.py"):
        run_train(AFTER, overrides)


def test_init_from_starts_a_run_that_resumes_by_itself(folder, softmax_runs):
    """Step 1 is that of the other run's weights on the batch after data.skip_steps; resuming does
    not read the other run again."""
    path, source = CONFIGS / "lssar.toml", softmax_runs[True]
    overrides = tiny(folder, name="tuned", init_from=str(find_checkpoints(source)[0]), train__max_steps="6",
                     train__checkpoint_every="3", data__skip_steps="5",
                     attention__reweight_p_warmup="0")  # fmt: skip
    run = run_train(path, overrides)
    config = load_config(path, overrides)
    model = GPT(config)
    model.load_state_dict(parameters(source))
    stream = TokenStream(folder / "data", "train")
    x, y = train_batch(stream, 5, n_seq=16, seq_len=16, order=config.data.order, seed=config.seed)
    loss = model(torch.from_numpy(x), torch.from_numpy(y)).item()
    whole = metrics(run, "loss")
    assert whole[0] == pytest.approx(loss, rel=1e-6)
    find_checkpoints(run)[0].unlink()  # as if killed after step 3
    hidden = source.rename(source.with_name("hidden"))
    try:
        run_train(path, overrides)
    finally:
        hidden.rename(source)
    assert metrics(run, "loss") == whole


@pytest.mark.parametrize(
    ("tied", "changes", "expected"),
    [
        (
            True,
            {"model__n_embd": "64"},
            r"embedding.weight: .*\[128, 32\].*\[128, 64\].*n_embd 32 -> 64",
        ),
        (True, {"model__mlp_hidden": "8"}, r"blocks.0.mlp.up.weight: .*model.mlp_hidden \w+ -> 8"),
        (
            True,
            {"init_from": "nowhere"},
            "init_from = 'nowhere': nowhere: no readable checkpoint: .*No such file",
        ),
        (
            False,
            {"model__tie_embeddings": "true"},
            "lm_head.weight is tied to the embedding here, not there",
        ),
    ],
)
def test_init_from_rejects_what_does_not_fit(tied, changes, expected, folder, softmax_runs):
    changes = {"init_from": str(softmax_runs[tied]), "name": "rejected"} | changes
    with pytest.raises(UserError, match=expected) as e:
        run_train(BASES[tied][0], [*BASES[tied][1], *tiny(folder, **changes)])
    assert len(str(e.value).splitlines()) == 1
    assert [path.name for path in (folder / "runs/rejected").iterdir()] == [".lock"]


# ---------------------------------------------------------------- the loss


@pytest.mark.parametrize(
    ("gamma", "tau"),
    [
        (None, None),
        ("inf", 0.5),
        (2.0, 1.5),
        (100.0, None),
        ("logit_norm", None),
        ("logit_norm", 0.3),
    ],
)
def test_scaled_logits_of_the_vocabulary(gamma, tau):
    """norm_softmax: z / (tau min(sigma, gamma)); logit_norm: z / (tau |z|), tau = V^(-1/2) by
    default.
    """
    z = (
        torch.randn(3, 5, 40, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 3
        + 1
    )
    is_norm = gamma != "logit_norm"
    options: dict[str, Any] = {"loss": "norm_softmax" if is_norm else "logit_norm"}
    options |= {"loss_tau": tau} if tau else {}
    options |= {"loss_gamma": gamma} if is_norm and gamma else {}
    for row, got in zip(
        z.flatten(0, 1), scale_logits(z, TrainConfig(**options)).flatten(0, 1), strict=True
    ):
        if is_norm:
            divisor = (tau or 1.0) * min(row.std(correction=0).item(), float(gamma or "inf"))
        else:
            divisor = (tau or 40**-0.5) * row.norm().item()
        assert got.tolist() == pytest.approx((row / divisor).tolist(), rel=1e-12)


@pytest.mark.parametrize("loss", ["norm_softmax", "logit_norm"])
def test_equal_logits_have_a_uniform_distribution_and_small_gradients(loss):
    """Zero where the formula has none; logit_norm's of equal logits other than zero is that of any
    others.
    """
    for value in (0.0, 7.0):
        z = torch.full((2, 9), value, requires_grad=True)
        out = F.cross_entropy(scale_logits(z, TrainConfig(loss=loss)), torch.tensor([1, 2]))  # type: ignore[arg-type]
        out.backward()
        assert out.item() == pytest.approx(math.log(9), rel=1e-6) and z.grad is not None
        assert z.grad.abs().max() < 1 and (z.grad == 0).all() == (
            loss == "norm_softmax" or value == 0.0
        )


def test_validation_reports_both_losses(folder, softmax_runs):
    run = run_train(CONFIGS / "softmax.toml", tiny(folder, name="both", train__loss="norm_softmax"))
    model = load_model(run).model
    tokens = torch.from_numpy(TokenStream(folder / "data", "val").read(0, 321).astype(np.int64))
    x, y = tokens[:-1].view(20, 16), tokens[1:].view(20, 16)
    with torch.no_grad():
        unscaled = model(x, unscaled=True).flatten(0, 1).double()
        own = model.token_losses(x, y).mean().item()
    cross_entropy = F.cross_entropy(unscaled, y.flatten()).item()
    assert metrics(run, "val_cross_entropy")[-1] == pytest.approx(cross_entropy)
    sigma = unscaled.std(-1, correction=0, keepdim=True)
    loss = F.cross_entropy(unscaled / sigma, y.flatten()).item()
    assert metrics(run, "val_loss")[-1] == pytest.approx(loss) == pytest.approx(own)
    assert not metrics(softmax_runs[True], "val_cross_entropy")
