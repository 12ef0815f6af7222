"""Config files: inheritance, overrides, and what a user reads after each kind of mistake."""

import os
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from conftest import one_line

import config
import eval_length
import sample
import sweep
import train
from config import changed_keys, config_from_dict, describe_keys, expand_sweep, load_config, to_toml
from data import prepare, python_source
from infra.cli import ArgumentParser, UserError, run_main
from normalisers.adaptive import NormSoftmax
from normalisers.own import NORMALISERS, list_variants
from schema import VARIANT_KEYS, AttentionConfig, Config, describe_layers

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "configs/gpt2_124m.toml"
CONFIGS = sorted((ROOT / "configs").rglob("*.toml"))
VARIANTS = sorted((ROOT / "configs/variants").glob("*.toml"))
NOT_AT_A = {"ssmax_sft", "ssmax_sft_B"}


def write(folder, name, text):
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_config_loads_and_replays(path, tmp_path):
    for run in expand_sweep(path):
        config = load_config(path, run.overrides)
        assert config.name.startswith(path.stem)
        assert load_config(write(tmp_path, "other_name.toml", to_toml(config))) == config
        assert config_from_dict(config.model_dump(), "a checkpoint") == config


@pytest.mark.parametrize("scale", ["scales/B", "scales/C", "scales/recall", "gpt2_124m", "track"])
def test_every_variant_trains_at_every_scale(scale):
    """A variant states attention alone, and what it says of it is the same at every scale."""
    base = str(ROOT / f"configs/{scale}.toml")
    for path in VARIANTS:
        stated = tomllib.loads(path.read_text())
        if path.stem != "drope":  # goes on with a run of softmax
            keys = {"model", "attention", "layers", "sweep"}
            assert stated.keys() <= keys, path
        run = expand_sweep(path, ["--base", base])[0]
        config = load_config(path, [*run.overrides, "--base", base])
        own = load_config(path, run.overrides)
        changed = changed_keys(own, config)
        numbers = {f"attention.{key}" for key in ("scale", "scale_init", "reweight_p_warmup")}
        numbers |= {"layers"}
        assert {key for key in changed if key.startswith(VARIANT_KEYS)} <= numbers
        stated = [[entry.model_fields_set for entry in each.layers] for each in (config, own)]
        assert stated[0] == stated[1]


def test_the_lists_of_names_are_those_of_the_folder(call, capsys):
    call(config, "--variants")
    rows = capsys.readouterr().out.splitlines()[2:]
    assert len(rows) == len(VARIANTS)
    for row, path in zip(rows, VARIANTS, strict=True):
        assert re.fullmatch(rf"\| `{path.name}` \| .{{20,}} \|", row)
    page = (ROOT / "docs/normalisers.md").read_text(encoding="utf-8")
    table = page.partition("## The names")[2].partition("![")[0]
    first_cells = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    listed = [name for cell in first_cells for name in re.findall("`([a-z0-9_]+)`", cell)]
    modules = {name: cls.__module__ for name, cls in NORMALISERS.items()}
    ours = {name for name, module in modules.items() if module.startswith("normalisers.")}
    assert {*listed} - {"normaliser"} == ours | {*list_variants()}


def test_numbers_that_follow_from_the_sizes():
    """In two decimals: the committed runs have 23.06, 25.94, 1.44, 1.28."""
    for train_len, scale, scale_init in (
        (256, 23.06, 1.44),
        (512, 25.94, 1.28),
        (1024, 28.83, 1.15),
    ):
        length = ["--train.seq-len", str(train_len), "--attention.scale"]
        config = load_config(RECIPE, [*length, "ln_d_ln_L"])
        assert config.attention.model_dump()["scale"] == scale
        config = load_config(
            RECIPE, [*length, "learned", "--attention.scale-init", "sqrt_d_over_ln_L"]
        )
        assert config.attention.model_dump()["scale_init"] == scale_init
    config = load_config(
        RECIPE, ["--attention.scores", "cosine", "--attention.scale", "1.3 sqrt_d"]
    )
    assert config.attention.model_dump()["scale"] == 10.4
    rise = ["--attention.reweight-p", "3", "--attention.reweight-p-warmup", "0.3"]
    assert load_config(RECIPE, rise).attention.reweight_p_warmup == 5659  # of 5659.5


