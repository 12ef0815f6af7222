"""python -m lab.report on run folders: rows, seeds, scales, descent, the published numbers."""

import itertools
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from conftest import one_line

import eval_length
import train
from config import load_config, to_toml
from evals.rows import FACTORS, Row, write_rows
from infra.cli import UserError
from lab import fading, report
from lab.figures import P_N_FITS, all_figures, fit_p_n
from lab.records import read_records, record_of, run_of
from lab.runs import Runs, experiment_of, read_runs, tabulate
from lab.tables import CONFIGS, read_published, read_rows, read_tables

TEXT = "0123456789ab+0x2x2048"


def make_run(
    folder: Path, name: str, losses: list[float], *overrides: str, step: int = 3, begun: str = ""
) -> None:
    """A run folder with evaluations whose losses at 1x, 2x, ... are given."""
    given = {"name": name, "log.dir": folder, "train.max-steps": 3, "optimizer.warmup-steps": 1}
    args = [text for key, value in given.items() for text in (f"--{key}", str(value))]
    config = load_config(CONFIGS / "demo_softmax.toml", [*args, *overrides])
    config.run_dir.mkdir(parents=True)
    (config.run_dir / "config.toml").write_text(to_toml(config))
    validation = {"step": config.train.max_steps, "val_loss": 4.0}
    (config.run_dir / "metrics.jsonl").write_text(json.dumps(validation) + "\n")
    if begun:
        (config.run_dir / "init_from.txt").write_text(begun)
    run = (config.name, config.seed, config.optimizer.lr, step, "eval_length", "ntk", TEXT)
    rows = []
    for factor, loss in zip(FACTORS, losses, strict=False):
        measures = [(0, "loss", loss - 1), (1, "loss", loss + 1), (None, "loss[0:128]", loss)]
        rows += [Row(*run, 128 * factor, *measure) for measure in measures]
    if rows:
        write_rows(config.run_dir, rows)


def table_of(paper: str, i: int, runs: Runs) -> str:
    published = read_published()
    return report.paper_table(read_tables()[paper][i], runs, published[published.paper == paper])


def cells(text: str, row: str) -> list[list[str]]:
    """The lines of a row in a table of the report: the one that names it, and those below without a
    name.
    """
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()]
    first = next(i for i, line in enumerate(lines) if line and line[0] == f"`{row}`")
    return [
        lines[first],
        *itertools.takewhile(lambda line: line and line[0] == "", lines[first + 1 :]),
    ]


def test_a_scale_is_compared_on_the_text_that_most_of_its_runs_read(tmp_path):
    """Of equally many runs on the text that skips least."""
    for name, seed in (("a", "1"), ("b", "2")):
        make_run(tmp_path, name, [1.0, 2.0, 3.0, 4.0, 5.0], "--seed", seed)
        for text in ("0123456789ab+4096x2x2048", f"other{name}+0x9x2048"):
            row = Row(name, int(seed), 0.1, 3, "eval_length", "ntk", text, 128, 0, "loss", 9.0)
            write_rows(tmp_path / name, [row])
    means = tabulate(read_runs([str(tmp_path)])).means()
    assert sorted(means.loss) == sorted(2 * [1.0, 2.0, 3.0, 4.0, 5.0])
    make_run(tmp_path, "c", [], "--seed", "3")
    assert len(tabulate(read_runs([str(tmp_path)])).table) == 3, "not evaluated at all: a dash"
    row = Row("c", 3, 0.1, 3, "eval_length", "ntk", "0123456789ab+0x9x2048", 128, 0, "loss", 9.0)
    write_rows(tmp_path / "c", [row])
    with one_line(f"c: evaluated on the text 0123456789ab+0x9x2048: expected {TEXT}"):
        tabulate(read_runs([str(tmp_path)]))


