"""Kill a training run at random moments, again and again: its curve must be that of an undisturbed run.

    python -m benchmarks.chaos                      # 20 SIGKILLs, with one process and with two
    python -m benchmarks.chaos --kills 2            # as in CI

Every second kill waits until a checkpoint is being written. With two processes one rank is killed, and
`torchrun --max-restarts` restarts the run.
"""

import json
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

from infra.cli import ArgumentParser, UserError, run_main

ROOT = Path(__file__).resolve().parents[1]
OVERRIDES = [  # a small model, short steps and many checkpoints
    *("--model.n-layer", "2", "--train.max-steps", "150", "--train.seq-len", "64"),
    *("--train.batch-tokens", "1024", "--train.micro-batch", "8", "--train.val-tokens", "4096"),
    *("--train.val-every", "20", "--train.checkpoint-every", "5", "--train.keep-last", "3"),
    *("--optimizer.warmup-steps", "10", "--log.every", "5"),
]
PATIENCE = 1500  # seconds for a restart: gloo waits five times its timeout where a connection is refused
KEPT = ("step", "loss", "lr", "grad_norm", "val_loss", "skipped")  # the keys that no clock changes


def start(folder: Path, name: str, processes: int) -> subprocess.Popen[bytes]:
    """A run in its own process group; its output goes to `<name>.log`."""
    command = [sys.executable]
    if processes > 1:
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
        command += ["--max-restarts=100", "--monitor-interval=0.1"]
    command += ["train.py", "configs/demo_lssar.toml", "--name", name, "--log.dir", str(folder), *OVERRIDES]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    with open(folder / f"{name}.log", "ab") as log:
        return subprocess.Popen(command, cwd=ROOT, env=env, stdout=log, stderr=log, start_new_session=True)


def curve(run: Path) -> list[dict[str, Any]]:
    """metrics.jsonl without what depends on the clock."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{key: line[key] for key in KEPT if key in line} for line in lines]


def undisturbed(folder: Path, processes: int) -> tuple[list[dict[str, Any]], float]:
    """The curve of an undisturbed run, and how long it took."""
    began = time.monotonic()
    name = f"undisturbed{processes}"
    if start(folder, name, processes).wait(timeout=600):
        raise UserError(f"the undisturbed run failed:\n{(folder / f'{name}.log').read_text()[-2000:]}")
    return curve(folder / name), time.monotonic() - began


def ranks(process: subprocess.Popen[bytes], processes: int) -> list[int]:
    """The ids of the training processes: torchrun's children, or the run itself."""
    if processes == 1:
        return [process.pid]
    return [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]


def writing(run: Path) -> bool:
    """Whether a checkpoint is being written now; killed writes have left older files."""
    try:
        ages = [time.time() - path.stat().st_mtime for path in (run / "checkpoints").glob(".step_*.tmp")]
    except FileNotFoundError:
        return False
    return any(age < 0.2 for age in ages)


def kill_one(
    process: subprocess.Popen[bytes], processes: int, run: Path, patience: float, in_write: bool
) -> bool:
    """Kill one rank after `patience` seconds, or during the next write of a checkpoint; False: too late."""
    end = time.monotonic() + patience
    while process.poll() is None and time.monotonic() < end:
        if in_write and writing(run):
            break
        time.sleep(0.0005 if in_write else 0.01)
    if process.poll() is not None:
        return False
    try:
        os.kill(random.choice(ranks(process, processes)), signal.SIGKILL)
    except (ProcessLookupError, FileNotFoundError, IndexError):  # it has ended, or not started
        return False
    return True


def chaos(folder: Path, processes: int, kills: int) -> None:
    expected, seconds = undisturbed(folder, processes)
    random.seed(processes)
    done, in_writes, rounds = 0, 0, 0
    while done < kills:
        rounds += 1
        name = f"killed{processes}-{rounds}"
        run, process = folder / name, start(folder, name, processes)
        while process.poll() is None or process.returncode:
            in_write = done % 2 == 1
            patience = random.uniform(0.3, 0.9) * seconds
            killed = done < kills and kill_one(process, processes, run, patience, in_write)
            done += killed
            in_writes += killed and in_write and writing(run)
            if processes == 1 or done >= kills:
                process.wait(timeout=PATIENCE)
            if process.poll():
                if not killed or processes > 1:  # torchrun must restart it
                    raise UserError(f"{run}: failed without a kill; see {folder / f'{name}.log'}")
                process = start(folder, name, processes)
        output = (folder / f"{name}.log").read_text()
        same = curve(run) == expected
        print(
            f"{processes} process(es): {done} kills, {in_writes} left a partial checkpoint, resumed "
            f"{output.count('resumed from')} times: {'the same curve' if same else 'ANOTHER CURVE'}",
            flush=True,
        )
        if not same or "Traceback" in output and processes == 1:
            raise UserError(f"{run}: not the curve of the undisturbed run; see {folder / f'{name}.log'}")


def main() -> None:
    parser = ArgumentParser(__doc__)
    parser.add_argument("--kills", type=int, default=20, help="for each number of processes (default: 20)")
    args = parser.parse_args()
    if not (ROOT / "data" / "python_bytes").is_dir():
        raise UserError("data/python_bytes: no such data; run python -m data.python_source first")
    folder = Path(tempfile.mkdtemp())  # kept if something fails
    for processes in (1, 2):
        chaos(folder, processes, args.kills)
    shutil.rmtree(folder)


if __name__ == "__main__":
    run_main(main)
