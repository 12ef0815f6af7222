"""Parameter groups and learning-rate schedules."""

import re

import pytest
import torch
import torch._dynamo
from torch._dynamo.testing import CompileCounterWithBackend

from config import load_config
from model import GPT
from schema import AttentionConfig, OptimizerConfig
from training.optim import (
    lr_factor,
    make_optimizers,
    orthogonalised,
    power_at,
    set_learning_rates,
)


@pytest.mark.parametrize("optimizer", ["adamw", "muon", "sgd"])
@pytest.mark.parametrize("tied", ["true", "false"])
def test_every_parameter_is_in_one_group(optimizer, tied, tiny_config):
    flags = ["--optimizer.name", optimizer, "--model.tie_embeddings", tied]
    config = load_config(tiny_config, [*flags, "--attention.normaliser", "ssmax"])
    model = GPT(config)
    optimizers = make_optimizers(model, config.optimizer)
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    ids = [id(p) for group in groups for p in group["params"]]
    assert len(ids) == len(set(ids)) and set(ids) == {id(p) for p in model.parameters()}
    for group in groups:
        assert all((p.ndim >= 2) == (group["weight_decay"] > 0) for p in group["params"])
    if optimizer == "muon":
        assert optimizers[1].param_groups[0]["peak_lr"] == config.optimizer.muon_lr
    main = optimizers[0].param_groups[0]
    betas = (config.optimizer.beta1, config.optimizer.beta2)
    assert main["peak_lr"] == 0.01 and main.get("betas", betas) == betas
    momenta = [group["momentum"] for group in groups if "momentum" in group]
    assert set(momenta) == (set() if optimizer == "adamw" else {config.optimizer.momentum})
    assert set_learning_rates(optimizers, config.optimizer, 0, 12) == 0.005  # half of the warm-up
    assert all(group["lr"] == 0.5 * group["peak_lr"] for group in groups)


HIDDEN = ["attention.qkv", "attention.out", "mlp.up", "mlp.down"]
SSMAX_MODEL = (
    "--model.norm rmsnorm --model.mlp swiglu --model.bias false --model.tie-embeddings false"
)


@pytest.mark.parametrize(
    ("flags", "muon", "adamw", "n_vectors"),
    [
        ("", HIDDEN, ["embedding"], 10),
        ("--attention.normaliser ssmax --model.n-kv-head 1", HIDDEN, ["embedding"], 11),
        # FoX's w is 2 x 32, where a head has 16 channels
        ("--attention.normaliser fox", HIDDEN, ["embedding", "attention.normaliser.signal"], 11),
        (
            SSMAX_MODEL + " --model.attention-gate true",
            [*HIDDEN, "attention.gate", "mlp.gate"],
            ["embedding", "lm_head"],
            3,
        ),
    ],
)
def test_the_optimiser_of_every_parameter(flags, muon, adamw, n_vectors, tiny_config):
    config = load_config(tiny_config, ["--optimizer.name", "muon", *flags.split()])
    model = GPT(config)
    names = {p: re.sub(r"blocks\.\d\.|\.weight", "", name) for name, p in model.named_parameters()}
    of_adamw, of_muon = make_optimizers(model, config.optimizer)
    matrices, vectors = ({names[p] for p in group["params"]} for group in of_adamw.param_groups)
    assert matrices == {*adamw} and len(vectors) == n_vectors
    assert {names[p] for p in of_muon.param_groups[0]["params"]} == {*muon}


@pytest.mark.parametrize("split", ["qkv", "head", "none"])
def test_muon_with_parts_is_muon_on_matrices_of_their_own(split, tiny_config):
    """With two heads of queries and one of keys and values. torch's Muon rounds to bfloat16."""
    flags = ["--optimizer.name", "muon", "--optimizer.muon-split", split, "--model.n-kv-head", "1"]
    config = load_config(tiny_config, flags)
    model = GPT(config)
    rows = {"qkv": [32, 16, 16], "head": [16, 16, 16, 16], "none": [64]}[split]
    whole = model.blocks[0].attention.qkv.weight
    before = whole.detach().clone()
    parts = [torch.nn.Parameter(part.clone()) for part in before.split(rows)]
    muon = make_optimizers(model, config.optimizer)[1]
    group = muon.param_groups[0]
    apart = torch.optim.Muon(
        parts, lr=group["lr"], momentum=group["momentum"], weight_decay=group["weight_decay"]
    )
    for step in range(3):
        whole.grad = torch.randn(whole.shape, generator=torch.Generator().manual_seed(step))
        for part, grad in zip(parts, whole.grad.split(rows), strict=True):
            part.grad = grad.clone()
        muon.step()
        apart.step()
    expected = torch.cat(tuple(parts)) - before
    assert (whole - before - expected).norm() < 0.02 * expected.norm()
    assert muon.state_dict()["state"][0]["momentum_buffer"].shape == whole.shape