def test_rows_find_their_runs(tmp_path, capsys):
    for seed, shift in ((1, 0.0), (2, 0.1), (3, 0.2)):
        make_run(tmp_path, f"any{seed}", [2 + shift] * 4 + [3 + shift], "--seed", str(seed))
    make_run(
        tmp_path, "p15", [2.0] * 5, "--attention.normaliser", "lssa", "--attention.reweight-p", "15"
    )
    make_run(tmp_path, "any_again", [9.0] * 5, "--seed", "3")
    make_run(tmp_path, "rate", [5.0] * 5, "--optimizer.lr", "1e-4")
    make_run(tmp_path, "bold", [9.0] * 5, "--optimizer.weight-decay", "0.0")
    # evaluated before
    make_run(tmp_path, "stale", [7.0] * 5, "--attention.normaliser", "relu_li", step=2)
    (tmp_path / "p15/metrics.jsonl").write_text('{"step": 2, "val_loss": 4.0}\n')
    with open(tmp_path / "any1/metrics.jsonl", "a") as f:
        f.write('{"step": 3, "val')  # truncated by a kill
    make_run(tmp_path, "diverged", [8.0] * 5, "--seed", "9")
    (tmp_path / "diverged/metrics.jsonl").write_text('{"step": 3, "val_loss": null}\n')
    make_run(tmp_path, "nope", [8.0] * 5, "--model.position", "none")  # softmax, but of no row
    make_run(tmp_path, "gate", [8.0] * 5, "--model.attention-gate", "true")
    runs = tabulate(read_runs([str(tmp_path)]))
    printed = capsys.readouterr().out
    for name in ("p15", "diverged"):
        assert (
            f"skipped: {tmp_path / name} is not finished, or its last loss is not finite" in printed
        )
    assert f"left out: {tmp_path / 'any_again'}, a repeat of" in printed
    of_scale = report.runs_table(runs.table[runs.table.scale == "A"], runs.means())
    assert (
        "| any1 | 1, 2, 3 | 644,224 | 4.0000 ±0.0000 | 2.1000 ±0.1000 | 3.1000 ±0.1000 | 1.0000 ±0.0000 |"
        in of_scale
    )
    seeds = [
        "",
        "ours, scale A, 3 seeds (`any1`), RoPE ntk",
        *4 * ["2.1000 ±0.1000"],
        "3.1000 ±0.1000",
    ]
    rate = ["", "ours, scale A (`rate`), RoPE ntk", *5 * ["5.0000"]]  # another recipe is no seed
    assert cells(table_of("lssar", 0, runs), "table1_softmax") == [
        ["`table1_softmax`", "paper, Table 1", "3.1911", *4 * ["–"]], seeds, rate
    ]  # fmt: skip
    text = table_of("lssar", 3, runs)
    second_hand = "second-hand (a reader's notes on the ICML 2026 version), Table 4"
    assert cells(text, "table4_softmax") == [
        ["`table4_softmax`", second_hand, "3.19", "4.17", "5.45", "6.28", "–"], seeds, rate
    ]  # fmt: skip
    assert "`p15`" not in text and "table4_relu_li" not in text, "not finished, not evaluated"
    robust = table_of("normsoftmax", 3, runs)
    assert cells(robust, "no_weight_decay_normaliser=softmax")[1][2] == "9.0000"
    accuracy = cells(table_of("normsoftmax", 0, runs), "gamma_gamma=inf")[0]
    assert accuracy[1].startswith("paper, Table 1: nsm-inf, CIFAR10, ViT 88.01 % test accuracy;")
    assert accuracy[2:] == 5 * ["–"]


def test_scales_stay_apart(tmp_path):
    make_run(tmp_path, "a", [2.0] * 5)
    make_run(tmp_path, "b", [3.0] * 5, "--model.n-layer", "2")
    runs = tabulate(read_runs([str(tmp_path)]))
    lines = cells(table_of("lssar", 0, runs), "table1_softmax")[1:]
    assert [line[1] for line in lines] == [
        "ours, scale A (`a`), RoPE ntk",
        "ours, scale B (`b`), RoPE ntk",
    ]
    assert sorted(line[2] for line in lines) == ["2.0000", "3.0000"]
    assert report.scales_text(runs).count("layers, 2 heads of 64") == 2


