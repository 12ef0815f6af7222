"""sweep.py: which runs there are, what it skips, and how it goes on after a failure or a signal."""

import shutil
import signal
import sys
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
import torch
from conftest import one_line

import measure
import sweep
from config import expand_sweep, load_config, to_toml
from data.dataset import TokenStream
from infra.cli import UserError
from infra.distributed import StopSignals
from training.checkpoint import save_checkpoint
from training.loader import open_streams
from training.state import data_info

CONFIGS = Path(__file__).parents[2] / "configs"


class FakeCommands:
    """Replaces sweep.run: leaves the files of train.py and eval_length.py, or fails."""

    def __init__(self, monkeypatch, failing=""):
        self.failing = failing
        self.commands: list[list[str]] = []
        monkeypatch.setattr(sweep, "run", self.run)

    @property
    def scripts(self):
        return [command[0] for command in self.commands]

    def run(self, command, stop, env=None, log=None):
        i = next(i for i, arg in enumerate(command) if arg.endswith(".py"))
        script, arguments = Path(command[i]).name, command[i + 1 :]
        self.commands.append([script, *arguments])
        if script == "eval_length.py":
            run_dir = Path(arguments[0])
            leave_rows(load_config(run_dir / "config.toml"))
        elif self.failing and self.failing in " ".join(arguments):
            return 2
        else:
            leave_run(load_config(arguments[0], arguments[1:]))
        return 0


def leave_rows(config):
    """5 nats for everything that eval_length.py measures by default."""
    text = TokenStream(config.data.dir, "val").fingerprint[7:19]
    key = (config.name, config.train.max_steps, text, "same_targets")
    rows: list[tuple[Any, ...]] = []
    for length in (16, 32, 64, 128, 256):
        for context in ((0, "none"), (0, "ntk"), (16, "none")):
            rows += [(*key, length, *context, block, 0, 5.0) for block in range(3)]
    measure.write_rows(config.run_dir, rows)


def leave_run(config):
    steps = config.train.max_steps
    data = data_info(*open_streams(config))
    content = {"step": steps, "data": data, "config": config.model_dump()}
    content |= {"model": {}, "optimizers": [], "rng": []}
    save_checkpoint(config.run_dir, content, keep_last=1)
    (config.run_dir / "config.toml").write_text(to_toml(config))
    (config.run_dir / "metrics.jsonl").write_text(f'{{"step": {steps}, "val_loss": 4.0}}\n')


# ---------------------------------------------------------------- which runs
def test_the_product_of_a_file_and_of_lists(tmp_path):
    path = tmp_path / "s.toml"
    path.write_text('[sweep]\nseed = [1, 2]\n"attention.normaliser" = ["softmax", "lssa"]\n')
    lists = ["--seed", "7", "--optimizer.lr", "1e-3", "0.2", "--train.grad-clip=2.0"]
    jobs = sweep.make_jobs([str(path)], lists)
    names = [f"s_normaliser={name}_lr={lr}" for name in ("softmax", "lssa") for lr in (0.001, 0.2)]
    assert [job.config.name for job in jobs] == names
    assert jobs[3].swept == {"attention.normaliser": "lssa", "optimizer.lr": 0.2}
    assert [job.config.optimizer.lr for job in jobs] == [0.001, 0.2, 0.001, 0.2]
    assert {(job.config.seed, job.config.train.grad_clip) for job in jobs} == {(7, 2.0)}
    assert [run.swept["seed"] for run in expand_sweep(path)] == [1, 1, 2, 2]
    heir = tmp_path / "heir.toml"
    heir.write_text('base = "s.toml"\n')
    assert load_config(heir).seed == 1337 and [run.swept for run in expand_sweep(heir)] == [{}]
    expected = "describes a sweep: python sweep.py .*--attention.normaliser"
    with pytest.raises(UserError, match=expected):
        load_config(path, ["--seed", "1", "--optimizer.lr", "0.1"])
    path.write_text(
        'attention.normaliser = "norm_softmax"\n'
        '[[sweep]]\n"attention.normaliser" = ["softmax"]\nseed = [1, 2]\n'
        '[[sweep]]\n"attention.gamma" = ["sqrt_d", "inf"]\n'
    )
    runs = [load_config(path, run.overrides).attention for run in expand_sweep(path)]
    assert [run.normaliser for run in runs] == 2 * ["softmax"] + 2 * ["norm_softmax"]
    assert [run.model_dump()["gamma"] for run in runs[2:]] == ["sqrt_d", "inf"]
    with pytest.raises(UserError, match="by --attention.normaliser ..., or by --attention.gamma"):
        load_config(path, ["--seed", "1"])


