"""hub/export.py against transformers: the same logits, the same tokens; errors in one line."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from attention_cases import OPTIONS
from conftest import FAMILIES, make_byte_run, one_line, slow, train_bpe

from attention import make_normaliser
from config import load_config
from data.tokenizer import get_tokenizer
from generation import generate
from hub import export
from hub.native import choose_architecture
from infra.cli import UserError
from model import GPT
from positions import RopeScaling
from schema import AttentionConfig
from training.checkpoint import find_checkpoints, load_checkpoint, load_model

FOX = f"{Path(__file__).parents[2]}/configs/variants/fox.py:FoX"


@pytest.mark.parametrize("tie", ["true", "false"])
@pytest.mark.parametrize("bias", ["true", "false"])
@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_transformers_gives_the_same_logits(family, bias, tie, tiny_config, call, capsys):
    """Loading is strict, so equal logits also mean that each weight is written, and written once."""
    pytest.importorskip("transformers")
    out = tiny_config.with_name("out")
    run = make_byte_run(tiny_config, *family, "--model.bias", bias, "--model.tie-embeddings", tie)
    call(export, run, out, "--check")
    assert float(capsys.readouterr().out.split("between the logits: ")[1]) <= 1e-4
    files = {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert files <= {path.name for path in out.iterdir()}
    config = json.loads((out / "config.json").read_text())
    assert config["vocab_size"] == 257 and config["tie_word_embeddings"] == (tie == "true")
    assert config["rope_parameters"]["rope_theta"] == 5000.0


@pytest.mark.parametrize(
    "wrong", [math.nan, math.inf, 2e-3, "embedding.weight", "blocks.0.attention.qkv.weight"]
)
def test_a_check_that_fails(wrong, tiny_config, call, monkeypatch):
    """A difference beyond the bound, or a parameter that was exported with one wrong number."""
    pytest.importorskip("transformers")
    if isinstance(wrong, float):
        monkeypatch.setattr(export, "check", lambda *args: wrong)
    else:
        native_model = export.native_model

        def spoilt(model, *args):
            converted = native_model(model, *args)
            with torch.no_grad():
                model.get_parameter(wrong).view(-1)[5] += 1
            return converted

        monkeypatch.setattr(export, "native_model", spoilt)
    run = make_byte_run(tiny_config, *FAMILIES["llama"])
    with one_line("logits differ by ", "expected at most 1e-03"):
        call(export, run, tiny_config.with_name("out"), "--check")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_a_cache_keeps_every_bit_of_the_signals(dtype):
    """Of 6 query heads in 2 heads of keys."""
    transformers = pytest.importorskip("transformers")
    from hub.modeling import HubCache

    k, v = torch.randn(2, 2, 2, 9, 16, dtype=dtype)
    signals = torch.randn(2, 6, 9, 2, dtype=torch.promote_types(dtype, torch.float32))
    cache = transformers.DynamicCache()
    for piece in (slice(0, 7), slice(7, 9)):
        got = HubCache(cache).append(0, k[:, :, piece], v[:, :, piece], signals[:, :, piece])
    assert all(map(torch.equal, got, (k, v, signals)))


def test_a_quantised_cache_has_no_place_for_signals():
    transformers = pytest.importorskip("transformers")
    from hub.modeling import HubCache

    cache = Mock(spec=transformers.QuantizedCache, get_seq_length=lambda: 0)
    signals = torch.zeros(1, 2, 3, 1)
    with pytest.raises(UserError, match="a quantised cache keeps no bits"):
        HubCache(cache).append(0, *torch.zeros(2, 1, 2, 3, 16), signals)


def test_generate_does_without_a_cache_that_a_model_cannot_have(tiny_config):
    """lm-eval asks for one in every task that generates."""
    pytest.importorskip("transformers")
    options = ["--attention.normaliser", "sigmoid", "--attention.bias", "log_len"]
    model = GPT(load_config(tiny_config, options))
    converted = export.own_model(model, RopeScaling(), 0).eval()
    x = torch.randint(1, 60, (1, 9))
    new = converted.generate(x, use_cache=True, max_new_tokens=1, do_sample=False)[0, -1]
    assert new == model.eval()(x)[0, -1].argmax()


def test_no_token_that_the_tokenizer_lacks_is_generated(tiny_config, call):
    pytest.importorskip("transformers")
    out = tiny_config.with_name("out")
    call(export, make_byte_run(tiny_config, "--model.vocab-size", "300"), out)
    generation = json.loads((out / "generation_config.json").read_text())
    assert generation["suppress_tokens"] == [*range(257, 300)]


@pytest.fixture
def converted(tiny_config):
    """An exported model with shifted keys and a learned normaliser, in training mode."""
    pytest.importorskip("transformers")
    options = ["--attention.normaliser", "ssmax", "--model.key-shift", "true"]
    return export.own_model(GPT(load_config(tiny_config, options)), RopeScaling(), 0)


def test_an_exported_model_takes_what_models_of_transformers_take(converted):
    model = converted.eval()
    x = torch.randint(60, (2, 9))
    logits = model(x).logits
    embedded = model(
        inputs_embeds=model.get_input_embeddings()(x), position_ids=7 + torch.arange(9)[None]
    )
    assert torch.equal(embedded.logits, logits)
    states = model(x, output_hidden_states=True).hidden_states
    assert len(states) == 1 + model.config.num_hidden_layers
    assert torch.equal(states[0], model.gpt.embedding(x))
    assert torch.equal(states[-1], model.gpt.hidden(x, RopeScaling()))
    assert model(x).hidden_states is None
    mask = torch.ones(2, 9, dtype=int)
    mask[0, :4] = 0
    padded = model(x, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp_min(0)).logits
    assert torch.allclose(padded[0, 4:], model(x[:1, 4:]).logits[0], atol=1e-5)


def test_an_exported_model_knows_documents(tiny_config, tmp_path):
    """Through a file, and after a cache that ends within a document."""
    pytest.importorskip("transformers")
    gpt = GPT(load_config(tiny_config, ["--data.documents=true", "--model.key-shift=true"])).eval()
    assert gpt.end_of_text is not None
    gpt.end_of_text.fill_(7)
    exported = export.own_model(gpt, RopeScaling(), 0)
    exported.save_pretrained(tmp_path)
    model = type(exported).from_pretrained(tmp_path).eval()
    x = torch.randint(8, 60, (2, 12))
    x[:, 4] = 7
    logits = model(x).logits
    assert torch.allclose(logits, gpt(x), atol=1e-5)
    assert torch.allclose(logits[:, 4:], model(x[:, 4:]).logits, atol=1e-5)
    cache = model(x[:, :7], use_cache=True).past_key_values
    rest = model(x[:, 7:], past_key_values=cache).logits
    assert torch.allclose(rest, logits[:, 7:], atol=1e-5)


@pytest.mark.parametrize("normaliser", ["softmax", FOX], ids=["softmax", "fox"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_documents_follow_a_cache(normaliser, dtype, tiny_config):
    """That is cropped, as after a rejected proposal, reordered, as by beams, or repeated."""
    pytest.importorskip("transformers")
    overrides = ["--data.documents=true", f"--attention.normaliser={normaliser}"]
    gpt = GPT(load_config(tiny_config, overrides)).eval()
    assert gpt.end_of_text is not None
    gpt.end_of_text.fill_(7)
    model = export.own_model(gpt, RopeScaling(), 0).eval().to(dtype)
    x = torch.randint(8, 60, (2, 12))
    x[0, 3] = x[1, 5] = x[:, 8] = 7
    tolerance = 0.05 if dtype == torch.bfloat16 else 1e-5

    def goes_on(change, rows):
        cache = model(x[:, :9], use_cache=True).past_key_values
        change(cache)
        rest = x[rows][:, 9:]
        n_kept = cache.get_seq_length()
        found = model(rest, past_key_values=cache).logits
        whole = model(torch.cat((x[rows][:, :n_kept], rest), 1)).logits
        assert torch.allclose(found, whole[:, n_kept:], atol=tolerance)

    goes_on(lambda cache: None, [0, 1])
    goes_on(lambda cache: cache.crop(-1), [0, 1])
    goes_on(lambda cache: cache.crop(-2), [0, 1])
    goes_on(lambda cache: (cache.crop(-2), cache.reorder_cache(torch.tensor([1, 0]))), [1, 0])
    goes_on(lambda cache: (cache.crop(-2), cache.batch_repeat_interleave(2)), [0, 0, 1, 1])
    whole = model(x).logits
    for end in (3, 9):  # embeddings before the first document's end, and after ids
        kinds = [{"inputs_embeds": model.gpt.embedding(x[:, :end])}, {"input_ids": x[:, end:]}]
        if end == 9:
            kinds = [{"input_ids": x[:, :9]}, {"inputs_embeds": model.gpt.embedding(x[:, 9:])}]
        cache = model(**kinds[0], use_cache=True).past_key_values
        found = model(**kinds[1], past_key_values=cache).logits
        assert torch.allclose(found, whole[:, end:], atol=tolerance)


def test_what_an_exported_model_refuses_says_what_to_do(converted):
    x = torch.zeros(1, 4, dtype=int)
    cases = [
        ({"input_ids": x + converted.config.vocab_size}, "expected ids from 0 to .*resize_token"),
        ({"input_ids": x - 1}, "input_ids: -1: expected ids from 0"),
        ({"input_ids": x, "output_attentions": True}, "attention_inputs gives the q and k"),
        ({"input_ids": x, "position_ids": torch.tensor([[0, 1, 0, 1]])}, "a row of its own"),
        ({}, "expected one of the two"),
    ]
    for options, message in cases:
        with pytest.raises(UserError, match=message):
            converted(**options)
    with pytest.raises(UserError, match="attn_implementation = sdpa: expected none: .*engine"):
        type(converted)._from_config(converted.config, attn_implementation="sdpa")
    type(converted)._from_config(converted.config, attn_implementation="eager")


@pytest.mark.parametrize("size", [40, 100, 300])
def test_resized_embeddings_keep_their_rows_through_a_file(converted, size, tmp_path):
    model = converted.eval()
    n = min(size, model.config.vocab_size)
    x = torch.randint(n, (1, 9))
    before = model(x).logits[..., :n]
    model.resize_token_embeddings(size)
    logits = model(x).logits
    assert logits.shape[-1] == size == model.config.vocab_size
    assert torch.allclose(logits[..., :n], before, atol=1e-6)
    model(torch.full((1, 2), size - 1))
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    assert torch.equal(again(x).logits, logits)


def test_gradient_checkpointing_gives_the_same_gradients(converted):
    model = converted
    x = torch.randint(60, (2, 9))
    mask = torch.ones_like(x)
    mask[0, :4] = 0
    gradients = []
    calls = []
    model.gpt.blocks[0].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    for enable in (model.gradient_checkpointing_enable, model.gradient_checkpointing_disable):
        enable()
        assert model.is_gradient_checkpointing == (len(gradients) == 0)
        model.zero_grad()
        model(x, attention_mask=mask, labels=x, use_cache=True).loss.backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
    assert len(calls) == 2 + 1
    assert all(map(torch.allclose, *gradients))


def test_an_unknown_scaling_stops_before_the_weights():
    pytest.importorskip("transformers")
    from hub.modeling import NormaliserGPTConfig, NormaliserGPTForCausalLM

    with pytest.raises(UserError, match="RoPE scaling foo: expected none, ntk"):
        NormaliserGPTForCausalLM(NormaliserGPTConfig(rope="foo"))


def spaced_bpe(*before):
    """tokenizer.json of a BPE in which the first word of a text begins with a space, as Llama's
    has.

    before: pre-tokenisers that stand before it.
    """
    tokenizers = pytest.importorskip("tokenizers")
    pre = tokenizers.pre_tokenizers
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE(byte_fallback=True))
    bpe.pre_tokenizer = pre.Sequence([*before, pre.Metaspace(prepend_scheme="first")])
    bytes_ = [f"<0x{i:02X}>" for i in range(256)]
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400, special_tokens=["</s>", *bytes_], show_progress=False
    )
    bpe.train_from_iterator([export.CHECK_TEXT, "def f(x): return x"], trainer)
    return bpe.to_str(pretty=True)


def test_a_text_after_the_end_token_has_the_tokens_of_training():
    pytest.importorskip("transformers")
    ours = get_tokenizer("", spaced_bpe())
    theirs = export.convert_tokenizer(ours, None)
    for text in ("def f(x)", "x", " x", export.CHECK_TEXT):
        assert theirs.encode(text) == ours.encode_ordinary(text)
        assert theirs.encode("</s>" + text) == [ours.eot_token, *ours.encode_ordinary(text)]


def test_a_space_before_the_first_word_alone():
    pre = pytest.importorskip("tokenizers").pre_tokenizers
    pytest.importorskip("transformers")
    ours = get_tokenizer("", spaced_bpe(pre.Digits()))
    assert export.convert_tokenizer(ours, None).encode("x 12 y") == ours.encode_ordinary("x 12 y")


@pytest.mark.parametrize("name", ["bytes", "gpt2", "file"])
def test_exported_tokenizer_gives_the_same_tokens(name, tmp_path):
    transformers = pytest.importorskip("transformers")
    try:
        ours = (
            get_tokenizer("", train_bpe(["a text"], 300)) if name == "file" else get_tokenizer(name)
        )
    except UserError:
        pytest.skip("GPT-2's vocabulary is not at hand")
    export.convert_tokenizer(ours, None).save_pretrained(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert len(theirs) == ours.n_vocab
    source = Path(__file__).parents[2].joinpath("config.py").read_text() + export.CHECK_TEXT
    odd = bytes(range(256)).decode("latin-1") + "  \r\n\t ß 日本語 🙂 ½ " + "a" * 300
    for text in (source, odd):
        assert theirs.encode(text) == ours.encode_ordinary(text)
        assert theirs.decode(theirs.encode(text), clean_up_tokenization_spaces=False) == text
    assert len(theirs.encode(source, truncation=True)) > 2048  # no length of training cuts a text
    assert theirs.bos_token_id == theirs.eos_token_id == ours.eot_token


def test_a_damaged_checkpoint_is_one_line(tiny_config, call):
    run = make_byte_run(tiny_config)
    (path,) = find_checkpoints(run)
    content = load_checkpoint(path)
    for damage in ({"config": {}}, {"model": {}}, {"data": {"tokenizer": "none"}}):
        torch.save(content | damage, path)
        with pytest.raises(UserError) as error:
            call(export, path, tiny_config.with_name("out"))
        assert "\n" not in str(error.value) and not tiny_config.with_name("out").exists()


def test_one_line_without_transformers(tiny_config, call, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    run = make_byte_run(tiny_config)
    out = tiny_config.with_name("out")
    with pytest.raises(
        UserError, match="^transformers is not installed: pip install -r requirements-hub"
    ):
        call(export, run, out)
    assert not out.exists()


# ---------------------------------------------------------------- models with the repo's own code

# Runs without this repo on its path: every folder's logits at 1x and 4x, with left padding, in
# bfloat16, and 20 greedy tokens, into one file.
LOAD_ALL = """
import gc
gc.disable()  # collecting takes a fifth of the time
import sys, torch, transformers
transformers.utils.logging.set_verbosity_error()
torch.set_grad_enabled(False)
results = {}
for folder, rope, n_prompt in eval(sys.argv[2]):
    options = {"rope": rope, "output_loading_info": True}
    load = transformers.AutoModelForCausalLM.from_pretrained
    model, info = load(folder, trust_remote_code=True, **options)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    results[folder, rope] = found = {}
    tokens = torch.load(sys.argv[1])
    for length in (64, 256):
        try:
            found[length] = model(tokens[:, :length]).logits
        except ValueError as e:
            found[length] = str(e)
    for kept in (0, 2, torch.tensor([3, 63])):
        last = slice(-kept, None) if isinstance(kept, int) else kept
        few = model(tokens[:, :64], logits_to_keep=kept).logits
        assert torch.allclose(few, found[64][:, last], atol=1e-4), folder
    model.save_pretrained(folder + "_again")
    again = load(folder + "_again", trust_remote_code=True)
    assert torch.equal(again(tokens[:, :64]).logits, found[64]), folder
    prompt = tokens[:1, :n_prompt]
    greedy = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": None}
    found["tokens"] = model.generate(prompt, **greedy)
    model.generation_config.max_new_tokens = 20  # the length may stand there, beside a config of the call
    same = model.generate(prompt, generation_config=transformers.GenerationConfig(do_sample=False))
    assert torch.equal(same, found["tokens"][:, : same.shape[1]]), folder  # it may end by end-of-text
    if model.config.use_cache:
        static = model.generate(prompt, cache_implementation="static", **greedy)
        assert torch.equal(static, found["tokens"]), folder
        assisted = model.generate(prompt, assistant_model=model, **greedy)  # a `generate` within another
        assert torch.equal(assisted, found["tokens"]), folder
    padded = torch.cat((torch.zeros(2, 5, dtype=int), tokens[:, :9]), 1)
    mask = torch.ones_like(padded)
    mask[0, :5] = 0
    found["padded"] = model(padded, attention_mask=mask).logits[0, 5:]
    found["bare"] = model(tokens[:1, :9]).logits[0]
    a = model.generate(padded, attention_mask=mask, **greedy | {"max_new_tokens": 9})[0, 5:]
    b = model.generate(padded[:1, 5:], **greedy | {"max_new_tokens": 9})[0]
    assert torch.equal(a, b), folder
    model.bfloat16()
    found["bfloat16"] = model(tokens[:, :64]).logits