def test_every_row_is_another_experiment() -> None:
    """Else one run would be in two rows of a table that mean different things."""
    tables = read_tables()
    assert set(read_published().paper) == set(tables)
    keys: set[str] = set()
    for table in itertools.chain(*tables.values()):
        rows = read_rows(table["folder"], table["files"])
        experiments = [(experiment_of(row.config), *row.sizes.items()) for row in rows]
        doubles = {
            row.config.name
            for row, e in zip(rows, experiments, strict=True)
            if experiments.count(e) > 1
        }
        assert doubles <= {"norm_softmax", "tau_gamma=sqrt_d_tau=1.0", "baseline", "gamma_gamma=inf",
                           "gamma_gamma=sqrt_d", "tau_gamma=inf_tau=1.0",
                           "scale_scale=rsqrt_d"}, doubles  # fmt: skip
        keys |= {key for row in rows for key in row.keys}
    files = {f"{folder}/{path.stem}" for folder in ("lssar_paper", "normsoftmax_paper")
             for path in (CONFIGS / folder).glob("*.toml")}  # fmt: skip
    assert files <= keys


def test_every_published_number_is_in_the_report_once(tmp_path) -> None:
    """All 146, and 24 that are second-hand: in the row of its config where it has one, which must
    exist.

    Also without a run of a paper.
    """
    make_run(
        tmp_path, "other", [2.0] * 5, "--train.loss", "norm_softmax", "--train.loss-gamma", "2.5"
    )
    runs = tabulate(read_runs([str(tmp_path)]))
    tables = itertools.chain(*read_tables().values())
    keys = {
        key
        for table in tables
        for row in read_rows(table["folder"], table["files"])
        for key in row.keys
    }
    text = report.report_text(runs, {})
    tables_of = {
        paper: [table["title"] for table in tables] for paper, tables in read_tables().items()
    }
    sections = {section.splitlines()[0]: section.splitlines() for section in text.split("\n### ")}
    lines = {
        paper: [line for title in titles for line in sections[title]]
        for paper, titles in tables_of.items()
    }
    published = read_published()
    for n in published.itertuples():
        parts = [n.row, n.unit, f" {n.printed} |"]
        of_paper = lines[n.paper]
        if n.config:
            assert n.config in keys, n
            stem = n.config.split("/")[1].split(":")[0]
            of_paper = [line for line in of_paper if line.startswith(f"| `{stem}")]
            is_loss = n.column in report.LOSSES
            parts = [
                "second-hand (a reader's notes" if n.source else "",
                f"`{stem}` " if n.source else "",
                n.where,
                f" {n.printed} |"
                if is_loss
                else f"{n.where}: {n.row}, {n.column} {n.printed} {n.unit}",
            ]
        assert sum(all(part in line for part in parts) for line in of_paper) == 1, n
    assert published.source.ne("").value_counts().to_dict() == {False: 146, True: 24}


def test_a_run_belongs_to_a_row_with_init_from_if_it_replaced_the_normaliser(tmp_path) -> None:
    """A fine-tuned (b) is not (f), though both are SSMax models that began from another run's
    weights.
    """
    ssmax = ["--attention.normaliser", "ssmax"]
    replaced = "  changed     attention.normaliser 'softmax' -> 'ssmax', train.max_steps 3 -> 2\n"
    make_run(tmp_path, "a", [1.0] * 5)
    make_run(tmp_path, "b", [2.0] * 5, *ssmax)
    for name, loss, source, steps, summary in (
        ("e", 3.0, "a, step 3", 0, replaced),
        ("f", 4.0, "a/checkpoints/step_000001.pt, step 1", 2, replaced),
        ("b_again", 5.0, "b, step 3", 3, "  changed     nothing\n"),
        ("sft_b", 6.0, "b, step 3", 3, "  changed     data.dir 'a' -> 'data/squad'\n"),
        (
            "sft_a",
            7.0,
            "a, step 3",
            3,
            replaced.replace("train", "data.dir 'a' -> 'data/squad', train"),
        ),
        ("orphan", 8.0, "", 3, ""),
    ):
        options = [
            "--init-from",
            "runs/x",
            "--train.max-steps",
            str(steps),
            "--optimizer.warmup-steps",
            "0",
        ]
        begun = f"init_from {source}\n{summary}" if source else ""
        make_run(tmp_path, name, [loss] * 5, *ssmax, *options, step=steps, begun=begun)
    runs = tabulate(read_runs([str(tmp_path)]))
    text = table_of("ssmax", 0, runs)
    ours = [line.split(" | ")[2] for line in text.splitlines() if "ours, scale A" in line]
    assert ours == ["1.0000", "2.0000", "3.0000"]
    assert len(runs.table) == 8 and len({*runs.table.line}) == 8
    assert set(runs.table[runs.table.scale == "A"].name) >= {"a", "b", "e", "f"}