def test_another_base_loses_nothing_of_the_attention(tmp_path):
    recipe = write(tmp_path, "recipe.toml", "[train]\nmax_steps = 800\n")
    config = load_config(ROOT / "configs/lssa.toml", ["--base", str(recipe)])
    assert (config.attention.normaliser, config.train.max_steps) == ("lssa", 800)
    based = write(tmp_path, "based.toml", f'base = "{ROOT}/configs/lssa.toml"\n')
    with one_line("based.toml would lose attention.normaliser = 'lssa' of its own base"):
        load_config(based, ["--base", str(recipe)])
    stated = write(
        tmp_path,
        "own.toml",
        f'base = "{ROOT}/configs/lssa.toml"\n[attention]\nnormaliser = "lssa"\n',
    )
    assert load_config(stated, ["--base", str(recipe)]).attention.normaliser == "lssa"
    shifted = write(tmp_path, "shifted.toml", f'base = "{ROOT}/configs/scales/context.toml"\n')
    with one_line("shifted.toml would lose model.key_shift = True of its own base"):
        load_config(shifted, ["--base", str(recipe)])
    assert not load_config(
        shifted, ["--base", str(recipe), "--model.key-shift", "false"]
    ).model.key_shift
    text = (
        f'base = "{ROOT}/configs/scales/context.toml"\n[sweep]\n"model.key_shift" = [true, false]\n'
    )
    swept = write(tmp_path, "swept.toml", text)
    assert len(expand_sweep(swept, ["--base", str(recipe)])) == 2
    with one_line("nowhere.toml: no such config file"):
        load_config(ROOT / "configs/lssa.toml", ["--base", "nowhere.toml"])


def test_rows_of_the_papers_run_at_a_small_scale():
    base = ["--base", str(ROOT / "configs/scales/A.toml"), "--model.n-head", "2"]
    base += ["--train.max-steps", "1000"]  # the papers' sweeps of these are of other sizes
    for path in CONFIGS:
        if path.parent.name == "papers" and path.stem not in NOT_AT_A:
            for row in expand_sweep(path, base):
                assert load_config(path, [*base, *row.overrides]).data.dir == "data/python_bytes"


def test_inheritance_and_override_order(tmp_path):
    write(
        tmp_path, "a.toml", 'name = "not_inherited"\nseed = 1\n[model]\nn_layer = 1\nn_head = 2\n'
    )
    write(tmp_path, "sub/b.toml", 'base = "../a.toml"\n[model]\nn_layer = 3\n')
    c = write(tmp_path, "c.toml", 'base = "sub/b.toml"\n[attention]\nnormaliser = "lssa"\n')
    config = load_config(c, ["--model.n-head", "4", "--attention.reweight_p=7"])
    assert (config.name, config.seed) == ("c", 1)
    assert (config.model.n_layer, config.model.n_head) == (3, 4)
    assert (config.attention.normaliser, config.attention.reweight_p) == ("lssa", 7)


def test_overrides_take_toml_values_and_bare_strings():
    options = "--log.wandb true --train.compile False --optimizer.lr 1e-3 --name 2024-11-20 --data.dir 1e3"
    config = load_config(RECIPE, options.split())
    assert config.log.wandb is True and config.train.compile is False
    assert (config.optimizer.lr, config.name, config.data.dir) == (1e-3, "2024-11-20", "1e3")
    assert load_config(RECIPE, ["--data.dir", "/a b"]).data.dir == "/a b"
    odd = load_config(RECIPE, ["--data.dir", 'a\x7f"\n'])
    assert config_from_dict(tomllib.loads(to_toml(odd)), "") == odd


def test_a_section_given_as_one_value_keeps_its_other_keys(tiny_config):
    config = load_config(tiny_config, ["--train", "{max_steps = 20}"])
    assert changed_keys(load_config(tiny_config), config).keys() == {"train.max_steps"}


def test_changed_keys():
    path = ROOT / "configs/lssar.toml"
    a, b = load_config(path), load_config(path, ["--attention.reweight-p", "3", "--seed", "1"])
    assert changed_keys(a, b) == {"attention.reweight_p": (15, 3), "seed": (1337, 1)}


