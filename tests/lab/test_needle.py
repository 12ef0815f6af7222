"""lab/needle.py on a model built by hand to copy the needle, so that every number is known."""

from functools import partial
from itertools import cycle
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import save_run, write_dataset
from test_model import make_gpt, random_tokens

from config import config_from_dict
from data.tokenizer import get_tokenizer
from infra.cli import UserError
from lab import needle
from measure import read_rows, select
from model import GPT, KVCache
from positions import RopeScaling
from training.checkpoint import load_model

LETTERS = " 0123456789"  # what the model copies, each with a direction of its own
OTHER = len(LETTERS)  # the direction of all other bytes
WIDTH, HEAD = 64, 32
OWN, BEFORE, COPIED = 0, 16, 32  # where in the residual stream: own byte, byte before, byte to come


def copying_config(folder, **sections):
    values = {
        "name": "copy",
        "model": {"n_layer": 2, "n_head": 2, "n_embd": WIDTH, "vocab_size": 257, "norm": "rmsnorm",
                  "tie_embeddings": False, "rope_theta": 1e100},
        "data": {"dir": str(folder / "data")},
        "train": {"seq_len": 256, "batch_tokens": 256, "micro_batch": 1, "dtype": "float32", "max_steps": 1},
        "optimizer": {"warmup_steps": 0},
        "log": {"dir": str(folder / "runs")},
    }  # fmt: skip
    return config_from_dict(values | sections, "test")


def copying_model(config):
    """An induction head: layer 0 head 0 looks at the byte before, layer 1 head 0 for a digit after
    this byte.

    With a base of 1e100 only the first pair of a head's dimensions turns, by one radian a position;
    layer 0 uses it (cos(distance - 1) is largest at 1), layer 1 the others.
    """
    model = GPT(config)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
        for name, p in model.named_parameters():
            if "norm.weight" in name:
                p.fill_(1.0)
        model.embedding.weight[:, OWN + OTHER] = 1.0
        for i, letter in enumerate(LETTERS):
            model.embedding.weight[ord(letter), OWN + OTHER] = 0.0
            model.embedding.weight[ord(letter), OWN + i] = 1.0
            model.lm_head.weight[ord(letter), COPIED + i] = 100.0
        first, second = (block.attention for block in model.blocks)
        # Rows of qkv: q of head 0, head 1, then k, then v.
        q, k, v = 0, WIDTH, 2 * WIDTH
        # Scores 1e5 cos(distance - 1): q is turned back by a radian.
        turn = torch.tensor(1.0)
        first.qkv.bias[q] = 1e5 * HEAD**0.5 * turn.cos()
        first.qkv.bias[q + 1] = -1e5 * HEAD**0.5 * turn.sin()
        first.qkv.bias[k] = 1.0
        for i in range(OTHER + 1):
            first.qkv.weight[v + i, OWN + i] = 1.0
            first.out.weight[BEFORE + i, i] = 1.0
        for i in range(len(LETTERS)):
            second.qkv.weight[q + 2 + i, OWN + i] = 200.0 * HEAD**0.5  # this byte ...
            second.qkv.weight[k + 2 + i, BEFORE + i] = 1.0  # ... is the one before that key
            second.qkv.weight[v + i, OWN + i] = 1.0
            second.out.weight[COPIED + i, i] = 1.0
        second.qkv.bias[q + HEAD - 1] = 50.0 * HEAD**0.5
        second.qkv.weight[k + HEAD - 1, OWN + 1 : OWN + len(LETTERS)] = 1.0  # preferably of a digit
    return model.eval()


