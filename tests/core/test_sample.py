"""sample.py and the generation in model.py: the KV cache against no cache, for every normaliser."""

from types import SimpleNamespace

import pytest
import torch
from attention_cases import each_name
from conftest import needs_gpt2, save_run
from test_model import make_gpt, random_tokens

import generation
import sample
from data.tokenizer import get_tokenizer
from generation import generate
from infra.cli import UserError
from model import KVCache
from positions import RopeScaling


def stepwise_logits(gpt, tokens, rope, n_prompt):
    """Logits of each position from n_prompt - 1 on as generation computes them, with the cache."""
    cache = KVCache(gpt.config.model.n_layer, tokens.shape[1])
    pieces = [tokens[:, :n_prompt], *tokens[:, n_prompt:].split(1, dim=1)]
    with torch.no_grad():
        return torch.stack([gpt(piece, rope=rope, cache=cache)[:, -1] for piece in pieces], dim=1)


@each_name
def test_cached_logits_equal_uncached(cfg):
    """A batch of two, fed as generation does, to 1.5 x the training length with RoPE scaled for the
    end.
    """
    learned_to_its_length = cfg.normaliser == "ssmax_pn"
    seq_len = 24 if learned_to_its_length else 16
    gpt = make_gpt(cfg.model_dump(), seq_len=seq_len, std=0.2)
    tokens, rope = random_tokens(2, 24), RopeScaling("ntk", length=24)
    with torch.no_grad():
        expected = gpt(tokens, rope=rope)[:, 6:]
    cached = stepwise_logits(gpt, tokens, rope, n_prompt=7)
    error = (cached - expected).abs().max().item()
    if gpt.cacheable:
        assert error <= 1e-4
    else:  # its rows depend on the number of all keys: this is why generate() does not cache it
        assert error > 1e-3


def test_a_batch_equals_its_rows():
    gpt = make_gpt({"normaliser": "lssa", "reweight_p": 3}, std=0.2)
    prompts = random_tokens(3, 6)
    together = generate(gpt, prompts, 12, temperature=0)
    for row, prompt in zip(together, prompts, strict=True):
        assert torch.equal(row, generate(gpt, prompt[None], 12, temperature=0)[0])


@pytest.mark.parametrize("attention", [{}, {"normaliser": "fox"}], ids=str)
def test_generation_with_a_window_is_that_without_a_cache(attention, monkeypatch):
    """Of a prompt longer than the window; the cache holds no more keys than that."""
    caches = []

    class Cache(KVCache):
        def __init__(self, *args):
            super().__init__(*args)
            caches.append(self)

    monkeypatch.setattr(generation, "KVCache", Cache)
    gpt = make_gpt(attention, std=0.2, key_shift=True).with_window(5)
    tokens = random_tokens(2, 9)
    got = generate(gpt, tokens, 20, temperature=0)
    for _ in range(20):
        tokens = torch.cat((tokens, gpt(tokens)[:, -1].argmax(-1, keepdim=True)), dim=1)
    assert torch.equal(got, tokens)
    assert {part.shape[2] for held in caches[0].held for part in held} == {5}


def test_top_p_takes_the_fewest_that_have_the_mass():
    gpt, prompt = make_gpt(std=0.05), random_tokens(1, 6).expand(2000, 6)
    with torch.no_grad():
        probs, order = gpt(prompt[:1])[0, -1].softmax(-1).sort(descending=True)
    for top_p in (0.02, 0.3, 0.7):
        n = int((probs.cumsum(0) < top_p).sum()) + 1
        new = generate(gpt, prompt, 1, top_p=top_p, generator=torch.Generator().manual_seed(0))[
            :, -1
        ]
        assert set(new.tolist()) <= set(order[:n].tolist())
        if n <= 30:
            assert set(new.tolist()) == set(order[:n].tolist())
    everything = generate(gpt, prompt, 1, top_p=1.0, generator=torch.Generator().manual_seed(0))
    assert torch.equal(
        everything, generate(gpt, prompt, 1, generator=torch.Generator().manual_seed(0))
    )


def test_top_p_ends_where_the_mass_is_reached():
    """Two of four equal tokens have half of it."""
    drawn = generation.sample(torch.zeros(200, 4), 1.0, None, 0.5, torch.Generator().manual_seed(0))
    assert len(drawn.unique()) == 2


def test_top_k_takes_no_more_where_logits_are_equal():
    logits = torch.tensor([[1.0, 2.0, 1.0, 1.0]]).repeat(100, 1)
    assert len(set(generation.sample(logits, 1e6, 2, None, None).flatten().tolist())) == 2


@pytest.mark.parametrize("logit", [float("nan"), float("inf")])
def test_no_token_is_drawn_from_what_is_not_finite(logit):
    with pytest.raises(UserError, match="NaN or infinity"):
        generation.sample(torch.tensor([[0.0, logit]]), 1.0, None, None, None)