def test_rows_of_a_sweep_over_sizes_and_steps_have_runs_of_their_own(tmp_path) -> None:
    """NormSoftmax, Figures 3a and 3c: another length of training, or depth, is another row."""
    norm = ["--attention.normaliser", "norm_softmax", "--attention.gamma", "inf"]
    make_run(tmp_path, "long", [2.0] * 5, *norm, "--train.max-steps", "4716", step=4716)
    make_run(tmp_path, "deep", [3.0] * 5, *norm, "--model.n-layer", "6")
    runs = tabulate(read_runs([str(tmp_path)]))
    acceleration = table_of("normsoftmax", 2, runs)
    assert acceleration.count("| ours") == 1
    assert cells(acceleration, "acceleration_gamma=inf_max_steps=4716")[0][2] == "2.0000"
    depth = table_of("normsoftmax", 4, runs)
    assert (
        depth.count("| ours") == 1 and cells(depth, "depth_gamma=inf_n_layer=6")[0][2] == "3.0000"
    )
    _, *gamma = cells(table_of("normsoftmax", 0, runs), "gamma_gamma=inf")
    assert sorted(line[2] for line in gamma) == ["2.0000", "3.0000"], (
        "a row without sizes has these runs if it has no others"
    )
    make_run(tmp_path, "usual", [4.0] * 5, *norm)
    make_run(tmp_path, "other", [5.0] * 5, "--attention.normaliser", "lssa")
    runs = tabulate(read_runs([str(tmp_path)]))
    _, *gamma = cells(table_of("normsoftmax", 0, runs), "gamma_gamma=inf")
    assert [line[2] for line in gamma] == ["4.0000"]


def leave_losses(run: Path, shift: float) -> None:
    """Training losses of 200 steps."""
    losses = [json.dumps({"step": i, "loss": 5.0 + shift - i / 1000}) for i in range(1, 201)]
    with open(run / "metrics.jsonl", "a") as f:
        f.write("\n".join(losses))


def leave_attention(run: Path) -> None:
    """What earlier versions recorded of attention while training, of two steps."""
    lines = [
        {"step": 100 * i, "qk_std": {"layer_0": i, "layer_1": i}}
        | {"entropy": {"layer_0": 2.0 * i, "layer_1": 2.0 * i + 1}}
        for i in (1, 2)
    ]
    with open(run / "metrics.jsonl", "a") as f:
        f.write("".join(f"\n{json.dumps(line)}" for line in lines))


def test_attention_in_training_is_drawn_by_layer(tmp_path) -> None:
    make_run(
        tmp_path,
        "any",
        [2.0] * 5,
        "--attention.normaliser",
        "norm_softmax",
        "--attention.gamma",
        "inf",
    )
    make_run(tmp_path, "softmax", [2.0] * 5)
    make_run(tmp_path, "other", [2.0] * 5, "--attention.normaliser", "lssa")
    for name in ("any", "softmax", "other"):
        leave_attention(tmp_path / name)
    drawn = {file: figure for file, _, figure in all_figures(tabulate(read_runs([str(tmp_path)])))}
    panels = drawn["normsoftmax_attention_A.png"].axes
    titles = ["std of q.k, unscaled", "entropy, nats"]
    assert [axes.get_title() for axes in panels] == [
        f"{t}, layer_{i}" for t in titles for i in range(2)
    ]
    for axes in panels:
        assert axes.get_legend_handles_labels()[1] == ["softmax, float32", "gamma = inf, float32"]
    entropy = panels[3].get_lines()[0]
    assert np.array_equal(entropy.get_xydata(), [(100, 3), (200, 5)])


