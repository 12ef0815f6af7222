"""Accuracy of trained models on multiple choice (HellaSwag's kind) and on last words (LAMBADA's kind).

    python eval_choice.py runs/lssar --task hellaswag                  # from the hub
    python eval_choice.py runs/softmax runs/lssar --task lambada
    python eval_choice.py runs/lssar --task questions.jsonl            # a local file, no network
    torchrun --standalone --nproc_per_node=8 eval_choice.py runs/lssar --task hellaswag

A local file has one JSON object a line, all of one kind:

    {"ctx": "A man sits down. He", "endings": ["eats.", "flies."], "label": 0}
    {"text": "... she opened the door and saw her old friend Gabriel"}

choice      " " + ending follows ctx. The likeliest ending by its total log-probability (plain), and by the
            mean over its tokens (normalised), as llm.c does.
last word   right if each of its tokens is the likeliest; with its mean loss in nats.

Intervals are 95 % (Wilson). Sequences start with <|endoftext|>; RoPE is scaled for the longest of the task.
Tasks that need more (few-shot prompts, other metrics) are the business of EleutherAI's lm-evaluation-harness.

Writes eval_choice_<task>.json and .png into the run folder; several runs get one more picture.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor

from config import ArgumentParser, UserError, run_main
from data.hub import Download, HubDataset
from data.tokenizer import get_tokenizer
from distributed import World, join_world
from evaluation import (
    Run,
    add_arguments,
    choose_picture,
    describe_rope,
    evaluate_all,
    format_table,
    mean_and_stderr,
    open_runs,
    parse_arguments,
    percent,
    progress,
    proportion,
    save_figure,
    with_stderr,
)
from model import GPT, RopeScaling

ROWS_AT_ONCE = 64
HUB_TASKS = {  # name: (dataset, folder, how the file's name ends)
    "hellaswag": ("Rowan/hellaswag", "data", ("validation-00000-of-00001.parquet",)),
    "lambada": ("EleutherAI/lambada_openai", "data", ("lambada_test_en.jsonl", "lambada_test.jsonl")),
}


@dataclass(frozen=True)
class Item:
    """A context, its possible continuations, and which is right."""

    context: str
    endings: list[str]
    label: int


@dataclass(frozen=True)
class Task:
    name: str
    source: str
    kind: str  # "choice" or "last word"
    items: list[Item]


def main() -> None:
    args = parse_args()
    with join_world(args.device) as world:
        task = read_task(args.task)
        name = f"{args.name}_{task.name}"
        runs = open_runs(args.runs, name)
        picture = choose_picture(args.out, runs, name)
        evaluate_all(runs, world, picture, lambda run: evaluate(run, task, args, world), report, plot)


# ---------------------------------------------------------------- tasks


def read_task(name: str) -> Task:
    """A task of the hub by its name, or a local file.

    Raises:
        UserError: no such file, a line that is of neither kind or of another kind than the first.
    """
    if name not in HUB_TASKS:
        path = Path(name)
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as e:
            known = ", ".join(HUB_TASKS)
            raise UserError(f"--task {name}: cannot be read ({e}); expected a file, or {known}") from None
        return make_task(path.stem, name, parse_lines(path, lines))
    dataset_name, folder, ends = HUB_TASKS[name]
    dataset = HubDataset(dataset_name, wanted=f"{folder}/*")
    files = [file for file in dataset.files(folder) if file.name.endswith(ends)]
    if not files:
        raise UserError(f"--task {name}: {dataset_name} has no file {folder}/*{ends[0]} at {dataset.commit}")
    with tempfile.TemporaryDirectory() as temporary:
        path = Download(dataset, files[0], Path(temporary)).result()
        if path.suffix == ".parquet":
            import pyarrow.parquet

            rows = list(enumerate(pyarrow.parquet.read_table(path).to_pylist(), 1))
        else:
            rows = list(parse_lines(path, path.read_text(encoding="utf-8").splitlines()))
    return make_task(name, f"{dataset_name} at commit {dataset.commit}", rows)


def parse_lines(path: Path, lines: list[str]) -> Iterable[tuple[int, Any]]:
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                yield number, json.loads(line)
            except ValueError as e:
                raise UserError(f"{path}: line {number}: not valid JSON: {e}") from None


def make_task(name: str, source: str, rows: Iterable[tuple[int, Any]]) -> Task:
    kinds, items = set(), []
    for number, row in rows:
        kind, item = parse_item(row, f"{source}: line {number}")
        kinds.add(kind)
        items.append(item)
        if len(kinds) > 1:
            raise UserError(f"{source}: line {number}: of another kind than those before ({kind})")
    if not items:
        raise UserError(f"{source}: empty; expected a JSON object in each line")
    return Task(name, source, kinds.pop(), items)


def parse_item(row: Any, where: str) -> tuple[str, Item]:
    """One line's kind and content; a label may be text, as in HellaSwag."""
    if isinstance(row, dict) and isinstance(row.get("text"), str):
        context, _, word = row["text"].strip().rpartition(" ")
        if context:
            return "last word", Item(context, [f" {word}"], 0)
    try:
        context, endings, label = row["ctx"], row["endings"], int(row["label"])
        texts = all(isinstance(text, str) and text for text in (context, *endings))
        if texts and len(endings) > 1 and 0 <= label < len(endings):
            return "choice", Item(context, [f" {ending}" for ending in endings], label)
    except (KeyError, TypeError, ValueError):
        pass
    raise UserError(
        f"{where}: expected {{ctx: text, endings: [text, ...], label: which}}, or {{text: of several words}}"
    )


