"""Gradient norms in training by the power p of the re-weighting, its formula as written and in stable form.

    python -m benchmarks.gradients                          # configs/gradients/*.toml -> runs/gradients/
    python -m benchmarks.gradients configs/gradients/lssa.toml --out /tmp/gradients

LSSAR (Section 3.4) reports exploding gradients of softmax with p = 15. ReLU(n A - O)^p overflows float32
where n A - O > 3.4e38^(1/p), so a naive and a stable run separate arithmetic from mathematics. Each run stops
at its first step that is not finite. Writes gradients.json, run by run (finished runs are kept), and
gradients.png, and prints two tables: training, and the rows of untrained models. Data must be prepared
(python -m data.python_source).
"""

import json
import math
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor

import train
from config import expand_sweep, load_config
from infra.cli import ArgumentParser, UserError, run_main
from infra.distributed import World, join_world
from infra.files import write_json
from normalisers.base import reweight_naive
from schema import Config
from training.attention_statistics import attention_inputs
from training.run_log import RunLog
from training.state import TrainState

Record = dict[str, Any]
WARMUP = 30  # steps; the norms of the first ones are those of the initialisation
POWERS = (1, 3, 7, 15, 50, 100)
GPT2 = ["--model.n-embd", "768", "--model.n-head", "12", "--model.gelu", "tanh"]  # two layers of it
FORMS = {False: "stable", True: "as written"}


def train_run(config: Config, world: World) -> Record:
    """One run: the loss and the gradient norm (before clipping) of each step up to the first bad one."""
    state = TrainState(config, world)
    log, bad, peaks = RunLog(state), None, [largest_peak(state)]
    log.print = lambda *lines: None  # type: ignore[method-assign]
    log.flush = lambda: None  # type: ignore[method-assign]  # keep the records
    while state.step < config.train.max_steps and bad is None:
        try:
            train.train_step(state, log)
        except UserError:
            bad = state.step
        if state.step % 10 == 0 and bad is None:
            peaks.append(largest_peak(state))
    steps = log.pending[: None if bad is None else -1]
    return {
        "normaliser": config.attention.normaliser, "p": config.attention.reweight_p,
        "form": FORMS[config.attention.naive_power], "bad_step": bad,
        "loss": [step["loss"] for step in steps], "grad_norm": [step["grad_norm"] for step in steps],
        "largest_nA": peaks,
    }  # fmt: skip


@torch.no_grad()
def weights_before(state: TrainState) -> Iterator[tuple[Tensor, Tensor]]:
    """Each layer's weights before the re-weighting, (1, H, T, T), and n, (T, 1), on validation tokens."""
    gpt, length = state.raw_model, state.config.train.seq_len
    tokens = torch.from_numpy(state.val_stream.read(0, length))[None].to(state.world.device)
    for normaliser, q, k in attention_inputs(gpt, tokens):
        q, k, context = normaliser.prepare(q, k)
        scores = (q @ k.mT).masked_fill(~context.visible(k.mT), -math.inf)
        yield normaliser.definition.weights(scores, context), context.n


def largest_peak(state: TrainState) -> float:
    """The largest n A of any layer, head and row before the re-weighting."""
    return max((n * a).max().item() for a, n in weights_before(state))


def initial_rows(configs: list[Config], world: World) -> str:
    """Which rows of an untrained model the formula as written makes inf / inf or 0 / 0, in per cent, by p."""
    lines = [f"| untrained model | largest n A | {' | '.join(f'p = {p}' for p in POWERS)} |"]
    lines += ["|---|---:|" + "---:|" * len(POWERS)]
    for config in configs:
        pairs = list(weights_before(state := TrainState(config, world)))
        cells = [f"{largest_peak(state):.3g}"]
        for p in POWERS:
            bad = [reweight_naive(a, n, p).isfinite().all(-1).logical_not().float().mean() for a, n in pairs]
            cells.append(f"{100 * max(bad).item():.3g}")
        lines.append(f"| {config.attention.normaliser}, width {config.model.n_embd} | {' | '.join(cells)} |")
    return "\n".join(lines)