# Overrides on configs/gpt2_124m.toml, and what the message must contain besides the source and the
# section.
BAD_OVERRIDES = [
    ("--model.n_layer twelve", "n_layer = 'twelve': expected integer"),
    ("--model.n_embd 100", "multiple of model.n_head = 12"),
    ("--model.n_kv_head 5", "n_kv_head = 5: expected a divisor of model.n_head = 12"),
    (
        "--model.rope_fraction 0.5",
        "model.rope_fraction = 0.5: only read by model.position = p_rope",
    ),
    (
        "--model.key-shift unrotated",
        "key_shift = unrotated: all rotate: expected position = p_rope",
    ),
    ("--model.n_embd 12", "n_embd = 12: position = rope needs an even head size"),
    ("--model.norm batchnorm", "'layernorm' or 'rmsnorm'"),
    ("--model.n_layers 3", "did you mean model.n_layer?"),
    ("--attention.normaliser softmaxx", "did you mean softmax?"),
    ("--attention.tau 2.0", "unknown key; expected one of normaliser"),
    ("--train.lr 0.1", "did you mean optimizer.lr?"),
    ("--train.batch_tokens 1000", "multiple of train.seq_len = 1024"),
    ("--train.micro_batch 7", "divisor of the 512 sequences"),
    ("--optimizer.schedule wsd --optimizer.decay_fraction 0.99", "at most 0.9629"),
    ("--train.val_tokens 10", "at least train.seq_len = 1024"),
    ("--train.compile maybe", "'auto' or boolean"),
    ("--optimizer.lr nan", "finite number"),
    ("--optimizer.warmup_steps 99999999", "at most train.max_steps = 18865"),
    ("--train.loss-gamma 1.0", "train.loss_gamma = 1.0: only read by train.loss = norm_softmax"),
    ("--name a/b", "name = 'a/b': expected letters, digits and ."),
    ("--modle.n_layer 3", "did you mean model?"),
    ("--model 3", "a section"),
]


@pytest.mark.parametrize(("override", "expected"), BAD_OVERRIDES)
def test_bad_values_give_one_line(override, expected):
    section = override.split()[-2].removeprefix("--").split(".")[0]
    with one_line("command line", section, expected):
        load_config(RECIPE, override.split())


BAD_ATTENTION = [
    ('normaliser = "lssa"\ngamma = 2.0', "attention.gamma = 2.0: unknown key; expected one of"),
    (
        'normaliser = "phi"\nphi = "gelu"\nreweight_p = 3',
        "attention.reweight_p = 3: re-weighting needs",
    ),
    ('normaliser = "sigmoid"\nreweight_p = 3', "attention.reweight_p = 3"),
    (
        'normaliser = "lssa"\nreweight_p_warmup = 9',
        "attention.reweight_p_warmup = 9: only read with",
    ),
    (
        'normaliser = "lssa"\nreweight_p = 3\nreweight_p_warmup = 99999',
        "at most train.max_steps = 18865",
    ),
    ('normaliser = "relu_shen"\ngamma = "inf"', "attention.gamma = 'inf': expected number"),
    ('normaliser = "sigmoid"\nsink = "one"', "attention.sink = 'one': is part of the row sum"),
    ('normaliser = "sigmoid"\nbias = true', "attention.bias = true: the learned b of SSMax needs"),
    ('normaliser = "ssmax"\nbias = "log_n"', "attention.bias = 'log_n': cancels in a softmax"),
    ('normaliser = "ssmax"\nscale = "one"\nscale_init = 0.2', "attention.scale_init = 0.2"),
    ('normaliser = "norm_softmax"\ngamma = -1.0', "expected greater than 0 or 'sqrt_d' or 'inf'"),
    ('normaliser = "norm_softmax"\ngamma_factor = 2.0', "attention.gamma_factor = 2.0: unknown"),
    (
        'normaliser = "norm_softmax"\nvariant = "affine"\ngamma = 1.0',
        "attention.variant = 'affine'",
    ),
    ('normaliser = "norm_softmax"\nvariant = "inverse"\ngamma = "inf"', "attention.gamma = 'inf'"),
]


