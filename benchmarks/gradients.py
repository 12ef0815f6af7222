"""Gradient norms in training by the power p of the re-weighting, its formula as written and in
stable form.

    python -m benchmarks.gradients      # configs/papers/lssar_gradients.toml -> runs/gradients/

The LSSAR paper (Section 3.4) reports exploding gradients of softmax with p = 15. ReLU(n A - O)^p
overflows float32 where n A - O > 3.4e38^(1/p), so a run of each form separates arithmetic from
mathematics. A run stops at its first step that is not finite. Writes gradients.json (a finished run
is kept) and gradients.png. Prints a table of the runs, and one of the rows of untrained models.
Data must be prepared (python -m data.python_source).
"""

import json
import math
import statistics
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from matplotlib.figure import Figure
from torch import Tensor

import train
from config import expand_sweep, load_config
from infra.cli import ArgumentParser, UserError, run_main
from infra.distributed import World, join_world
from infra.files import write_json
from schema import Config
from training.run_log import RunLog
from training.state import TrainState

Record = dict[str, Any]
WARMUP = 30  # steps; the norms of the first ones are those of the initialisation
POWERS = (1, 3, 7, 15, 50, 100)
GPT2_WIDTH = ["--model.n-embd", "768", "--model.n-head", "12", "--model.gelu", "tanh"]


def reweight_naive(a: Tensor, n: Tensor, p: int) -> Tensor:
    """LSSAR's eq. 5 as written: inf / inf where a power overflows, 0 / 0 where all of a row
    underflow.
    """
    powers = torch.relu(n * a - (n > 3).to(a.dtype)).pow(p)
    return powers / powers.sum(-1, keepdim=True)


def train_run(config: Config, world: World) -> Record:
    """One run: the loss and the gradient norm (before clipping) of each step up to the first bad
    one.
    """
    state = TrainState(config, world)
    log = RunLog(state)
    log.print = lambda *lines: None  # type: ignore[method-assign]
    log.flush = lambda: None  # type: ignore[method-assign]  # keep the records
    bad_step = None
    peaks = [largest_peak(state)]
    while state.step < config.train.max_steps and bad_step is None:
        try:
            train.train_step(state, log)
        except UserError:
            bad_step = state.step
        if state.step % 10 == 0 and bad_step is None:
            peaks.append(largest_peak(state))
    steps = log.pending if bad_step is None else log.pending[:-1]
    curves = {key: [step[key] for step in steps] for key in ("loss", "grad_norm")}
    return {"bad_step": bad_step, **curves, "largest_nA": peaks}


def train_both(config: Config, world: World) -> Iterator[Record]:
    """The run in each form. As written it uses the dense engine: the others compute the stable
    form.
    """
    about = {"normaliser": config.attention.normaliser, "p": config.attention.reweight_p}
    yield {**about, "form": "stable"} | train_run(config, world)
    dense = config.model_copy(update={"train": config.train.model_copy(update={"engine": "dense"})})
    with patch("normalisers.layer.reweight", reweight_naive):
        yield {**about, "form": "as written"} | train_run(dense, world)


@torch.no_grad()
def weights_before(state: TrainState) -> Iterator[tuple[Tensor, Tensor]]:
    """Each layer's weights before the re-weighting, (1, H, T, T), and n, (T, 1), on validation
    tokens.
    """
    length = state.config.train.seq_len
    tokens = torch.from_numpy(state.val_stream.read(0, length))[None].to(state.world.device)
    for layer, q, k, signals in state.raw_model.attention_inputs(tokens):
        context = replace(layer.context(q, k, signals), p=None)
        yield layer.dense_weights(q, k, context), context.n


def largest_peak(state: TrainState) -> float:
    """The largest n A of any layer, head and row before the re-weighting."""
    return max((n * a).max().item() for a, n in weights_before(state))