def summary(record: Record) -> list[str]:
    """Median of the gradient norms, the largest after warm-up, the mean loss of the last ten steps."""
    norms, losses = record["grad_norm"], record["loss"]
    values = statistics.median(norms), max(norms[WARMUP:], default=math.nan), statistics.fmean(losses[-10:])
    return [f"{value:.{digits}f}" for value, digits in zip(values, (2, 2, 3), strict=True)]


def table(records: list[Record]) -> str:
    """A line for each normaliser and p: the stable run, then where the naive one ended."""
    header = ["attention", "p", "norm: median", "largest after warm-up", "last loss", "largest n A"]
    lines = [f"| {' | '.join(header)} | as written: largest norm |", "|---|" + "---:|" * 5 + "---|"]
    runs = {(r["normaliser"], r["p"], r["form"]): r for r in records}
    for name, p in dict.fromkeys((r["normaliser"], r["p"]) for r in records):
        naive, r = runs.get((name, p, "as written")), runs.get((name, p, "stable"))
        cells = ["–"] * 4
        if r:
            ended = f", not finite at step {r['bad_step']}" if r["bad_step"] else ""
            cells = [*summary(r), f"{max(r['largest_nA']):.3g}{ended}"]
        end = "–"
        if naive and naive["bad_step"]:
            end = f"not finite at step {naive['bad_step']}"
        elif naive:
            end = "{1}, loss {2}".format(*summary(naive))
        lines.append(f"| {name} | {p} | {' | '.join(cells)} | {end} |")
    return "\n".join(lines)


def draw(records: list[Record]) -> Figure:
    """Gradient norms by step, a panel for each normaliser; a cross where a run was no longer finite."""
    names, powers = (list(dict.fromkeys(r[key] for r in records)) for key in ("normaliser", "p"))
    figure = Figure(figsize=(6 * len(names), 4.8), layout="constrained")
    for axes, name in zip(figure.subplots(1, len(names), sharey=True, squeeze=False)[0], names, strict=True):
        for r in (r for r in records if r["normaliser"] == name):
            naive, color = r["form"] == "as written", f"C{powers.index(r['p'])}"
            label = None if naive else f"p = {r['p']}"
            x, y = range(1, len(r["grad_norm"]) + 1), r["grad_norm"]
            axes.plot(x, y, color=color, label=label, alpha=0.4 if naive else 1, lw=3 if naive else 1)
            if r["bad_step"]:
                height = y[-1] if y else 10 ** (0.5 - 0.12 * powers.index(r["p"]))
                axes.plot(r["bad_step"], height, "X", color=color, ms=9, markeredgecolor="k", clip_on=False)
        axes.set(title=name, xlabel="step", yscale="log")
        axes.grid(alpha=0.3)
    axes.plot([], [], "k", lw=3, alpha=0.4, label="as written")
    axes.plot([], [], "X", color="w", markeredgecolor="k", ms=9, label="first step not finite")
    figure.axes[0].set_ylabel("gradient norm before clipping")
    axes.legend(frameon=False, fontsize=8, ncols=2)
    return figure


def main() -> None:
    parser = ArgumentParser(__doc__)
    files = ["configs/gradients/softmax.toml", "configs/gradients/lssa.toml"]
    parser.add_argument("configs", nargs="*", default=files)
    parser.add_argument("--out", type=Path, default=Path("runs/gradients"), metavar="DIR")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / "gradients.json"
    done = {r["run"]: r for r in (json.loads(path.read_text()) if path.exists() else [])}
    records = []
    for config in [load_config(file, run.overrides) for file in args.configs for run in expand_sweep(file)]:
        if config.name not in done:
            with join_world(config.train.device) as world:
                done[config.name] = {"run": config.name} | train_run(config, world)
            write_json(list(done.values()), path)
        records.append(done[config.name])
        print(f"{config.name}: {len(records[-1]['loss'])} steps", flush=True)
    draw(records).savefig(args.out / "gradients.png", dpi=90)
    chosen = ["--attention.naive-power", "true", "--attention.reweight-p", "1"]
    with join_world("cpu") as world:
        untrained = [load_config(file, chosen + more) for more in ([], GPT2) for file in args.configs]
        print(f"{table(records)}\n\n{initial_rows(untrained, world)}")


if __name__ == "__main__":
    run_main(main)
