"""Any causal model of transformers in an evaluation of losses: a folder, or a name on its hub.

    python eval_length.py EleutherAI/pythia-160m --data data/pythia     # made with its tokenizer.json

The evaluation loads this file by name, for a source that is no run. A model runs if its attention
goes through transformers' AttentionInterface. A rolling window is a mask beside the model's own,
with a KV cache of that many keys and positions as they are in the text. Attention is the model's
eager one, on as many queries at a time as bounds its memory.
"""

import copy
import os
import sys
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from textwrap import shorten
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from data.dataset import TokenStream
from data.tokenizer import TOKENIZERS, FileTokenizer, get_tokenizer
from evaluation import LOGITS_AT_ONCE, open_stream
from hub.export import CHECK_TEXT
from hub.native import import_transformers
from infra.cli import UserError
from infra.distributed import World
from infra.files import read_text
from positions import UNSCALED, RopeScaling

NAME = "rolling_window"  # of the attention and its masks, in transformers
SCORES_AT_ONCE = 2**21  # of a head: rows times queries times keys
N_CHECKED = 12  # tokens of the checks


class CausalScorer:
    """A model of transformers as a `Scorer`.

    Raises UserError: a position sees later tokens, or the model cannot have a window.
    """

    def __init__(self, model: Any, train_len: int) -> None:
        register_window()
        self.model = model.eval()
        self.config = model.config.get_text_config()
        self.train_len = train_len
        names = signature(model.forward).parameters
        # its name before transformers 5.24
        self.cache_name = "cache" if "cache" in names else "past_key_values"
        model.set_attn_implementation(NAME)
        name = type(model).__name__
        x = torch.arange(N_CHECKED, device=model.device)[None] % self.config.vocab_size
        half = N_CHECKED // 2
        later = torch.cat((x[:, :half], x[:, :half]), 1)
        if not self.agrees(x, later, slice(0, half), 0):
            raise UserError(f"{name}: a position sees later tokens; expected a causal model")
        earlier = torch.cat((x[:, half:], x[:, half:]), 1)
        if not self.agrees(x, earlier, slice(half, None), 1):
            raise UserError(
                f"{name}: sees past a window of 1; expected attention by transformers' interface alone"
            )

    @torch.no_grad()
    def agrees(self, x: Tensor, y: Tensor, positions: slice, window: int) -> bool:
        """Whether both have the same logits there."""
        self.config.rolling_window = window
        a, b = (self.model(each, use_cache=False).logits[:, positions] for each in (x, y))
        return torch.allclose(a, b, rtol=0, atol=1e-3 * a.std().item())

    @torch.no_grad()
    def losses(
        self, tokens: Tensor, n_targets: int, window: int = 0, scaling: RopeScaling = UNSCALED
    ) -> Tensor:
        """See `Scorer`. Raises UserError: more positions than were learned; a scaling that its RoPE
        has no place for; a window of 1.
        """
        tokens = tokens.to(self.model.device)
        inputs = tokens[:, :-1]
        length = inputs.shape[1]
        if window == 1:
            raise UserError("window 1: expected at least 2")
        limit = learned_positions(self.model)
        if limit and length > limit:
            raise UserError(f"{length} positions: the model has learned {limit}")
        window = window if window < length else 0
        size = min(LOGITS_AT_ONCE, SCORES_AT_ONCE // (window or length))
        size = max(1, size // len(tokens))
        self.config.rolling_window = window
        cache = make_cache(self.model, window)
        losses: list[Tensor] = []
        with scaled_rope(self.model, scaling, length, self.train_len):
            for start in range(0, length, size):
                chunk = inputs[:, start : start + size]
                stop = start + chunk.shape[1]
                kept = min(max(1, stop - length + n_targets), chunk.shape[1])
                options = {self.cache_name: cache, "use_cache": True, "logits_to_keep": kept}
                logits = self.model(chunk, **options).logits[:, -kept:]
                if stop <= length - n_targets:
                    continue
                targets = tokens[:, stop - kept + 1 : stop + 1]
                loss = F.cross_entropy(
                    logits.flatten(0, 1).float(), targets.flatten(), reduction="none"
                )
                losses.append(loss.view(targets.shape))
        return torch.cat(losses, 1)


# ---------------------------------------------------------------- windows
def register_window() -> None:
    """Name the model's own eager attention, whose masks have a rolling window as well."""
    transformers = import_transformers()
    transformers.AttentionInterface.register(NAME, own_attention)
    transformers.AttentionMaskInterface.register(NAME, window_mask)


def own_attention(module: nn.Module, *args: Any, **options: Any) -> Any:
    return sys.modules[type(module).__module__].eager_attention_forward(module, *args, **options)


def window_mask(
    *args: Any, mask_function: Any = None, config: Any = None, **options: Any
) -> Tensor:
    from transformers import masking_utils

    mask_function = mask_function or masking_utils.causal_mask_function
    if window := getattr(config, "rolling_window", 0):
        overlay = masking_utils.sliding_window_overlay(window)
        mask_function = masking_utils.and_masks(mask_function, overlay)
    return masking_utils.eager_mask(*args, mask_function=mask_function, config=config, **options)


def make_cache(model: Any, window: int) -> Any:
    """A KV cache of the last `window` keys of each layer, or of a layer's own window if smaller."""
    from transformers.cache_utils import DynamicCache, DynamicSlidingWindowLayer

    class RollingLayer(DynamicSlidingWindowLayer):
        is_sliding = False  # its mask is that of full attention

    cache = DynamicCache(config=model.config)
    for i, layer in enumerate(cache.layers if window else ()):
        if not layer.is_sliding:
            cache.layers[i] = RollingLayer(window)
        elif layer.sliding_window > window:
            cache.layers[i] = DynamicSlidingWindowLayer(window)
    return cache


# ---------------------------------------------------------------- positions
def learned_positions(model: Any) -> int:
    """How many the model has learned; 0: it has none, but RoPE or biases."""
    embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    is_learned = len(embeddings) > 1 and not rope_sections(model.config)
    return int(model.config.get_text_config().max_position_embeddings) if is_learned else 0


def rope_sections(config: Any) -> list[dict[str, Any]]:
    """The rope_parameters of layers with full attention; empty: none rotate."""
    config = config.get_text_config()
    parameters = getattr(config, "rope_parameters", None) or {}
    layer_types = set(getattr(config, "layer_types", None) or ())
    if parameters and all(isinstance(each, dict) for each in parameters.values()):
        return [parameters[kind] for kind in ("full_attention",) if kind in parameters]
    if layer_types:
        is_scaled = layer_types == {"full_attention"}
    else:
        is_scaled = not getattr(config, "sliding_window", None)
    return [parameters] if parameters and is_scaled else []


class scaled_rope:
    """In its context the model's RoPE is scaled as `positions.rope_tables` does, for a length.

    Windows of a layer's own are left alone: only full attention is scaled.
    """

    def __init__(self, model: Any, scaling: RopeScaling, length: int, train_len: int) -> None:
        self.changed: list[tuple[nn.Module, dict[str, Any]]] = []
        ratio = max(1.0, length / train_len)
        is_unscaled = scaling.name == "none" or (not scaling.theta and ratio == 1)
        if is_unscaled:
            return
        config = copy.deepcopy(model.config.get_text_config())
        sections = rope_sections(config)
        if not sections:
            raise UserError(
                f"RoPE scaling {scaling.name}: no layer with full attention has its own"
            )
        for section in sections:
            size = getattr(config, "head_dim", None)
            size = size or config.hidden_size // config.num_attention_heads
            size = int(size * section.get("partial_rotary_factor", 1.0))
            if scaling.theta:
                section["rope_theta"] = scaling.theta
            elif scaling.name == "ntk":
                section["rope_theta"] *= ratio ** (size / (size - 2))
            else:
                section |= {
                    "rope_type": "yarn",
                    "factor": ratio,
                    "original_max_position_embeddings": train_len,
                    "truncate": False,
                }
        for module in model.modules():
            if type(module).__name__.endswith("RotaryEmbedding"):
                self.changed.append((module, dict(vars(module))))
                with model.device:
                    vars(module).update(vars(type(module)(config)))

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        for module, values in self.changed:
            vars(module).update(values)


# ---------------------------------------------------------------- models as runs
@dataclass(frozen=True)
class HubRun:
    """A model of transformers in the place of an `evaluation.Run`."""

    source: Path
    folder: Path
    config: Any  # of transformers
    tokenizer: str
    train_len: int
    step: int = 0

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def title(self) -> str:
        return self.name

    @property
    def size(self) -> str:
        return f"{self.config.model_type}, T = {self.train_len}"

    def scorer(self, world: World) -> tuple[CausalScorer, int]:
        """Raises UserError: it does not load, or see `CausalScorer`."""
        transformers = import_transformers()
        model = load(transformers.AutoModelForCausalLM, str(self.source), dtype="auto")
        return CausalScorer(model.to(world.device), self.train_len), self.step

    def text(self, folder: Path | None, split: str | None) -> TokenStream:
        """Raises UserError: no dataset is named, or see `evaluation.open_stream`."""
        if folder is None:
            raise UserError(f"{self.source}: expected --data DIR, prepared with its tokenizer.json")
        return open_stream(folder, self.config.vocab_size, self.tokenizer, split)

    def scalings(self, asked: Iterable[RopeScaling]) -> list[RopeScaling]:
        return list(asked) if rope_sections(self.config) else [UNSCALED]


def open_run(source: str, train_len: int) -> HubRun:
    """Read what the model is, without its tensors. train_len: 0 is what its config says.

    Its rows go into its folder, or into runs/ for a name on the hub. Raises UserError: it cannot be
    read, is no decoder, or has no training length.
    """
    transformers = import_transformers()
    config = load(transformers.AutoConfig, source)
    if type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UserError(f"{source}: model_type = {config.model_type}: expected a causal model")
    config = config.get_text_config()
    train_len = train_len or getattr(config, "max_position_embeddings", None) or 0
    if not train_len:
        raise UserError(f"{source}: its config has no training length: expected --train-len T")
    folder = Path(os.path.abspath(source))
    if not folder.is_dir():
        folder = Path(os.path.abspath("runs")) / source.replace("/", "_")
        folder.mkdir(parents=True, exist_ok=True)
    return HubRun(Path(source), folder, config, name_tokenizer(source), train_len)


def load(kind: Any, source: str, **options: Any) -> Any:
    try:
        return kind.from_pretrained(source, trust_remote_code=False, **options)
    except (OSError, ValueError, KeyError) as e:
        raise UserError(f"{source}: cannot be loaded: {shorten(str(e), 300)}") from None


def name_tokenizer(source: str) -> str:
    """As datasets name it: the one of ours with the same tokens, or its tokenizer.json's identity."""
    transformers = import_transformers()
    theirs = load(transformers.AutoTokenizer, source)
    tokens = theirs.encode(CHECK_TEXT, add_special_tokens=False)
    for name in TOKENIZERS:
        with suppress(UserError):  # gpt2's files are not at hand
            if get_tokenizer(name).encode_ordinary(CHECK_TEXT) == tokens:
                return name
    file = transformers.utils.cached_file(source, "tokenizer.json")
    return FileTokenizer(read_text(Path(file)), source).name
