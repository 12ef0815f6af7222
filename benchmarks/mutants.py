"""Do the tests see small mistakes? Each mutant is one, in a scratch copy, where the named tests
should fail.

    OMP_NUM_THREADS=1 nice python -m benchmarks.mutants          # all, about three minutes
    python -m benchmarks.mutants 3 17                            # these
    python -m benchmarks.mutants 12 --tests tests/core           # by other tests than its own

Prints a line for each and exits with 1 if one survives. RESULTS.md has the last result. It is an
error if a mutant's text is no longer in its file exactly once: write it anew.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from infra.cli import ArgumentParser, UserError, integer, run_main

ROOT = Path(__file__).parents[1]

# After the tests that should fail, a line for each mutant: the file, the text there, and what
# replaces it.
LIST = r"""
# tests/core/training/test_loss_mask.py
model.py: (targets != -100).sum().clamp_min(1) => targets.numel()
training/loader.py: count * self.world.size / => count /
train.py: loss * n_targets if => loss if
train.py: label_smoothing=config.label_smoothing => label_smoothing=0.0
data/batches.py: mask.read(start + 1, count => mask.read(start, count
# tests/core/training/test_optim.py
training/optim.py: "params": [*vectors.values()], "weight_decay": 0.0 => "params": [*vectors.values()]
training/optim.py: (step + 1) / config.warmup => step / config.warmup
training/optim.py: (config.reweight_p - 1) * step => (config.reweight_p - 1) * (step + 1)
training/optim.py: 1 - (1 - low) * max( => 1 - max(
training/optim.py: else matrix.float() => else matrix.bfloat16()
training/optim.py: max(1.0, len(part) / part.shape[1]) => 1.0
# tests/core/test_train.py
training/loader.py: [1 / len(batch)] => [1.0]
training/validation.py: val_tokens, config.seq_len) => val_tokens, config.seq_len) - 1
training/validation.py: if first < n_windows: => if True:
train.py: config.train.grad_clip or math.inf => config.train.grad_clip
training/trial.py: / 1000 * train.batch_tokens / shortened.train.batch_tokens => / 1000
# tests/core/test_experiments.py
loss.py: z.shape[-1] ** -0.5 => 1.0
# tests/core/test_attention.py -k window
normalisers/base.py: (keys > self.place - self.n) => (keys >= self.place - self.n)
# tests/core/test_attention.py -k decay
engines/sdpa.py: decay.detach() - decay.detach()[..., n_before : n_before + 1, :] => decay.detach()
# tests/core/test_attention.py -k gates_on_sdpa_in_blocks
engines/sdpa.py: keys = slice(0, n_before + rows.stop) => keys = slice(0, rows.stop)
# tests/core/test_attention.py -k agree_float32
engines/rows.py: d_decay[batch, :, queries][:, :, block] += => d_decay[batch, :, queries][:, :, block] =
engines/rows.py: h.sum(-1, keepdim=True) / n => h.mean(-1, keepdim=True)
# tests/core/test_attention.py -k windows
engines/sdpa.py: visible = (keys >= first_seen) => visible = (keys > first_seen)
normalisers/layer.py: (index - row_first + 1) => (index - row_first + 2)
model.py: places, current) => places, 0 * current)
normalisers/layer.py: n = (index + 1).clamp_max(n_max) => n = index + 1
# tests/core/test_attention.py -k without_mass
normalisers/base.py: torch.where(r_max > 0, 1 / r_max, 0.0) => 1 / r_max
# tests/core/test_attention.py -k norm_softmax_in_bfloat16
normalisers/adaptive.py: exact_rows: ClassVar[int] = 16 => exact_rows: ClassVar[int] = 0
# tests/core/engines/test_triton.py -k decoding
attention.py: q.shape[-2] == 1 and => q.shape[-2] == 0 and
# tests/core/engines/test_triton.py -k every_phi
engines/triton_kernels.py: lower = tl.where(t > 0, 1.0, 0.0) => lower = tl.where(t >= 0, 1.0, 0.0)
# tests/core/engines/test_triton.py -k documents
engines/triton_kernels.py: visible = visible & (first <= j) => visible = visible & (first < j)
engines/triton_kernels.py: end = tl.load(ends_ptr + tl.minimum(block * BN + BN, n_keys) - 1) => end = of_all
# tests/core/engines/test_triton.py -k any_power
engines/triton_kernels.py: offset = tl.where((n > 3) => offset = tl.where((n > 2)
# tests/core/engines/test_flex.py
engines/flex.py: (key >= highest) => (key >= lowest)
engines/flex.py: (key + BLOCK <= start + 1) => (key + BLOCK <= start + 2)
engines/self_check.py: if not error <= tolerance => if error > tolerance
# tests/core/test_model.py -k window
model.py: part[:, :, -window:].clone() => part[:, :, 1 - window :].clone()
model.py: min(window, layer.window or window) => window
model.py: UNSCALED if 0 < m.window <= train_len => UNSCALED if 0 < m.window
# tests/core/test_attention.py -k alibi
positions.py: -8 * (head + 1) => -8 * head
# tests/core/test_attention.py -k grouped
normalisers/base.py: repeat_interleave(group, dim=1) => repeat(1, group, 1, 1)
# tests/core/test_attention.py -k reference
engines/rows.py: .triu(1) => .triu(2)
engines/rows.py: if p == 1: => if p == 0:
# tests/core/test_normalisers.py
normalisers/base.py: (keys <= self.place) => (keys <= self.place + 1)
normalisers/base.py: (n > 3) => (n > 4)
normalisers/base.py: .square().sum(-1, keepdim=True) / self.n => .square().mean(-1, keepdim=True)
normalisers/family.py: g = s * context.n.log() => g = s * (context.n + 1).log()
normalisers/family.py: context.n.long() - 1] => context.n.long() - 2]
normalisers/adaptive.py: else context.n**-0.5 => else (context.n + 1) ** -0.5
# tests/core/test_model.py
positions.py: torch.complex(cos, sin) => torch.complex(cos, -sin)
positions.py: pairs = x.float().unflatten(-1, (-1, 2)) => pairs = x.float().unflatten(-1, (2, -1)).mT
positions.py: s ** (head_dim / (head_dim - 2)) => s
positions.py: theta = scaling.theta or theta => theta = 5e5 if scaling.theta else theta
schema.py: int(self.rope_share * (self.head_dim // 2) + 1e-9) => round(self.rope_share * (self.head_dim // 2))
model.py: (1 - share) * k + share * before => (1 - share) * k + share * k
generation.py: rope.length or length + n_new => rope.length or length
positions.py: 0.1 * math.log(s) + 1 => 0.1 * math.log(s)
# tests/core/data/test_shards.py
data/batches.py: min(n_tokens, stream.n_tokens - 1) => min(n_tokens, stream.n_tokens)
data/batches.py: n_windows = stream.n_tokens // seq_len => n_windows = (stream.n_tokens - 1) // seq_len
data/batches.py: SeedSequence([epoch, seed]) => SeedSequence([0, seed])
data/batches.py: ends - starts > length => ends - starts >= length
data/dataset.py: len(shard) != n_listed => False
data/dataset.py: if path.name not in self.listed => if False
data/dataset.py: if number > 1 and => if number > 2 and
# tests/core/data/test_prepare.py
data/documents.py: "utf-8-sig" => "utf-8"
data/documents.py: (rest + fragment).split => fragment.split
data/documents.py: n_unreadable > MOST_UNREADABLE * n_characters => False
data/documents.py: part[:99].lstrip().startswith(begin) => part.startswith(begin)
data/documents.py: HALF_PAIR.sub("\ufffd", "" if t is None else t) => "" if t is None else t
data/prepare.py: != (part.split == "val") => == (part.split == "val")
data/prepare.py: dataset.refuse_others(out, tuple(own)) => dataset.refuse_others(out, "")
data/prepare.py: begin + self.max_tokens - self.n_tokens => begin + self.max_tokens
# tests/core/data/test_packages.py
data/packages.py: owner[first][which] < owner => owner[first][which] <= owner
data/packages.py: copied <= MOST_COPIED[split] => copied <= 0.5
data/packages.py: VENDORED.search(name) => False
# tests/core/test_config.py -k layer
schema.py: options else attention | options => options else self.attention.model_dump() | options
schema.py: model |= {key: own => model = self.model.model_dump() | {key: own
schema.py: (layer + 1) % self.every => layer % self.every
schema.py: model.rope_theta for model in models => self.model.rope_theta for model in models
schema.py: yield from self._layer_conflicts() => yield from ()
# tests/core/test_config.py -k sizes
config.py: int(value * size("train.max_steps") + 1e-9) => round(value * size("train.max_steps"))
# tests/core/test_config.py -k swept
config.py: p.value in (0, 1) and p.source != rise.source => p.value in (0, 1)
# tests/core/test_config.py -k disagree
schema.py: divmod(self.batch_tokens, self.seq_len) => divmod(self.batch_tokens, 1)
# tests/core/test_model.py -k layers_of_their_own
model.py: kind = (own, m.rope_theta, m.rotating, amplified) => kind = (own, m.rotating, amplified)
# tests/core/test_train.py -k dry_run
train.py: power_at(state.config.attention, state.step) => power_at(state.config.attention, state.step + 1)
# tests/core/training/test_run_log.py
training/run_log.py: each["step"] <= step] => each["step"] < step]
training/run_log.py: has_rows or unsaved > => unsaved >
# tests/core/training/test_loader.py
training/loader.py: config.data.skip_steps + step => step
# tests/core/training/test_kills.py -k validation
training/state.py: max(0, self.step - 1) => self.step
# tests/core/training/test_checkpoint.py
training/checkpoint.py: UserError if is_system or is_out_of_memory(e) => UserError if is_system
training/state.py: in (parameter.shape, ()) => in (parameter.shape, (), (3,))
# tests/core/training/test_state.py -k resumed
train.py: state.raw_model.set_power(power_at( => print(power_at(
# tests/core/training/test_state.py
training/state.py: len(factors) == 1 and step < max_steps => len(factors) == 1 and step <= max_steps
training/state.py: n in (old.train.max_steps, max_steps) => n in (max_steps, max_steps)
training/state.py: {"fixed", "resumable"} if is_finished => {"fixed"} if is_finished
training/state.py: optimizer.load_state_dict(saved) => pass
training/state.py: self.step = step => self.step = step + 1
train.py: not state.world.agree([state.step, file, init_summary[:-1]]) => False
# tests/core/training/test_guard.py
train.py: not math.isfinite(value) => value != value
# tests/core/test_eval_length.py
eval_length.py: losses[-1, part] => losses[0, part]
eval_length.py: end - context - 1 => end - context
eval_length.py: slice(-args.lengths[0], None) => slice(-args.lengths[-1], None)
evaluation.py: if 0 < window < inputs.shape[1] => if window
evaluation.py: searchsorted([start + length for => searchsorted([start for
evaluation.py: range(world.rank, n_items, world.size) => range(world.rank, n_items - 1, world.size)
# tests/core/test_measure.py
measure.py: r"\[.*"}, "[", regex=True => r"\[.*"}, "[", regex=False
measure.py: m / (m - 1) * => 
measure.py: np.sort(p) * np.arange(len(p), 0, -1) => np.sort(p) * len(p)
measure.py: kept = old[~old_sets.isin(new_sets)] => kept = old
# tests/core/test_sweep.py
sweep.py: known.setdefault(run_identity(config), folder) => folder
sweep.py: is_last = step_of(checkpoints[0]) == self.config.train.max_steps => is_last = True
sweep.py: if was_trained and eval_length => if eval_length
# tests/core/test_compare.py
compare.py: max(TOLERANCE, min(difference.half, MOST_TOLERANCE)) => 0.05
compare.py: (other, tokens[:, :cut]) => (other,)
# tests/core/test_sample.py
generation.py: - ranked >= top_p => - ranked > top_p
# tests/lab/test_text_gain.py
lab/text_gain.py: TokenStream(args.data, "train") => TokenStream(args.data, "val")
lab/text_gain.py: blocks[1 - parity :: 2] => blocks[parity::2]
# tests/lab/test_recall.py
lab/recall.py: 0 evaluation {i} => 0 train {i}
# tests/hub/test_export.py
hub/export.py: None if args.code or is_scaled else => None if args.code else
hub/modeling.py: labels[:, 1:] => labels[:, :-1]
"""


class Mutant(NamedTuple):
    tests: str
    file: str
    old: str
    new: str

    def check(self) -> None:
        """Raises UserError: the old text is not in the file once."""
        n = (ROOT / self.file).read_text().count(self.old)
        if n != 1:
            raise UserError(f"{self.file}: {self.old!r}: found {n} times, expected once")


def read_list() -> list[Mutant]:
    mutants = []
    tests = ""
    for line in filter(None, LIST.splitlines()):
        if line.startswith("# "):
            tests = line[2:]
        else:
            file, change = line.split(": ", 1)
            mutants.append(Mutant(tests, file, *change.split(" => ")))
    return mutants


def main() -> None:
    mutants = read_list()
    args = parse_args(len(mutants))
    for mutant in mutants:
        mutant.check()
    numbers = args.numbers or range(len(mutants))
    n_survivors = 0
    with tempfile.TemporaryDirectory() as folder:
        copy = copy_of_the_repo(Path(folder))
        for number in numbers:
            mutant = mutants[number]
            path = copy / mutant.file
            original = path.read_text()
            path.write_text(original.replace(mutant.old, mutant.new))
            survives = pass_tests(copy, args.tests or mutant.tests.split())
            path.write_text(original)
            n_survivors += survives
            verdict = "SURVIVES" if survives else "killed"
            print(
                f"{number:3}  {verdict:8}  {mutant.file}: {mutant.old} => {mutant.new}", flush=True
            )
    print(f"{len(numbers) - n_survivors} of {len(numbers)} mutants are killed")
    if n_survivors:
        sys.exit(1)


def copy_of_the_repo(folder: Path) -> Path:
    """The files that git tracks, as they are here."""
    tracked = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for name in tracked.stdout.splitlines():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    return folder


def pass_tests(folder: Path, tests: list[str]) -> bool:
    options = ["-x", "-m", "not slow", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *options, *tests]
    status = subprocess.run(command, cwd=folder, capture_output=True).returncode
    if status not in (0, 1):
        raise UserError(f"{' '.join(tests)}: pytest ended with status {status}")
    return status == 0


def parse_args(n_mutants: int) -> argparse.Namespace:
    parser = ArgumentParser(__doc__)
    add = parser.add_argument
    add(
        "numbers",
        nargs="*",
        type=integer(0, n_mutants - 1),
        metavar="N",
        help="mutants (default: all)",
    )
    add("--tests", nargs="+", metavar="FILE", help="instead of each mutant's own")
    return parser.parse_args()


if __name__ == "__main__":
    run_main(main)