def test_p_of_the_demo(tmp_path):
    """At p = 1 nothing rises, and the rise is stated in the demo's file alone."""
    path = tmp_path / "p.toml"
    demo = CONFIGS / "demo_lssar.toml"
    path.write_text(f'base = "{demo}"\n[sweep]\n"attention.reweight_p" = [1, 3, 7, 15]\n')
    lists = ["--attention.reweight-p", "1", "3", "7", "15"]
    for jobs in (sweep.make_jobs([str(path)], []), sweep.make_jobs([str(demo)], lists)):
        options = [job.config.attention for job in jobs]
        assert [each.reweight_p for each in options] == [1, 3, 7, 15]
        assert [each.reweight_p_warmup for each in options] == [0, 125, 125, 125]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("sweep = 3", "sweep = 3: expected a section, or several [[sweep]] sections"),
        ("[sweep]\nseed = 3", "sweep: seed = 3: expected a list of values"),
        (f"[sweep]\nseed = {[*range(20_000)]}", "20000 runs: expected at most 10000"),
    ],
)
def test_no_sweep(text, expected, tmp_path):
    path = tmp_path / "s.toml"
    path.write_text(text)
    with one_line(path, expected):
        sweep.make_jobs([str(path)], [])


def test_ten_billion_runs_are_refused_at_once(tiny_config):
    lists = [["--seed"], ["--optimizer.lr"], ["--train.grad-clip"], ["--train.val-every"]]
    words = [word for option in lists for word in (*option, *map(str, range(320)))]
    with one_line("10485760000 runs"):
        sweep.make_jobs([str(tiny_config)], words)


@pytest.mark.parametrize("folder", ["papers", "variants"])
def test_every_run_of_a_folder_has_a_name_of_its_own(folder, capsys):
    """make_jobs loads each run of each [sweep], rejects two of one name, leaves out equal configs."""
    files = sorted(map(str, (CONFIGS / folder).glob("*.toml")))
    jobs = sweep.make_jobs(files, [])
    left_out = capsys.readouterr().out.splitlines()
    assert len(jobs) + len(left_out) >= len(files) > 5


@pytest.mark.parametrize(
    ("key", "values", "n"), [("data.dir", ["a", "b"], 2), ("train.micro_batch", [1, 2], 1)]
)
def test_what_makes_another_run(key, values, n, tiny_config):
    tiny_config.write_text(f'{tiny_config.read_text()}[sweep]\n"{key}" = {values}\n')
    assert len(sweep.make_jobs([str(tiny_config)], [])) == n


def test_a_run_follows_the_one_that_it_starts_from(tiny_config, call, monkeypatch):
    """Also with several jobs at once."""
    folder = tiny_config.with_name("runs")
    later = tiny_config.with_name("a.toml")
    later.write_text(f'base = "tiny.toml"\ninit_from = "{folder}/tiny"\n')
    last = tiny_config.with_name("b.toml")
    last.write_text(f'base = "tiny.toml"\ninit_from = "{folder}/a/checkpoints/step_000012.pt"\n')
    files = [str(last), str(later), str(tiny_config)]
    assert [job.config.name for job in sweep.make_jobs(files, [])] == ["tiny", "a", "b"]
    fake = FakeCommands(monkeypatch)
    call(sweep, *files, "--jobs", 3, "--eval-tokens", 0)
    assert [Path(command[1]).stem for command in fake.commands] == ["tiny", "a", "b"]
    tiny_config.write_text(f'init_from = "{folder}/b"\n' + tiny_config.read_text())
    with one_line("these runs start from each other"):
        sweep.make_jobs(files, [])


# ---------------------------------------------------------------- what it runs
def test_all_runs_but_the_finished_ones_and_on_after_a_failure(
    four_runs, call, monkeypatch, capsys
):
    fake = FakeCommands(monkeypatch, failing="normaliser=softmax_seed=2")
    with pytest.raises(SystemExit) as e:
        call(sweep, four_runs, "--optimizer.lr", "0.01")
    out = capsys.readouterr().out
    run = four_runs.parent / "runs/s_normaliser=softmax_seed=2"
    assert e.value.code == 1 and "3 of 4 runs are trained and evaluated" in out
    assert out.splitlines()[-1] == f"failed: {run}: train.py ended with status 2"
    done = ["train.py", "eval_length.py"]
    assert fake.scripts == [*done, "train.py", *done, *done]
    header, _, *table, picture = [line.split() for line in out.splitlines()[-9:-2]]
    assert header == ["run", "validation", "1x", "16x", "16x", "NTK", "16x", "window"]
    finished = ["4.000", *4 * ["5.000"]]
    assert [line[1:] for line in table] == [finished, 5 * ["-"], finished, finished]
    assert max(map(len, out.splitlines()[-9:-3])) <= 80
    assert Path(picture[1]).name == "s_sweep.png" and Path(picture[1]).exists()

    again = FakeCommands(monkeypatch)
    call(sweep, four_runs, "--optimizer.lr", "0.01")
    assert again.scripts == done
    call(sweep, four_runs, "--optimizer.lr", "0.01", "--eval-tokens", 0)
    assert again.scripts == done
    assert "4 of 4 runs are trained\n" in capsys.readouterr().out
    (run / "rows.csv").unlink()
    call(sweep, four_runs, "--optimizer.lr", "0.01")
    assert again.scripts == [*done, "eval_length.py"]


