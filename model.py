"""GPT: a pre-norm decoder with the positions and the attention normaliser that the config names.

GPT-2 (Radford et al. 2019) with RoPE (Su et al. 2021) instead of learned positions. The config's
options make it the model of the SSMax paper as well: RMSNorm, SwiGLU, no biases, untied embeddings.

    model = GPT(load_config("configs/gpt2_124m.toml"))
    loss = model(tokens, targets)                              # mean cross-entropy in nats
    losses = model.token_losses(tokens, targets, rope=RopeScaling("ntk"))   # (B, T), any length
    losses = model.with_window(1024).token_losses(tokens, targets)          # a rolling KV window
"""

import copy
import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attention import ChosenEngine, attend, choose_engine, make_normaliser
from infra.cli import UserError
from loss import ChunkedLoss, chunk_loss, scale_logits
from normalisers.base import share_heads
from normalisers.layer import NormaliserLayer
from positions import UNSCALED, RopeScaling, apply_rope, rope_tables
from schema import Config, Engine, ModelConfig

INIT_STD = 0.02


class KVCache:
    """Keys, values and signals of every layer so far, as `Attention.project` holds them. For
    inference.

    windows: of each layer, how many of its last positions are kept, 0 for all. (A window's first
    query needs one less; the one more is what `Attention.shift_keys` adds to the oldest key.)
    """

    attend = staticmethod(attend)  # a cache of padded sequences leaves out their padding

    def __init__(self, n_layer: int, max_length: int, windows: Sequence[int] = ()) -> None:
        self.max_length = max_length
        self.windows = windows or [0] * n_layer
        self.length = 0  # advanced by GPT once all layers have appended
        self.starts: Tensor | None = None  # (B, T) of the last tokens, see `GPT.document_starts`
        self.held: list[list[Tensor]] = [[] for _ in range(n_layer)]

    def append(self, layer: int, *parts: Tensor) -> list[Tensor]:
        """Store (B, heads, T, size) each behind the positions present; return each with those that
        were there.
        """
        end = self.length + parts[0].shape[2]
        if end > self.max_length:
            raise ValueError(
                f"KVCache: {end} positions do not fit in max_length = {self.max_length}"
            )
        if window := self.windows[layer]:
            if self.held[layer]:
                pairs = zip(self.held[layer], parts, strict=True)
                parts = tuple(torch.cat(pair, dim=2) for pair in pairs)
            # copies, which do not keep a long prompt's positions in memory
            self.held[layer] = [part[:, :, -window:].clone() for part in parts]
            return [*parts]
        if not self.held[layer]:
            self.held[layer] = [
                p.new_zeros(*p.shape[:2], self.max_length, p.shape[-1]) for p in parts
            ]
        for held, part in zip(self.held[layer], parts, strict=True):
            held[:, :, self.length : end] = part
        return [held[:, :, :end] for held in self.held[layer]]

    def keys_before(self, k: Tensor) -> Tensor:
        """The key before each of k (B, n_kv_head, T, D), zeros before the first of a sequence."""
        return F.pad(k, (0, 0, 1, -1))


def make_linear(n_in: int, n_out: int, bias: bool, std: float = INIT_STD) -> nn.Linear:
    """A linear layer with weights from N(0, std²) and zero bias."""
    layer = nn.Linear(n_in, n_out, bias=bias)
    nn.init.normal_(layer.weight, std=std)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
    return layer


def residual_std(config: ModelConfig) -> float:
    """Init of the layers that write to the residual stream: 2·n_layer of them add up (GPT-2,
    section 2.3).
    """
    return INIT_STD / math.sqrt(2 * config.n_layer)


def make_norm(config: ModelConfig) -> nn.Module:
    if config.norm == "rmsnorm":
        return nn.RMSNorm(config.n_embd, eps=config.norm_eps)
    return nn.LayerNorm(config.n_embd, eps=config.norm_eps, bias=config.bias)