@pytest.mark.parametrize("shape", [(64, 64), (16, 64), (64, 16)])
def test_rounding_of_a_gradient_is_not_enlarged_by_muon(shape):
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    update = orthogonalised(matrix)
    change = orthogonalised(matrix * (1 + 1e-6 * torch.randn(shape))) - update
    assert change.norm() < 2e-5 * update.norm()
    if len(matrix) != matrix.shape[1]:  # a square matrix has singular values near 0
        values = torch.linalg.svdvals(update)
        assert values.min() > 0.6 and values.max() < 1.3


def factors(schedule, **keys):
    config = OptimizerConfig(schedule=schedule, warmup_steps=10, **keys)  # type: ignore[arg-type]
    return [lr_factor(config, step, 110) for step in range(110)]


def test_schedules():
    for schedule in ("constant", "cosine", "linear", "wsd"):
        assert factors(schedule)[:10] == pytest.approx([(i + 1) / 10 for i in range(10)])
        assert factors(schedule)[10] == 1
    assert factors("constant")[-1] == 1
    assert factors("cosine")[60] == pytest.approx(0.5)
    assert factors("cosine", min_lr_ratio=0.2)[60] == pytest.approx(0.6)
    assert factors("linear")[35] == pytest.approx(0.75)
    assert factors("linear", min_lr_ratio=0.2)[60] == pytest.approx(0.6)
    wsd = factors("wsd", decay_fraction=0.2)
    assert wsd[88] == 1 and wsd[99] == pytest.approx(0.5)
    assert factors("wsd", decay_fraction=0.2, min_lr_ratio=0.2)[99] == pytest.approx(0.6)
    assert 0 < factors("cosine")[-1] < factors("linear")[-1] < 0.02


def test_the_power_of_the_re_weighting_rises():
    def powers(p, n_steps):
        config = AttentionConfig(normaliser="lssa", reweight_p=p, reweight_p_warmup=n_steps)
        return [power_at(config, step) for step in range(9)]

    assert powers(15, 8) == [1, 2, 4, 6, 8, 9, 11, 13, None]
    assert powers(3, 4) == [1, 1, 2, 2, *5 * [None]]
    assert powers(2, 8) == [1] * 8 + [None]
    assert powers(7, 0) == 9 * [None]


def compile_lssar(path, engine, backend):
    """The model, p = 15 at most, itself and compiled, and the counter of its graphs."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    flags = f"--attention.normaliser lssa --attention.reweight-p 15 --train.engine {engine}"
    model, compiled = (GPT(load_config(path, flags.split())) for _ in range(2))
    compiled.load_state_dict(model.state_dict())
    compiled.compile(backend=counter)
    return model, compiled, counter


def test_a_compiled_model_has_few_graphs_for_all_powers(tiny_config):
    """p is a tensor: of a number there would be a graph for each value."""
    model, compiled, counter = compile_lssar(tiny_config, "dense", "eager")
    tokens = torch.arange(16)[None]
    for p in range(1, 16):
        for network in (compiled, model):
            network.set_power(p)
        torch.testing.assert_close(compiled(tokens), model(tokens), rtol=1e-5, atol=1e-6)
    assert counter.frame_count <= 2


@pytest.mark.slow
def test_a_rising_power_compiles_with_its_gradients(tiny_config):
    """On the fused kernels, by Triton's interpreter."""
    model, compiled, counter = compile_lssar(tiny_config, "triton", "aot_eager")
    tokens = torch.arange(16)[None]
    for p in (1, 2, 7, 14, None):
        networks = (compiled, model)
        for network in networks:
            network.set_power(p)
        losses = [network(tokens, tokens.roll(-1)) for network in networks]
        gradients = [
            torch.autograd.grad(loss, [*network.parameters()])
            for loss, network in zip(losses, networks, strict=True)
        ]
        assert torch.allclose(*losses)
        assert all(
            (got - want).norm() <= 1e-5 * want.norm() for got, want in zip(*gradients, strict=True)
        )
    assert counter.frame_count <= 3  # one of the loss