# ---- the script ----


@pytest.fixture
def run(tmp_path):
    # With tied embeddings greedy text repeats one token, which hides mistakes.
    gpt = make_gpt(
        {"normaliser": "lssa", "reweight_p": 3}, std=0.2, vocab_size=257, tie_embeddings=False
    )
    return save_run(tmp_path / "run", gpt.config, gpt)


@pytest.fixture
def sampled(call, capsys):
    """What sample.py prints with these arguments."""

    def stdout(*args):
        call(sample, *args, "--device", "cpu")
        return capsys.readouterr().out

    return stdout


def test_only_tokens_of_the_tokeniser_are_drawn(tmp_path, sampled):
    """From a model with more rows than its tokeniser has tokens. Those of the others have larger
    logits.
    """
    gpt = make_gpt(vocab_size=400, tie_embeddings=False)
    with torch.no_grad():
        gpt.get_parameter("final_norm.weight").zero_()
        gpt.get_parameter("final_norm.bias").fill_(1.0)
        gpt.lm_head.weight[257:] = 1.0
    prompt = random_tokens(1, 5)
    assert generate(gpt, prompt, 8)[:, 5:].min() >= 257
    assert generate(gpt, prompt, 8, n_vocab=257)[:, 5:].max() < 257
    run = save_run(tmp_path / "run", gpt.config, gpt)
    assert sampled(run, "--prompt", "ab", "--tokens", 20, "--samples", 2).count("ab") >= 2


def test_streamed_text_is_the_batch_text(run, sampled, tmp_path):
    (tmp_path / "prompt.txt").write_text("é!", encoding="utf-8")
    ask = (run, "--tokens", 40, "--rope", "ntk", "--temperature", 0)
    alone = [
        sampled(*ask, "--prompt", "ab"),
        sampled(*ask, "--prompt-file", tmp_path / "prompt.txt"),
    ]
    assert alone[1].startswith("é!")
    both = sampled(*ask, "--prompt", "ab", "--prompt-file", tmp_path / "prompt.txt")
    assert both == f"--- prompt 1, sample 1\n{alone[0]}--- prompt 2, sample 1\n{alone[1]}"
    assert alone[0] == sampled(*ask, "--prompt", "ab", "--seed", 9)
    assert alone[0] != sampled(*ask, "--prompt", "ab", "--rope", "none")
    assert alone[0] != sampled(*ask, "--prompt", "ab", "--window", 3)
    assert alone[0] == sampled(*ask, "--prompt", "ab", "--window", 43)  # of all that are read


@needs_gpt2
def test_a_prompt_that_overflows_the_tokenisers_stack(sampled, monkeypatch):
    trained = SimpleNamespace(model=make_gpt(), tokenizer=get_tokenizer("gpt2"))
    monkeypatch.setattr(sample, "load_model", lambda *_: trained)
    prompt = " " * 10**6 + "word"
    assert sampled("run", "--prompt", prompt, "--tokens", 0) == f"{prompt}\n"


def test_seeds(run, sampled):
    def texts(*args):
        return sampled(run, "--tokens", 30, *args).split("--- prompt ")[1:]

    first, second = texts("--prompt", "ab", "ab", "--seed", 5)
    assert first[len("1, sample 1") :] != second[len("2, sample 1") :]
    shifted = texts("--prompt", "xyz", "ab", "--seed", 4)
    assert shifted[1][1:] == first[1:]
    three = texts("--prompt", "ab", "--samples", 3)
    assert len({text[len("1, sample 1") :] for text in three}) == 3


def test_a_sample_ends_with_the_document(run, sampled, monkeypatch):
    """Text after a row's end is cut, though the rows beside it continue."""
    eot = get_tokenizer("bytes").eot_token
    steps = [[97, 98], [eot, 99], [100, 101], [102, eot], [103, 104]]

    def stream(model, tokens, n_new, **options):
        assert tokens[:, 0].eq(eot).all()
        assert (options["top_k"], options["top_p"], options["temperature"]) == (50, 0.3, 0.8)
        return (torch.tensor(step)[:, None] for step in steps)

    monkeypatch.setattr(sample, "stream", stream)
    out = sampled(run, "--prompt", ">", "--samples", 2, "--top-p", 0.3)
    assert out == "--- prompt 1, sample 1\n>a\n--- prompt 1, sample 2\n>bce\n"


def test_bad_input(run, sampled):
    for option, value, message in (
        ("--rope", "theta", "RoPE scaling theta: expected none, ntk, yarn or theta=500000"),
        ("--temperature", "inf", "--temperature inf"),
        ("--seed", 2**63, "--seed: .* at least 0, at most"),
        ("--prompt-file", "none.txt", "^none.txt: cannot be read"),
    ):
        with pytest.raises(UserError, match=message):
            sampled(run, option, value)
