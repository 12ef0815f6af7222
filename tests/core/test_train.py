"""Training: the same losses however the batch is split, and what the command line does."""

import json
import math
from functools import partial
from pathlib import Path

import pytest
import torch
import torch._dynamo
from launch import CPU, build, finish, fork_ranks, metrics, run
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.utils import parameters_to_vector

import train
from config import load_config
from data.batches import read_windows, train_batch
from data.dataset import TokenStream
from infra.cli import UserError
from infra.distributed import join_world
from normalisers.own import list_normalisers
from training import trial, validation
from training.checkpoint import find_checkpoints, load_checkpoint, load_model
from training.optim import power_at
from training.run_log import RunLog
from training.validation import validate


def test_a_run_and_its_folder(tiny_config, call, capsys):
    folder = run(tiny_config, "--train.max-steps", "6")
    assert list(metrics(folder, "loss")) == [1, 2, 3, 4, 5, 6]
    assert list(metrics(folder, "val_loss")) == [4, 6]
    names = [path.name for path in find_checkpoints(folder)]
    assert names == ["step_000006.pt", "step_000003.pt"]
    assert load_config(folder / "config.toml") == load_config(
        tiny_config, ["--train.max-steps", "6"]
    )
    assert "step 6/6 | loss" in capsys.readouterr().out

    call(train, tiny_config, "--train.max-steps", "6")
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert "6 of 6 steps done" in capsys.readouterr().out
    assert list(metrics(folder, "loss")) == [1, 2, 3, 4, 5, 6]


def test_a_validation_on_fineweb_is_beside_llm_c_s(tiny_config, capsys, monkeypatch):
    assert validation.llm_c_loss(2000) == 3.8585
    between = validation.llm_c_loss(2828)  # about the geometric mean of 2,000 and 4,000
    assert between == pytest.approx((3.8585 + 3.6176) / 2, abs=1e-4)
    assert validation.llm_c_loss(1999) is validation.llm_c_loss(20000) is None
    monkeypatch.setattr(validation, "llm_c_loss", lambda step: 4.0)
    monkeypatch.setattr(validation, "LLM_C_TOKENS", 128)
    run(tiny_config, "--train.max-steps", "4", "--name", "another_text")
    assert "llm.c" not in capsys.readouterr().out
    monkeypatch.setattr(TokenStream, "is_fineweb", True)
    folder = run(tiny_config, "--train.max-steps", "4")
    loss = metrics(folder, "val_loss")[4]
    assert f"loss {loss:.4f} | {loss - 4:+.4f} to llm.c's 4.0000" in capsys.readouterr().out


def test_accumulated_step_is_that_of_the_whole_batch(tiny_config):
    state = build(tiny_config)
    reference = build(tiny_config).raw_model
    x, y = train_batch(state.batches.stream, 0, 8, 16, "sequential", state.config.seed)
    loss = reference(torch.from_numpy(x), torch.from_numpy(y))
    loss.backward()
    norm = torch.stack([p.grad.norm() for p in reference.parameters() if p.grad is not None]).norm()
    log = RunLog(state)
    train.train_step(state, log)
    assert log.pending[0]["loss"] == pytest.approx(loss.item(), rel=1e-6)
    assert log.pending[0]["grad_norm"] == pytest.approx(norm.item(), rel=1e-5)


@pytest.mark.parametrize("clip", ["0.01", "0"])  # 0: not at all
def test_the_first_update_is_clipped_and_warmed_up(clip, tiny_config):
    flags = "--optimizer.name sgd --optimizer.lr 1.0 --optimizer.weight-decay 0.0 --optimizer.warmup-steps 4"
    state = build(tiny_config, *flags.split(), "--train.grad-clip", clip)
    log = RunLog(state)
    before = parameters_to_vector(state.raw_model.parameters()).detach()
    train.train_step(state, log)
    update = parameters_to_vector(state.raw_model.parameters()).detach() - before
    norm = min(float(clip) or math.inf, log.pending[0]["grad_norm"])
    assert update.norm().item() == pytest.approx(norm / 4, rel=1e-3)
    assert log.pending[0]["lr"] == 0.25 and log.pending[0]["grad_norm"] > 0.1


def test_validation_is_the_mean_over_the_first_val_tokens(tiny_config):
    state = build(tiny_config)
    x, y = read_windows(state.val_stream, 0, 20, 16)
    losses = state.raw_model.token_losses(torch.from_numpy(x), torch.from_numpy(y))
    assert validate(state, RunLog(state)) == pytest.approx(losses.mean().item(), rel=1e-6)


