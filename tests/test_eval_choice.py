"""eval_choice.py: its scores against full logits, its tasks, its refusals."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from fake_hub import FakeHub
from test_eval_length import read, save_run
from test_model import make_gpt

import eval_choice
from checkpoint import load_model
from config import UserError
from data.tokenizer import get_tokenizer
from evaluation import proportion
from model import RopeScaling

torch.set_num_threads(1)
ROOT = Path(__file__).resolve().parents[1]
BYTES = get_tokenizer("bytes")
CHOICES: list[dict[str, Any]] = [
    {"ctx": "A man sits down. He", "endings": ["eats.", "flies away with the bees.", "is"], "label": 0},
    {"ctx": "x", "endings": ["yy", "zzzzzzz", "?", "a b"], "label": "2"},
    {"ctx": "The end of a much longer context than the others have", "endings": ["no", "yes"], "label": 1},
] * 9
LAST_WORDS = [{"text": f"one two three {word}"} for word in ("four", "a", "fünf", "x y")] * 3


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for name, std in (("a", 0.2), ("b", 0.1)):
        gpt = make_gpt({"normaliser": "lssa", "reweight_p": 3}, std=std, vocab_size=257)
        exact = gpt.config.train.model_copy(update={"dtype": "float32"})
        config = gpt.config.model_copy(update={"train": exact})
        save_run(tmp_path / "runs" / name, config, gpt, step=1, tokenizer="bytes")
    return tmp_path / "runs" / "a"


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n\n", encoding="utf-8")
    return path


def call(monkeypatch: pytest.MonkeyPatch, *args: object) -> None:
    monkeypatch.setattr(sys, "argv", ["eval_choice.py", *map(str, args), "--device", "cpu"])
    eval_choice.main()


def direct(run: Path, context: str, ending: str, longest: int) -> tuple[float, int, bool]:
    """ln P of the ending, its length, whether it is greedy: one sequence, full logits."""
    model = load_model(run).model
    tokens = [256, *context.encode(), *ending.encode()]
    start = 1 + len(context.encode())
    with torch.no_grad():
        logs = (
            model(torch.tensor([tokens]), rope=RopeScaling("ntk", length=longest))[0].double().log_softmax(-1)
        )
    steps = [(logs[i - 1], tokens[i]) for i in range(start, len(tokens))]
    return (
        sum(log[token].item() for log, token in steps),
        len(steps),
        all(log.argmax() == token for log, token in steps),
    )


def test_choice_equals_direct_computation(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    call(monkeypatch, run, "--task", write(tmp_path / "quiz.jsonl", CHOICES))
    result = read(run / "eval_choice_quiz.json")
    longest = max(2 + len(c["ctx"]) + len(e) for c in CHOICES for e in c["endings"])
    plain = normalised = 0
    for row in CHOICES[:3]:
        scores = [direct(run, row["ctx"], f" {ending}", longest) for ending in row["endings"]]
        label = int(row["label"])
        plain += scores[label][0] == max(total for total, _, _ in scores)
        normalised += scores[label][0] / scores[label][1] == max(total / n for total, n, _ in scores)
    assert result["plain"] == proportion(9 * plain, 27)
    assert result["normalised"] == proportion(9 * normalised, 27)
    assert result["chance"] == pytest.approx((1 / 3 + 1 / 4 + 1 / 2) / 3) and result["items"] == 27
    assert (run / "eval_choice_quiz.png").read_bytes().startswith(b"\x89PNG")


def test_scores_of_padded_rows(run: Path) -> None:
    model = load_model(run).model
    endings = [(row["ctx"], f" {ending}") for row in CHOICES[:3] for ending in row["endings"]]
    rows = [([256, *context.encode()], list(ending.encode())) for context, ending in endings]
    found = eval_choice.score_rows(model, rows, RopeScaling("ntk", length=64))
    for score, (context, ending) in zip(found.tolist(), endings, strict=True):
        total, n, greedy = direct(run, context, ending, 64)
        assert score[0] == pytest.approx(total, rel=1e-5) and score[1] == n and (score[2] == 0) == greedy


def test_last_words(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With one of the words made what greedy decoding gives."""
    model = load_model(run).model
    prompt = torch.tensor([[256, *b"one two three"]])
    n = 3
    rope = RopeScaling("ntk", length=64)
    greedy = model.generate(prompt, n, temperature=0, rope=rope)[0, -n:].tolist()
    rows = [([256, *b"one two three"], greedy), ([256, *b"one two three"], [*greedy[:-1], greedy[-1] ^ 1])]
    scores = eval_choice.score_rows(model, rows, rope)
    right, wrong = (eval_choice.outcome(score[None], 0) for score in scores)
    assert right[1] == 1 and wrong[1] == 0 and wrong[2] > right[2] > 0
    call(monkeypatch, run, run.parent / "b", "--task", write(tmp_path / "words.jsonl", LAST_WORDS))
    result = read(run / "eval_choice_words.json")
    longest = max(1 + len(row["text"].encode()) for row in LAST_WORDS)
    items = [row["text"].rpartition(" ") for row in LAST_WORDS[:4]]
    expected = [direct(run, context, f" {word}", longest) for context, _, word in items]
    assert result["loss"] == pytest.approx(-sum(total for total, _, _ in expected) / 4, rel=1e-5)
    assert result["last_word"] == proportion(3 * sum(greedy for _, _, greedy in expected), 12)
    assert (run.parent / "eval_choice_words.png").exists()
    assert "words: 12 items of" in capsys.readouterr().out