# ---------------------------------------------------------------- evaluation

Row = tuple[list[int], list[int]]  # tokens of context and continuation


def evaluate(run: Run, task: Task, args: argparse.Namespace, world: World) -> dict[str, Any]:
    """All items: what eval_choice_<task>.json holds. Every process gets the same."""
    model, _, step, tokenizer_name = run.load(world)
    tokenizer = get_tokenizer(tokenizer_name)

    def encode(item: Item) -> list[Row]:
        context = [tokenizer.eot_token, *tokenizer.encode_ordinary(item.context)]
        return [(context, tokenizer.encode_ordinary(ending)) for ending in item.endings]

    rows = [encode(item) for item in task.items]
    longest = max(len(context) + len(ending) for item in rows for context, ending in item)
    rope = RopeScaling(args.rope, args.rope_theta, longest)
    outcomes = torch.zeros(len(rows), 3, dtype=torch.float64, device=world.device)
    mine = range(world.rank, len(rows), world.size)
    group = max(1, ROWS_AT_ONCE // max(map(len, rows)))
    with progress(run.label, len(mine), "items", world) as bar:
        for start in range(0, len(mine), group):
            here = mine[start : start + group]
            with model.autocast():
                scores = score_rows(model, [row for i in here for row in rows[i]], rope)  # (rows, 3)
            for i, score in zip(here, scores.split([len(rows[i]) for i in here]), strict=True):
                outcomes[i] = outcome(score, task.items[i].label)
            bar.update(len(here))
    outcomes = world.sum(outcomes).cpu()
    n = len(rows)
    result = {
        **run.describe(step, args),
        "task": task.name,
        "source_of_task": task.source,
        "kind": task.kind,
        "items": n,
    }
    if task.kind == "choice":
        chance = sum(1 / len(item.endings) for item in task.items) / n
        plain, normalised = (proportion(int(outcomes[:, i].sum()), n) for i in (0, 1))
        return result | {"chance": chance, "plain": plain, "normalised": normalised}
    loss, stderr = mean_and_stderr(outcomes[:, 2])
    return result | {
        "last_word": proportion(int(outcomes[:, 1].sum()), n),
        "loss": loss,
        "loss_stderr": stderr,
    }


def outcome(scores: Tensor, label: int) -> Tensor:
    """(n_endings, 3) of `score_rows` to three numbers.

    choice: whether the right one is the likeliest, plain and normalised, and 0; last word: 0, whether it is
    what greedy decoding gives, and its loss.
    """
    total, n_tokens, n_wrong = scores.unbind(1)
    if len(scores) == 1:
        return torch.stack([torch.zeros_like(total[0]), (n_wrong[0] == 0).double(), -total[0]])
    plain, normalised = total.argmax() == label, (total / n_tokens).argmax() == label
    return torch.stack([plain.double(), normalised.double(), torch.zeros_like(total[0])])


@torch.no_grad()
def score_rows(model: GPT, rows: list[Row], rope: RopeScaling) -> Tensor:
    """Of each row's continuation: ln P, number of tokens, how many are not the likeliest: (rows, 3) float64.

    Rows are padded at the end, where no earlier position sees it.
    """
    device = model.embedding.weight.device
    longest = max(len(context) + len(ending) for context, ending in rows)
    tokens = torch.zeros(len(rows), longest, dtype=torch.long)
    wanted = torch.zeros(len(rows), longest - 1, dtype=torch.bool)  # positions whose next token counts
    for i, (context, ending) in enumerate(rows):
        stop = len(context) + len(ending)
        tokens[i, :stop] = torch.tensor(context + ending)
        wanted[i, len(context) - 1 : stop - 1] = True
    tokens, wanted = tokens.to(device), wanted.to(device)
    logits = model.logits(model.hidden(tokens[:, :-1], rope)[wanted])  # (N, V)
    targets, row = tokens[:, 1:][wanted], wanted.nonzero()[:, 0]
    each = logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]
    values = torch.stack([each, torch.ones_like(each), (logits.argmax(-1) != targets).float()], dim=1)
    return torch.zeros(len(rows), 3, dtype=torch.float64, device=device).index_add_(0, row, values.double())