assert not {"model", "attention", "normalisers"} & set(sys.modules)
torch.save(results, sys.argv[1])
"""


def compare_in_a_fresh_process(cases, tiny_config, call):
    """Export a model for each (overrides, RoPE scaling), load all elsewhere, compare with ours."""
    pytest.importorskip("transformers")
    tokens = torch.randint(257, (2, 256), generator=torch.Generator().manual_seed(1))
    file = tiny_config.with_name("results.pt")
    listed = []
    runs = []
    torch.save(tokens, file)
    for i, (overrides, rope) in enumerate(cases):
        out = tiny_config.with_name(f"out{i}")
        run = make_byte_run(tiny_config, "--train.seq-len", "64", *overrides, "--name", f"run{i}")
        call(export, run, out, "--code")
        # with 20 new tokens: its longest, or beyond 64
        n_prompt = 44 if '"ssmax_pn"' in overrides else 60
        listed.append((str(out), rope, n_prompt))
        runs.append(run)
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"HF_HOME": str(tiny_config.with_name("hf")), "HF_HUB_OFFLINE": "1"}
    arguments = [sys.executable, "-c", LOAD_ALL, str(file), repr(listed)]
    subprocess.run(arguments, cwd=tiny_config.parent, env=environment, check=True)
    results = torch.load(file)
    for run, (out, rope, n_prompt), (overrides, _) in zip(runs, listed, cases, strict=True):
        model = load_model(run).model
        found = results[out, rope]
        scaling = RopeScaling(rope)
        with torch.no_grad():
            for length in (64, 256):
                if length == 256 and '"ssmax_pn"' in overrides:
                    assert "learned for at most" in found[256]
                    continue
                ours = model(tokens[:, :length], rope=scaling)
                difference = (found[length] - ours).abs().max() / max(1, ours.abs().max())
                assert difference <= 1e-4, (overrides, length)
        ours = generate(model, tokens[:1, :n_prompt], 20, temperature=0, rope=scaling)
        assert torch.equal(found["tokens"], ours), overrides
        difference = (found["padded"] - found["bare"]).abs().max() / max(
            1, found["bare"].abs().max()
        )
        assert difference <= 1e-4, overrides
        assert (found["bfloat16"] - found[64]).abs().mean() <= 0.2, overrides


def flags(options):
    return [
        text for key, value in options.items() for text in (f"--attention.{key}", json.dumps(value))
    ]


LSSAR = flags({"normaliser": "lssa", "reweight_p": 15})


@pytest.mark.parametrize("chosen", [slice(0, 4, 3), *slow(slice(1, 3))], ids=["outer", "inner"])
def test_exported_models_are_ours(tiny_config, own_file, call, chosen):
    llama_like = [*FAMILIES["llama"], "--model.tie-embeddings", "false", "--model.bias", "false"]
    untrained = ["--train.max-steps", "0", "--optimizer.warmup-steps", "0", "--init-from", "runs/a"]
    mine = f"attention = {{normaliser = '{own_file}:Mine'}}"
    other = own_file.parent / "other/mine.py"  # another formula of the same names
    other.parent.mkdir()
    other.write_text(own_file.read_text().replace("0.5", "0.9"))
    cases = [
        ([*LSSAR, *llama_like, *untrained], "ntk"),
        ([*flags({"normaliser": "ssmax_pn"}), "--model.n-kv-head", "1"], "none"),
        ([*flags({"normaliser": "fox"}), "--model.position", "none"], "none"),
        (
            [
                "--model.window",
                "9",
                "--layers",
                f"[{{at = [1], position = 'none', window = 0, {mine}}}]",
                "--attention.normaliser",
                f"{other}:Mine",
            ],
            "ntk",
        ),
    ]
    compare_in_a_fresh_process(cases[chosen], tiny_config, call)


def test_files_of_ones_own_need_no_name_that_python_takes(tmp_path):
    """Nor different ones, and the file that registers them imports both."""
    files = [tmp_path / folder / "my-soft.max.py" for folder in ("a", "b")]
    for file in files:
        file.parent.mkdir()
        file.write_text(f"# of {file.parent.name}\n")
    out = tmp_path / "out"
    out.mkdir()
    export.copy_code(out, [f"{file}:Mine{file.parent.name}" for file in files])
    lines = (out / "hub_modeling.py").read_text().splitlines()
    registered = [line for line in lines if line.startswith("MODULES[")]
    assert [line.partition('"] = ')[2] for line in registered] == ["own_0", "own_1"]
    assert all(line.startswith('MODULES["my-soft.max-') for line in registered)
    assert [(out / f"own_{i}.py").read_text() for i in (0, 1)] == ["# of a\n", "# of b\n"]


def test_a_file_of_ones_own_may_import_anything(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "import math, triton, normalisers.base as base  # others; ours\n"
        "\x0c\nfrom infra.files import read_text\nmath.pi\nif True:\n\tfrom normalisers.base import HIDDEN\n"
    )
    out = tmp_path / "out"
    out.mkdir()
    export.copy_code(out, [f"{file}:Mine"])
    text = (out / "own_0.py").read_text()
    assert (
        "import math\ntry:\n    import triton\n" in text
        and "as base\n" in text
        and "\x0c\nfrom .infra_files import read_text\nmath.pi\nif True:\n\tfrom .normalisers_base"
        in text
    )
    for copied in out.glob("*.py"):
        compile(copied.read_text(), copied.name, "exec")
    assert (out / "infra_files.py").exists()


@pytest.mark.parametrize(
    "line",
    [
        "import normalisers.base",
        "import math; from normalisers.family import Softmax",
        "if True: from normalisers.family import Softmax",
        "import normalisers.base as base; base.HIDDEN",
    ],
)
def test_what_has_no_flat_form_is_one_line(line, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(line)
    with one_line(f"{file}, line 1: {line}: cannot be exported"):
        export.copy_code(tmp_path, [f"{file}:Mine"])
    assert [*tmp_path.iterdir()] == [file]


def test_a_file_beside_ones_own_is_one_line(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    file = tmp_path / "mine.py"
    file.write_text("import math\nfrom helper import FACTOR\n")
    (tmp_path / "helper.py").write_text("FACTOR = 1")
    with one_line(
        f"{file}, line 2: import of helper: cannot be exported: expected no file of yours beside"
    ):
        export.copy_code(tmp_path, [f"{file}:Mine"])


@pytest.mark.parametrize("name", ["ssmax", "fox"])
def test_offloaded_parameters_are_loaded(name):
    accelerate = pytest.importorskip("accelerate")
    position = "none" if name == "fox" else "rope"
    layer = make_normaliser(AttentionConfig(normaliser=name), 2, 8, 16, position, width=4)
    h = torch.randn(1, 3, 4)
    learned, signals = layer(torch.float32), layer.read(h)
    accelerate.cpu_offload(layer, execution_device=torch.device("cpu"))
    assert all(parameter.is_meta for parameter in layer.parameters())
    for parameter_name, value in layer(torch.float32).items():
        assert torch.equal(value, learned[parameter_name])
    assert signals is None or torch.equal(layer.read(h), signals)


def test_code_needs_no_package_of_kernels(tmp_path):
    """transformers demands what a file of the hub imports outside a try, in functions as well."""
    dynamic = pytest.importorskip("transformers.dynamic_module_utils")
    export.copy_code(tmp_path, ["softmax"])
    files = [*tmp_path.glob("*.py")]
    imported = {name.split(".")[0] for file in files for name in dynamic.get_imports(file)}
    assert len(files) > 10 and "triton" not in imported


@torch.no_grad()
def test_the_loss_and_the_length_to_scale_for(tiny_config):
    pytest.importorskip("transformers")
    model = load_model(make_byte_run(tiny_config)).model
    converted = export.own_model(model, RopeScaling(), 256).eval()
    x = torch.randint(257, (2, 16))
    labels = x.clone()
    labels[0, :5] = -100
    loss = converted(x, labels=labels).loss
    torch.testing.assert_close(loss, model(x[:, :-1], labels[:, 1:]), rtol=1e-4, atol=1e-5)
    converted.config.rope, converted.config.rope_length = "ntk", 64
    expected = model(x, rope=RopeScaling("ntk", length=64))
    torch.testing.assert_close(converted(x).logits, expected, rtol=1e-4, atol=1e-4)


def test_a_scaling_is_written_and_needs_our_code(tiny_config, call):
    pytest.importorskip("transformers")
    out = tiny_config.with_name("out")
    call(export, make_byte_run(tiny_config), out, "--rope", "theta=500000")
    config = json.loads((out / "config.json").read_text())
    assert (config["model_type"], config["rope"]) == ("normaliser_gpt", "theta=500000")


def test_native_only_where_exact(tiny_config):
    changes = [
        "--model.position=alibi",
        "--model.attention-gate=true",
        "--attention.output-norm=true",
    ]
    changes += ["--model.window=9", "--layers=[{at = [1], position = 'none'}]"]
    changes += ["--model.n-kv-head=1", "--attention.scores=cosine", "--train.loss=logit_norm"]
    changes += ["--model.norm=rmsnorm", "--attention.reweight-p=3", "--data.documents=true"]
    assert choose_architecture(load_config(tiny_config)) == "gpt_neox"
    for change in changes:
        assert choose_architecture(load_config(tiny_config, [change])) is None, change


@pytest.mark.slow
def test_every_normaliser_and_scaling_leaves(tiny_config, own_file, call):
    kinds: dict[Any, dict[str, Any]] = {}  # one of each set of keys and of parameters
    for options in OPTIONS:
        parameters = make_normaliser(AttentionConfig(**options), 2, 16, 64).state_dict()
        kinds[options["normaliser"], *sorted(options), *parameters] = options
    cases = [(flags(options), "ntk") for options in kinds.values()]
    cases += [(LSSAR, rope) for rope in ("none", "ntk", "theta=500000", "yarn")]
    positions = [["--model.position", name] for name in ("p_rope", "none", "alibi")]
    cases += [([*some, *each], "ntk") for some in (LSSAR, []) for each in positions]
    cases += [
        ([*LSSAR, "--model.attention-gate", "true", "--attention.output-norm", "true"], "yarn")
    ]
    cases += [([*LSSAR, "--train.loss", loss], "ntk") for loss in ("norm_softmax", "logit_norm")]
    cases += [
        (
            [*flags({"normaliser": "sigmoid", "bias": "log_len"}), "--model.position", "alibi"],
            "ntk",
        ),
        (["--attention.normaliser", f"{own_file}:Mine"], "ntk"),
        ([*LSSAR, "--model.key-shift", "true"], "ntk"),
        (flags({"length_scale": "query"}), "yarn"),
    ]
    compare_in_a_fresh_process(cases, tiny_config, call)


def test_only_a_new_folder_is_written(tiny_config, call):
    pytest.importorskip("transformers")
    run = make_byte_run(tiny_config)
    with pytest.raises(UserError, match="exists; expected a new folder"):
        call(export, run, run)
