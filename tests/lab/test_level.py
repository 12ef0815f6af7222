"""lab.level: differences are paired over seeds and blocks, and their limits say what they show."""

import math

import pandas as pd
import pytest

from evals.rows import Row, read_table
from infra.cli import UserError
from lab.level import level_table, standard_error, verdict
from lab.report import RESULTS

# losses of two blocks by seed: they differ much
TEXT = {1: [2.5, 0.5], 2: [2.9, 0.4], 3: [2.1, 0.8]}


def rows_of(run, losses, length=8, rope="none", document=(1, 2)):
    """Losses of two blocks by seed, a run each, and the blocks' documents."""
    rows = []
    for seed, values in losses.items():
        key = (f"{run}_seed={seed}", seed, 0.1, 1, "eval_length", rope, "t", length)
        rows += [Row(*key, block, "loss", value) for block, value in enumerate(values)]
        rows += [Row(*key, block, "document", number) for block, number in enumerate(document)]
        rows += [Row(*key, None, "loss", 9.0)]
    return rows


def over(losses, difference):
    return {seed: [value + difference for value in values] for seed, values in losses.items()}


def test_table():
    """Seeds of a run are one line. The baseline has its better scaling at each length."""
    rows = [*rows_of("softmax", TEXT), *rows_of("softmax", over(TEXT, 1.0), 16)]
    rows += [*rows_of("softmax", TEXT, rope="ntk"), *rows_of("softmax", over(TEXT, 0.5), 16, "ntk")]
    rows += [*rows_of("mine", over(TEXT, 0.001)), *rows_of("mine", TEXT, 16)]
    rows += rows_of("one", {1: [2.6, 0.7]})
    table = level_table(pd.DataFrame(rows), "softmax", margin=0.01).set_index(["run", "rope"])
    assert [*table] == ["seeds", "8", "16"]
    assert [*table.loc[("mine", "none")]] == [3, "+0.001 ±0.000, level", "−0.500 ±0.000, lower"]
    assert [*table.loc[("softmax", "none")]] == [3, "+0.000 ±0.000, level", "+0.500 ±0.000, higher"]
    assert table.loc[("one", "none"), "8"] == "+0.150 ±0.050, –"
    assert (
        level_table(pd.DataFrame(rows), "softmax").set_index("run").loc["one", "8"]
        == "+0.150 ±0.050"
    )


def test_errors_of_text_and_seeds_add_up():
    losses = {1: [1.0, 3.0], 2: [2.0, 4.0]}  # over the baseline: blocks 1.5 and 3.5, seeds 2 and 3
    # of one document the blocks are all there is
    for document, text in (((1, 2), 1.0), ((1, 1), 1.0)):
        rows = [*rows_of("zero", {1: [0, 0], 2: [0, 0]}, document=document)]
        rows += rows_of("mine", losses, document=document)
        cell = level_table(pd.DataFrame(rows), "zero").set_index("run").loc["mine", "8"]
        assert cell == f"+2.500 ±{math.hypot(text, 0.5):.3f}"


def test_the_baseline_has_a_scaling_of_all_its_seeds():
    """One more scaling of one seed, though better, is none that the others can be compared with."""
    rows = [*rows_of("softmax", TEXT), *rows_of("mine", over(TEXT, 0.001))]
    rows += rows_of("softmax", {1: [0.5, 0.1]}, rope="ntk")
    table = level_table(pd.DataFrame(rows), "softmax", margin=0.01).set_index(["run", "rope"])
    assert [*table.loc[("mine", "none")]] == [3, "+0.001 ±0.000, level"]


def test_a_length_that_a_seed_lacks_is_a_dash():
    rows = [*rows_of("softmax", TEXT), *rows_of("softmax", TEXT, 16)]
    rows += [*rows_of("mine", TEXT), *rows_of("mine", {1: TEXT[1], 2: TEXT[2], 3: [2.0]}, 16)]
    table = level_table(pd.DataFrame(rows), "softmax").set_index(["run", "rope"])
    assert [*table.loc[("mine", "none")]] == [3, "+0.000 ±0.000", "–"]