def test_layers(tmp_path):
    """Later entries win; a normaliser takes the section's place, other keys change it; sizes give
    numbers.
    """
    text = """
[model]
position = "p_rope"
rope_fraction = 0.5
[attention]
scores = "cosine"
scale = "sqrt_d"
[[layers]]
every = 4
position = "none"
attention = { length_scale = "ln_n" }
[[layers]]
at = [0, -1]
window = 128
rope_theta = 5e5
attention = { normaliser = "ssmax", scores = "cosine", scale_init = "sqrt_d_over_ln_L" }
"""
    config = load_config(write(tmp_path, "x.toml", f'base = "{RECIPE}"\n{text}'))
    of_layers = config.layer_configs
    assert [c.model.position for c in of_layers] == 2 * [*3 * ["p_rope"], "none"] + 3 * [
        "p_rope"
    ] + ["none"]
    assert [c.model.window for c in of_layers] == [128, *10 * [0], 128]
    assert [c.model.rope_theta for c in of_layers] == [5e5, *10 * [1e4], 5e5]
    assert of_layers[1].attention == config.attention and of_layers[1].model == config.model
    assert of_layers[3].attention.model_dump() == config.attention.model_dump() | {
        "length_scale": "ln_n"
    }
    assert of_layers[0].attention == AttentionConfig(
        normaliser="ssmax", scores="cosine", scale_init=1.15
    )
    assert load_config(write(tmp_path, "y.toml", to_toml(config)), ["--name", "x"]) == config
    p_rope = ["--model.position=p_rope", "--model.rope-fraction=0.5"]
    there_and_back = '[{every = 1, position = "none"}, {at = [1], position = "p_rope"}]'
    assert (
        load_config(RECIPE, [*p_rope, "--layers", there_and_back])
        .layer_configs[1]
        .model.rope_fraction
        == 0.5
    )
    same = load_config(RECIPE, ["--model.position=p_rope", "--model.rope-fraction=0.5",
                                "--layers", '[{at = [1], position = "p_rope"}]'])  # fmt: skip
    assert same.layer_configs[1].model == same.model
    qk_norm = "softmax (scores = cosine, scale = sqrt_d"
    assert describe_layers(config) == (
        "layer 0: ssmax (scores = cosine, scale_init = 1.15, position = p_rope, window = 128, "
        "rope_theta = 500000.0, rope_fraction = 0.5); "
        f"layers 1, 2, 4, 5, 6, 8, 9, 10: {qk_norm}, position = p_rope, rope_fraction = 0.5); "
        f"layers 3, 7: {qk_norm}, length_scale = ln_n, position = none); "
        "layer 11: ssmax (scores = cosine, scale_init = 1.15, position = none, window = 128)"
    )
    value = (
        "[{every = 1, attention = {length_scale = 'ln_n'}}, {at = [1], attention = {sink = 'one'}}]"
    )
    second = load_config(RECIPE, ["--layers", value]).layer_configs[1].attention.definition
    assert (second.length_scale, second.sink) == ("ln_n", "one")
    value = '[{every = 12, attention = {normaliser = "lssa"}}]'
    config = load_config(RECIPE, ["--layers", value])
    assert [config.layer_configs[i].attention.normaliser for i in (10, 11)] == ["softmax", "lssa"]
    write(tmp_path, "layers.toml", "[[layers]]\nevery = 4\nwindow = 9\n")
    with one_line("would lose layers = [{'every': 4, 'window': 9}] of its own base"):
        load_config(write(tmp_path, "z.toml", 'base = "layers.toml"'), ["--base", str(RECIPE)])


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        (
            "{every = 2, windw = 1}",
            "layers.0.windw = 1: unknown key; did you mean layers.0.window?",
        ),
        ("{every = 13}", "expected either at, of layers 0 to 11, or every, 1 to 12"),
        ("{at = [12]}", "layers.0 = {'at': [12]}: expected either at"),
        ("{window = 3}", "layers.0 = {'window': 3}: expected either at"),
        ("{at = 3}", "layers.0.at = 3: expected list"),
        (
            "{at = [3], window = -1}",
            "layers.0.window = -1: expected greater than or equal",
        ),
        (
            "{at = [3], attention = {tau = 1.0}}",
            "layers: in layer 3 attention.tau = 1.0: unknown key",
        ),
        (
            "{at = [3], attention = {reweight_p_warmup = 9}}",
            "expected reweight_p_warmup in [attention]",
        ),
        ("3", "layers.0 = 3: expected a section"),
    ],
)
def test_layers_that_do_not_fit(entry, expected, tmp_path):
    path = write(tmp_path, "x.toml", f"layers = [{entry}]\n")
    with one_line(path, expected):
        load_config(path)


