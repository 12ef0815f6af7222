"""model.py: sizes, init, RoPE and its scalings, causality, KV cache, losses, generation."""

import math

import pytest
import torch
from conftest import one_line, slow
from torch.nn import functional as F

from attention import attend
from generation import generate
from infra.cli import UserError
from model import GPT, KVCache, make_norm
from positions import RopeScaling, apply_rope, rope_tables
from schema import AttentionConfig, Config, ModelConfig, TrainConfig

TINY = {"n_layer": 2, "n_head": 2, "n_embd": 32, "vocab_size": 61}
LSSAR = {"normaliser": "lssa", "reweight_p": 15}


def make_config(attention=None, seq_len=16, layers=None, **model):
    return Config(
        name="test",
        layers=layers or [],
        model=ModelConfig(**(TINY | model)),
        attention=AttentionConfig(**(attention or {})),
        train=TrainConfig(seq_len=seq_len, batch_tokens=seq_len, micro_batch=1, val_tokens=seq_len),
    )


def make_gpt(attention=None, seq_len=16, std=None, layers=None, **model):
    """A tiny model; with `std`, matrices large enough that attention and positions move the logits."""
    torch.manual_seed(0)
    gpt = GPT(make_config(attention, seq_len, layers, **model))
    if std is not None:
        for p in gpt.parameters():
            if p.dim() == 2:
                torch.nn.init.normal_(p, std=std)
    return gpt


def random_tokens(B, T, seed=1):
    return torch.randint(TINY["vocab_size"], (B, T), generator=torch.Generator().manual_seed(seed))


# ---- sizes and init ----


def test_n_params_gpt2_124m():
    # One block: two LayerNorms 2·2·768                                         3,072
    #            qkv 768·2304 + 2304, out 768·768 + 768             1,771,776 + 590,592
    #            up 768·3072 + 3072, down 3072·768 + 768          2,362,368 + 2,360,064
    #            together                                                    7,087,872
    # 12 blocks + final norm 2·768                     85,054,464 + 1,536 = 85,056,000
    # Embedding = output layer, 50257 padded to 393·128 = 50304: 50304·768 = 38,633,472
    with torch.device("meta"):
        gpt = GPT(Config(name="gpt2"))
    assert gpt.padded_vocab == 50304
    assert gpt.n_params() == 123_689_472


@pytest.mark.parametrize("mlp", ["gelu", "swiglu"])
@pytest.mark.parametrize("tie", [True, False])
def test_init(mlp, tie):
    gpt = make_gpt(n_layer=4, n_embd=128, vocab_size=1000, mlp=mlp, tie_embeddings=tie)
    seen = 0
    for name, p in gpt.named_parameters():
        if p.dim() == 2:
            residual = name.endswith(("attention.out.weight", "mlp.down.weight"))
            std = 0.02 / math.sqrt(2 * 4) if residual else 0.02
            assert abs(p.std().item() / std - 1) < 0.03, name
            assert abs(p.mean().item()) < 4 * std / math.sqrt(p.numel()), name
            seen += residual
        elif name.endswith("bias"):
            assert (p == 0).all(), name
        else:
            assert "norm" in name and (p == 1).all(), name
    assert seen == 8


def test_ssmax_pn_shares_one_vector():
    gpt = make_gpt({"normaliser": "ssmax_pn"}, n_layer=3)
    vectors = [block.attention.normaliser.p_n for block in gpt.blocks]
    assert all(p is vectors[0] for p in vectors) and torch.equal(vectors[0], torch.ones(16))
    # p_n once; s, b per head
    assert gpt.n_params() == make_gpt(n_layer=3).n_params() + 16 + 3 * 2 * 2
    gpt(random_tokens(2, 16), random_tokens(2, 16, seed=2)).backward()
    assert vectors[0].grad is not None and vectors[0].grad.abs().sum() > 0