class Attention(nn.Module):
    """Causal attention with the normaliser: multi-head or grouped-query (Ainslie et al. 2023)."""

    def __init__(self, config: Config, layer: int) -> None:
        super().__init__()
        m = config.model
        self.layer = layer
        self.n_head = m.n_head
        self.head_dim = m.head_dim
        self.n_kv_head = m.kv_heads
        self.rotating = m.rotating
        self.engine: ChosenEngine | Engine = "auto"  # chosen by GPT
        self.qkv = make_linear(m.n_embd, (m.n_head + 2 * m.kv_heads) * m.head_dim, m.bias)
        self.is_exclusive = m.exclusive
        self.key_shift = nn.Parameter(torch.zeros(m.kv_heads)) if m.key_shift else None
        self.n_unshifted = m.rotating if m.key_shift == "unrotated" else 0  # of a key's channels
        self.normaliser = make_normaliser(
            config.attention,
            m.n_head,
            m.head_dim,
            config.train.seq_len,
            m.position,
            m.window,
            m.n_embd,
        )
        self.gate = make_linear(m.n_embd, m.n_embd, m.bias) if m.attention_gate else None
        self.out = make_linear(m.n_embd, m.n_embd, m.bias, residual_std(m))

    def project(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        cache: KVCache | None = None,
        starts: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
        """(B, T, C) to q (B, H, T, D) and k as the scores take them, v, (B, n_kv_head, T, D) each,
        the signals, and `first` of `attend`.

        Here alone q and k are normed for cosine scores, rotated and shifted. With a cache, which is
        extended: k, v, the signals and `first` of all keys. starts: of `GPT.document_starts`.
        """
        qkv = self.qkv(x).unflatten(-1, (-1, self.head_dim))  # (B, T, heads of q, k and v, D)
        # Split first: backward then joins the gradients in the projection's own layout, without a
        # copy.
        parts = qkv.split((self.n_head, self.n_kv_head, self.n_kv_head), dim=2)
        q, k, v = (part.transpose(1, 2) for part in parts)  # (B, heads, T, D)
        q = self.normaliser.norm_heads(q)
        if self.key_shift is None:
            k = self.normaliser.norm_heads(k)
        if self.rotating:
            q = apply_rope(q, cos, sin)
            k = apply_rope(k, cos, sin)
        signals = self.normaliser.read(x)
        if cache is not None:
            k, v, *rest = cache.append(
                self.layer, k.to(v.dtype), v, *([] if signals is None else [signals])
            )
            signals = rest[0] if rest else None
        first = None
        if starts is not None:
            n_before = k.shape[2] - starts.shape[1]  # keys held, the last ones of the text
            offset = 0 if cache is None else cache.length - n_before
            before = starts[:, :1].expand(-1, n_before)
            first = (torch.cat((before, starts), dim=1) - offset).clamp_min(0)  # (B, Tk)
        if self.key_shift is not None:
            k = self.shift_keys(k, cache, first)
            k = self.normaliser.norm_heads(k)
        return q, k, v, signals, first

    def shift_keys(
        self, k: Tensor, cache: KVCache | None = None, first: Tensor | None = None
    ) -> Tensor:
        """(1 - s) k_j + s k_{j - 1} of all keys (B, n_kv_head, T, D) after RoPE, s learned by key
        head, in the channels from `n_unshifted` on.

        A key then says which token came before, so one layer finds what followed the last token's
        earlier occurrences (smeared keys, Olsson et al. 2022). The first key of a sequence or
        document has no other.
        """
        assert self.key_shift is not None
        share = torch.sigmoid(self.key_shift)[:, None, None].to(k.dtype)
        before = F.pad(k, (0, 0, 1, -1)) if cache is None else cache.keys_before(k)
        if first is not None:
            is_first = first == torch.arange(k.shape[2], device=k.device)
            before = before.masked_fill(is_first[:, None, :, None], 0.0)
        shifted = (1 - share) * k + share * before
        if not self.n_unshifted:
            return shifted
        return torch.cat((k[..., : self.n_unshifted], shifted[..., self.n_unshifted :]), dim=-1)

    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        cache: KVCache | None = None,
        starts: Tensor | None = None,
    ) -> Tensor:
        """(B, T, C) to the same. cos, sin: of `rope_tables`. starts: of `GPT.document_starts`. A
        cache is extended.
        """
        q, k, v, signals, first = self.project(x, cos, sin, cache, starts)
        run = attend if cache is None else cache.attend
        y = run(q, k, v, self.normaliser, self.engine, signals, normed=True, first=first)
        if self.is_exclusive:  # o - (o.v) v / v.v, v the query's own value
            own = F.normalize(share_heads(v[:, :, -y.shape[2] :], y), dim=-1)
            y = y - (y * own).sum(-1, keepdim=True) * own
        y = y.transpose(1, 2).flatten(2)  # (B, T, C)
        return self.out(y if self.gate is None else y * torch.sigmoid(self.gate(x)))