def test_rope_bases_are_of_every_layer(tmp_path):
    """[model] alone does not say: RoPE may be in a layer of its own, or in none."""
    assert load_config(RECIPE, ["--layers", "[{at=[1],rope_theta=5.0}]"]).rope_bases == {1e4, 5.0}
    rotating = write(
        tmp_path, "a.toml", 'layers = [{at = [1], position = "rope"}]\n[model]\nposition = "none"\n'
    )
    assert load_config(rotating).rope_bases
    assert not load_config(rotating, ["--layers", "[]"]).rope_bases
    still = write(tmp_path, "b.toml", 'layers = [{every = 1, position = "none"}]\n')
    assert not load_config(still).rope_bases


@pytest.mark.parametrize(("section", "expected"), BAD_ATTENTION)
def test_attention_options_that_do_not_fit(section, expected, tmp_path):
    path = write(tmp_path, "x.toml", f"[attention]\n{section}\n")
    with one_line(path, expected):
        load_config(path)


def test_a_bias_beside_a_sink_does_not_cancel():
    assert AttentionConfig(normaliser="softmax", sink="one", bias="log_n").definition


def test_all_problems_at_once_with_their_files(tmp_path):
    base = write(tmp_path, "base.toml", "[model]\nn_layer = 0\nn_embdd = 3\n")
    path = write(tmp_path, "x.toml", 'base = "base.toml"\n[train]\nmax_step = 3\n')
    with pytest.raises(UserError) as e:
        load_config(path, ["--optimizer.lr", "0"])
    places = [line.split(" = ")[0] for line in str(e.value).splitlines()]
    of_base = [f"{base}: model.n_embdd", f"{base}: model.n_layer"]
    of_path = [f"{path}: train.max_step", "command line: optimizer.lr"]
    assert sorted(places) == sorted([*of_base, *of_path])


@pytest.mark.parametrize(
    ("overrides", "keys"),
    [
        (
            "--model.n-kv-head 5 --model.n-embd 770 --model.rope-fraction 0.5 --train.val-tokens 2",
            "model.n_kv_head model.n_embd model.rope_fraction train.val_tokens",
        ),
        # nothing to train, and a longer warm-up
        ("--train.max-steps 0", "train.max_steps optimizer.warmup_steps"),
        (
            "--optimizer.warmup-steps 99999 --layers [{at=[12]}]",
            "optimizer.warmup_steps layers.0",
        ),
        (
            "--layers [{at=[1,2],window=-1},{at=[5],rope_theta=-2.0}]",
            "layers.0.window layers.1.rope_theta",
        ),
        # nothing about the defaults of keys that are mistyped, or of those that depend on them
        (
            "--train.max-steps=99999 --optimizer.schedule=wsd --optimizer.decay-fraction=0.98 "
            "--train.batch-tokens 1000",
            "train.batch_tokens",
        ),
        (
            "--attention.normaliser=softpick --attention.reweight-p=15 "
            "--attention.reweight-p-warmup 9",
            "attention.reweight_p",
        ),
        ("--train.seq_len x --train.batch_tokens 1000", "train.seq_len"),
    ],
)
def test_all_problems_of_a_kind_at_once(overrides, keys):
    with pytest.raises(UserError) as e:
        load_config(RECIPE, overrides.split())
    named = [line.split(" = ")[0].split(": ")[-1] for line in str(e.value).splitlines()]
    assert named == keys.split()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('base = "missing.toml"', "missing.toml: no such config file"),
        ('base = "x.toml"', "base files form a cycle: x.toml -> x.toml"),
        ("base = 3", "base = 3: expected the name of a config file"),
        ("[name]\nn_layer = 3", "name = a section: expected a string"),
        ("[model\nn_layer = 3", "not valid TOML"),
        ('base = "."', "no such config file"),
        ("seed = 1\n[seed]\nx = 1", "not valid TOML"),
        (f"a = {'[' * 9999}", "not valid TOML"),
        ("[" + ".".join(3000 * "a") + "]", "a = a section: unknown key"),
        ("[model" + 3000 * ".a" + "]", "model.a = a section: unknown key"),
        ('base = "a\\u0000.toml"', "no such config file"),
        ('base = "pipe"', "no such config file"),
        ('[data]\ndir = "a\\u0000"', "data.dir = 'a\\x00': expected no NUL"),
        ("[sweep]\nseed = [1, 2]\nlayers = [1, 2, 3]", "sweep: 6 runs: expected at most 5"),
    ],
    ids=range(14),
)
def test_bad_files(text, expected, tmp_path, monkeypatch):
    monkeypatch.setattr(config, "MAX_RUNS", 5)
    os.mkfifo(tmp_path / "pipe")
    with one_line(tmp_path, expected):
        expand_sweep(write(tmp_path, "x.toml", text))
        load_config(tmp_path / "x.toml")