def test_the_committed_record_gives_what_the_findings_say():
    rows = read_table(RESULTS / "novels/B.csv")
    table = level_table(rows, "softmax").set_index("run")
    assert table.loc["ssmax_qk_norm", "512"] == "+0.002 ±0.004"
    assert table.loc["hybrid_fox", "512"] == "−0.012 ±0.003"
    assert table.loc["window_32", "512"] == "−0.003 ±0.005"
    assert [cell.split()[0] for cell in table["8,192"]] == ["−0.861", "+0.000", "−0.764", "−0.850"]
    findings = (RESULTS / "findings.md").read_text()
    labels = {
        "ssmax_qk_norm": "SSMax on QK-norm",
        "window_32": "`window_32`",
        "hybrid_fox": "`hybrid_fox`",
    }
    for run, label in labels.items():
        row = table.loc[run]
        assert f"| {label} | {row['512']} | {row['8,192'].split()[0]} |" in findings


def test_mistakes():
    rows = pd.DataFrame(rows_of("softmax", TEXT))
    with pytest.raises(UserError, match="--baseline other: expected a run among the rows"):
        level_table(rows, "other")
    with pytest.raises(
        UserError, match="softmax: rows of several rates: expected one, or another name"
    ):
        level_table(pd.concat([rows, rows.assign(lr=0.2)]), "softmax")
    with pytest.raises(
        UserError, match="softmax: rows of several steps: expected one, or another name"
    ):
        level_table(pd.concat([rows, rows.assign(step=2, rope="ntk")]), "softmax")
    with pytest.raises(
        UserError, match="softmax, seed 1: rows given twice: expected each file once"
    ):
        level_table(pd.concat([rows, rows]), "softmax")


@pytest.mark.parametrize(
    ("mean", "spread_of_blocks", "spread_of_seeds", "n_seeds", "expected"),
    [
        (0.0, 0.001, 0.001, 3, "level"),
        (0.0, 0.001, 0.001, 2, "–"),
        (0.0, 0.01, 0.001, 3, "not shown"),  # the text is too short
        (0.0, 0.001, 0.01, 3, "not shown"),  # the seeds are too few
        (-0.02, 0.007, 0.001, 3, "lower"),
        (-0.02, 0.013, 0.001, 3, "not higher"),
        (0.02, 0.007, 0.001, 3, "higher"),
        (0.02, 0.02, 0.001, 3, "not shown"),
    ],
)
def test_verdict(mean, spread_of_blocks, spread_of_seeds, n_seeds, expected):
    blocks = pd.Series([-spread_of_blocks, spread_of_blocks, -spread_of_blocks, spread_of_blocks])
    seeds = [spread_of_seeds, -spread_of_seeds, 0.0]
    differences = pd.DataFrame({seed: mean + blocks + seeds[seed] for seed in range(n_seeds)})
    differences.index = pd.MultiIndex.from_product([["t"], range(4)], names=["text", "block"])
    assert verdict(differences, 0.01, {}) == expected


def test_blocks_of_a_document_err_together():
    """As the mean of 2 + 4 equal blocks: cluster-robust, with the factor of few clusters n / (n -
    1).
    """
    values = pd.Series([1.0, 1.0, 4.0, 4.0, 4.0, 4.0])
    values.index = pd.MultiIndex.from_product([["t"], range(6)], names=["text", "block"])
    assert standard_error(values, {}) == pytest.approx(values.sem())
    documents = {("t", block): 7 if block < 2 else 9 for block in range(6)}
    assert standard_error(values, documents) == pytest.approx(math.hypot(4, 4) * 2**0.5 / 6)
    assert math.isnan(standard_error(values, dict.fromkeys(documents, 1)))