def test_validation_is_at_the_power_of_the_last_step(tiny_config):
    """p rises from 1 to 7 in 12 steps: the eighth has 4, the ninth would have 5."""
    power = "--attention.normaliser lssa --attention.reweight-p 7 --attention.reweight-p-warmup 12"
    state = build(tiny_config, *power.split())
    x, y = map(torch.from_numpy, read_windows(state.val_stream, 0, 20, 16))
    losses = []
    for p in (5, 4):
        state.raw_model.set_power(p)
        with torch.no_grad():
            losses.append(state.raw_model(x, y).item())
    next_one, expected = losses
    assert validate(state, RunLog(state)) == pytest.approx(expected, rel=1e-6)
    assert abs(next_one - expected) > 1e-5 * expected


SELDOM = ["--train.val-every", "20", "--train.checkpoint-every", "20"]
QUICK = ["--train.max-steps", "20", "--train.micro-batch", "8", *SELDOM]


def test_two_processes_give_the_losses_of_one(tiny_config, capsys):
    # 17: the last batch leaves one to rank 0 and none to rank 1
    windows = ["--train.val-tokens", "272", "--data.documents", "true"]
    alone = run(tiny_config, "--name", "one", *windows)
    finish(
        fork_ranks(train.main, tiny_config, "--name", "two", "--train.micro-batch", "2", *windows)
    )
    together = alone.parent / "two"
    for key in ("loss", "val_loss", "grad_norm"):
        assert metrics(together, key) == pytest.approx(metrics(alone, key), abs=1e-4)
    # A validation that a stop has left out is made by both.
    lines = (together / "metrics.jsonl").read_text().splitlines(keepends=True)
    assert "val_loss" in lines[-1]
    (together / "metrics.jsonl").write_text("".join(lines[:-1]))
    finish(
        fork_ranks(train.main, tiny_config, "--name", "two", "--train.micro-batch", "2", *windows)
    )
    assert (together / "metrics.jsonl").read_text().splitlines(keepends=True) == lines
    # A checkpoint of two processes resumes in one, and has plain parameter names.
    assert (
        load_model(together).model.state_dict().keys()
        == load_model(alone).model.state_dict().keys()
    )
    find_checkpoints(together)[0].unlink()
    run(tiny_config, "--name", "two", *windows)
    assert "9 of 12 steps done" in capsys.readouterr().out
    assert metrics(together, "loss") == pytest.approx(metrics(alone, "loss"), abs=1e-4)


@pytest.mark.slow
def test_fused_engine_in_two_processes(tiny_config):
    """The Triton kernels (interpreted here: conftest.py) under DistributedDataParallel, against
    `rows`.
    """
    pytest.importorskip("triton", reason="triton is not installed (it exists for Linux only)")
    flags = [
        "--attention.normaliser",
        "lssa",
        "--attention.reweight-p",
        "3",
        "--train.max-steps",
        "2",
    ]
    flags += ["--train.micro-batch", "8", "--train.val-tokens", "16", "--train.batch-tokens", "256"]
    rows = run(tiny_config, *flags, "--name", "rows")
    output = finish(
        fork_ranks(train.main, tiny_config, *flags, "--train.engine", "triton", "--name", "fused")
    )
    assert "engine triton" in output[0][0]
    assert metrics(rows.parent / "fused", "loss") == pytest.approx(metrics(rows, "loss"), rel=1e-5)


@pytest.mark.parametrize("normaliser", list_normalisers())
def test_every_normaliser_trains(normaliser, tiny_config):
    options = ["--attention.normaliser", normaliser]
    folder = run(tiny_config, *options, *QUICK)
    losses = list(metrics(folder, "loss").values())
    assert all(map(math.isfinite, losses)) and losses[-1] < losses[0] - 0.3


@pytest.mark.parametrize(("optimizer", "lr"), [("adamw", "0.01"), ("muon", "0.01"), ("sgd", "0.3")])
def test_optimisers_lower_the_loss(optimizer, lr, tiny_config):
    flags = ["--optimizer.name", optimizer, "--optimizer.lr", lr, "--train.max-steps", "20"]
    losses = list(metrics(run(tiny_config, *flags, *SELDOM), "loss").values())
    assert losses[-1] < losses[0] - 0.5