def test_a_home_folder_in_files_and_options(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    write(tmp_path, "a.toml", "seed = 9\n")
    path = write(tmp_path, "b/x.toml", 'base = "~/a.toml"\n[log]\ndir = "~/runs"\n')
    read = load_config(path, ["--data.dir=~/text", "--init-from", "~/runs/a"])
    assert read.seed == 9 and read.run_dir == tmp_path / "runs/x"
    assert (read.data.dir, read.init_from) == (f"{tmp_path}/text", f"{tmp_path}/runs/a")
    assert load_config(RECIPE, ["--base", "~/a.toml"]).seed == 1337  # the file's own comes last
    parser = ArgumentParser(None)
    parser.add_argument("--data")
    args, overrides = parser.parse_known_args(["--data=~/x", "--log.dir=~", "--name=a=~"])
    assert args.data == f"{tmp_path}/x" and overrides == [f"--log.dir={tmp_path}", "--name=a=~"]


def test_p_may_be_swept_where_it_rises(tmp_path):
    """A file's rise does nothing where p, stated elsewhere, leaves nothing to rise."""
    for p, rise in ((0, 0), (1, 0), (3, 125)):
        read = load_config(ROOT / "configs/demo_lssar.toml", ["--attention.reweight-p", str(p)])
        assert (read.attention.reweight_p, read.attention.reweight_p_warmup) == (p, rise)
    both = ["--attention.reweight-p", "1", "--attention.reweight-p-warmup", "9"]
    with one_line("attention.reweight_p_warmup = 9: only read with reweight_p >= 2"):
        load_config(RECIPE, both)


@pytest.mark.parametrize("key", ["name", "base", '"train.seq-len"', "attention"])
def test_what_cannot_be_swept(key, tmp_path):
    path = write(tmp_path, "x.toml", f"[sweep]\n{key} = [1, 2]\n")
    with one_line(
        path, f"sweep: {key.strip(chr(34))} = [1, 2]: expected keys such as train.seq_len"
    ):
        expand_sweep(path)


def test_a_byte_order_mark_is_no_mistake(tmp_path):
    path = tmp_path / "bom.toml"
    path.write_text("\ufeffseed = 3\n", encoding="utf-8")
    assert load_config(path).seed == 3


@pytest.mark.parametrize(
    "key", ["model.window", "model.n_embd", "train.max_steps", "train.batch_tokens"]
)
def test_numbers_have_bounds(key):
    with one_line(f"command line: {key} = 1", "expected less than or equal to"):
        load_config(RECIPE, [f"--{key}", f"1{400 * '0'}"])


def test_a_mistake_in_a_sweep_is_blamed_on_the_file(tmp_path):
    path = write(tmp_path, "x.toml", '[sweep]\n"attention.reweigt_p" = [1, 3]\n')
    with one_line(
        "x.toml: [sweep]: attention.reweigt_p = 3: unknown key; did you mean attention.reweight_p?"
    ):
        load_config(path, expand_sweep(path)[1].overrides)
    with one_line("command line: attention.reweigt_p = 4"):
        load_config(path, ["--attention.reweigt-p", "4"])


def test_malformed_overrides():
    for overrides, expected in (
        (["model.n_layer", "3"], "--section.key value"),
        (["--seed", "--name", "x"], "--seed: expected a value"),
    ):
        with pytest.raises(UserError, match=expected):
            load_config(RECIPE, overrides)


def test_help_describes_options_that_a_class_of_ones_own_inherits(monkeypatch):
    class Mine(NormSoftmax):
        tau: float = 0.5

    monkeypatch.setitem(NORMALISERS, "mine", Mine)
    text = describe_keys(Config(attention=AttentionConfig(normaliser="mine")))
    assert "--attention.tau 0.5\n      number: Temperature." in text


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("nowhere.py:Mine", "cannot be imported here: FileNotFoundError"),
        ("Mine:Mine", "expected FILE.py:CLASS"),
        ("{}", "unknown; expected one of"),
        ("{}:Yours", "expected `class Yours(Softmax, name="),
        ("{}:Leaves", "cannot be imported here: SystemExit: 3"),
    ],
)
def test_a_file_of_ones_own_that_does_not_fit(name, expected, own_file):
    if name == "{}:Leaves":
        own_file.write_text("raise SystemExit(3)")
    with one_line(expected):
        load_config(RECIPE, ["--attention.normaliser", name.format(own_file)])


