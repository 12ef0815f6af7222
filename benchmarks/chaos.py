"""Kill a training run at random moments, again and again: its curve must be that of an undisturbed
run.

    python -m benchmarks.chaos                      # 20 SIGKILLs, with one process and with two
    python -m benchmarks.chaos --kills 2            # as in CI

Every second kill waits until a checkpoint is being written. With two processes one rank is killed,
and `torchrun --max-restarts` restarts the run. Data must be prepared (python -m
data.python_source).
"""

import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from infra.cli import ArgumentParser, UserError, positive_int, run_main
from infra.files import read_jsonl

ROOT = Path(__file__).resolve().parents[1]
# a small model, short steps and many checkpoints
OVERRIDES = (
    "--model.n-layer 2 --train.max-steps 150 --train.seq-len 64 --train.batch-tokens 1024 "
    "--train.micro-batch 8 --train.val-tokens 4096 --train.val-every 20 --train.checkpoint-every 5 "
    "--train.keep-last 3 --optimizer.warmup-steps 10 --log.every 5"
)
PATIENCE = 300  # seconds for a restart and the rest of the run
KEPT = ("step", "loss", "lr", "grad_norm", "val_loss")  # the keys that no clock changes

Process = subprocess.Popen[bytes]


def start(run: Path, n_ranks: int) -> Process:
    """A run in its own process group; its output goes to `<run>.log`."""
    launcher = "-m torch.distributed.run --standalone --max-restarts=100 --monitor-interval=0.1"
    words = [] if n_ranks == 1 else [*launcher.split(), f"--nproc_per_node={n_ranks}"]
    words += [
        "train.py",
        "configs/demo_lssar.toml",
        "--name",
        run.name,
        "--log.dir",
        str(run.parent),
    ]
    command = [sys.executable, *words, *OVERRIDES.split()]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    with open(f"{run}.log", "ab") as log:
        return subprocess.Popen(
            command, cwd=ROOT, env=env, stdout=log, stderr=log, start_new_session=True
        )


def curve(run: Path) -> list[dict[str, Any]]:
    """metrics.jsonl without what depends on the clock."""
    return [{key: record.get(key) for key in KEPT} for record in read_jsonl(run / "metrics.jsonl")]


def writes_checkpoint(run: Path) -> bool:
    """Whether a checkpoint is being written now; killed writes have left older files."""
    try:
        files = run.glob("checkpoints/.step_*.tmp")
        return any(time.time() - path.stat().st_mtime < 0.2 for path in files)
    except FileNotFoundError:
        return False


def kill_one(process: Process, n_ranks: int, run: Path, delay: float, in_write: bool) -> bool:
    """Kill one rank after `delay` seconds, or in the next write of a checkpoint; False: it was too
    late.
    """
    end = time.monotonic() + delay
    while (
        process.poll() is None
        and time.monotonic() < end
        and not (in_write and writes_checkpoint(run))
    ):
        time.sleep(0.0005 if in_write else 0.01)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    try:
        ranks = [str(process.pid)] if n_ranks == 1 else children.read_text().split()
        os.kill(int(random.choice(ranks)), signal.SIGKILL)
    except (ProcessLookupError, FileNotFoundError, IndexError):  # it has ended, or not started
        return False
    return True


def chaos(folder: Path, n_ranks: int, n_kills: int) -> None:
    undisturbed = folder / f"undisturbed{n_ranks}"
    began = time.monotonic()
    if start(undisturbed, n_ranks).wait(timeout=600):
        raise UserError(f"the undisturbed run failed: see {undisturbed}.log")
    seconds = time.monotonic() - began
    random.seed(n_ranks)
    kills = 0
    partial = 0
    while kills < n_kills:
        run = folder / f"killed{n_ranks}-{len(list(folder.glob('*.log')))}"
        process = start(run, n_ranks)
        while process.poll() is None or process.returncode:
            in_write = kills % 2 == 1
            delay = random.uniform(0.3, 0.9) * seconds
            killed = kills < n_kills and kill_one(process, n_ranks, run, delay, in_write)
            kills += killed
            partial += killed and in_write and writes_checkpoint(run)
            if n_ranks == 1 or kills >= n_kills:
                process.wait(timeout=PATIENCE)
            if process.poll():
                if not killed or n_ranks > 1:  # torchrun must restart it
                    raise UserError(f"{run}: failed without a kill; see {run}.log")
                process = start(run, n_ranks)
        output = Path(f"{run}.log").read_text()
        if curve(run) != curve(undisturbed) or ("Traceback" in output and n_ranks == 1):
            raise UserError(f"{run}: not the curve of the undisturbed run; see {run}.log")
        resumed = f"resumed {output.count('resumed from')} times: the same curve"
        print(
            f"{n_ranks} process(es): {kills} kills, {partial} left a partial checkpoint, {resumed}",
            flush=True,
        )


def main() -> None:
    parser = ArgumentParser(__doc__)
    kills_help = "for each number of processes (20)"
    parser.add_argument("--kills", type=positive_int, default=20, help=kills_help)
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp())  # kept if something fails
    for n_ranks in (1, 2):
        chaos(folder, n_ranks, args.kills)
    shutil.rmtree(folder)


if __name__ == "__main__":
    run_main(main)
