"""Which of the peak rates of slurm/evening.sh is best, and is it on llm.c's curve?

    python -m lab.choose_rate runs/evening 2000 3e-4 6e-4 1.2e-3    # prints 0.0006

Reads the runs `softmax_lr=...` of the folder at that step. A rate that diverged is not the best one.
Exit status 5, with the rate: it is more than 0.1 above llm.c's loss, where llm.c has published one for the
step, the data are FineWeb and a step has as many tokens.
"""

import sys
from pathlib import Path

from config import load_config
from data.dataset import TokenStream
from infra.cli import ArgumentParser, UserError, positive_float, positive_int, run_main
from infra.files import read_jsonl
from training.validation import expected_loss

MOST_ABOVE = 0.1  # nats above llm.c's loss
OFF_THE_CURVE = 5  # exit status


def last_loss(run: Path, steps: int) -> float | None:
    """The validation loss at the step. None: it diverged. Raises UserError: it was not reached."""
    lines = read_jsonl(run / "metrics.jsonl")
    for line in lines:
        if line["step"] == steps and line.get("val_loss") is not None:
            return float(line["val_loss"])
    last = lines[-1] if lines else {}
    if None in (last.get("loss", 0), last.get("grad_norm", 0), last.get("val_loss", 0)):
        return None
    raise UserError(f"{run}: has not done its {steps} steps")


def main() -> None:
    parser = ArgumentParser(__doc__)
    add = parser.add_argument
    add("folder", type=Path, metavar="DIR", help="that of the runs")
    add("steps", type=positive_int, metavar="STEPS", help="of each run")
    add("rates", type=positive_float, nargs="+", metavar="RATE", help="those that count")
    args = parser.parse_args()
    losses = {}
    for run in sorted(args.folder.glob("softmax_lr=*")):
        config = load_config(run / "config.toml")
        if (rate := config.optimizer.lr) in args.rates:
            loss = last_loss(run, args.steps)
            found = "diverged" if loss is None else f"{loss:.4f}"
            print(f"rate {rate:g}: {found}", file=sys.stderr)
            if loss is not None:
                losses[rate] = loss
    if not losses:
        raise UserError(f"{args.folder}: no rate has a loss at step {args.steps}")
    best = min(losses, key=lambda rate: losses[rate])
    print(best)
    expected = expected_loss(config.train, TokenStream(config.data.dir, "val"), args.steps)
    if expected is None:
        print("llm.c has no loss for this step, batch or data: not compared", file=sys.stderr)
        return
    print(f"llm.c at step {args.steps}: {expected:.4f}", file=sys.stderr)
    if losses[best] > expected + MOST_ABOVE:
        sys.exit(OFF_THE_CURVE)


if __name__ == "__main__":
    run_main(main)