class MLP(nn.Module):
    """GELU (exact, or GPT-2's tanh approximation) or SwiGLU (Shazeer 2020): down(silu(gate x) · up
    x).
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        hidden = config.mlp_hidden or 4 * config.n_embd
        self.gelu = "tanh" if config.gelu == "tanh" else "none"  # torch's names
        self.gate = (
            make_linear(config.n_embd, hidden, config.bias) if config.mlp == "swiglu" else None
        )
        self.up = make_linear(config.n_embd, hidden, config.bias)
        self.down = make_linear(hidden, config.n_embd, config.bias, residual_std(config))

    def forward(self, x: Tensor) -> Tensor:
        if self.gate is None:
            return self.down(F.gelu(self.up(x), approximate=self.gelu))
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, config: Config, layer: int) -> None:
        super().__init__()
        self.attention_norm = make_norm(config.model)
        self.attention = Attention(config, layer)
        self.mlp_norm = make_norm(config.model)
        self.mlp = MLP(config.model)

    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        cache: KVCache | None = None,
        starts: Tensor | None = None,
    ) -> Tensor:
        """As `Attention.forward`."""
        x = x + self.attention(self.attention_norm(x), cos, sin, cache, starts)
        return x + self.mlp(self.mlp_norm(x))


class GPT(nn.Module):
    """The whole model: embedding, blocks, final norm, output layer.

    Token ids are not checked. One beyond the padded vocabulary fails in the embedding (on CUDA,
    later).
    """

    end_of_text: Tensor | None

    def __init__(self, config: Config, device: torch.device | str | None = None) -> None:
        super().__init__()
        m = config.model
        self.config = config
        # whole tiles for the largest matmul
        self.padded_vocab = 128 * math.ceil(m.vocab_size / 128)
        self.embedding = nn.Embedding(self.padded_vocab, m.n_embd)
        nn.init.normal_(self.embedding.weight, std=INIT_STD)
        self.layer_configs = config.layer_configs
        blocks = [
            Block(layer_config, layer) for layer, layer_config in enumerate(self.layer_configs)
        ]
        normalisers = [block.attention.normaliser for block in blocks]
        sharing = [normaliser for normaliser in normalisers if hasattr(normaliser, "p_n")]
        # ssmax_pn has one p_n for all layers and heads (SSMax eq. 3)
        for normaliser in sharing[1:]:
            normaliser.p_n = sharing[0].p_n
        self.blocks: Sequence[Block] = nn.ModuleList(blocks)  # type: ignore[assignment]  # ModuleList is not generic
        self.final_norm = make_norm(m)
        # The token before each document, which train.py learns from the data and checkpoints keep.
        end_of_text = torch.tensor(-1) if config.data.documents else None
        self.register_buffer("end_of_text", end_of_text)
        self.lm_head = make_linear(m.n_embd, self.padded_vocab, bias=False)
        if m.tie_embeddings:
            self.lm_head.weight = self.embedding.weight
        self.chunk_loss = chunk_loss
        # after the initialisation, which so draws the same numbers for every device
        self.to(device)
        self.choose_engine(config.train.engine)

    def with_window(self, window: int) -> "GPT":
        """This model, its parameters shared, with a rolling KV window: what it computes when it
        decodes token by token with a cache of the last `window` keys of each layer.

        Each layer sees the smaller of `window` and its own; n counts the keys that it sees, at most
        as many. Positions are those in the text, so with a window of at most the training length no
        distance is new to RoPE, and a scaling, which the caller chooses, is not needed. A layer
        whose engine has no windows gets another.
        """
        if window < 1:
            raise UserError(f"window = {window}: expected at least 1")
        shared = [*self.parameters(), *self.buffers()]
        model = copy.deepcopy(self, {id(tensor): tensor for tensor in shared})
        for block in model.blocks:
            layer = block.attention.normaliser
            layer.window = min(window, layer.window or window)
        try:
            model.choose_engine(self.config.train.engine)
        except UserError:  # of the named engine
            model.choose_engine("auto")
        return model

    def set_power(self, bound: int | None) -> None:
        """Set each layer's power p of the re-weighting, as long as it rises at most `bound`; None:
        its reweight_p, with which a model begins.
        """
        for block in self.blocks:
            layer = block.attention.normaliser
            layer.p.fill_(min(layer.reweight_p, layer.reweight_p if bound is None else bound))

    @property
    def windows(self) -> list[int]:
        """How many keys a query of each layer sees at most; 0: all before it."""
        return [block.attention.normaliser.window for block in self.blocks]

    def choose_engine(self, name: Engine = "auto", dtype: torch.dtype | None = None) -> None:
        """Choose each layer's attention engine, on the parameters' device; compiled code could not.

        dtype: of q, k and v; None: that of the config's autocast. Raises UserError: it cannot run
        here.
        """
        device = self.embedding.weight.device
        dtype = dtype or getattr(torch, self.config.train.dtype)
        documents = self.config.data.documents
        engines = [
            choose_engine(block.attention.normaliser, name, device, dtype, documents)
            for block in self.blocks
        ]
        for block, engine in zip(self.blocks, engines, strict=True):
            block.attention.engine = engine
        self.engine_note = ", ".join(dict.fromkeys(engine.note for engine in engines))

    def rope(
        self, tokens: Tensor, scaling: RopeScaling, cache: KVCache | None = None
    ) -> list[tuple[Tensor, Tensor]]:
        """`rope_tables` of each layer, cos and sin, for tokens (B, T) that follow what is in the
        cache.

        A layer that was trained with a window of at most the training length is never scaled: it
        sees no distance that is new.
        """
        start = 0 if cache is None else cache.length
        stop = start + tokens.shape[1]
        positions = torch.arange(start, stop, device=tokens.device)
        train_len = self.config.train.seq_len
        tables: dict[object, tuple[Tensor, Tensor]] = {}
        by_layer = []
        for block, layer_config in zip(self.blocks, self.layer_configs, strict=True):
            m = layer_config.model
            amplified = block.attention.normaliser.definition.scores != "cosine"
            own = UNSCALED if 0 < m.window <= train_len else scaling
            kind = (own, m.rope_theta, m.rotating, amplified)
            if kind not in tables:
                tables[kind] = rope_tables(
                    m.head_dim,
                    stop,
                    m.rope_theta,
                    own,
                    train_len,
                    positions,
                    m.rotating,
                    amplified,
                )
            by_layer.append(tables[kind])
        return by_layer

    def document_starts(self, tokens: Tensor, cache: KVCache | None = None) -> Tensor | None:
        """Of each of tokens (B, T) that follow what is in the cache, where its document begins: the
        position of its end-of-text token, or of the first token of all. Embeddings (B, T, C) begin
        none.

        None where `data.documents` is false.
        """
        if self.end_of_text is None:
            return None
        length = 0 if cache is None else cache.length
        places = length + torch.arange(tokens.shape[1], device=tokens.device)
        known = None if cache is None else cache.starts
        current = places.new_zeros(()) if known is None else known[:, -1:]
        is_start = tokens == self.end_of_text
        if tokens.is_floating_point():
            is_start = torch.zeros_like(tokens[..., 0], dtype=torch.bool)
        return torch.where(is_start, places, current).cummax(dim=1).values

    def hidden(self, tokens: Tensor, rope: RopeScaling, cache: KVCache | None = None) -> Tensor:
        """The final norm's output, (B, T, C), for tokens (B, T), or embeddings of some (B, T, C),
        that follow what is in the cache.
        """
        x = tokens if tokens.is_floating_point() else self.embedding(tokens)  # (B, T, C)
        starts = self.document_starts(tokens, cache)
        if cache is not None:
            cache.starts = starts
        for block, (cos, sin) in zip(self.blocks, self.rope(tokens, rope, cache), strict=True):
            x = block(x, cos, sin, cache, starts)
        if cache is not None:
            cache.length += tokens.shape[1]
        return self.final_norm(x)

    def attention_inputs(
        self, tokens: Tensor, rope: RopeScaling = UNSCALED, cache: KVCache | None = None
    ) -> Iterator[tuple[NormaliserLayer, Tensor, Tensor, Tensor | None, Tensor | None]]:
        """Each layer's normaliser, and q (B, H, T, D), k, the signals and `first` of
        `Attention.project`.

        With a cache, k is of all keys; its length does not change.
        """
        x = self.embedding(tokens)  # (B, T, C)
        starts = self.document_starts(tokens, cache)
        for block, (cos, sin) in zip(self.blocks, self.rope(tokens, rope, cache), strict=True):
            attention = block.attention
            h = block.attention_norm(x)
            q, k, _, signals, first = attention.project(h, cos, sin, cache, starts)
            yield attention.normaliser, q, k, signals, first
            x = block(x, cos, sin, cache, starts)

    def autocast(self) -> torch.autocast:
        """The precision that the config trains in, for every forward pass that should give its
        losses.
        """
        enabled = self.config.train.dtype == "bfloat16"
        return torch.autocast(self.embedding.weight.device.type, torch.bfloat16, enabled=enabled)

    def compile(self, *args: Any, **options: Any) -> None:
        """Compile, in place and with the options of torch.compile, what training spends its time
        in: the blocks as one graph, a chunk of the loss as another.
        """
        self.hidden = torch.compile(self.hidden, *args, **options)  # type: ignore[method-assign]
        self.chunk_loss = torch.compile(chunk_loss, *args, **options)

    @property
    def output_weight(self) -> Tensor:
        """Of the output layer, (V, C). On a CPU without the padding, which serves a GPU's tiles
        only.
        """
        weight = self.lm_head.weight
        return weight[: self.config.model.vocab_size] if weight.device.type == "cpu" else weight

    def unscaled_logits(self, hidden: Tensor) -> Tensor:
        """(..., C) to (..., vocab_size) in float32: the padding's columns are cut off, never
        predicted.
        """
        vocab_size = self.config.model.vocab_size
        return F.linear(hidden, self.output_weight)[..., :vocab_size].float()

    def logits(self, hidden: Tensor) -> Tensor:
        """`unscaled_logits` as the training loss takes them: their softmax is what the model
        predicts.
        """
        return scale_logits(self.unscaled_logits(hidden), self.config.train)

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        *,
        rope: RopeScaling = UNSCALED,
        cache: KVCache | None = None,
        unscaled: bool = False,
        label_smoothing: float = 0.0,
    ) -> Tensor:
        """Loss with targets, logits without.

        Args:
            tokens: (B, T) int64; with a cache, which is extended, those that follow its content.
            targets: (B, T) int64, the token after each; -100 leaves a position out of the mean.
            unscaled: leave out what train.loss does to the logits.
            label_smoothing: share of the target's probability spread over all tokens (Szegedy et
            al. 2016).
        Returns:
            The mean cross-entropy in nats, a float32 scalar, 0 without any target; or logits,
            (B, T, vocab_size) float32.
        """
        hidden = self.hidden(tokens, rope, cache)
        if targets is None:
            return self.unscaled_logits(hidden) if unscaled else self.logits(hidden)
        targets = targets.flatten()
        loss = partial(
            self.chunk_loss, config=self.config, unscaled=unscaled, smoothing=label_smoothing
        )
        total = ChunkedLoss.apply(
            hidden.flatten(0, 1), self.output_weight, targets, loss, torch.is_grad_enabled()
        )
        return total / (targets != -100).sum().clamp_min(1)

    @torch.no_grad()
    def token_losses(
        self, tokens: Tensor, targets: Tensor, *, rope: RopeScaling = UNSCALED, chunk: int = 1024
    ) -> Tensor:
        """Cross-entropy in nats of targets (B, S), those of the last S positions, 0 at -100: (B, S)
        float32.

        Logits exist for `chunk` positions at a time: (T, V) at T = 16384 would take 3.3 GB a row.
        """
        hidden = self.hidden(tokens, rope)[:, -targets.shape[1] :]  # (B, S, C)
        losses = []
        for h, t in zip(hidden.split(chunk, dim=1), targets.split(chunk, dim=1), strict=True):
            loss = F.cross_entropy(self.logits(h).flatten(0, 1), t.flatten(), reduction="none")
            losses.append(loss.view(t.shape))  # (B, chunk)
        return torch.cat(losses, dim=1)

    @property
    def cacheable(self) -> bool:
        """Whether a position's output is final: not if a row's weights depend on the number of all
        keys.
        """
        return all(
            layer_config.attention.definition.cacheable for layer_config in self.layer_configs
        )

    def n_params(self) -> int:
        """Number of parameters, shared ones once."""
        return sum(p.numel() for p in self.parameters())

    def flops_per_token(self) -> float:
        """FLOPs of forward and backward per training token: what MFU counts (PaLM, appendix B,
        causal).

        6 for each weight that is multiplied with, and 6 T C in each layer's attention: two products
        of T/2 visible keys on average forward, four backward; a window W < T has W - W^2 / 2T keys.
        Re-weighting and l1 add no products; NormSoftmax's standard deviation takes q Cov(k) q and
        the building of Cov(k). Recomputation and elementwise work do not count.
        """
        m = self.config.model
        seq_len = self.config.train.seq_len
        weights = sum(p.numel() for p in self.parameters() if p.ndim >= 2)
        if not m.tie_embeddings:
            weights -= self.embedding.weight.numel()  # looked up, not multiplied with
        attention = 0.0
        for layer_config in self.layer_configs:
            window = min(layer_config.model.window or seq_len, seq_len)
            attention += 12 * (window - window**2 / (2 * seq_len)) * m.n_embd
            attention += m.n_head * layer_config.attention.definition.extra_flops(m.head_dim)
        return 6.0 * weights + attention
