"""A trained model as transformers loads it. `hub.export` copies this file and all that it imports.

    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, rope="ntk")

The model is the training code's `GPT` with its normalisers, engines and positions. In padded
batches n counts real keys only. The config chooses RoPE's scaling (`rope`, `rope_length`, see
`RopeScaling`). It is scaled for the positions present, in `generate` for the final length, and with
`rope_length` always for that. The sequences of a padded batch are all scaled for the batch's length.

Attention runs in the engine that the config names, whatever `attn_implementation` could say.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache, QuantizedCache
from transformers.modeling_outputs import CausalLMOutputWithPast

from config import config_from_dict
from hub.padding import PaddedCache, mask_spans
from infra.cli import UserError
from loss import scale_logits
from model import GPT
from positions import RopeScaling


class NormaliserGPTConfig(PreTrainedConfig):
    """config.json: the run's config, the RoPE scaling, and the sizes under transformers' names."""

    model_type = "normaliser_gpt"

    gpt: dict[str, Any] | None = None  # sections of `schema.Config`
    rope: str = "none"
    rope_length: int | None = None
    vocab_size: int = 0
    hidden_size: int = 0
    num_hidden_layers: int = 0
    num_attention_heads: int = 0
    max_position_embeddings: int = 0  # the training length
    tie_word_embeddings: bool = True
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    pad_token_id: int | None = None
    use_cache: bool = True


class HubCache(PaddedCache):
    """A cache of transformers, or none, in the place of a `KVCache`."""

    def __init__(
        self,
        cache: Cache | None,
        device: torch.device | str = "cpu",
        has_documents: bool = False,
    ) -> None:
        self.cache = cache
        self.length = 0 if cache is None else int(cache.get_seq_length())
        self.starts = None
        if cache is not None and self.length and has_documents:
            last = cache.layers[0].keys[:, :1, self.length - 1]  # (B, 1, channels)
            number = number_type(last)
            bits = last[..., -number.itemsize // last.itemsize :].contiguous()
            self.starts = bits.view(number).squeeze(-1).long().to(device)

    def append(self, layer: int, *parts: Tensor) -> list[Tensor]:
        if self.cache is None:
            return [*parts]
        k, v, *signals = parts
        joined = join_signals(k, *signals)
        size = joined.shape[-1]
        if layer == 0 and self.starts is not None:
            # where each token's document begins goes with its key: cut, repeated and reordered
            starts = self.starts.to(number_type(k))[:, None, :, None]
            joined = join_signals(joined, starts.expand(-1, k.shape[1], -1, -1))
        if joined is not k and isinstance(self.cache, QuantizedCache):
            raise UserError(
                "a quantised cache keeps no bits of documents, nor of what a normaliser reads from "
                "the layer's input"
            )
        end = self.length + k.shape[2]
        held, values = self.cache.update(joined, v, layer)
        # a static cache returns all of its room
        held, values = held[:, :, :end, :size], values[:, :, :end]
        keys, bits = held.split((k.shape[-1], size - k.shape[-1]), dim=-1)
        return [keys, values, *(split_signals(bits, new) for new in signals)]


def number_type(k: Tensor) -> torch.dtype:
    """What the number of a token is kept as, in the bits of channels of k: exact up to 2^24."""
    return torch.promote_types(k.dtype, torch.float32)


def join_signals(k: Tensor, signals: Tensor | None = None) -> Tensor:
    """k with the bits of the signals, in k's type, behind a key's channels: any cache keeps both."""
    if signals is None:
        return k
    # (B, n_kv_head, T, numbers of a key head)
    by_key_head = signals.unflatten(1, (k.shape[1], -1)).transpose(2, 3).flatten(3)
    return torch.cat((k, by_key_head.contiguous().view(k.dtype)), dim=-1)


def split_signals(bits: Tensor, new: Tensor) -> Tensor:
    """The signals of all keys, of the type and size of the `new` ones."""
    numbers = bits.contiguous().view(new.dtype).unflatten(-1, (-1, new.shape[-1]))
    return numbers.transpose(2, 3).flatten(1, 2)


def check_positions(position_ids: Tensor, attention_mask: Tensor | None) -> None:
    """Raises UserError: they are not consecutive at the real keys, as those of packed sequences."""
    wrong = position_ids.diff(dim=-1) != 1  # (B, T - 1)
    if attention_mask is not None:
        real = attention_mask[:, -position_ids.shape[-1] :].bool()
        wrong = wrong & real[:, 1:] & real[:, :-1]
    if wrong.any():
        raise UserError(
            "position_ids: expected consecutive ones; give each packed sequence a row of its own"
        )


class NormaliserGPTForCausalLM(PreTrainedModel, GenerationMixin):
    config_class = NormaliserGPTConfig
    _no_split_modules = ["Block"]
    supports_gradient_checkpointing = True
    gradient_checkpointing = False

    def __init__(self, config: NormaliserGPTConfig) -> None:
        super().__init__(config)
        RopeScaling(config.rope)  # raises before the first forward
        self.gpt = GPT(config_from_dict(config.gpt or {}, "config.json"))
        self.engine_chosen_for: tuple[torch.device, torch.dtype] | None = None
        # The output layer, and SSMax's p_n: one vector for all layers.
        tied = {"gpt.lm_head.weight": "gpt.embedding.weight"} if config.tie_word_embeddings else {}
        p_n = [f"gpt.{name}" for name in self.gpt.state_dict() if name.endswith(".p_n")]
        self._tied_weights_keys = tied | {name: p_n[0] for name in p_n[1:]}
        self.final_length: int | None = None  # of the sequence that `generate` is extending
        self.post_init()

    def _init_weights(self, module: torch.nn.Module) -> None:
        """Nothing: `GPT` has initialised itself."""

    def get_expanded_tied_weights_keys(self, all_submodels: bool = False) -> dict[str, str]:
        return dict(self._tied_weights_keys)

    def get_input_embeddings(self) -> torch.nn.Module:
        return self.gpt.embedding

    def get_output_embeddings(self) -> torch.nn.Module:
        return self.gpt.lm_head

    def set_input_embeddings(self, value: torch.nn.Module) -> None:
        self.gpt.embedding = value  # type: ignore[assignment]

    def set_output_embeddings(self, new_embeddings: torch.nn.Module) -> None:
        self.gpt.lm_head = new_embeddings  # type: ignore[assignment]

    def resize_token_embeddings(  # type: ignore[override]
        self,
        new_num_tokens: int | None = None,
        pad_to_multiple_of: int | None = None,
        mean_resizing: bool = True,
    ) -> torch.nn.Module:
        """Change the vocabulary's size. The rows stay padded to a multiple of 128."""
        if new_num_tokens is None:
            return self.gpt.embedding
        multiple = pad_to_multiple_of or 1
        size = -(-new_num_tokens // multiple) * multiple
        super().resize_token_embeddings(size, 128, mean_resizing)
        sections = self.config.gpt or {}
        self.config.vocab_size = size
        self.config.gpt = {**sections, "model": {**sections["model"], "vocab_size": size}}
        self.gpt.config = config_from_dict(self.config.gpt, "config.json")
        self.gpt.padded_vocab = self.gpt.embedding.num_embeddings
        self.generation_config.suppress_tokens = None  # those that no tokeniser had
        return self.gpt.embedding

    def _check_and_adjust_attn_implementation(
        self, attn_implementation: str | None, *args: Any, **options: Any
    ) -> str:
        if attn_implementation not in (None, "eager"):  # the name that transformers takes for none
            raise UserError(
                f"attn_implementation = {attn_implementation}: expected none: this model has its "
                "own engines; config.json names one, gpt.train.engine"
            )
        return "eager"

    def _set_gradient_checkpointing(
        self,
        enable: bool = True,
        gradient_checkpointing_func: Any = checkpoint,
        every_n_layers: int = 1,
    ) -> None:
        self.gradient_checkpointing = enable
        for layer, block in enumerate(self.gpt.blocks):
            vars(block).pop("forward", None)  # of an earlier call
            if enable and layer % every_n_layers == 0:
                block.forward = partial(gradient_checkpointing_func, block.forward)  # type: ignore[method-assign]

    def create_masks_for_generate(
        self, attention_mask: Tensor | None = None, **_: Any
    ) -> Tensor | None:
        """The padding mask itself, in the place of transformers' 4D masks for a static cache."""
        return attention_mask

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        cache: Cache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        return_dict: bool = True,
        past_key_values: Cache | None = None,  # the name of `cache` before transformers 5.24
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
    ) -> CausalLMOutputWithPast | tuple[Any, ...]:
        """Logits of the last `logits_to_keep` positions (0: all), or of those; with labels the mean
        loss.

        Args:
            input_ids: (B, T) int64, those that follow the cache's content.
            attention_mask: (B, cached + T), 0 at padding, on the left or right.
            labels: (B, T), input_ids or -100; position t is compared with labels[t + 1]. The loss
            is in nats.
            position_ids: (B, T), rising by 1 at the real keys. Where they begin has no effect.
            inputs_embeds: (B, T, C), in the place of input_ids.
            output_hidden_states: also what each block gets, and the final norm's output.
        Raises:
            UserError: padding inside a sequence, a cache for a model that can have none, an id
            beyond the vocabulary, packed sequences, attention weights.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise UserError("input_ids, inputs_embeds: expected one of the two")
        if output_attentions or (output_attentions is None and self.config.output_attentions):
            raise UserError(
                "output_attentions: no engine keeps the weights; "
                "model.gpt.attention_inputs gives the q and k of each layer"
            )
        if input_ids is not None and not torch.compiler.is_compiling():
            self.check_ids(input_ids)
        inputs = inputs_embeds if input_ids is None else input_ids
        assert inputs is not None
        self.choose_engine()
        cache = past_key_values if cache is None else cache
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training
        if self.gradient_checkpointing and torch.is_grad_enabled():
            use_cache = False  # a block that is computed again would append its keys twice
        if (cache is not None or use_cache) and not self.gpt.cacheable:
            raise UserError(
                "use_cache: weights that depend on the number of all keys need use_cache=False"
            )
        if use_cache and cache is None:
            cache = DynamicCache(config=self.config)
        kv_cache = HubCache(cache, inputs.device, self.gpt.end_of_text is not None)
        if attention_mask is not None:
            expected = (inputs.shape[0], kv_cache.length + inputs.shape[1])
            if attention_mask.shape != expected:
                raise UserError(
                    f"attention_mask: shape {tuple(attention_mask.shape)}, expected {expected}"
                )
            kv_cache.spans = mask_spans(attention_mask)
        if position_ids is not None and not torch.compiler.is_compiling():
            check_positions(position_ids, attention_mask)
        length = self.config.rope_length or self.final_length
        rope = RopeScaling(self.config.rope, length)
        unused = cache is None and kv_cache.spans is None
        states: list[Tensor] = []
        hooks = []
        if output_hidden_states or (
            output_hidden_states is None and self.config.output_hidden_states
        ):
            hooks = [
                block.register_forward_pre_hook(lambda _, args: states.append(args[0]))
                for block in self.gpt.blocks
            ]
        try:
            hidden = self.gpt.hidden(inputs, rope, None if unused else kv_cache)
        finally:
            for hook in hooks:
                hook.remove()
        # The layer is called, not its weight read: accelerate's hooks may have to load it.
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        padded_logits = self.gpt.lm_head(hidden[:, kept])
        unscaled = padded_logits[..., : self.config.vocab_size].float()
        logits = scale_logits(unscaled, self.gpt.config.train)
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        all_states = (*states, hidden) if hooks else None
        output = CausalLMOutputWithPast(loss, logits, cache, all_states)
        return output if return_dict else output.to_tuple()

    def check_ids(self, input_ids: Tensor) -> None:
        """The embedding has rows of padding, which an id beyond the vocabulary would read."""
        wrong = (input_ids < 0) | (input_ids >= self.config.vocab_size)
        if wrong.any():
            raise UserError(
                f"input_ids: {int(input_ids[wrong][0])}: expected ids from 0 to "
                f"{self.config.vocab_size - 1}; resize_token_embeddings adds some"
            )

    def choose_engine(self) -> None:
        """Let the model choose its attention engine anew wherever it was moved."""
        parameter = self.gpt.embedding.weight
        where = (parameter.device, parameter.dtype)
        if where != self.engine_chosen_for and not torch.compiler.is_compiling():
            self.gpt.choose_engine(dtype=parameter.dtype)
            self.engine_chosen_for = where

    def generate(  # type: ignore[override]
        self, inputs: Tensor | None = None, generation_config: Any = None, **kwargs: Any
    ) -> Any:
        """transformers' `generate`, with RoPE scaled for the final length from the first token on.

        Without a cache, whatever is asked for, where the model can have none.
        """
        if not self.gpt.cacheable:
            kwargs["use_cache"] = False
        outer = self.final_length  # where this model is its own assistant
        try:
            return super().generate(inputs, generation_config, **kwargs)  # type: ignore[misc]
        finally:
            self.final_length = outer

    def _prepare_generated_length(self, *args: Any, **kwargs: Any) -> Any:
        """Called by `generate` once the length is known from its arguments and both generation
        configs.
        """
        options = super()._prepare_generated_length(*args, **kwargs)  # type: ignore[misc]
        self.final_length = options.max_length
        return options