def test_what_is_not_finished(own_file, tiny_config, monkeypatch, capsys, call):
    """Another config, formula or step, and an unreadable folder: train.py names the difference."""
    FakeCommands(monkeypatch)
    options = ["--attention.normaliser", f"{own_file}:Mine"]

    def state(*more):
        call(sweep, tiny_config, "--list", *options, *more)
        return capsys.readouterr().out.strip().rpartition("  ")[2]

    assert state() == "to run"
    call(sweep, tiny_config, *options)
    capsys.readouterr()
    assert state() == state("--train.device", "cpu") == "finished"
    assert state("--optimizer.lr", "0.02") == "to run"
    formula = own_file.read_text()
    own_file.write_text(f"{formula}\n")
    assert state() == "to run"
    own_file.write_text(formula)
    run = tiny_config.parent / "runs/tiny"
    path = next(run.glob("checkpoints/*.pt"))
    early = path.rename(path.with_name("step_000009.pt"))
    assert state() == "to run"
    early.rename(path)
    (run / "config.toml").write_text("{")
    assert "not valid TOML" in state()


def test_a_run_that_was_stopped_itself_is_not_evaluated(four_runs, call, monkeypatch, capsys):
    """By a signal to train.py, which then exits with 0."""
    monkeypatch.setattr(sweep, "run", lambda *args: 0)
    with pytest.raises(SystemExit):
        call(sweep, four_runs, "--index", "0")
    assert "train.py stopped before its last step" in capsys.readouterr().out


def test_jobs_run_side_by_side_with_their_share_of_the_machine(
    four_runs, call, monkeypatch, capsys
):
    """Each call waits for a second one at the same time; one that cannot start stops no other run."""
    fake = FakeCommands(monkeypatch)
    barrier = Barrier(2)
    shares = []

    def run(command, stop, env, log):
        barrier.wait(timeout=60)
        shares.append((env["OMP_NUM_THREADS"], env.get("CUDA_VISIBLE_DEVICES")))
        assert env["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] == "600"  # time to save
        assert env["WANDB_RUN_GROUP"] == four_runs.stem
        assert log.name.startswith("s_normaliser=")
        if "normaliser=softmax_seed=2" in log.name:
            raise OSError("disk full")
        return fake.run(command, stop)

    monkeypatch.setattr(sweep, "run", run)
    monkeypatch.setattr(sweep, "n_cores", lambda: 12)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 6)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "9,8,7,6,5,4")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    options = ["--jobs", 2, "--eval-tokens", 0]
    with pytest.raises(SystemExit):
        call(sweep, four_runs, *options)
    out = capsys.readouterr().out
    assert fake.scripts == 3 * ["train.py"] and "3 of 4 runs" in out and "seed=2: disk full" in out
    assert set(shares) == {("2", "9,8,7"), ("2", "6,5,4")}
    on_cpu = ["--train.device", "cpu", "--log.dir", four_runs.with_name("cpu")]
    with pytest.raises(SystemExit):
        call(sweep, four_runs, *options, *on_cpu)
    assert {threads for threads, _ in shares} == {"2", "6"}  # three processes on GPUs, one on a CPU
    with one_line("--jobs 4 --nproc 2: expected at most 6 processes, one a GPU"):
        call(sweep, four_runs, "--jobs", 4, "--nproc", 2, "--train.device", "cuda")


def test_mistakes(four_runs, call):
    mistakes: list[tuple[list[object], str]] = [
        ([], "expected config files first"),
        ([four_runs, "--index", "4"], "--index 4: expected 0 to 3"),
        ([four_runs, "--train.max_step", "4"], "did you mean train.max_steps"),
        ([four_runs, "--job", "2"], "--job; did you mean --jobs?"),
        ([four_runs, four_runs], "two runs would be called"),
        ([four_runs, "--name", "x"], "two runs would be called"),
    ]
    for args, expected in mistakes:
        with pytest.raises(UserError, match=expected):
            call(sweep, *args)


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_a_run_and_its_evaluations(processes, four_runs, call):
    run = four_runs.parent / "runs/s_normaliser=softmax_seed=1"
    options = ["--index", 0, "--eval-tokens", 256, "--train.device", "cpu"]
    call(sweep, four_runs, *options, "--nproc", processes)
    rows = measure.read_rows(run)
    assert {*rows["step"]} == {12} and {*rows["length"]} == {16, 32, 64, 128, 256}
    data = load_config(run / "config.toml").data.dir
    moved = shutil.copytree(data, four_runs.with_name("moved"))
    before = (run / "rows.csv").read_bytes()
    call(sweep, four_runs, *options, "--data.dir", moved)
    assert (run / "rows.csv").read_bytes() == before


def test_a_signal_is_forwarded_as_sigterm():
    """At once: a notebook kills this process a third of a second after Ctrl-C."""
    child = "import os, signal, sys, time; began = time.monotonic()\n"
    child += (
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(7 + (time.monotonic() - began > 0.8)))\n"
    )
    child += "os.kill(os.getppid(), signal.SIGINT); time.sleep(60)"
    with StopSignals() as stop:
        assert sweep.run([sys.executable, "-c", child], stop, {}, None) == 7
        assert stop.number == signal.SIGINT
