"""slurm/: a time limit's warning requeues a job, and an evening's exits say what happened."""

import os
import subprocess
from signal import SIGINT, SIGTERM, SIGUSR1

import pytest
from launch import ROOT

STUBS = {
    "python": 'echo "$@" > arguments; trap "touch saved; exit 3" USR1; touch ready; sleep 9 & wait',
    "scontrol": 'echo "$@" > requeued',
}


def test_an_array_task_saves_and_requeues(tmp_path):
    for name, body in STUBS.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    env = {
        "SLURM_SUBMIT_DIR": str(tmp_path),
        "SLURM_ARRAY_JOB_ID": "77",
        "SLURM_ARRAY_TASK_ID": "4",
    }
    env |= {"PYTHON": "./python", "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    command = ["bash", str(ROOT / "slurm/sweep.sbatch"), "a.toml", "--seed", "2"]
    with subprocess.Popen(command, env=env) as job:
        while not (tmp_path / "ready").exists():
            assert job.poll() is None
        job.send_signal(SIGUSR1)
        assert job.wait(timeout=60) == 3
    assert (tmp_path / "arguments").read_text() == "sweep.py a.toml --seed 2 --index 4\n"
    assert (tmp_path / "saved").exists() and (tmp_path / "requeued").read_text() == "requeue 77_4\n"


@pytest.mark.parametrize(
    ("signal", "preempted", "requeued"),
    [
        ("SIGUSR1", "None", True),
        ("SIGTERM", "2026-11-27T09:00:00", True),
        ("SIGTERM", "None", False),
    ],
)
def test_a_training_that_saved_is_requeued(tmp_path, signal, preempted, requeued):
    """But for scancel's SIGTERM."""
    stubs = {
        "python": f'echo "rank $RANK"; echo "stopped by {signal} after step 3" >&2',
        "srun": 'while [[ $1 = --* ]]; do shift; done; SLURM_PROCID=0 SLURM_LOCALID=0 exec "$@"',
        "scontrol": f"""case $1 in
            requeue) echo "$@" > requeued ;;
            show) echo "PreemptEligibleTime=2026-11-27T08:00:00 PreemptTime={preempted}" ;;
        esac""",
    }
    for name, body in stubs.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    env = {"SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "a"}
    env |= {"SLURM_NTASKS": "8", "SLURM_NNODES": "1", "SLURM_CPUS_PER_TASK": "1"}
    env |= {"PYTHON": "./python", "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    command = ["bash", str(ROOT / "slurm/train.sbatch"), "a.toml"]
    log = tmp_path / "log"
    log.write_text("of the start before\n")
    with log.open("a") as output:
        subprocess.run(command, env=env, check=True, stdout=output, stderr=output)
    assert log.read_text() == f"of the start before\nrank 0\nstopped by {signal} after step 3\n"
    assert (tmp_path / "requeued").exists() == requeued


@pytest.mark.parametrize("script", ["train", "sweep"])
def test_scripts_parse(script):
    subprocess.run(["bash", "-n", str(ROOT / f"slurm/{script}.sbatch")], check=True)


def evening(folder, body):
    """The script's call in a copy, with a stub for Python."""
    python = folder / "python"
    python.write_text(f"#!/bin/bash\n{body}\n")
    python.chmod(0o755)
    (folder / "slurm").mkdir()
    script = folder / "slurm/evening.sh"
    script.write_text((ROOT / "slurm/evening.sh").read_text())
    return {"args": ["bash", str(script)], "env": os.environ | {"PYTHON": str(python)}}


@pytest.mark.parametrize("signal", [SIGINT, SIGTERM])
def test_an_evening_stops_at_once_and_runs_once(tmp_path, signal):
    trains = 'trap "touch saved; exit 0" TERM; touch ready; sleep 5 & wait'
    command = evening(tmp_path, f"case $* in *--list*) ;; sweep.py*) {trains} ;; esac")
    with subprocess.Popen(**command) as first:
        while not (tmp_path / "ready").exists():
            assert first.poll() is None
        second = subprocess.run(**command, capture_output=True, text=True)
        assert second.returncode == 6 and "another call" in second.stderr
        first.send_signal(signal)
        assert first.wait(timeout=60) == 130 and (tmp_path / "saved").exists()


@pytest.mark.parametrize(
    ("printed", "status", "expected"),
    [
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB", 1, 4),
        ("torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp", 1, 3),
        ("error: train.max_stps: no such key", 2, 2),
        ("Segmentation fault", 139, 6),
    ],
)
def test_the_exits_of_the_evening(printed, status, expected, tmp_path):
    command = evening(tmp_path, f'echo "{printed}"; exit {status}')
    done = subprocess.run(**command, capture_output=True, text=True)
    assert done.returncode == expected
    assert done.stderr.startswith("error: ") and len(done.stderr.splitlines()) == 1
