"""A normaliser with its parameters, as the layers of a model own it and every engine receives it."""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from infra.cli import UserError
from normalisers.base import HIDDEN, Normaliser, RowContext, reweight, share_heads
from positions import BIASES

# Cosine scores are of x / max(||x||_2, 1e-3): shorter vectors keep a norm below 1. A zero vector
# has the score 0 with every other, and at most 1000 times the gradient of a unit vector. With
# F.normalize's own 1e-12 a projection that begins at zero has a gradient norm of 1e11 in its first
# step.
COSINE_EPS = 1e-3
SIGNAL_STD = 0.02


class FullLinear(nn.Linear):
    """A linear layer in at least float32, also under autocast and in a model of 16 bits."""

    def forward(self, h: Tensor) -> Tensor:
        dtype = torch.promote_types(h.dtype, torch.float32)
        with torch.autocast(h.device.type, enabled=False):
            return F.linear(h.to(dtype), self.weight.to(dtype), self.bias.to(dtype))


class NormaliserLayer(nn.Module):
    """A normaliser for one attention layer, with its learned parameters (s, b, p_n, ...).

    definition is the formula with its options, reweight_p the power of the re-weighting, 0 for
    none. For the others see `attention.make_normaliser`.
    """

    def __init__(
        self,
        definition: Normaliser,
        reweight_p: int,
        n_head: int,
        head_dim: int,
        train_len: int,
        position: str = "rope",
        window: int = 0,
        width: int = 0,
    ) -> None:
        super().__init__()
        self.definition = definition
        self.reweight_p = reweight_p
        # The power of this step, which `GPT.set_power` raises: a tensor, as torch.compile has a
        # graph for each value of a number. On the CPU, where a kernel's launch reads it at once.
        self.p = torch.tensor(reweight_p, device="cpu")
        self.n_head = n_head
        self.head_dim = head_dim
        self.train_len = train_len
        self.position = position
        self.window = window
        for name, value in definition.learned(n_head, train_len).items():
            self.register_parameter(name, nn.Parameter(value))
        self.signals = definition.signals(head_dim)
        # the numbers per head that `read` gives
        self.n_signals = sum(map(len, self.signals.values()))
        if self.signals and width:
            self.signal = FullLinear(width, n_head * self.n_signals)
            nn.init.normal_(self.signal.weight, std=SIGNAL_STD)
            with torch.no_grad():  # (H, signals) each
                self.signal.bias.copy_(torch.tensor(sum(self.signals.values(), []) * n_head))

    @property
    def label(self) -> str:
        """For messages: "lssa with these options", "softmax with alibi"."""
        return f"{self.definition.name} with {self.position if self.position in BIASES else 'these options'}"

    def weights(self, q: Tensor, k: Tensor, signals: Tensor | None = None) -> Tensor:
        """The dense weights by definition: (B, H, Tq, Tk) in at least float32, 0 at keys after the
        query.

        q (B, H, Tq, D) and k (B, n_kv_head, Tk, D) after RoPE, and signals as in
        `attention.attend`.
        """
        with torch.autocast(q.device.type, enabled=False):
            q = self.norm_heads(q)
            k = self.norm_heads(k)
            return self.dense_weights(q, k, self.context(q, k, signals))

    def dense_weights(self, q: Tensor, k: Tensor, context: RowContext) -> Tensor:
        """`weights` of q and k that have passed `norm_heads`."""
        q, k = self.prepare(q, k, context)
        x = self.scores(q, k, context)
        return self.row_weights(x.masked_fill(~context.visible(x), HIDDEN), context)

    def scores(self, q: Tensor, k: Tensor, context: RowContext) -> Tensor:
        """The scores (B, H, Tq, Tk) of prepared q and k, with `key_decay`, before `at_distance`."""
        return context.add_decay(q @ k.mT)

    def row_weights(self, x: Tensor, context: RowContext) -> Tensor:
        """Scores (..., R, K), HIDDEN at hidden keys, to weights: the formula, then the
        re-weighting.
        """
        if self.by_distance or self.decays:
            head = torch.arange(self.n_head, device=x.device)[:, None, None]
            x = self.at_distance(x, context.distance(x), head)
            # a factor that decays may have shrunk it
            x = x.masked_fill(~context.visible(x), HIDDEN)
        a = self.definition.weights(x, context)
        if a.shape != x.shape:
            shapes = f"weights of shape {tuple(a.shape)} for scores of {tuple(x.shape)}"
            raise UserError(f"{self.definition.name}: {shapes}; expected one weight for each score")
        if self.definition.form == "any":  # a formula may forget the hidden keys
            a = context.zero_hidden(a)
        return a if context.p is None else reweight(a, context.n, context.p)

    @property
    def by_distance(self) -> bool:
        """The scores depend on the distances of the keys."""
        return self.position in BIASES or "at_distance" in self.definition.own_methods

    @property
    def decays(self) -> bool:
        """The scores have the bias of a `key_decay`."""
        return "key_decay" in self.definition.own_methods

    def at_distance(self, x: Tensor, t: Tensor, head: Tensor) -> Tensor:
        """The scores x of a head's keys at distance t, t and head expanding to x's shape."""
        x = self.definition.at_distance(x, t)
        return x + BIASES[self.position](t, head, self.n_head) if self.position in BIASES else x

    def read(self, h: Tensor) -> Tensor | None:
        """The formula's S signals, (B, H, T, S) in at least float32, of the layer's input (B, T,
        C).
        """
        if not self.signals:
            return None
        return self.signal(h).unflatten(-1, (self.n_head, -1)).transpose(1, 2)

    def norm_heads(self, x: Tensor) -> Tensor:
        """q or k, for cosine scores l2-normalised in at least float32. RoPE may follow: it keeps
        norms.

        A compiled step is faster with the norm before RoPE (benchmarks/RESULTS.md), and a KV cache
        holds normed keys. With `model.key_shift` a key is normed after its shift.
        """
        if self.definition.scores != "cosine":
            return x
        return F.normalize(
            x.to(torch.promote_types(x.dtype, torch.float32)), dim=-1, eps=COSINE_EPS
        )

    def prepare(
        self,
        q: Tensor,
        k: Tensor,
        context: RowContext,
        dtype: torch.dtype | None = None,
        unit: float = 1.0,
    ) -> tuple[Tensor, Tensor]:
        """q (B, H, Tq, D) and k, of `norm_heads`, to those whose products are the scores. Every
        engine starts here.

        dtype: of the kernel that multiplies them, and of both here. Its products are `unit` times
        the scores, with the temperature of an adaptive softmax in them, and k keeps its n_kv_head
        heads. None: the definition multiplies them, in at least float32, and k has H heads.
        """
        definition = self.definition
        given = k
        q = q.to(torch.promote_types(q.dtype, torch.float32))
        if definition.centre_keys:
            k = k.to(q.dtype)
            k = k - first_keys(k, context)
        if dtype is None:
            return q * definition.factor(context), share_heads(k.to(q.dtype), q)
        factor = definition.fused_factor(q, k, context)
        if definition.scores == "dot" and dtype.itemsize == 2:
            # centred keys would be rounded once more, and a softmax does not see the shift
            k = given
        return (q * (factor * unit)).to(dtype), k.to(dtype)

    def context(
        self, q: Tensor, k: Tensor, signals: Tensor | None = None, first: Tensor | None = None
    ) -> RowContext:
        """The `RowContext` of queries (..., Tq, D), the last of the Tk positions, of `attend`'s
        arguments.
        """
        n_queries = q.shape[-2]
        n_keys = k.shape[-2]
        dtype = torch.promote_types(q.dtype, torch.float32)
        if n_queries > n_keys:
            raise ValueError(f"{n_queries} queries for {n_keys} keys: expected at most as many")
        rows = slice(n_keys - n_queries, None)
        index = torch.arange(n_keys, dtype=dtype, device=q.device)[rows, None]
        n_max = min(self.window or n_keys, n_keys)
        n = (index + 1).clamp_max(n_max)
        p = self.p if self.reweight_p else None
        learned = self(dtype)
        context = RowContext(n, index, n_keys, n_max, self.train_len, self.head_dim, p, learned)
        if first is not None:
            first = first.contiguous()
            row_first = first[:, None, rows, None]  # (B, 1, Tq, 1)
            n = (index - row_first + 1).clamp_max(n_max)
            context = replace(context, n=n, first=row_first)
            if not self.definition.cacheable:  # it reads how many keys a document has
                sizes = torch.searchsorted(first, first, right=True) - first
                context = replace(context, n_keys=sizes[:, None, rows, None].to(dtype))
        if not self.signals:
            return context
        if signals is None:
            raise UserError(f"{self.definition.name} reads the layer's input: expected signals")
        widths = [*map(len, self.signals.values())]
        by_name = dict(zip(self.signals, signals.to(dtype).split(widths, dim=-1), strict=True))
        row_signals = {name: each[..., rows, :] for name, each in by_name.items()}
        return replace(context, signals=row_signals, decay=self.definition.key_decay(by_name))

    def cut(self, k: Tensor, v: Tensor, context: RowContext) -> tuple[Tensor, Tensor, RowContext]:
        """k, v and their `RowContext` without the keys that lie before the windows of all queries."""
        n_before = k.shape[-2] - len(context.place) + 1 - self.window
        if not self.window or n_before <= 0:
            return k, v, context
        keys = slice(n_before, None)
        cut = replace(context.block(slice(None), slice(None), keys), signals=context.signals)
        return k[..., keys, :], v[..., keys, :], cut

    def forward(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """Learned parameters, those per head as (H, 1, 1). By a call accelerate loads offloaded
        ones.
        """
        parameters = {
            name: parameter.to(dtype) for name, parameter in self.named_parameters(recurse=False)
        }
        return {name: v if name == "p_n" else v[:, None, None] for name, v in parameters.items()}


def first_keys(k: Tensor, context: RowContext) -> Tensor:
    """Of each key in k (B, H, Tk, D) the first one of its document, of those that a query sees."""
    first = context.first  # of the queries
    if first is None:
        return k[..., :1, :]
    n_before = k.shape[-2] - first.shape[-2]
    before = first[:, :, :1].expand(-1, -1, n_before, -1)
    return torch.take_along_dim(k, torch.cat((before, first), dim=2).clamp_min(0), dim=2)