# ---------------------------------------------------------------- tables and pictures


def report(results: list[dict[str, Any]]) -> str:
    first = results[0]
    head = (
        f"{first['task']}: {first['items']} items of {first['source_of_task']}, RoPE {describe_rope(first)}"
    )
    if first["kind"] == "choice":
        head += f"; chance is {100 * first['chance']:.1f} %"
        rows = [["run", "normaliser", "step", "plain", "normalised"]]
        cells = [[percent(result["plain"]), percent(result["normalised"])] for result in results]
    else:
        rows = [["run", "normaliser", "step", "last word", "loss (nats)"]]
        cells = [
            [percent(result["last_word"]), with_stderr(result["loss"], result["loss_stderr"])]
            for result in results
        ]
    for result, values in zip(results, cells, strict=True):
        rows.append([result["run"], result["normaliser"], str(result["step"]), *values])
    return f"{head}.\n\n{format_table(rows)}\n"


def plot(results: list[dict[str, Any]], path: Path) -> list[Path]:
    """A bar for each run and measure, with its interval."""
    figure = Figure(figsize=(7, 1.8 + 0.7 * len(results)), layout="constrained")
    axes = figure.subplots()
    measures = ["plain", "normalised"] if results[0]["kind"] == "choice" else ["last_word"]
    for i, name in enumerate(measures):
        places = [j + 0.35 * i for j in range(len(results))]
        shares = [result[name]["share"] for result in results]
        low = [max(0.0, result[name]["share"] - result[name]["low"]) for result in results]
        high = [max(0.0, result[name]["high"] - result[name]["share"]) for result in results]
        axes.barh(places, shares, 0.33, xerr=(low, high), capsize=3, label=name.replace("_", " "))
    if "chance" in results[0]:
        axes.axvline(results[0]["chance"], color="0.4", linestyle="--", linewidth=1, label="chance")
    labels = [f"{result['run']}\n{result['normaliser']}" for result in results]
    axes.set_yticks([j + 0.175 * (len(measures) - 1) for j in range(len(results))], labels)
    axes.set_xlim(0, 1)
    axes.invert_yaxis()
    axes.set_xlabel(f"accuracy on {results[0]['task']} ({results[0]['items']} items), 95 % interval")
    axes.legend(frameon=False)
    return save_figure(figure, path)


def parse_args() -> argparse.Namespace:
    parser = ArgumentParser(__doc__)
    add_arguments(parser, data=False)
    parser.add_argument(
        "--task", required=True, metavar="FILE", help=f"a JSONL file, or from the hub: {', '.join(HUB_TASKS)}"
    )
    return parse_arguments(parser, "eval_choice")


if __name__ == "__main__":
    run_main(main)