def test_processes_change_nothing(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    task = write(tmp_path / "quiz.jsonl", CHOICES[:5])
    call(monkeypatch, run, "--task", task)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command += [str(ROOT / "eval_choice.py"), str(run), "--task", str(task), "--device", "cpu"]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=env)
    assert done.returncode == 0, done.stderr
    alone = capsys.readouterr().out
    assert done.stdout == alone and "quiz: 5 items" in alone


def test_tasks_of_the_hub(tmp_path: Path) -> None:
    """Both formats, as the hub has them."""
    swag, lambada = tmp_path / "swag" / "data", tmp_path / "lambada" / "data"
    swag.mkdir(parents=True)
    lambada.mkdir(parents=True)
    pq.write_table(pa.Table.from_pylist(CHOICES[1:2]), swag / "validation-00000-of-00001.parquet")
    write(lambada / "lambada_test_en.jsonl", LAST_WORDS[:2])
    tasks = "map(eval_choice.read_task, eval_choice.HUB_TASKS)"
    code = f"import eval_choice; print([(task.kind, len(task.items)) for task in {tasks}])"
    repos = {"Rowan/hellaswag": swag.parent, "EleutherAI/lambada_openai": lambada.parent}
    with FakeHub(repos) as hub:
        env = os.environ | {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home")}
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True, timeout=60
        )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[('choice', 1), ('last word', 2)]"


@pytest.mark.parametrize(
    "lines, message",
    [
        (None, "cannot be read.*expected a file, or hellaswag, lambada"),
        ([], "empty; expected a JSON object"),
        (["{"], "line 1: not valid JSON"),
        (['{"text": "word"}'], "line 1: expected {ctx: text"),
        (['{"ctx": "a", "endings": ["b"], "label": 0}'], "line 1: expected"),
        (['{"ctx": "a", "endings": ["b", "c"], "label": 2}'], "line 1: expected"),
        (['{"ctx": "a", "endings": ["b", "c"], "label": -1}'], "line 1: expected"),
        (
            ['{"text": "two words"}', '{"ctx": "a", "endings": ["b", "c"], "label": 1}'],
            "line 2: of another kind",
        ),
    ],
)
def test_bad_input(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: list[str] | None, message: str
) -> None:
    path = tmp_path / "task.jsonl"
    if lines is not None:
        path.write_text("\n".join(lines))
    with pytest.raises(UserError, match=message):
        call(monkeypatch, run, "--task", path)