@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm"])
@pytest.mark.parametrize("mlp", ["gelu", "swiglu"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("tie", [True, False])
def test_every_option_trains(norm, mlp, bias, tie):
    gpt = make_gpt(norm=norm, mlp=mlp, bias=bias, tie_embeddings=tie)
    loss = gpt(random_tokens(2, 16), random_tokens(2, 16, seed=2))
    loss.backward()
    assert loss.dtype == torch.float32
    assert abs(loss.item() - math.log(61)) < 0.1  # at init every token is about equally likely
    for name, p in gpt.named_parameters():
        assert p.grad is not None and p.grad.isfinite().all(), name
    assert (gpt.lm_head.weight is gpt.embedding.weight) == tie
    biases = [name for name, _ in gpt.named_parameters() if name.endswith("bias")]
    assert bool(biases) == bias and gpt.lm_head.bias is None


def test_autocast_keeps_float32_weights_and_loss():
    gpt = make_gpt()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = gpt(random_tokens(2, 16), random_tokens(2, 16, seed=2))
        out = generate(gpt, random_tokens(2, 4), 4)
    assert loss.dtype == torch.float32 and abs(loss.item() - math.log(61)) < 0.1
    assert gpt.embedding.weight.dtype == torch.float32 and out.shape == (2, 8)


# ---- RoPE ----


def rotate(x, theta=10000.0, start=0):
    """RoPE as multiplication of complex numbers by e^(i m w), (T, D), in float64."""
    T, D = x.shape
    z = torch.view_as_complex(x.double().view(T, D // 2, 2))
    w = [theta ** (-2 * i / D) for i in range(D // 2)]
    turn = torch.tensor(
        [[complex(math.cos(m * wi), math.sin(m * wi)) for wi in w] for m in range(start, start + T)]
    )
    z = z * turn.to(torch.complex128)
    return torch.view_as_real(z).flatten(1)


@pytest.mark.parametrize("start", [0, 131000])
def test_rope_matches_complex_reference(start):
    """Also of numbers of 16 bits, which are turned in float32."""
    T, D = 72, 64
    x = torch.randn(T, D, generator=torch.Generator().manual_seed(0)).bfloat16()
    cos, sin = rope_tables(
        D, start + T, 10000.0, RopeScaling(), 1024, torch.arange(start, start + T)
    )
    assert cos.shape == sin.shape == (T, D // 2) and cos.dtype == sin.dtype == torch.float32
    turned = apply_rope(x[None, None].float(), cos, sin)
    assert (turned[0, 0] - rotate(x, start=start)).abs().max() < 2e-6
    assert torch.equal(apply_rope(x[None, None], cos, sin), turned.bfloat16())


class OnGPU(torch.Tensor):
    """A tensor on the CPU that takes the way of those on a GPU."""

    device = torch.device("cuda")


def test_what_is_computed_in_another_way_on_a_gpu():
    x, tables = torch.randn(2, 3, 5, 8), rope_tables(8, 5, 10000.0, RopeScaling(), 16)
    gpt, hidden = make_gpt(std=0.2), torch.randn(2, 5, 32)
    for fn, given in ((lambda x: apply_rope(x, *tables), x), (gpt.unscaled_logits, hidden)):
        there = fn(given.as_subclass(OnGPU)).as_subclass(torch.Tensor)
        torch.testing.assert_close(there, fn(given), rtol=1e-5, atol=1e-6)


# With d = 4 and base 10000 the frequencies are 1 and 0.01; s = T / train_len = 4 throughout.
# ntk: base 10000·4^(4/2) = 160000, so 160000^(-1/2) = 0.0025: the lowest frequency is interpolated.
# theta: 500000^(-1/2) = 0.00141421.
#   yarn, train_len 1024: turns 1024/2π = 162.97 > 32 keeps 1; 10.24/2π = 1.62975 gives
#     g = 0.62975/31 = 0.0203144 and 0.0025 + 0.0075·g = 0.00265236.
# yarn, train_len 64: turns 64/2π = 10.18592, g = 9.18592/31 = 0.2963199, 0.25 + 0.75·g = 0.4722399;
# 0.64/2π = 0.102 < 1 interpolates fully: 0.0025.
#   yarn's amplitude: 0.1·ln 4 + 1 = 1.1386294.
SCALED = [
    (RopeScaling("none"), 1024, (1.0, 0.01), 1.0),
    (RopeScaling("ntk"), 1024, (1.0, 0.0025), 1.0),
    (RopeScaling("theta=500000"), 1024, (1.0, 0.00141421356), 1.0),
    (RopeScaling("theta=250000"), 1024, (1.0, 0.002), 1.0),
    (RopeScaling("yarn"), 1024, (1.0, 0.00265236), 1.1386294),
    (RopeScaling("yarn"), 64, (0.4722399, 0.0025), 1.1386294),
]


@pytest.mark.parametrize("by_length", [False, True])
@pytest.mark.parametrize("scaling,train_len,freqs,amplitude", SCALED)
def test_rope_scaling_by_hand(scaling, train_len, freqs, amplitude, by_length):
    n_positions = 4 * train_len
    if by_length:  # the length to scale for, with fewer positions present
        scaling, n_positions = RopeScaling(scaling.name, length=4 * train_len), 2
    cos, sin = rope_tables(4, n_positions, 10000.0, scaling, train_len)
    assert cos.shape == (n_positions, 2)
    torch.testing.assert_close(torch.atan2(sin[1], cos[1]), torch.tensor(freqs), rtol=2e-6, atol=0)
    norm = torch.hypot(cos, sin)
    torch.testing.assert_close(norm, torch.full_like(norm, amplitude), rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    "name", ["", "ntx", "theta", "theta=", "theta=0", "theta=nan", "theta=inf", "ntk=5e5"]
)
def test_rope_scaling_errors(name):
    with one_line(f"RoPE scaling {name}: expected none, ntk, yarn or theta=500000"):
        RopeScaling(name)


def test_rope_ntk_needs_two_frequencies():
    with pytest.raises(UserError, match="head size d above 2, got 2"):
        rope_tables(2, 32, 10000.0, RopeScaling("ntk"), 16)
    rope_tables(2, 16, 10000.0, RopeScaling("ntk"), 16)  # s = 1: not scaled


@pytest.mark.parametrize("kind", ["ntk", "yarn"])
def test_scaling_reaches_the_logits_of_long_texts_only(kind):
    gpt, rope = make_gpt(std=0.2), RopeScaling(kind)
    short, long = random_tokens(1, 16), random_tokens(1, 64)
    with torch.no_grad():
        assert (gpt(long, rope=rope) - gpt(long)).abs().max() > 1e-2
        assert torch.equal(gpt(short, rope=rope), gpt(short))


@pytest.mark.parametrize(
    "scaling", [RopeScaling("ntk"), RopeScaling("theta=500000"), RopeScaling("yarn")]
)
def test_windows_within_the_training_length_are_not_scaled(scaling):
    """By layer, at the window of training: that of `with_window` leaves the scaling to the caller."""
    layers = [{"at": [0], "window": 16}, {"at": [1], "window": 17}]
    gpt = make_gpt(n_layer=3, layers=layers)
    tokens = random_tokens(1, 64)
    plain = gpt.rope(tokens, RopeScaling())
    for model in (gpt, gpt.with_window(4)):
        scaled = model.rope(tokens, scaling)
        same = [torch.equal(a[1], b[1]) for a, b in zip(scaled, plain, strict=True)]
        assert same == [True, False, False]


def test_state_dict_holds_no_rope_state():
    gpt = make_gpt(bias=False)
    before = set(gpt.state_dict())
    gpt(random_tokens(1, 40), rope=RopeScaling("ntk"))
    block = ["attention_norm", "attention.qkv", "attention.out", "mlp_norm", "mlp.up", "mlp.down"]
    expected = {f"blocks.{i}.{name}.weight" for i in range(2) for name in block}
    expected |= {"embedding.weight", "final_norm.weight", "lm_head.weight"}
    assert before == set(gpt.state_dict()) == expected
    assert not list(gpt.buffers())


# ---- causality, cache, losses, generation ----


@pytest.mark.parametrize("attention", [{}, LSSAR])
def test_causality(attention):
    gpt = make_gpt(attention, std=0.2)
    tokens = random_tokens(2, 33)
    with torch.no_grad():
        before = gpt(tokens)
        for t in (1, 20, 32):
            changed = tokens.clone()
            changed[:, t] = (changed[:, t] + 1) % 61
            after = gpt(changed)
            assert (after[:, :t] - before[:, :t]).abs().max() <= 1e-6
            assert ((after[:, t:] - before[:, t:]).abs().amax(dim=(0, 2)) > 1e-3).all()


PIECES = [7, 9, 1, 7]
HYBRID = [
    {"every": 2, "position": "none", "window": 0, "attention": {"length_scale": "log_train_len_n"}}
]
MIXED = [
    {"at": [0], "window": 3, "attention": LSSAR},
    {"at": [1], "rope_theta": 5e3},
]


@pytest.mark.parametrize(
    ("window", "layers"),
    [
        (5, []),
        (5, HYBRID),
        (0, MIXED),
        (0, [{"at": [1], "position": "alibi"}]),
        (0, [{"at": [1], "rope_theta": 5e3}]),
    ],
    ids=str,
)
def test_layers_of_their_own(window, layers):
    """Each block is the one of a model whose [model] and [attention] are that layer's; decoding
    agrees.
    """
    gpt = make_gpt(std=0.2, layers=layers, window=window).double()
    tokens, rope = random_tokens(2, 24), RopeScaling("ntk", length=24)
    cache = KVCache(n_layer=2, max_length=24)
    with torch.no_grad():
        x = gpt.embedding(tokens)
        for i, block in enumerate(gpt.blocks):
            alone = GPT(gpt.layer_configs[i]).double()
            alone.blocks[i].load_state_dict(block.state_dict())
            x = alone.blocks[i](x, *alone.rope(tokens, rope)[i])
        logits = gpt.logits(gpt.final_norm(x))
        pieces = [gpt(piece, rope=rope, cache=cache) for piece in tokens.split(PIECES, dim=1)]
        far = tokens.clone()
        far[:, 0] = (far[:, 0] + 1) % 61
        seen = (gpt(far, rope=rope) - logits).abs().amax(-1)[0] > 1e-9
    torch.testing.assert_close(gpt(tokens, rope=rope), logits, atol=1e-9, rtol=0)
    torch.testing.assert_close(torch.cat(pieces, dim=1), logits, atol=1e-9, rtol=0)
    if not layers:  # two layers of a window of 5 see 9 tokens
        assert seen.tolist() == [True] * 9 + [False] * 15
        assert gpt.flops_per_token() < make_gpt().flops_per_token()


def test_one_schedule_of_p_for_all_layers():
    """p bounds each layer's own power: those that are not re-weighted stay so."""
    layers = [{"at": [0], "attention": {"normaliser": "softmax"}}]
    gpt = GPT(make_config(LSSAR, layers=layers))
    p3 = GPT(make_config(LSSAR | {"reweight_p": 3}, layers=layers))
    p3.load_state_dict(gpt.state_dict())
    tokens = random_tokens(2, 24)
    with torch.no_grad():
        final = gpt(tokens)
        gpt.set_power(3)
        assert torch.equal(gpt(tokens), p3(tokens))
        for bound in (15, 40, None):
            gpt.set_power(bound)
            assert torch.equal(gpt(tokens), final)
    assert [block.attention.engine.name for block in gpt.blocks] == ["sdpa", "rows"]
    assert gpt.engine_note == "sdpa, rows"


@pytest.mark.parametrize(("parts", "pieces"), [
    ({}, [1] * 24), ({}, [10] + [1] * 14), ({}, [24]),
    ({"n_kv_head": 1}, [1] * 24), ({"n_kv_head": 1}, PIECES),
    ({"position": "none"}, PIECES), ({"position": "p_rope", "rope_fraction": 0.5}, PIECES),
    ({"position": "alibi"}, PIECES), ({"attention_gate": True}, PIECES),
    ({"exclusive": True, "n_kv_head": 1}, PIECES),
    ({"key_shift": True}, [1] * 24), ({"key_shift": True, "n_kv_head": 1}, PIECES),
    ({"key_shift": "unrotated", "position": "p_rope"}, PIECES),
], ids=str)  # fmt: skip
@pytest.mark.parametrize(
    "attention",
    [
        {},
        LSSAR,
        *({"normaliser": name} for name in ("threshold", "scale_invariant", "fox")),
    ],
)
def test_cache_equals_uncached(attention, parts, pieces):
    gpt = make_gpt(attention, std=0.2, **parts).double()  # float32 rounds differently on each CPU
    tokens, rope = (
        random_tokens(2, 24),
        RopeScaling("yarn" if pieces == PIECES else "ntk", length=24),
    )
    cache = KVCache(n_layer=2, max_length=24)
    with torch.no_grad():
        expected = gpt(tokens, rope=rope)
        logits = [gpt(piece, rope=rope, cache=cache) for piece in tokens.split(pieces, dim=1)]
    assert cache.length == 24 and cache.held[0][0].shape[1] == gpt.config.model.kv_heads
    torch.testing.assert_close(torch.cat(logits, dim=1), expected, atol=1e-9, rtol=0)


def test_fox_reads_the_layers_input():
    """Of a single layer: logits move with w and b, and start at sigmoid(0) a token."""
    gpt = make_gpt({"normaliser": "fox"}, std=0.2, n_layer=1, position="none").double()
    signal = gpt.blocks[0].attention.normaliser.signal
    assert signal.weight.shape == (2, 32) and signal.bias.tolist() == [0, 0]
    far = make_gpt({"normaliser": "fox", "forget_init": 4.0}, n_layer=1, position="none")
    assert far.blocks[0].attention.normaliser.signal.bias.tolist() == [4, 4]
    tokens = random_tokens(2, 24)
    with torch.no_grad():
        signal.weight.zero_()
        signal.bias.fill_(100.0)  # forgets nothing
        softmax = make_gpt({}, n_layer=1, position="none").double()
        softmax.load_state_dict({k: v for k, v in gpt.state_dict().items() if "signal" not in k})
        torch.testing.assert_close(gpt(tokens), softmax(tokens), atol=1e-9, rtol=0)
        signal.bias.zero_()
    gpt(tokens, tokens).backward()
    assert signal.weight.grad.abs().max() > 0 and signal.bias.grad.abs().min() > 0


@pytest.mark.parametrize("position", ["none", "alibi"])
def test_without_rope_only_alibi_sees_the_order(position):
    """The last logits of a single-layer model, with the tokens before them in another order."""
    # heads of 9
    gpt = make_gpt(std=0.2, n_layer=1, position=position, n_head=4, n_kv_head=2, n_embd=36)
    tokens = random_tokens(2, 24)
    other = torch.cat((tokens[:, :-1].flip(1), tokens[:, -1:]), dim=1)
    with torch.no_grad():
        first, *rest = (
            gpt(tokens, rope=RopeScaling(kind))[:, -1] for kind in ("none", "ntk", "yarn")
        )
        assert all(torch.equal(first, logits) for logits in rest)  # nothing to scale
        difference = (gpt(other)[:, -1] - first).abs().max()
    assert difference > 1e-2 if position == "alibi" else difference < 1e-5


def test_p_rope_rotates_the_highest_frequencies():
    x = torch.randn(1, 1, 20, 8, generator=torch.Generator().manual_seed(0))
    whole, half = (
        apply_rope(x, *rope_tables(8, 20, 10000.0, RopeScaling(), 16, rotating=n)) for n in (8, 4)
    )
    assert torch.equal(half[..., :4], whole[..., :4]) and torch.equal(half[..., 4:], x[..., 4:])
    # in floats 0.58 * 50 < 29
    for share, head_dim, n in ((0.58, 100, 29), (0.7, 8, 2), (0.75, 6, 2)):
        gpt = make_gpt(n_embd=head_dim, n_head=1, position="p_rope", rope_fraction=share)
        _, sin = gpt.rope(random_tokens(1, 2), RopeScaling())[0]
        assert (sin[1] != 0).sum() == n


def make_layer(*attention, **model):
    return make_gpt(*attention, std=0.2, **model).blocks[0].attention


@pytest.fixture
def inputs():
    """Of a layer."""
    torch.manual_seed(0)
    return torch.randn(2, 16, 32), *rope_tables(16, 16, 10000.0, RopeScaling(), 16)


def test_gate_and_output_norm(inputs):
    """A gate of sigmoid(0) halves the heads' output; a normed output has mean square 1 in each
    head.
    """
    plain, gated = (make_layer(attention_gate=gate) for gate in (False, True))
    gated.load_state_dict(plain.state_dict(), strict=False)
    torch.nn.init.zeros_(gated.gate.weight)
    torch.testing.assert_close(gated(*inputs), plain(*inputs) / 2)  # the output's bias is 0
    normed = make_layer({"output_norm": True})
    torch.nn.init.eye_(normed.out.weight)
    mean_square = normed(*inputs).unflatten(-1, (2, 16)).square().mean(-1)
    torch.testing.assert_close(mean_square, torch.ones(2, 16, 2), atol=1e-2, rtol=0)


def test_exclusive_output(inputs):
    """Each head's output loses its part along the own value, and nothing else (XSA)."""
    outputs = []
    for exclusive in (False, True):
        layer = make_layer(exclusive=exclusive, n_kv_head=1)
        torch.nn.init.eye_(layer.out.weight)
        outputs.append(layer(*inputs).unflatten(-1, (2, 16)).transpose(1, 2))
    plain, found = outputs
    v = layer.project(*inputs)[2]  # (2, 1, 16, 16), of both heads
    torch.testing.assert_close((found * v).sum(-1), torch.zeros(2, 2, 16), atol=1e-5, rtol=0)
    torch.testing.assert_close(
        plain - found, (plain * v).sum(-1, True) / v.square().sum(-1, True) * v
    )


@pytest.mark.parametrize("kind", ["none", "yarn"])
@pytest.mark.parametrize("parts", [{}, {"key_shift": True}], ids=str)
def test_norms_before_rope_are_those_after(parts, kind, monkeypatch):
    """A head of q or k is normed once, and yarn's factor is not seen."""
    gpt = make_gpt({"normaliser": "lssa"}, std=0.2, n_layer=1, **parts)
    attention = gpt.blocks[0].attention
    x, scaling = (
        torch.randn(2, 64, 32, generator=torch.Generator().manual_seed(0)),
        RopeScaling(kind),
    )
    with monkeypatch.context() as patch:
        patch.setattr(attention.normaliser, "norm_heads", lambda x: x)
        q, k, v, *_ = attention.project(x, *rope_tables(16, 64, 10000.0, scaling, 16))
    want = attend(q, k, v, attention.normaliser, "dense")
    q, k, v, *_ = attention.project(x, *gpt.rope(x, scaling)[0])
    torch.testing.assert_close(q.norm(dim=-1), torch.ones(2, 2, 64))
    got = attend(q, k, v, attention.normaliser, "dense", normed=True)
    torch.testing.assert_close(got, want, rtol=0, atol=float(1e-6 * want.abs().max()))


def test_key_shift(inputs):
    """At the start s = sigmoid(0): each key is the mean of its own and the one before, the first is
    half.
    """
    part = {"position": "p_rope", "rope_fraction": 0.25, "key_shift": "unrotated"}
    outputs = []
    for options in ({}, {"key_shift": True}, part):
        layer = make_layer(**options)
        outputs.append(layer.project(*inputs)[:2])
    (q, k), (shifted_q, shifted_k), (_, part_k) = outputs
    assert torch.equal(q, shifted_q)
    torch.testing.assert_close(shifted_k[:, :, 1:], (k[:, :, 1:] + k[:, :, :-1]) / 2)
    torch.testing.assert_close(shifted_k[:, :, 0], k[:, :, 0] / 2)
    assert torch.equal(part_k, torch.cat((k[..., :4], shifted_k[..., 4:]), -1))


def test_cache_overflow():
    cache = KVCache(n_layer=2, max_length=4)
    with (
        torch.no_grad(),
        pytest.raises(ValueError, match="5 positions do not fit in max_length = 4"),
    ):
        make_gpt()(random_tokens(1, 5), cache=cache)


# ---- rolling window ----


class LastKeys(KVCache):
    """What a loop that decodes with the last keys has: it masks nothing, and evicts."""

    def append(self, layer, *parts):
        window = self.windows[layer]
        if self.held[layer]:
            parts = [torch.cat(pair, 2) for pair in zip(self.held[layer], parts, strict=True)]
        self.held[layer] = [part[:, :, -window:] for part in parts]
        return self.held[layer]


@pytest.mark.parametrize(
    "parts",
    [{}, {"n_kv_head": 1, "key_shift": True}, {"layers": [{"at": [0], "window": 3}]}],
    ids=str,
)
@pytest.mark.parametrize(
    "attention",
    [
        {},
        {"normaliser": "ssmax", "bias": True},
        LSSAR,
        {"normaliser": "fox"},
        {"normaliser": "stick_breaking"},
        {"normaliser": "ssmax_pn"},
        *slow({"normaliser": "norm_softmax"}, {"normaliser": "entmax"}),
    ],
    ids=str,
)
def test_a_rolling_window_is_a_loop_with_a_cache_of_its_keys(attention, parts):
    """Also beyond the training length of ssmax_pn, which has no p_n there; T is no multiple of W.

    A shift mixes the oldest key with the one before it, which the loop has lost.
    """
    gpt = make_gpt(attention, std=0.2, **parts).double()
    rolling = gpt.with_window(7)
    assert rolling.windows == ([3, 7] if "layers" in parts else [7, 7])
    tokens, targets = random_tokens(2, 24), random_tokens(2, 24, seed=2)
    got = rolling.token_losses(tokens, targets, rope=RopeScaling("ntk"))
    for model, cache, pieces in ((rolling, KVCache, PIECES), (gpt, LastKeys, 1)):
        if gpt.config.model.key_shift and cache is LastKeys:
            continue
        held = cache(2, 24, rolling.windows)
        rope = RopeScaling("ntk", length=24)
        with torch.no_grad():
            logits = [model(part, rope=rope, cache=held) for part in tokens.split(pieces, dim=1)]
        want = F.cross_entropy(torch.cat(logits, dim=1).mT, targets, reduction="none")
        torch.testing.assert_close(got, want, atol=1e-6, rtol=0)
        assert [keys.shape[2] for keys, *_ in held.held] == rolling.windows


def test_a_model_with_a_window_shares_the_parameters():
    gpt = make_gpt({"normaliser": "ssmax_pn"}, key_shift=True)
    rolling = gpt.with_window(3)
    assert [*map(id, rolling.parameters())] == [*map(id, gpt.parameters())]
    assert (gpt.windows, rolling.windows, rolling.with_window(5).windows) == (
        [0, 0],
        [3, 3],
        [3, 3],
    )
    with one_line("window = 0: expected at least 1"):
        gpt.with_window(0)


@pytest.mark.parametrize(
    ("normaliser", "engine", "with_window"),
    [("softmax", "sdpa", "sdpa"), ("softmax", "rows", "rows"), ("norm_softmax", "sdpa", "rows")],
)
def test_a_layer_whose_engine_has_no_windows_gets_another(normaliser, engine, with_window):
    config = make_config({"normaliser": normaliser})
    train = config.train.model_copy(update={"engine": engine})
    gpt = GPT(config.model_copy(update={"train": train}))
    assert (gpt.engine_note, gpt.with_window(3).engine_note) == (engine, with_window)


@pytest.mark.parametrize("chunk", [1, 7, 16, 1024])
def test_token_losses_equal_forward(chunk):
    gpt, rope = make_gpt(std=0.2), RopeScaling("ntk")
    tokens, targets = random_tokens(2, 40), random_tokens(2, 40, seed=2)
    targets[:, :5] = -100
    losses = gpt.token_losses(tokens, targets, rope=rope, chunk=chunk)
    assert losses.shape == (2, 40) and losses.dtype == torch.float32 and not losses.requires_grad
    assert (losses[:, :5] == 0).all()
    expected = gpt(tokens, targets, rope=rope)
    torch.testing.assert_close(losses[:, 5:].mean(), expected, atol=1e-6, rtol=1e-6)
    logits = gpt(tokens, rope=rope)
    one = F.cross_entropy(logits[1, 30], targets[1, 30])
    torch.testing.assert_close(losses[1, 30], one, atol=1e-5, rtol=1e-5)


def test_token_losses_hold_one_chunk_of_logits(monkeypatch):
    gpt, sizes = make_gpt(), []
    original = gpt.logits
    monkeypatch.setattr(gpt, "logits", lambda h: sizes.append(h.shape[1]) or original(h))
    gpt.token_losses(random_tokens(1, 40), random_tokens(1, 40), chunk=16)
    assert sizes == [16, 16, 8]


@pytest.mark.parametrize("tie", [True, False])
def test_padding_is_never_predicted(tie):
    gpt = make_gpt(tie_embeddings=tie)
    tokens, targets = random_tokens(2, 16), random_tokens(2, 16, seed=2)
    before = gpt(tokens, targets)
    with torch.no_grad():
        gpt.lm_head.weight[61:] = 100 * gpt.hidden(tokens, RopeScaling())[0, -1]
    assert gpt.padded_vocab == 128 and gpt(tokens).shape == (2, 16, 61)
    assert torch.equal(gpt(tokens, targets), before)
    out = generate(gpt, tokens, 20, generator=torch.Generator().manual_seed(0))
    assert out.max() < 61


@pytest.mark.parametrize("attention", [{}, LSSAR, {"normaliser": "sigmoid", "bias": "log_len"}])
def test_generate_greedy(attention):
    gpt, rope = make_gpt(attention, std=0.2, tie_embeddings=False), RopeScaling("ntk")
    prompt = random_tokens(2, 6)
    out = generate(gpt, prompt, 20, temperature=0, rope=rope)
    assert min(len(row.unique()) for row in out) > 7  # tied embeddings would repeat one token
    assert torch.equal(out, generate(gpt, prompt, 20, temperature=0, rope=rope))
    assert torch.equal(out, generate(gpt, prompt, 20, top_k=1, rope=rope))
    slow = prompt  # the whole sequence again for each token, scaled for the final length
    for _ in range(20):
        logits = gpt(slow, rope=RopeScaling("ntk", length=26))[:, -1]
        slow = torch.cat((slow, logits.argmax(-1, keepdim=True)), dim=1)
    assert torch.equal(out, slow)


def test_generate_sampling():
    gpt, prompt = make_gpt(std=0.2), random_tokens(1, 6).expand(64, 6)

    def run(**options):
        return generate(gpt, prompt, 3, generator=torch.Generator().manual_seed(0), **options)

    with torch.no_grad():
        likeliest = gpt(prompt)[0, -1].topk(3).indices
    assert set(run(top_k=3, temperature=5.0)[:, 6].tolist()) == set(likeliest.tolist())
    assert torch.equal(run(temperature=1e-30), run(temperature=0))  # must not overflow
    assert torch.equal(generate(gpt, prompt, 0), prompt)
    assert torch.equal(run(top_k=1000), run())


@pytest.mark.parametrize(
    "options", [{"temperature": -1.0}, {"top_k": 0}, {"top_p": 0.0}, {"top_p": 1.5}], ids=str
)
def test_generate_errors(options):
    for length, n_new, rest in ((0, 1, {}), (3, -1, {}), (3, 1, options)):
        with pytest.raises(UserError, match="expected"):
            generate(make_gpt(), random_tokens(1, length), n_new, **rest)


@pytest.mark.parametrize("kind", ["layernorm", "rmsnorm"])
def test_norms_are_their_formulas(kind):
    """With a large eps, and gains and biases as after training."""
    norm = make_norm(ModelConfig(**TINY, norm=kind, norm_eps=0.25))
    for p in norm.parameters():
        torch.nn.init.normal_(p)
    x = torch.randn(5, 32, generator=torch.Generator().manual_seed(0))
    if kind == "layernorm":
        x = x - x.mean(-1, keepdim=True)
    want = norm.weight * x / (x.square().mean(-1, keepdim=True) + 0.25).sqrt() + getattr(
        norm, "bias", 0.0
    )
    torch.testing.assert_close(norm(x), want)