def test_figures(tmp_path) -> None:
    """Of seeds of which one is not evaluated. Training curves are differences of the same seed and
    rate.
    """
    ssmax = ["--attention.normaliser", "ssmax", "--attention.scale", "one"]
    seed_2 = ["--seed", "2"]
    runs: list[tuple[str, list[str], float]] = [
        ("a", [], 0.0),
        ("a2", seed_2, 0.5),
        ("c", ssmax, 0.1),
        ("c2", [*ssmax, *seed_2], 0.7),
        ("c3", [*ssmax, "--seed", "3"], 9.0),
        ("fast", [*ssmax, "--optimizer.lr", "0.1"], 9.0),
    ]
    for name, options, shift in runs:
        make_run(tmp_path, name, [2.0] * 5, *options, "--train.max-steps", "200", step=200)
        leave_losses(tmp_path / name, shift)
    (tmp_path / "a2/rows.csv").unlink()
    figures = {
        name: (caption, figure)
        for name, caption, figure in all_figures(tabulate(read_runs([str(tmp_path)])))
    }
    assert [*figures] == ["lssar_figure1_A.png", "ssmax_figure4_A.png"]
    caption, figure = figures["ssmax_figure4_A.png"]
    assert "means over 100 steps; seeds: (c) c 2" in caption
    curve = figure.axes[0].lines[0]
    assert curve.get_xdata().tolist() == [100, 200]  # type: ignore[union-attr]
    assert curve.get_ydata() == pytest.approx(2 * [0.15])  # type: ignore[arg-type]


def test_fits_of_p_n_find_their_own_formulas():
    n = np.arange(1, 201)
    for name, function in P_N_FITS.items():
        p_n = 0.7 * function(n) - 0.2
        p_n[0] = 1.0  # never trained
        assert fit_p_n(p_n, name) == pytest.approx((0.7, -0.2, 1.0), rel=1e-9)
        assert all(fit_p_n(p_n, other)[2] < 1 for other in P_N_FITS if other != name)


def test_a_run_of_another_name_for_the_same_formula_is_of_the_row(tmp_path) -> None:
    """relu_li and sigmoid are presets of phi; relu_shen, ssmax_pn and scale_invariant add formulas."""

    def experiment(*options: str) -> str:
        words = [f"--attention.{word}" if i % 2 == 0 else word for i, word in enumerate(options)]
        return experiment_of(load_config(CONFIGS / "demo_softmax.toml", words))

    relu = experiment("normaliser", "phi", "phi", "relu")
    assert experiment("normaliser", "relu_li") == relu
    sigmoid = ("normaliser", "phi", "phi", "sigmoid", "bias", "log_n", "l1", "false")
    assert experiment("normaliser", "sigmoid", "l1", "false") == experiment(*sigmoid)
    names = (
        "softmax",
        "relu_li",
        "relu_shen",
        "relu_wortsman",
        "ssmax",
        "ssmax_pn",
        "scale_invariant",
        "lssa",
    )
    assert len({experiment("normaliser", name) for name in names}) == len(names)
    make_run(tmp_path, "li", [2.0] * 5, "--attention.normaliser", "relu_li")
    runs = tabulate(read_runs([str(tmp_path)]))
    assert cells(table_of("lssar", 2, runs), "table3_relu")[1][2] == "2.0000"
    assert cells(table_of("lssar", 3, runs), "table4_relu_li")[0][2] == "2.0000"


@pytest.mark.slow
def test_records_redraw_the_report_without_the_runs(tmp_path, call, no_drawing) -> None:
    """With those records of the comparison that are rows of a paper."""
    out = tmp_path / "out"
    make_run(
        tmp_path / "runs",
        "pn",
        [2.0] * 5,
        "--attention.normaliser",
        "phi",
        "--attention.phi",
        "relu6",
    )
    make_run(tmp_path / "runs", "bare", [2.0] * 5, "--attention.normaliser", "relu_shen")
    (tmp_path / "runs/bare/rows.csv").unlink()
    leave_losses(tmp_path / "runs/pn", 0.0)
    leave_attention(tmp_path / "runs/pn")
    call(report, "--papers", tmp_path / "runs", "--out", out)
    text = (out / "report.md").read_text()
    (kept,) = read_records(out / "runs.jsonl")
    (run,) = (run for run in read_runs([str(tmp_path / "runs")]) if run.config.name == "pn")
    assert kept.config == run.config and kept.logged("val_loss") == run.logged("val_loss")
    assert kept.logged("entropy") == {
        100: {"layer_0": 2.0, "layer_1": 3.0},
        200: {"layer_0": 4.0, "layer_1": 5.0},
    }
    assert kept.logged("loss") == pytest.approx(
        {i: 5 - i / 1000 + 0.0005 for i in range(2, 201, 2)}
    )
    assert "| `table3_relu6` | paper, Table 3 |" in text and "(`pn`)" in text
    assert "(`lssar_p15, lr 0.002`)" in text and "lssar_p15_p_rope" not in text
    call(report, "--papers", "--out", out)
    assert (out / "report.md").read_text() == text


