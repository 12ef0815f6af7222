"""Several processes: how they find one another after a restart, and how they end."""

import os
import socket
import subprocess
import sys

import pytest
from launch import ROOT

from infra.cli import UserError
from infra.distributed import join_world

# The reducer of a DDP model, kept by a cycle, holds its process group too.
TWO_RANKS = """
import atexit
from pathlib import Path

@atexit.register  # before those of the import: it is called after them
def print_threads():
    names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    print([name for name in names if "gloo" in name], flush=True)

import gc
import torch
from torch.nn.parallel import DistributedDataParallel
from infra.distributed import join_world

def main():
    with join_world("cpu") as world:
        model = DistributedDataParallel(torch.nn.Linear(2, 1))
        model.cycle = [model]
        model(torch.ones(3, 2)).sum().backward()
        gc.freeze()  # as train.py
        world.gather_objects("text")
        print_threads()

main()
"""


def test_restarts_of_several_machines_need_new_stores(monkeypatch):
    """Their agents count restarts differently, so processes of one start would look for other keys."""
    for name, value in {
        "WORLD_SIZE": "16",
        "GROUP_WORLD_SIZE": "2",
        "TORCHELASTIC_MAX_RESTARTS": "3",
    }.items():
        monkeypatch.setenv(name, value)
    expected = (
        "--max-restarts=3 on 2 machines: expected --rdzv-backend=c10d, and TORCH_DISABLE_SHARE_RDZV"
    )
    with pytest.raises(UserError, match=expected), join_world("cpu"):
        pass


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads the names of threads from /proc")
def test_no_thread_of_gloo_is_left_at_exit():
    """One that frees a tensor later asks a closing interpreter for the GIL, which aborts the
    process.
    """
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    world = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", TWO_RANKS], cwd=ROOT, env=world | {"RANK": rank},
            stdout=subprocess.PIPE, text=True,
        )
        for rank in ("0", "1")
    ]  # fmt: skip
    for rank in ranks:
        stdout, _ = rank.communicate(timeout=120)
        in_world, at_exit = stdout.splitlines()
        assert "gloo" in in_world
        assert at_exit == "[]"
        assert rank.returncode == 0
