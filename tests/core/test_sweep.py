"""sweep.py: what it runs, skips, and continues with after a failure."""

import shutil
import signal
import sys
import time
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
import torch

import measure
import sweep
from config import expand_sweep, load_config, to_toml
from data.dataset import TokenStream
from infra.cli import UserError
from infra.distributed import StopSignals
from measure import write_rows
from training.checkpoint import find_checkpoints, save_checkpoint
from training.loader import open_streams
from training.state import data_info

CONFIGS = Path(__file__).parents[2] / "configs"


class FakeTorchrun:
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
            config = load_config(run_dir / "config.toml")
            leave_rows(config, int(arguments[arguments.index("--tokens") + 1]))
        elif self.failing and self.failing in " ".join(arguments):
            return 2
        else:
            leave_run(load_config(arguments[0], arguments[1:]))
        return 0


def leave_rows(config, tokens, step=None):
    """5 nats for everything that eval_length.py measures by default."""
    text = TokenStream(config.data.dir, "val").fingerprint[7:19]
    rows: list[tuple[Any, ...]] = []
    for length in (16, 32, 64, 128, 256):
        for context in ((0, "none"), (0, "ntk"), (16, "none")):
            for block in range(min(tokens // 256, 3)):  # as many as 1,000 tokens have
                key = (config.name, step or config.train.max_steps, text, "same_targets")
                rows.append((*key, length, *context, block, 0, 5.0))
    write_rows(config.run_dir, rows)


def leave_run(config):
    steps = config.train.max_steps
    data = data_info(*open_streams(config))
    content = {"step": steps, "data": data, "config": config.model_dump()}
    content |= {"model": {}, "optimizers": [], "rng": []}
    save_checkpoint(config.run_dir, content, keep_last=1)
    (config.run_dir / "config.toml").write_text(to_toml(config))
    (config.run_dir / "metrics.jsonl").write_text(f'{{"step": {steps}, "val_loss": 4.0}}\n')


def test_all_runs_but_the_finished_ones_and_on_after_a_failure(
    four_runs, call, monkeypatch, capsys
):
    fake = FakeTorchrun(monkeypatch, failing="normaliser=softmax_seed=2")
    with pytest.raises(SystemExit) as e:
        call(sweep, four_runs, "--optimizer.lr", "0.01")
    out = capsys.readouterr().out
    assert e.value.code == 1 and "3 of 4 runs are trained and evaluated" in out
    run = four_runs.parent / "runs/s_normaliser=softmax_seed=2"
    assert out.splitlines()[-1] == f"failed: {run}: train.py ended with status 2"
    done = ["train.py", "eval_length.py"]
    assert fake.scripts == [*done, "train.py", *done, *done]
    assert all("--optimizer.lr" in command for command in fake.commands if command[0] == "train.py")
    header, _, *table, picture = [line.split() for line in out.splitlines()[-9:-2]]
    assert header == ["run", "validation", "1x", "16x", "16x", "NTK", "16x", "window"]
    finished = ["4.000", *4 * ["5.000"]]
    assert [line[1:] for line in table] == [finished, 5 * ["-"], finished, finished]
    assert max(map(len, out.splitlines()[-9:-3])) <= 80
    assert Path(picture[1]).name == "s_sweep.png" and Path(picture[1]).exists()

    again = FakeTorchrun(monkeypatch)
    call(sweep, four_runs, "--optimizer.lr", "0.01")
    assert again.scripts == done
    assert "4 of 4 runs are trained and evaluated" in capsys.readouterr().out

    call(sweep, four_runs, "--optimizer.lr", "0.01", "--eval-tokens", 0)
    assert again.scripts == done
    assert "4 of 4 runs are trained\n" in capsys.readouterr().out
    # other tokens are no result
    call(sweep, four_runs, "--optimizer.lr", "0.01", "--eval-tokens", 512)
    assert again.scripts == [*done, *4 * ["eval_length.py"]]


def test_jobs_run_side_by_side_with_their_share_of_the_machine(
    four_runs, call, monkeypatch, capsys
):
    """Each call waits for a second one at the same time; one that cannot start stops no other run."""
    fake = FakeTorchrun(monkeypatch)
    barrier = Barrier(2)
    shares = []

    def run(command, stop, env, log):
        barrier.wait(timeout=60)
        shares.append((env["OMP_NUM_THREADS"], env.get("CUDA_VISIBLE_DEVICES")))
        assert env["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] == "600"  # time to save
        assert env["WANDB_RUN_GROUP"] == four_runs.stem
        assert log.parent == four_runs.parent / "runs" and log.name.startswith("s_normaliser=")
        if "normaliser=softmax_seed=2" in log.name:
            raise OSError("disk full")
        return fake.run(command, stop)

    monkeypatch.setattr(sweep, "run", run)
    monkeypatch.setattr(sweep, "n_cores", lambda: 12)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 6)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "9,8,7,6,5,4")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    with pytest.raises(SystemExit):
        call(sweep, four_runs, "--jobs", 2, "--eval-tokens", 0)
    out = capsys.readouterr().out
    assert fake.scripts == 3 * ["train.py"] and "3 of 4 runs" in out and "seed=2: disk full" in out
    assert set(shares) == {("2", "9,8,7"), ("2", "6,5,4")}
    with pytest.raises(SystemExit):
        call(
            sweep,
            four_runs,
            "--jobs",
            2,
            "--eval-tokens",
            0,
            "--train.device",
            "cpu",
            "--tag",
            "cpu",
        )
    assert {threads for threads, _ in shares} == {"2", "6"}  # three processes on GPUs, one on a CPU
    with pytest.raises(
        UserError, match="--jobs 4 --nproc 2: expected at most 6 processes, one a GPU"
    ):
        call(sweep, four_runs, "--jobs", 4, "--nproc", 2, "--train.device", "cuda")


def test_a_run_that_was_stopped_itself_is_not_evaluated(four_runs, call, monkeypatch, capsys):
    """By a signal to train.py, which then exits with 0. An unreadable run folder hides no other in
    --list.
    """
    monkeypatch.setattr(sweep, "run", lambda *args: 0)
    with pytest.raises(SystemExit):
        call(sweep, four_runs, "--index", "0")
    assert "train.py stopped before its last step" in capsys.readouterr().out
    overrides = [
        "--attention.normaliser",
        "softmax",
        "--seed",
        "1",
        "--name",
        "s_normaliser=softmax_seed=1",
    ]
    leave_run(load_config(four_runs, overrides))
    (four_runs.parent / "runs/s_normaliser=softmax_seed=1/config.toml").write_text("{")
    call(sweep, four_runs, "--list")
    states = capsys.readouterr().out.splitlines()
    assert len(states) == 4 and "not valid TOML" in states[0] and states[1].endswith("to run")


def test_a_run_is_finished_without_its_config_and_where_its_data_moved(four_runs, call, capsys):
    """By the config.toml that train.py rewrites, else by the checkpoint, unless that is damaged."""
    options = ["--attention.normaliser", "softmax", "--seed"]
    names = [f"s_normaliser=softmax_seed={seed}" for seed in (1, 2)]
    first, second = (load_config(four_runs, [*options, name[-1], "--name", name]) for name in names)
    for config in (first, second):
        leave_run(config)
        (config.run_dir / "config.toml").unlink()
    find_checkpoints(second.run_dir)[0].write_text("{")

    def states(*overrides):
        call(sweep, four_runs, "--list", *overrides)
        return [line.rpartition("  ")[2] for line in capsys.readouterr().out.splitlines()]

    assert states() == ["finished", "to run", "to run", "to run"]
    moved = str(shutil.copytree(first.data.dir, four_runs.with_name("moved")))
    assert states("--data.dir", moved)[0] == "to run"  # train.py then writes its config.toml
    (first.run_dir / "config.toml").write_text(
        to_toml(load_config(four_runs, [*options, "1", "--data.dir", moved]))
    )
    assert states("--data.dir", moved)[0] == "finished"
    path = find_checkpoints(first.run_dir)[0]
    path.rename(path.with_name("step_000009.pt"))
    assert states("--data.dir", moved)[0] == "to run"


@pytest.mark.parametrize("folder", ["papers", "variants"])
def test_every_run_of_a_folder_has_a_name_of_its_own(folder, capsys):
    """make_jobs loads each run of each [sweep], rejects two of one name, leaves out equal configs."""
    files = sorted(map(str, (CONFIGS / folder).glob("*.toml")))
    jobs = sweep.make_jobs(files, [], None)
    left_out = capsys.readouterr().out.splitlines()
    assert len(jobs) + len(left_out) >= len(files) > 5


def test_a_tag_keeps_the_name_of_the_file(tiny_config):
    tiny_config.write_text('name = "foo"\n' + tiny_config.read_text())
    (job,) = sweep.make_jobs([str(tiny_config)], [], "t")
    assert job.config.name == "foo_t"


def test_another_config_under_the_same_name_is_left_to_train(four_runs, call, monkeypatch):
    """train.py names the difference; skipping would present the old run as the new one."""
    FakeTorchrun(monkeypatch)
    call(sweep, four_runs, "--index", "3")
    FakeTorchrun(monkeypatch, failing="--optimizer.lr")
    with pytest.raises(SystemExit):
        call(sweep, four_runs, "--index", "3", "--optimizer.lr", "0.02")


def test_a_run_on_other_data_is_left_to_train(four_runs, tiny_dataset, call, monkeypatch):
    data = shutil.copytree(tiny_dataset, four_runs.parent / "data")
    options = ["--index", "0", "--eval-tokens", "0", "--data.dir", str(data)]
    FakeTorchrun(monkeypatch)
    call(sweep, four_runs, *options)
    info = data / "dataset.json"
    info.write_text(info.read_text().replace('"sha256": "', '"sha256": "0'))
    again = FakeTorchrun(monkeypatch, failing="data.dir")
    with pytest.raises(SystemExit):
        call(sweep, four_runs, *options)
    info.write_text(info.read_text().replace('"sha256": "0', '"sha256": "'))
    next(four_runs.parent.glob("runs/*/checkpoints/*.pt")).write_bytes(b"damaged")
    with pytest.raises(SystemExit):
        call(sweep, four_runs, *options)
    assert again.scripts == ["train.py", "train.py"]


def test_an_evaluation_of_another_step_or_text_is_done_again(four_runs, call, monkeypatch, capsys):
    """And one that lacks a block; what still lacks it afterwards has failed."""
    FakeTorchrun(monkeypatch)
    call(sweep, four_runs, "--index", "0")
    job = sweep.make_jobs([str(four_runs)], [], None)[0]
    path = job.run_dir / "rows.csv"
    whole = path.read_text()
    is_last = (whole.splitlines(keepends=True)[-1], "")
    for content in (
        whole.replace(",12,", ",4,"),
        whole.replace(*is_last),
        whole.replace(",ntk,", ",yarn,"),
    ):
        path.write_text(content)
        again = FakeTorchrun(monkeypatch)
        call(sweep, four_runs, "--index", "0")
        assert again.scripts == ["eval_length.py"]
    path.write_text(whole.replace(",12,", ",4,"))
    monkeypatch.setattr(sweep, "run", lambda *_: 0)  # which leaves it
    capsys.readouterr()
    with pytest.raises(SystemExit):
        call(sweep, four_runs, "--index", "0")
    out = capsys.readouterr().out
    assert "eval_length.py has measured another step" in out and "16x" not in out


def test_lists_on_the_command_line_sweep(tiny_config, four_runs):
    """With those of the file, in the names and in what a picture shows."""
    lists = ["--optimizer.lr", "0.1", "0.2", "--seed", "3", "4", "--train.grad-clip=2.0"]
    jobs = sweep.make_jobs([str(tiny_config)], lists, None)
    assert [job.config.name for job in jobs] == [
        f"tiny_lr={lr}_seed={seed}" for lr in (0.1, 0.2) for seed in (3, 4)
    ]
    assert [(job.config.optimizer.lr, job.config.seed) for job in jobs][1] == (0.1, 4)
    assert jobs[3].swept == {"optimizer.lr": 0.2, "seed": 4}
    assert all(job.config.train.grad_clip == 2.0 for job in jobs)
    jobs = sweep.make_jobs([str(four_runs)], lists[:3], None)
    assert len(jobs) == 8 and jobs[0].config.name == "s_normaliser=softmax_seed=1_lr=0.1"
    with pytest.raises(UserError, match="20000 runs: expected at most 10000"):
        sweep.make_jobs([str(tiny_config)], ["--seed", *map(str, range(20_000))], None)


def test_a_run_follows_the_one_that_it_starts_from(tiny_config, call, monkeypatch):
    """Also with several jobs at once."""
    folder = tiny_config.with_name("runs")
    later = tiny_config.with_name("a.toml")
    later.write_text(f'base = "tiny.toml"\ninit_from = "{folder}/tiny"\n')
    last = tiny_config.with_name("b.toml")
    last.write_text(f'base = "tiny.toml"\ninit_from = "{folder}/a/checkpoints/step_000012.pt"\n')
    files = [str(last), str(later), str(tiny_config)]
    assert [job.config.name for job in sweep.make_jobs(files, [], None)] == ["tiny", "a", "b"]
    fake = FakeTorchrun(monkeypatch)
    call(sweep, *files, "--jobs", 3, "--eval-tokens", 0)
    assert [Path(command[1]).stem for command in fake.commands] == ["tiny", "a", "b"]
    tiny_config.write_text(f'init_from = "{folder}/b"\n' + tiny_config.read_text())
    with pytest.raises(UserError, match="these runs start from each other"):
        sweep.make_jobs(files, [], None)


def test_400_runs_are_compared_in_a_second(tiny_config, monkeypatch):
    """Each with all before, by one key."""
    config = load_config(tiny_config)
    loaded = iter(range(1000))
    monkeypatch.setattr(
        sweep,
        "load_config",
        lambda *_: config.model_copy(update={"name": f"r{next(loaded)}", "seed": 1}),
    )
    began = time.perf_counter()
    jobs = sweep.make_jobs([str(tiny_config)], ["--seed", *map(str, range(400))], None)
    assert len(jobs) == 1 and time.perf_counter() - began < 10


def test_names_that_a_table_has_room_for():
    names = [f"a_very_long_name_of_a_variant_power={p}_lr=0.001" for p in (1, 15)]
    assert sweep.short_names(names) == ["power=1_lr=0.001", "power=15_lr=0.001"]
    assert sweep.short_names(["x" * 40]) == ["x" * 14 + "…" + "x" * 15]
    assert sweep.short_names(["s_a", "s_b"]) == ["s_a", "s_b"]


@pytest.mark.parametrize(
    ("key", "values", "n"),
    [("data.dir", ["a", "b"], 2), ("train.micro_batch", [1, 2], 1)],
)
def test_what_may_differ_on_resume_and_makes_another_run(key, values, n, tiny_config):
    tiny_config.write_text(f'{tiny_config.read_text()}[sweep]\n"{key}" = {values}\n')
    assert len(sweep.make_jobs([str(tiny_config)], [], None)) == n


def test_list_and_mistakes(four_runs, call, capsys):
    listed: dict[tuple[str, str], list[str]] = {
        ("--tag", "x"): [
            f"s_normaliser={name}_seed={i}_x" for name in ("softmax", "lssa") for i in (1, 2)
        ],
        ("--seed", "7"): ["s_normaliser=softmax", "s_normaliser=lssa"],
    }
    for options, names in listed.items():
        call(sweep, four_runs, "--list", *options)
        states = [line.split("/")[-1] for line in capsys.readouterr().out.splitlines()]
        assert states == [f"{name}  to run" for name in names]
    mistakes: list[tuple[list[object], str]] = [
        ([], "expected config files first"),
        ([four_runs, "--index", "4"], "--index 4: expected 0 to 3"),
        ([four_runs, "--train.max_step", "4"], "did you mean train.max_steps"),
        ([four_runs, "--job", "2"], "--job; did you mean --jobs?"),
        ([four_runs, four_runs], "two runs would be called"),
        ([four_runs, "--name", "x"], "expected --tag WORD"),
        ([four_runs, "--eval-tokens", "-1"], "--eval-tokens -1: expected at least 256"),
    ]
    for args, expected in mistakes:
        with pytest.raises(UserError, match=expected):
            call(sweep, *args)


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_a_run_and_its_evaluations(processes, four_runs, call):
    run = four_runs.parent / "runs/s_normaliser=softmax_seed=1"
    call(
        sweep,
        four_runs,
        "--index",
        0,
        "--nproc",
        processes,
        "--eval-tokens",
        256,
        "--train.device",
        "cpu",
    )
    rows = measure.read_rows(run)
    assert {*rows["step"]} == {12} and {*rows["length"]} == {16, 32, 64, 128, 256}
    if processes == 2:  # a finished run on data that have moved since is not evaluated again
        data = load_config(run / "config.toml").data.dir
        moved = shutil.copytree(data, four_runs.with_name("moved"))
        flags = ["--train.device", "cpu", "--data.dir", moved, "--nproc", 1]
        before = (run / "rows.csv").read_bytes()
        call(sweep, four_runs, "--index", 0, "--eval-tokens", 256, *flags)
        assert (run / "rows.csv").read_bytes() == before


def test_a_signal_is_forwarded_as_sigterm():
    child = "import os, signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))\n"
    child += "os.kill(os.getppid(), signal.SIGINT); time.sleep(60)"
    with StopSignals() as stop:
        assert sweep.run([sys.executable, "-c", child], stop, None, None) == 7
        assert stop.number == signal.SIGINT


def test_sweep_expands_to_the_product(tmp_path):
    path = tmp_path / "s.toml"
    path.write_text(
        '[sweep]\nseed = [1, 2]\n"attention.normaliser" = ["softmax", "lssa"]\n"optimizer.lr" = [1e-3]\n'
    )
    configs = [load_config(path, run.overrides) for run in expand_sweep(path)]
    assert [(c.seed, c.attention.normaliser) for c in configs] == [
        (1, "softmax"), (1, "lssa"), (2, "softmax"), (2, "lssa")
    ]  # fmt: skip
    assert configs[1].name == "s_seed=1_normaliser=lssa_lr=0.001"
    with pytest.raises(
        UserError, match="describes a sweep: python sweep.py .*--attention.normaliser"
    ):
        load_config(path, ["--seed", "1", "--optimizer.lr", "0.1"])
    heir = tmp_path / "heir.toml"
    heir.write_text('base = "s.toml"\n')
    assert load_config(heir).seed == 1337 and [run.swept for run in expand_sweep(heir)] == [{}]
    path.write_text(
        'attention.normaliser = "norm_softmax"\n'
        '[[sweep]]\n"attention.normaliser" = ["softmax"]\nseed = [1, 2]\n'
        '[[sweep]]\n"attention.gamma" = ["sqrt_d", "inf"]\n'
    )
    runs = [load_config(path, run.overrides).attention for run in expand_sweep(path)]
    assert [run.normaliser for run in runs] == 2 * ["softmax"] + 2 * ["norm_softmax"]
    assert [run.model_dump()["gamma"] for run in runs[2:]] == ["sqrt_d", "inf"]
    with pytest.raises(
        UserError, match="run by --attention.normaliser ..., or by --attention.gamma"
    ):
        load_config(path, ["--seed", "1"])
    for text, expected in (
        ("sweep = 3", r"sweep = 3: expected a section, or several \[\[sweep\]\] sections"),
        (
            '[sweep]\n"attention.reweight_p" = 3',
            "sweep: attention.reweight_p = 3: expected a list of values",
        ),
    ):
        path.write_text(text)
        with pytest.raises(UserError, match=expected):
            expand_sweep(path)