def test_an_option_is_no_key_of_the_section(own_file):
    own_file.write_text(own_file.read_text().replace("beta", "reweight_p"))
    with one_line("has an option reweight_p, which is a key of [attention]"):
        load_config(RECIPE, ["--attention.normaliser", f"{own_file}:Mine"])


REWEIGHT = "attention.reweigt_p = 3: unknown key; did you mean attention.reweight_p?"
LSSA = "attention.normaliser = 'lsa': unknown; did you mean lssa?"
LR = "optimizer.lr = 'x': expected number"


@pytest.mark.parametrize(
    ("script", "options", "problems"),
    [
        (train, "configs/lssar.toml --attention.reweigt-p 3 --optimizer.lr x", [REWEIGHT, LR]),
        (sweep, "configs/lssar.toml --attention.reweigt-p 3 --optimizer.lr x", [REWEIGHT, LR]),
        (config, "configs/lssar.toml --seed x", ["seed = 'x': expected integer"]),
        (train, "configs/lssar.toml --attention.normaliser lsa", [LSSA]),
        *((script, "--help", []) for script in (train, eval_length, sample, sweep, config)),
        *((script, "--help", []) for script in (prepare, python_source)),
    ],
)
def test_typos_and_help(script, options, problems, call, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit) as end:
        run_main(lambda: call(script, *options.split()))
    out, err = capsys.readouterr()
    assert err.splitlines() == [f"error: command line: {problem}" for problem in problems]
    assert end.value.code == (2 if problems else 0) and ("usage: " in out) == (not problems)


def test_help(call, capsys):
    with pytest.raises(SystemExit) as end:
        call(train, "--help")
    assert end.value.code == 0 and "--attention.reweight-p" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        call(train, RECIPE, "--help")
    assert "--attention.length-scale" in capsys.readouterr().out
    annotations: list[Any] = [section.annotation for section in Config.model_fields.values()]
    sections = [each for each in annotations if hasattr(each, "model_fields")]
    fields = [field for section in sections for field in section.model_fields.values()]
    assert all(field.description for field in fields)
    text = describe_keys(load_config(ROOT / "configs/papers/ssmax_after.toml"))
    assert max(map(len, text.splitlines())) <= 80
    headings = ["[attention]", "[attention], options of normaliser = ssmax", "[data]"]
    lines = text.splitlines()
    assert [line for line in lines if line.startswith(("[a", "[d"))] == headings
    assert lines.index("[data]") > lines.index("  --attention.scale-init 0.1685")


def test_keys_that_disagree_are_blamed_on_the_last_one(tmp_path):
    """The recipe's batch is right until another length is stated, wherever that is."""
    base = write(
        tmp_path, "base.toml", "[train]\nseq_len = 1024\nbatch_tokens = 524288\nmicro_batch = 32\n"
    )
    path = write(tmp_path, "x.toml", 'base = "base.toml"\n[train]\nseq_len = 1000\n')
    with one_line(
        f"{path}: train.batch_tokens = 524288: expected a multiple of train.seq_len = 1000"
    ):
        load_config(path)
    with one_line(
        "command line: train.batch_tokens = 524288: expected a multiple of train.seq_len = 1001"
    ):
        load_config(path, ["--train.seq-len", "1001"])
    with one_line("command line: train.micro_batch = 32: expected a divisor of the 48 sequences"):
        load_config(base, ["--train.batch-tokens", "49152"])
    for text, problem in (
        ("lr = 0", "lr = 0: expected"),
        ("lrr = 1", "lrr = 1: unknown key; did you mean"),
    ):
        base.write_text(f"[optimizer]\n{text}\n")
        with one_line(f"{base}: optimizer.{problem}"):  # one key alone is where it is
            load_config(base, ["--optimizer.muon-lr", "0.1"])
    base.write_text('[model]\nmlp = "x"\n')
    # a choice, not the key gelu
    with one_line(f"{base}: model.mlp = 'x': expected 'gelu' or 'swiglu'"):
        load_config(base, ["--model.gelu", "exact"])
