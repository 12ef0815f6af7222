"""Any causal model of transformers in an evaluation of losses: a folder, or a name on its hub.

    python eval_length.py EleutherAI/pythia-160m --files 'books/*.txt'  # by its own tokeniser
    python eval_length.py EleutherAI/pythia-160m --data data/pythia     # made with its tokenizer.json

The evaluation loads this file by name, for a source that is no run. A model runs if its attention
goes through transformers' AttentionInterface. A rolling window is a mask beside the model's own,
with a KV cache of that many keys and positions as they are in the text. Attention is the model's
eager one, on as many queries at a time as bounds its memory. Where the tokeniser puts a token before
a text, as Llama's and Gemma's do, it stands in the place of the first token of each context. Exports
of this repo's own code run in the checkout's.
"""

import copy
import json
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from inspect import signature
from pathlib import Path
from textwrap import shorten
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from config import config_from_dict
from data.dataset import TokenStream
from data.tokenizer import TOKENIZERS, file_identity, get_tokenizer
from evaluation import LOGITS_AT_ONCE, GPTScorer, Scorer, open_stream
from hub.export import CHECK_TEXT
from hub.native import import_transformers
from infra.cli import UserError
from infra.distributed import World
from infra.files import read_text
from positions import UNSCALED, RopeScaling

NAME = "rolling_window"  # of the attention and its masks, in transformers
FULL = "full_attention"  # a layer type, there
OURS = "normaliser_gpt"  # model_type of hub/modeling.py
SCORES_AT_ONCE = 2**21  # of a head: rows times queries times keys
N_CHECKED = 12  # tokens of the checks


