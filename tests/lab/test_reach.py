"""lab/reach.py: what planted copies of the targets save, by distance."""

import pytest
import torch
from conftest import make_byte_run

from lab import reach
from measure import read_rows, select
from positions import UNSCALED


class Copier:
    """Its losses are 0 where the targets stand among the last `window` tokens before them, else 1."""

    def losses(self, tokens, n_targets, window=0, sinks=0, scaling=UNSCALED):
        before = tokens[:, :-n_targets]
        seen = before[:, -window:] if window else before
        targets = tokens[:, -n_targets:]
        found = (seen.unfold(1, n_targets, 1) == targets[:, None]).all(-1).any(1)
        return torch.where(found, 0.0, 1.0)[:, None].expand(-1, n_targets)


@pytest.mark.parametrize("window", [0, 64, 200])
def test_a_copy_is_found_as_far_as_the_window_reaches(window):
    tokens = torch.randint(1000, (2, 513), generator=torch.Generator().manual_seed(0))
    distances = reach.distances_of(512)
    assert distances == [64, 128, 256, 448]
    saved = reach.saved_by_copies(Copier(), tokens, distances, window, UNSCALED)
    expected = [float(not window or distance <= window) for distance in distances]
    assert saved.tolist() == [expected, expected]


def test_script(tiny_config, call, capsys):
    run = make_byte_run(tiny_config, "--train.seq-len", "16", "--model.vocab-size", "101")
    call(reach, run, "--device", "cpu", "--rope", "ntk", "--window", 32, "--tokens", 800)
    assert "192" in capsys.readouterr().out
    rows = select(read_rows(run), measure="copy_saves", window=32, scaling="ntk")
    assert sorted(rows.groupby("length").size().items()) == [(64, 3), (128, 3), (192, 3)]
    assert rows[rows.length == 64].value.abs().min() > 0
    assert rows[rows.length > 64].value.abs().max() < 1e-6  # two layers see 62 tokens back
    assert (run / "reach.png").exists()