def distinct_digits(rng):
    """Numbers in which a digit determines the next one: what an induction head can copy."""
    return [
        "".join(map(str, rng.permutation(np.arange(1, 10))[:7])) for _ in range(needle.N_CHOICES)
    ]


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run folder with the copying model, and a haystack of letters without digits."""
    text = np.random.default_rng(0).choice(np.frombuffer(b"abcdefgh .,", np.uint8), 5000)
    write_dataset(tmp_path / "data", {"val": text}, 10**6)
    config = copying_config(tmp_path)
    monkeypatch.setattr(needle, "draw_numbers", distinct_digits)
    return save_run(tmp_path / "runs" / "copy", config, copying_model(config))


@pytest.fixture
def evaluate(call, no_drawing):
    return partial(call, needle, "--device", "cpu")


def shares(run, measure):
    """By length the values of a measure; NaN where the model rejects the length."""
    return select(read_rows(run), measure=measure).set_index("length").value.to_dict()


def test_a_model_that_copies_finds_the_needle(run, call, capsys):
    call(needle, run, "--lengths", 256, 600, "--samples", 5, "--depths", 10, 90, "--device", "cpu")
    for name in needle.MEASURES:
        for measure in (name, f"{name}[10%]", f"{name}[90%]"):
            assert shares(run, measure) == {256: 1.0, 600: 1.0}
    for length in (
        256,
        600,
    ):  # layer 1 head 0 looks at the number, layer 0 head 0 at the byte before
        assert shares(run, "needle_score[1.0]")[length] > 0.999
        assert shares(run, "needle_score[0.0]")[length] < 1e-3
    assert (run / "needle.png").read_bytes().startswith(b"\x89PNG")
    assert "100.0 [56.6, 100.0]" in capsys.readouterr().out


def test_rope_is_scaled_for_the_length(run, evaluate):
    """Positions divided by 600 / 256: the byte before is no longer one radian away."""
    evaluate(run, "--lengths", 600, "--samples", 2, "--depths", 50, "--rope", "theta=1e4")
    assert shares(run, "number") == {600: 0.0}


def test_a_model_that_copies_the_wrong_digits_does_not(run, evaluate, monkeypatch):
    """Every digit but the first comes out as 0. And one of ten numbers is likelier than the right
    one.
    """
    values = cycle([-2.0, *8 * [-3.0], -1.0])
    monkeypatch.setattr(
        needle,
        "log_likelihood",
        lambda _, first, *more: first.new_full(first.shape[:1], next(values)),
    )
    model, config, step, *_ = load_model(run)
    with torch.no_grad():
        second = model.blocks[1].attention
        second.out.weight.zero_()
        second.out.weight[COPIED : COPIED + 11, :11] = torch.eye(11)
        # After a digit (no longer after a space) the output's 0 is raised above the copied digit.
        model.lm_head.weight[ord("0"), OWN + 1 : OWN + 11] = 500.0
    save_run(run, config, model, step)
    evaluate(run, "--lengths", 256, "--samples", 4, "--depths", 0, 50)
    assert shares(run, "number") == shares(run, "choice") == {256: 0.0}
    assert shares(run, "first_digit[0%]") == shares(run, "first_digit[50%]") == {256: 1.0}


def test_trials_follow_their_definition():
    tokenizer = get_tokenizer("bytes")
    text = np.frombuffer(b"abcd" * 1000, np.uint8)
    stream = SimpleNamespace(read=lambda start, n: text[start : start + n], n_tokens=len(text))
    haystack = needle.Haystack(stream, tokenizer)
    anywhere = {
        needle.make_trial(haystack, 400, needle.RANDOM_DEPTH, index).span for index in range(20)
    }
    assert len(anywhere) > 10 and max(span.stop for span in anywhere) < 400
    for depth in (10, 50, 100):
        trial = needle.make_trial(haystack, 400, depth, index=7)
        assert (
            len(trial.prompt) == 400 - needle.ANSWER_TOKENS
            and trial.prompt[0] == tokenizer.eot_token
        )
        words = tokenizer.decode(trial.prompt[1:])
        statement = words[words.index("The special") :]
        city = statement.split()[3]
        assert city in needle.CITIES
        assert statement.startswith(f"The special magic {city} number is: {trial.number}.\n")
        question = f"\n\nQuestion: What is the special magic {city} number?\n"
        assert words.endswith(f"{question}Answer: The special magic {city} number is: ")
        assert tokenizer.decode([trial.prompt[i] for i in trial.span]) == f" {trial.number}."
        assert trial.number == tokenizer.decode(trial.choices[0])
        assert len({*map(tuple, trial.choices)}) == needle.N_CHOICES
        before = words.index("\nThe special")
        after = words.index("\n\nQuestion") - words.index(trial.number) - 9
        assert before == (before + after) * depth // 100
        bare = needle.make_trial(haystack, 400, depth, index=7, question_only=True)
        words = tokenizer.decode(bare.prompt[1:])
        assert words.endswith(f"{question}Answer: ") and words.count("The special magic") == 1
        assert len(bare.prompt) == len(trial.prompt) and bare.choices == trial.choices
        again = needle.make_trial(haystack, 400, depth, index=7)
        assert again == trial != needle.make_trial(haystack, 400, depth, index=8)


@torch.no_grad()
def test_likelihoods_are_those_of_whole_sequences():
    """Answers of different lengths after one cached prompt, against the model run on each sequence."""
    gpt = make_gpt(std=0.2, vocab_size=257)
    rope = RopeScaling("ntk", length=20)
    prompt = random_tokens(2, 12)
    answers = [[3, 4, 5], [7]]
    cache = KVCache(2, 20)
    first = gpt(prompt, rope=rope, cache=cache)[:, -1]
    needle.greedy(gpt, first, rope, cache, get_tokenizer("bytes"))  # leaves the cache longer
    likelihoods = needle.log_likelihood(gpt, first, answers, rope, cache, 12)
    for tokens, answer, value in zip(prompt, answers, likelihoods, strict=True):
        logs = gpt(torch.tensor([tokens.tolist() + answer]), rope=rope)[0].log_softmax(-1)
        expected = sum(logs[11 + i, token] for i, token in enumerate(answer))
        assert value.item() == pytest.approx(expected.item(), abs=1e-4)


@torch.no_grad()
def test_answers_are_tokens_of_the_tokeniser_and_not_its_end_of_text():
    """Of a model with more rows than its tokeniser has tokens, which prefers those rows, then
    end-of-text.
    """
    gpt = make_gpt(vocab_size=400, tie_embeddings=False)
    # at every position ids that the tokeniser does not have get the largest logits
    with torch.no_grad():
        gpt.get_parameter("final_norm.weight").zero_()
        gpt.get_parameter("final_norm.bias").fill_(1.0)
        gpt.lm_head.weight[257:] = 1.0
    rope = RopeScaling()
    gpt.lm_head.weight.data[256] = 0.5
    cache = KVCache(2, 20)
    first = gpt(random_tokens(2, 12), rope=rope, cache=cache)[:, -1]
    assert first.argmax(-1).min() >= 257 and (first[:, :257].argmax(-1) == 256).all()
    assert max(map(max, needle.greedy(gpt, first, rope, cache, get_tokenizer("bytes")))) < 256


def test_several_runs(run, tmp_path, evaluate, capsys):
    config = copying_config(tmp_path, name="short", attention={"normaliser": "ssmax_pn"})
    other = save_run(tmp_path / "runs" / "short", config, GPT(config))
    evaluate(run, other, "--lengths", 256, 300, "--samples", 2)
    assert shares(run, "number") == {256: 1.0, 300: 1.0}
    short = shares(other, "number[10%]")
    assert short[256] == 0.0 and np.isnan(short[300])
    assert "at 300, 10 %: no result: ssmax_pn" in capsys.readouterr().out


def test_wilson_interval():
    """Values from Wilson's formula worked out with pencil: z = 1.96, 8 of 10 and the ends."""
    assert needle.format_share(0.8, 10) == "80.0 [49.0, 94.3]"
    assert needle.format_share(0.0, 10) == "0.0 [0.0, 27.8]"


@pytest.mark.parametrize(
    "args, message",
    [
        (["--lengths", "100"], "a sequence of 100 tokens: expected at least"),
        (["--lengths", "9000"], "at most the 5000 tokens of"),
    ],
)
def test_bad_input(run, evaluate, args, message):
    with pytest.raises(UserError, match=message):
        evaluate(run, *args)