def initial_rows(configs: list[Config], world: World) -> str:
    """Which rows of an untrained model the formula as written makes inf / inf or 0 / 0, in per
    cent, by p.
    """
    lines = [f"| untrained model | largest n A | {' | '.join(f'p = {p}' for p in POWERS)} |"]
    lines += ["|---|---:|" + "---:|" * len(POWERS)]
    for config in configs:
        state = TrainState(config, world)
        cells = [
            f"{config.attention.normaliser}, width {config.model.n_embd}",
            f"{largest_peak(state):.3g}",
        ]
        for p in POWERS:
            finite = [reweight_naive(a, n, p).isfinite().all(-1) for a, n in weights_before(state)]
            cells.append(f"{100 * max((~rows).float().mean().item() for rows in finite):.3g}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def table(records: list[Record]) -> str:
    """A line for each run: gradient norms (the largest is after warm-up), mean loss of the last ten
    steps.
    """
    lines = ["| attention | p | form | norm: median | largest | last loss | largest n A | |"]
    lines += ["|---|---:|---|" + "---:|" * 4 + "---|"]
    for record in records:
        norms = record["grad_norm"] or [math.nan]
        loss = statistics.fmean(record["loss"][-10:] or [math.nan])
        numbers = f"{statistics.median(norms):.2f} | {max(norms[WARMUP:], default=math.nan):.2f} | {loss:.3f}"
        end = "" if record["bad_step"] is None else f"not finite at step {record['bad_step']}"
        run = f"{record['normaliser']} | {record['p']} | {record['form']}"
        lines.append(f"| {run} | {numbers} | {max(record['largest_nA']):.3g} | {end} |")
    return "\n".join(lines)


def draw(records: list[Record]) -> Figure:
    """Gradient norms by step, a panel for each normaliser; a cross where a run was no longer
    finite.
    """
    names = list(dict.fromkeys(record["normaliser"] for record in records))
    figure = Figure(figsize=(6 * len(names), 4.8), layout="constrained")
    panels = figure.subplots(1, len(names), sharey=True, squeeze=False)[0]
    for record in records:
        axes = panels[names.index(record["normaliser"])]
        rank = POWERS.index(record["p"])
        norms = record["grad_norm"]
        style: dict[str, Any] = {"color": f"C{rank}", "label": f"p = {record['p']}"}
        if record["form"] == "as written":
            style |= {"label": None, "alpha": 0.4, "lw": 3}
        axes.plot(range(1, len(norms) + 1), norms, **style)
        if record["bad_step"]:
            height = norms[-1] if norms else 10 ** (0.5 - 0.12 * rank)
            axes.plot(
                record["bad_step"], height, "X", color=f"C{rank}", ms=9, mec="k", clip_on=False
            )
        axes.set(title=record["normaliser"], xlabel="step", yscale="log")
    panels[0].set_ylabel("gradient norm before clipping (wide: as written; X: not finite)")
    panels[0].legend(frameon=False, fontsize=8, ncols=2)
    return figure


def main() -> None:
    parser = ArgumentParser(__doc__)
    default = ["configs/papers/lssar_gradients.toml"]
    parser.add_argument("configs", nargs="*", default=default)
    parser.add_argument("--out", type=Path, default=Path("runs/gradients"), metavar="DIR")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / "gradients.json"
    records: list[Record] = json.loads(path.read_text()) if path.exists() else []
    done = {(record["normaliser"], record["p"]) for record in records}
    with join_world("cpu") as world:
        for config in [
            load_config(file, run.overrides) for file in args.configs for run in expand_sweep(file)
        ]:
            if (config.attention.normaliser, config.attention.reweight_p) not in done:
                records += train_both(config, world)
                write_json(records, path)
                print(f"{config.name}: trained in both forms", flush=True)
        draw(records).savefig(args.out / "gradients.png", dpi=90)
        one = ["--attention.reweight-p", "1"]
        untrained = [
            load_config(file, [*one, "--attention.normaliser", name, *more])
            for more in ([], GPT2_WIDTH)
            for file in args.configs
            for name in dict.fromkeys(record["normaliser"] for record in records)
        ]
        print(f"{table(records)}\n\n{initial_rows(untrained, world)}")


if __name__ == "__main__":
    run_main(main)
