"""The loss by chunks of rows is that of whole logits, with its gradients."""

import pytest
import torch
import torch._dynamo
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn import functional as F

import loss
from config import load_config
from model import GPT

TOKENS = torch.randint(64, (4, 20), generator=torch.Generator().manual_seed(1))


def make_model(path, flags=""):
    torch.manual_seed(0)
    model = GPT(load_config(path, ["--model.vocab-size", "61", *flags.split()]))
    with torch.no_grad():
        model.lm_head.weight *= 20  # logits as after training
    return model


def grads_of(value, model):
    grads = torch.autograd.grad(3 * value, [*model.parameters()])
    return [value.detach(), *grads]


def whole(model, x, y, smoothing):
    mean = F.cross_entropy(model(x).flatten(0, 1), y.flatten(), label_smoothing=smoothing)
    return grads_of(mean, model)


def assert_close(got, want, tolerance):
    for a, b in zip(got, want, strict=True):
        assert a.dtype == b.dtype and (a - b).norm() <= tolerance * b.norm()


@pytest.mark.parametrize("tied", ["true", "false"])
@pytest.mark.parametrize(
    ("name", "smoothing"), [("softmax", 0.0), ("norm_softmax", 0.0), ("logit_norm", 0.1)]
)
def test_chunks_are_the_whole(tied, name, smoothing, tiny_config, monkeypatch):
    """Of 7 rows at most, without the padding's columns; -100 is no target."""
    model = make_model(tiny_config, f"--train.loss {name} --model.tie-embeddings {tied}")
    x = TOKENS.clamp_max(60)
    y = x.roll(-1, 1)
    y[:, :3] = -100
    want = whole(model, x, y, smoothing)
    shapes = []

    def scale(z, config):
        shapes.append(z.shape)
        return original(z, config)

    original = loss.scale_logits
    monkeypatch.setattr(loss, "scale_logits", scale)
    monkeypatch.setitem(loss.CHUNK_ROWS, "cpu", 7)
    got = grads_of(model(x, y, label_smoothing=smoothing), model)
    assert_close(got, want, 1e-5)
    assert shapes == 11 * [(7, 61)] + [(3, 61)]
    with torch.no_grad():
        assert torch.equal(model(x, y, label_smoothing=smoothing), got[0])
    nothing = grads_of(model(x, torch.full_like(y, -100)), model)
    assert all((tensor == 0).all() for tensor in nothing)


def test_bfloat16_is_as_exact_as_with_whole_logits(tiny_config, monkeypatch):
    """The output layer's gradient is summed in float32."""
    model = make_model(tiny_config, "--train.dtype bfloat16 --model.tie-embeddings false")
    x = TOKENS.clamp_max(60)
    y = x.roll(-1, 1)
    exact = whole(model, x, y, 0.0)
    with model.autocast():
        rounded = whole(model, x, y, 0.0)
        monkeypatch.setitem(loss.CHUNK_ROWS, "cpu", 7)
        got = grads_of(model(x, y), model)
    names = ["loss", *dict(model.named_parameters())]
    for name, a, b, want in zip(names, got, rounded, exact, strict=True):
        assert a.dtype == torch.float32
        factor = 1 if name == "lm_head.weight" else 2
        assert (a - want).norm() <= factor * (b - want).norm() + 1e-4 * want.norm()


def test_a_compiled_model_has_a_graph_of_its_blocks_and_one_of_a_chunk(tiny_config, monkeypatch):
    monkeypatch.setitem(loss.CHUNK_ROWS, "cpu", 20)
    torch._dynamo.reset()
    model = make_model(tiny_config, "--train.engine sdpa")
    x = TOKENS.clamp_max(60)
    y = x.roll(-1, 1)
    want = grads_of(model(x, y), model)
    counter = CompileCounterWithBackend("aot_eager")
    model.compile(backend=counter)
    assert_close(grads_of(model(x, y), model), want, 1e-5)
    assert counter.frame_count == 2