@pytest.mark.slow
def test_committed_report_comes_out_of_the_committed_records(tmp_path, call, no_drawing) -> None:
    results = CONFIGS.parent / "results/papers"
    shutil.copy(results / "runs.jsonl", tmp_path)
    call(report, "--papers", "--out", tmp_path)
    assert (tmp_path / "report.md").read_text() == (results / "report.md").read_text()
    drawn = {path.name for path in tmp_path.glob("*.png")}
    # of lab.fading
    assert drawn == {path.name for path in results.glob("*.png")} - {"ssmax_figures_1_3.png"}


def test_attention_fading():
    """SSMax, Figures 1 and 3: softmax's weight falls with n; SSMax's does not where z_max is 1 / s
    above.
    """
    softmax = [fading.last_weight(fading.figure_1_scores(n), None) for n in (4, 256, 4096)]
    expected = [np.exp(5) / (np.exp(5) + n - 1) for n in (4, 256, 4096)]
    assert softmax == pytest.approx(expected, rel=1e-5)
    ssmax = [
        fading.last_weight(fading.figure_1_scores(n), fading.FIGURE_1_S) for n in (4, 256, 4096)
    ]
    assert ssmax == pytest.approx(
        [1 / (1 + (n - 1) * n ** (-5 * 0.43)) for n in (4, 256, 4096)], rel=1e-5
    )
    above, below = (
        [fading.last_weight(fading.figure_3_scores(n, z), 1.0) for n in (256, 65536)]
        for z in (2.5, 1.2)
    )
    assert above[1] > above[0] > 0.98 and below[1] < below[0] < 0.9


@pytest.mark.slow
def test_a_run_its_evaluations_and_the_report(tiny_config, call):
    call(train, tiny_config)
    run = tiny_config.parent / "runs/tiny"
    call(eval_length, run, "--tokens", 256, "--also", "none", "theta=500000.0")
    evaluation = json.loads((run / "eval_length_none.json").read_text())
    folder = run.with_name("report")
    folder.mkdir()
    (folder / "report.md").write_text("# Report\n\n![of an earlier report](stale.png)")
    for file in ("stale.png", "mine.png"):
        (folder / file).touch()
    other = shutil.copytree(run, run.parent / "group" / "tiny")
    call(report, other.parent, run)  # into the folder that has both
    assert not (folder / "stale.png").exists() and (folder / "mine.png").exists()
    text = (folder / "report.md").read_text()
    assert "`tiny`" in text
    loss = evaluation["lengths"][0]["loss"]
    assert f"{loss:.4f}" in "".join(cells(text, "table1_softmax")[1])
    pictures = re.findall(r"\]\((.*?\.png)\)", text)
    assert all((folder / picture).stat().st_size for picture in pictures)
    with pytest.raises(UserError, match="no finished run"):
        read_runs([str(tiny_config.parent)])
    with pytest.raises(UserError, match="nowhere: no such run folder"):
        read_runs(["nowhere"])


def test_a_record_keeps_a_runs_losses(tmp_path):
    make_run(tmp_path, "a", [1.0, 2.0, 3.0, 4.0, 5.0])
    leave_losses(tmp_path / "a", 0.0)
    (run,) = read_runs([str(tmp_path)])
    kept = run_of(json.loads(json.dumps(record_of(run))), tmp_path)
    assert tabulate([kept]).means().to_dict() == tabulate([run]).means().to_dict()
    assert kept.config == run.config
    assert kept.logged("loss") == pytest.approx(
        {i: 5 - i / 1000 + 0.0005 for i in range(2, 201, 2)}
    )
