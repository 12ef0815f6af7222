"""Steps that must not be taken: losses and gradient norms that are not finite, or outliers."""

import math
import statistics
from collections import deque
from typing import Any

from infra.cli import UserError
from schema import TrainConfig

WINDOW = 128  # accepted steps that an outlier is compared with


class Guard:
    """Rejects bad steps and decides whether the run skips them or stops.

    A loss or gradient norm that is not finite is bad. With train.outlier_z, so is one more than that many
    standard deviations above the mean of the last WINDOW accepted steps (as in llm.c), once there are WINDOW.

    Attributes:
        n_rejected: steps rejected in a row.
        is_outlier: the newest step was finite and rejected by outlier_z.
    """

    def __init__(self, config: TrainConfig) -> None:
        self.config = config
        self.recent = {what: deque[float](maxlen=WINDOW) for what in ("loss", "gradient norm")}
        self.n_rejected = 0
        self.is_outlier = False

    def check(self, losses: list[float], norms: list[float]) -> str:
        """Why a step is bad, given the loss and the gradient norm of each rank; "" if it is good."""
        means = {"loss": statistics.fmean(losses), "gradient norm": norms[0]}
        problem = not_finite("loss", losses) or not_finite("gradient norm", norms)
        self.is_outlier = False
        if not problem and self.config.outlier_z:
            problem = self._outlier(means)
            self.is_outlier = problem != ""
        if problem:
            self.n_rejected += 1
            return problem
        self.n_rejected = 0
        for what, value in means.items():
            self.recent[what].append(value)
        return ""

    def _outlier(self, means: dict[str, float]) -> str:
        for what, value in means.items():
            recent = self.recent[what]
            if len(recent) == WINDOW and (std := statistics.stdev(recent)):
                z = (value - statistics.fmean(recent)) / std
                if z > self.config.outlier_z:
                    return f"{what} {value:.4g}, {z:.1f} standard deviations above the last {WINDOW}"
        return ""

    def handle_bad_step(self, where: str) -> str:
        """The line to log about a step that `check` has rejected; where: step, reason and data.

        Raises UserError: the config does not skip such steps, or not that many in a row.
        """
        if self.config.on_bad_step == "stop" and not self.is_outlier:
            hint = '(train.on_bad_step = "skip" skips such steps)'
            raise UserError(f"{where}: stopped, the last checkpoint is unchanged {hint}")
        if self.n_rejected >= self.config.max_skips:
            raise UserError(f"{where}: stopped after {self.n_rejected} bad steps in a row (train.max_skips)")
        return f"{where}: skipped"

    def state_dict(self) -> dict[str, Any]:
        return {"skipped": self.n_rejected} | {what: list(values) for what, values in self.recent.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.n_rejected = state["skipped"]
        for what, values in self.recent.items():
            values.extend(state[what])


def not_finite(what: str, values: list[float]) -> str:
    """The first of the ranks' values that is not finite, in words; "" if all are."""
    bad = [f"{what} {value} on rank {rank}" for rank, value in enumerate(values) if not math.isfinite(value)]
    return bad[0] if bad else ""
