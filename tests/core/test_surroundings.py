"""Where people work: notebooks, terminals without UTF-8, closed streams, left-over variables."""

import importlib
import io
import os
import subprocess
import sys

import pytest
from conftest import make_byte_run
from launch import ROOT

from infra.cli import launcher_problem, run_main


def run_python(*arguments, **env):
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=os.environ | env, text=True, capture_output=True
    )


@pytest.mark.parametrize(
    "backend",
    ["module://matplotlib_inline.backend_inline", "module://ipympl.nbagg", "nonsense", "qtagg", ""],
)
def test_figures_need_no_backend(backend, tmp_path):
    """A notebook hands MPLBACKEND on to the commands that it starts. Nor do they need LaTeX."""
    (tmp_path / "matplotlibrc").write_text("backend: nonsense\ntext.usetex: True\n")
    draw = "from infra.figures import Figure; Figure().text(0, 0, 'x'); print('drawn')"
    done = run_python("-c", draw, MPLBACKEND=backend, MATPLOTLIBRC=str(tmp_path))
    assert done.stdout == "drawn\n", done.stderr


ALONE = [
    {},
    {"MASTER_ADDR": "localhost"},
    {"RANK": "0"},
    {"WORLD_SIZE": ""},
    {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "x", "MASTER_PORT": "1"},
    {"SLURM_NTASKS": "8", "SLURM_PROCID": "3", "SLURM_LOCALID": "3"},
    {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "2", "PMI_RANK": "1"},
]
HOST = {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
WRONG = [
    {"WORLD_SIZE": "2"},
    {"RANK": "1"},
    {"LOCAL_RANK": "1"},
    {"WORLD_SIZE": "two"},
    {"WORLD_SIZE": "0"},
    {"WORLD_SIZE": "-1"},
    {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "localhost"},
    {"WORLD_SIZE": "2", "RANK": "2"} | HOST,
    {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "1"} | HOST,
    {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "99999"},
]


@pytest.mark.parametrize("variables", [*ALONE, *WRONG], ids=str)
def test_left_over_variables_of_a_launcher(variables, monkeypatch, capsys):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    if variables in ALONE:
        assert launcher_problem() == ""
        return
    with pytest.raises(SystemExit) as end:
        run_main(lambda: pytest.fail("nothing may start"))
    (line,) = capsys.readouterr().err.splitlines()
    assert end.value.code == 2 and line.endswith(f"unset {' '.join(variables)}")


CALLS = [
    "train {config} --train.max-steps 2",
    "eval_length {run} --tokens 512",
    "sample {run} --tokens 5 --prompt é",
    "sweep {config} --list",
    "compare --help",
    "data.prepare --files {text} --tokenizer bytes --out {config}.data",
    "data.prepare --files nowhere\N{SNOWMAN} --tokenizer bytes --out {config}.data2",
    "train nowhere\N{SNOWMAN}.toml",
]


STREAMS = {
    "ascii": lambda: io.TextIOWrapper(io.BytesIO(), "ascii"),
    "cp1252": lambda: io.TextIOWrapper(io.BytesIO(), "cp1252"),
    "utf-16": lambda: io.TextIOWrapper(io.BytesIO(), "utf-16"),
    "closed": lambda: None,
    "notebook": io.StringIO,
}


@pytest.mark.parametrize("streams", STREAMS)
def test_every_command_ends_as_it_should(streams, tiny_config, monkeypatch, no_drawing):
    byte_run = make_byte_run(tiny_config, "--name", "bytes")
    text = tiny_config.with_name("té.txt")
    text.write_text("é ± \N{SNOWMAN}\n" * 99)
    for command in CALLS:
        for name in ("stdout", "stderr"):
            monkeypatch.setattr(sys, name, STREAMS[streams]())
        script, *arguments = command.format(config=tiny_config, run=byte_run, text=text).split()
        monkeypatch.setattr(sys, "argv", [script, *arguments])
        try:
            run_main(importlib.import_module(script).main)
            status = 0
        except SystemExit as end:
            status = end.code
        assert status == (2 if "nowhere" in command else 0), command


@pytest.mark.parametrize("command", ["train.py", "sample.py", "-m data.prepare", "-m data.bpe"])
def test_without_torch(command):
    """As outside the virtual environment: -S leaves out what is installed."""
    done = run_python("-S", *command.split())
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    assert "has no torch, " in done.stderr and ".venv/bin/activate" in done.stderr


def test_without_a_temporary_folder():
    """Some packages ask for one while torch is imported."""
    start = "import tempfile; tempfile._candidate_tempdir_list = list; import train"
    done = run_python("-c", start)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    assert done.stderr.endswith("expected TMPDIR=FOLDER that can be written\n")