class CausalScorer:
    """A model of transformers as a `Scorer`.

    first: the token before every text, if its tokeniser adds one. Raises UserError: a position sees
    later tokens, or the model cannot have a window.
    """

    def __init__(self, model: Any, train_len: int, first: int | None = None) -> None:
        register_window()
        self.first = first
        self.model = model.eval()
        self.config = model.config.get_text_config()
        self.train_len = train_len
        names = signature(model.forward).parameters
        # its name before transformers 5.24
        self.cache_name = "cache" if "cache" in names else "past_key_values"
        name = type(model).__name__
        try:
            model.set_attn_implementation(NAME)
        except ValueError as e:
            raise UserError(f"{name}: {shorten(str(e), 200)}") from None
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
        self.config.rolling_window = (window, 0)
        a, b = (self.model(each, use_cache=False).logits[:, positions] for each in (x, y))
        return torch.allclose(a, b, rtol=0, atol=1e-3 * a.std().item())

    @torch.no_grad()
    def losses(
        self,
        tokens: Tensor,
        n_targets: int,
        window: int = 0,
        sinks: int = 0,
        scaling: RopeScaling = UNSCALED,
    ) -> Tensor:
        """See `Scorer`. Layers with a window of their own have no sinks. Raises UserError: more
        positions than were learned; a scaling that its RoPE has no place for; a window of 1.
        """
        tokens = tokens.to(self.model.device)
        inputs = tokens[:, :-1].clone()
        if self.first is not None:
            inputs[:, 0] = self.first
        length = inputs.shape[1]
        if window == 1:
            raise UserError("window 1: expected at least 2")
        limit = learned_positions(self.model)
        if limit and length > limit:
            raise UserError(f"{length} positions: the model has learned {limit}")
        window = window if window < length else 0
        n_keys = length if sinks or not window else window
        size = min(LOGITS_AT_ONCE, SCORES_AT_ONCE // n_keys)
        size = max(1, size // len(tokens))
        self.config.rolling_window = (window, sinks)
        cache = make_cache(self.model, 0 if sinks else window)  # sinks are in a cache of all keys
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
    window, sinks = getattr(config, "rolling_window", (0, 0))
    if window:
        seen = masking_utils.sliding_window_overlay(window)
        if sinks:
            seen = masking_utils.or_masks(seen, lambda batch, head, query, key: key < sinks)
        mask_function = masking_utils.and_masks(mask_function, seen)
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
    config = model.config.get_text_config()
    embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    is_learned = len(embeddings) > 1 and not getattr(config, "rope_parameters", None)
    return int(config.max_position_embeddings) if is_learned else 0


def rope_section(config: Any) -> dict[str, Any]:
    """The rope_parameters of layers with full attention; empty: none has them, or none rotates."""
    config = config.get_text_config()
    parameters = getattr(config, "rope_parameters", None) or {}
    layer_types = getattr(config, "layer_types", None)
    is_windowed = bool(getattr(config, "sliding_window", None))  # in all layers, without types
    has_full = FULL in layer_types if layer_types else not is_windowed
    if not has_full:
        return {}
    if all(isinstance(each, dict) for each in parameters.values()):  # by layer type
        return dict(parameters.get(FULL, {}))
    return dict(parameters)


@contextmanager
def scaled_rope(model: Any, scaling: RopeScaling, length: int, train_len: int) -> Iterator[None]:
    """In its context the model's RoPE is scaled as `positions.rope_tables` does, for a length.

    Layers with a window of their own are left alone: only full attention is scaled. Raises
    UserError: there is none with RoPE.
    """
    ratio = max(1.0, length / train_len)
    if scaling.name == "none" or (not scaling.theta and ratio == 1):
        yield
        return
    config = scaled_config(model, scaling, ratio, train_len)
    changed = []
    hooks = []
    for module in model.modules():
        if type(module).__name__.endswith("RotaryEmbedding"):
            changed.append((module, dict(vars(module))))
            plain = copy.deepcopy(module)
            with model.device:
                vars(module).update(vars(type(module)(config)))
            hooks += keep_unscaled(model, module, plain)
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for module, values in changed:
            vars(module).update(values)


def scaled_config(model: Any, scaling: RopeScaling, ratio: float, train_len: int) -> Any:
    config = copy.deepcopy(model.config.get_text_config())
    section = rope_section(config)
    if not section:
        raise UserError(f"RoPE scaling {scaling.name}: no layer with full attention has RoPE")
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    size = int(size * section.get("partial_rotary_factor", 1.0))
    if scaling.theta:
        section["rope_theta"] = scaling.theta
    elif scaling.name == "ntk":
        if size <= 2:
            raise UserError(f"RoPE scaling ntk: expected more than 2 rotating channels, got {size}")
        section["rope_theta"] *= ratio ** (size / (size - 2))
    else:
        kept = {"rope_theta", "partial_rotary_factor"} & section.keys()
        section = {key: section[key] for key in kept} | {
            "rope_type": "yarn",
            "factor": ratio,
            "original_max_position_embeddings": train_len,
            "truncate": False,  # the ramp of the paper's formula
        }
    if FULL in config.rope_parameters:
        config.rope_parameters[FULL] = section
    else:
        config.rope_parameters = section
    return config


def keep_unscaled(model: Any, scaled: nn.Module, plain: nn.Module) -> list[Any]:
    """Hooks that give layers with windows the unscaled tables, where one table serves all layers."""
    config = model.config.get_text_config()
    layer_types = getattr(config, "layer_types", None) or []
    if FULL in config.rope_parameters or {*layer_types} <= {FULL}:
        return []
    tables: dict[str, Any] = {}

    def compute(module: nn.Module, args: Any, options: Any, result: Any) -> None:
        tables["position_embeddings"] = plain(*args, **options)

    def replace(module: nn.Module, args: Any, options: Any) -> Any:
        if "position_embeddings" not in options:
            raise UserError(f"{type(module).__name__}: RoPE cannot be scaled in some layers alone")
        return args, options | tables

    hooks = [scaled.register_forward_hook(compute, with_kwargs=True)]
    for module in model.modules():
        layer: Any = getattr(module, "layer_idx", None)
        is_attention = "Attention" in type(module).__name__ and layer is not None
        if is_attention and layer_types[layer] != FULL:
            hooks.append(module.register_forward_pre_hook(replace, with_kwargs=True))
    return hooks


# ---------------------------------------------------------------- models as runs
class HubTokenizer(NamedTuple):
    """What hub/files.py and the scorer use of a tokeniser of transformers."""

    name: str
    inner: Any  # of the tokenizers library
    eot_token: int
    first: int | None  # what it puts before every text


@dataclass(frozen=True)
class HubRun:
    """A model of transformers in the place of an `evaluation.Run`."""

    source: Path
    folder: Path
    config: Any  # of transformers
    train_len: int
    is_absolute: bool  # has learned positions
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

    @property
    def vocab_size(self) -> int:
        return int(self.config.vocab_size)

    @property
    def tokenizer(self) -> str:
        return self.load_tokenizer().name

    def load_tokenizer(self) -> HubTokenizer:
        return load_tokenizer(str(self.source))

    def scorer(self, world: World) -> tuple[Scorer, int]:
        """Raises UserError: it does not load, or see `CausalScorer`."""
        source = str(self.source)
        if self.config.model_type == OURS:
            from hub.modeling import NormaliserGPTForCausalLM

            own = load(NormaliserGPTForCausalLM, source).gpt.to(world.device).eval()
            own.choose_engine(own.config.train.engine)
            return GPTScorer(own), self.step
        model = load(import_transformers().AutoModelForCausalLM, source, dtype="auto")
        first = self.load_tokenizer().first
        return CausalScorer(model.to(world.device), self.train_len, first), self.step

    def text(self, folder: Path | None, split: str | None) -> TokenStream:
        """Raises UserError: no dataset is named, or see `evaluation.open_stream`."""
        if folder is None:
            prepared = "--data DIR, prepared with its tokenizer.json"
            raise UserError(f"{self.source}: expected --files PATTERN, or {prepared}")
        return open_stream(folder, self.vocab_size, self.tokenizer, split)

    def scalings(self, asked: Iterable[RopeScaling]) -> list[RopeScaling]:
        if self.config.model_type == OURS:
            rotates = bool(config_from_dict(self.config.gpt, str(self.source)).rope_bases)
        else:
            rotates = bool(rope_section(self.config))
        return list(asked) if rotates else [UNSCALED]


def open_run(source: str, train_len: int) -> HubRun:
    """Read what the model is, without its tensors. train_len: 0 is what its config says.

    Its rows go into its folder, or into runs/ for a name on the hub. Raises UserError: it cannot be
    read, is no decoder, or has no training length.
    """
    transformers = import_transformers()
    is_absolute = False
    if is_ours(source):
        from hub.modeling import NormaliserGPTConfig

        config = load(NormaliserGPTConfig, source)
    else:
        config = load(transformers.AutoConfig, source)
        if type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
            kind = f"model_type = {config.model_type}"
            raise UserError(f"{source}: {kind}: expected a causal model")
        with torch.device("meta"):
            is_absolute = (
                learned_positions(transformers.AutoModelForCausalLM.from_config(config)) > 0
            )
        config = config.get_text_config()
    train_len = train_len or getattr(config, "max_position_embeddings", None) or 0
    if not train_len:
        raise UserError(f"{source}: its config has no training length: expected --train-len T")
    folder = Path(os.path.abspath(source))
    if not folder.is_dir():
        folder = Path(os.path.abspath("runs")) / source.replace("/", "_")
        folder.mkdir(parents=True, exist_ok=True)
    run = HubRun(Path(source), folder, config, train_len, is_absolute)
    run.load_tokenizer()
    return run


def is_ours(source: str) -> bool:
    path = Path(source, "config.json")
    return path.is_file() and json.loads(read_text(path)).get("model_type") == OURS


def load(kind: Any, source: str, **options: Any) -> Any:
    try:
        return kind.from_pretrained(source, trust_remote_code=False, **options)
    except Exception as e:  # of any kind, by the libraries below
        raise UserError(f"{source}: cannot be loaded: {shorten(str(e), 300)}") from None


@cache
def load_tokenizer(source: str) -> HubTokenizer:
    """Its name as datasets have it: the one of ours with the same tokens, or the identity of its
    tokenizer.json. Raises UserError: it is not one of the tokenizers library, or ends no text.
    """
    transformers = import_transformers()
    theirs = load(transformers.AutoTokenizer, source)
    inner = getattr(theirs, "backend_tokenizer", None)
    ends = [token for token in (theirs.eos_token_id, theirs.bos_token_id) if token is not None]
    if inner is None or not ends:
        expected = "expected a tokenizer.json with an end-of-text token"
        raise UserError(f"{source}: its tokenizer, {type(theirs).__name__}: {expected}")
    inner.no_padding()
    inner.no_truncation()
    inner.encode_special_tokens = True  # special tokens in a text are ordinary text
    tokens = inner.encode(CHECK_TEXT, add_special_tokens=False).ids
    whole = inner.encode(CHECK_TEXT).ids
    first = whole[0] if whole[:1] != tokens[:1] else None
    for name in TOKENIZERS:
        with suppress(UserError):  # gpt2's files are not at hand
            if get_tokenizer(name).encode_ordinary(CHECK_TEXT) == tokens:
                return HubTokenizer(name, inner, ends[0], first)
    content = inner.to_str()
    with suppress(OSError):  # none, but another file from which the library makes one
        content = read_text(Path(transformers.utils.cached_file(source, "tokenizer.json")))
    return HubTokenizer(file_identity(content), inner, ends[0], first)