@pytest.mark.slow
def test_a_compiled_run_has_few_graphs_of_fixed_shapes(tiny_config, monkeypatch):
    """For three forms of p and a loss of its own, and a last validation batch that is smaller."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager")
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=counter))
    flags = "--attention.normaliser lssa --attention.reweight-p 3 --attention.reweight-p-warmup 4"
    flags += (
        " --train.engine dense --train.loss logit_norm --train.micro-batch 2 --train.val-tokens 48"
    )
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        run(tiny_config, *flags.split(), "--train.compile", "true", "--train.val-every", "1")
    assert counter.frame_count == 5  # blocks with gradients and without; the loss, also unscaled
    inputs = [node for graph in counter.graphs for node in graph.graph.find_nodes(op="placeholder")]
    tokens = [node for node in inputs if node.name == "l_tokens_"]
    assert len(tokens) == 2 and all(node.meta["example_value"].shape == (2, 16) for node in tokens)


def test_deterministic_algorithms_are_asked_for(tiny_config):
    """On a CPU every step is repeatable anyway: what is tested is that torch is told."""
    build(tiny_config, "--train.deterministic", "true")
    assert torch.are_deterministic_algorithms_enabled()
    build(tiny_config)
    assert not torch.are_deterministic_algorithms_enabled()


def test_bfloat16_and_shuffled_windows(tiny_config):
    folder = run(tiny_config, "--train.dtype", "bfloat16", "--data.order", "shuffled")
    assert all(map(math.isfinite, metrics(folder, "loss").values()))
    model = load_checkpoint(find_checkpoints(folder)[0])["model"]
    assert all(tensor.dtype == torch.float32 for tensor in model.values())


def test_flops_per_token(tiny_config):
    """By hand for the tiny model: 6 per multiplied weight, 6 T C per layer for causal attention."""
    c, layers, vocab, head = 32, 2, 128, 16
    flops = 6 * (vocab * c + layers * 12 * c * c) + layers * 6 * 16 * c
    sigma = layers * 6 * 2 * head * c  # of each row's scores, by way of the keys' covariance
    for more, flags in ((0, []), (0, ["--model.tie-embeddings", "false"]),
                        (sigma, ["--attention.normaliser", "norm_softmax"])):  # fmt: skip
        assert build(tiny_config, *flags).raw_model.flops_per_token() == flops + more


# ---------------------------------------------------------------- the command line


def test_mistakes(tiny_config):
    with pytest.raises(UserError, match="model.vocab_size = 50257: .* expected 64 to 1087"):
        build(tiny_config, "--model.vocab_size", "50257")
    long = "--train.seq_len 1024 --train.batch_tokens 1024 --train.micro_batch 1 --train.val_tokens 1024"
    with pytest.raises(UserError, match="expected at least 1025 for one window"):
        build(tiny_config, *long.split())
    # conftest.py hides them
    with pytest.raises(UserError, match="no CUDA device"), join_world("cuda"):
        pass


def test_dry_run_leaves_nothing(tiny_config, call, capsys):
    call(train, tiny_config, "--dry-run")
    assert not (tiny_config.parent / "runs").exists()
    out = capsys.readouterr().out
    for words in ("parameters", "engine sdpa", "memory ", "s a step of 128 tokens", "all 12"):
        assert words in out
    call(train, tiny_config, "--dry-run", "--data.dir", "nowhere")
    assert "data.dir = 'nowhere': no shards there: random tokens" in capsys.readouterr().out
    with pytest.raises(UserError, match="nowhere: no such data folder"):
        call(train, tiny_config, "--data.dir", "nowhere")


SMALL = """--model.n-layer 4 --model.n-head 2 --model.n-embd 16 --model.vocab-size 64 --train.seq-len 32
    --train.batch-tokens 1024 --train.micro-batch 8 --data.dir nowhere"""


@pytest.mark.parametrize("name", ["variants/hybrid", "lssar", "softmax"])
def test_a_dry_run_takes_any_config_and_leaves_nothing(name, tmp_path, call, capsys, monkeypatch):
    """None of a file's own keys, such as a warm-up of 700 steps, is in the way. p rises as far as
    it can.
    """
    powers = []
    monkeypatch.setattr(
        train, "power_at", lambda *args: powers.append(power_at(*args)) or powers[-1]
    )
    monkeypatch.chdir(tmp_path)
    call(train, Path(train.__file__).parent / f"configs/{name}.toml", "--dry-run", *SMALL.split())
    out = capsys.readouterr().out
    assert "step 4 | validation loss" in out and "512 tokens, 8 sequences at a time" in out
    assert "dry run  steps, validation and save work; nothing is kept\nmemory " in out
    assert "s a step of 1,024 tokens" in out
    of_steps = [1, 8, None, None] if name == "lssar" else [None] * 4
    assert powers[:4] == of_steps
    assert not list(tmp_path.iterdir())


def test_a_dry_run_counts_every_micro_batch(tiny_config, tmp_path):
    # 16 sequences a step, 4 at a time
    config = load_config(tiny_config, ["--train.batch-tokens", "256"])
    shortened = trial.shorten(config, CPU, tmp_path)
    # at the second micro-batch there are gradients
    assert shortened.train.batch_tokens == 2 * 4 * 16
    shortened.run_dir.mkdir()
    line = {"step": 4, "loss": 1.0, "step_ms": 500.0, "memory_gb": 1.0}
    (shortened.run_dir / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    time = trial.describe(config, shortened)[2]
    assert time.endswith(
        "at most 1 s a step of 256 tokens: 0:16:40 for 1000 steps, 0:00:12 for all 12"
    )
