"""The fields of a Hugging Face `config.json`, taken one by one, so that fields that no reader took can be refused.

`windows` says how many positions a token of each layer sees. A file says what each layer is (`layer_types`), or its
family has a pattern: all layers, all but each second (Gemma 2, GPT-OSS), fourth (Cohere 2) or sixth (Gemma 3), or those
behind `max_window_layers` (Qwen). Chunks of Llama 4 are not modelled.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping, Sequence
from itertools import islice
from types import MappingProxyType
from typing import Any

from simulator.models.parts import MOST, shown

# Fields that change neither sizes nor work: numerics, tokens, generation, what a file says of itself.
_HARMLESS = """
_attn_implementation _attn_implementation_autoset _from_model_config _name_or_path _sliding_window_pattern activation
activation_dropout activation_function add_bos_token add_classification_head add_cross_attention alpha
apply_query_key_layer_scaling apply_residual_connection_post_layernorm architectures attention_dropout
attention_head_dim attention_layers attention_multiplier attention_probs_dropout attention_probs_dropout_prob
attention_softmax_in_fp32 attention_types attn_implementation attn_logit_softcapping attn_output_multiplier attn_pdrop
attn_scale attn_temperature_tuning auto_map aux_loss_alpha bias_dropout_fusion block_mlp_init_scale block_norm_eps
block_out_init_scale block_use_xavier_init bos_token_id cache_implementation chunk_size_feed_forward cla_share_factor
class_num classifier_dropout clip_qkv conv_use_xavier_init decoder_start_token_id dense_list dropout dtype emb_pdrop
embd_pdrop embed_dropout embedding_dropout embedding_fraction embedding_initializer_range embedding_multiplier
embedding_multiplier_scale enable_bias eod_token_id eos_token_id ep_size experts_per_token ff_factor
final_logit_softcapping floor_scale for_llm_compressor fp32_residual_connection full_attn_mod gradient_checkpointing
group_limited_greedy hidden_act hidden_activation hidden_dropout hidden_dropout_prob id2label im_end_id im_newline_id
im_start_id init_config init_device init_std initial_context_length initializer_range input_jitter_noise
interpolate_factor is_decoder is_encoder_decoder label2id layer_norm_elementwise_affine layer_norm_eps
layer_norm_epsilon layer_switch layer_types layerdrop layernorm_epsilon layernorm_full_attention_beta
layernorm_linear_attention_beta layernorm_mlp_beta logit_scale logits_scaling mask_init_id masked_softmax_fusion
max_attn_value max_window_layers mlp_intermediate_size model_max_length model_type moe_capacity moe_drop_tokens moe_gate
moe_norm_min moe_random_routing_dropped_token mtp_transformer_layers n_ctx n_group no_rope_layer_interval no_rope_layers
norm_eps norm_epsilon norm_topk_prob num_media_embeds num_mtp_modules num_nextn_predict_layers offset_alibi
order_of_interleaved_layers org_vocab_size original_max_position_embeddings original_rope output_attentions
output_hidden_states output_multiplier_scale output_past output_router_logits pad_id pad_token_id partial_rotary_factor
pool_type position_embedding_type prefix pretraining_tp problem_type qk_head_dim quantization_config
query_pre_attn_scalar reorder_and_upcast_attn resid_dropout resid_pdrop residual_dropout residual_multiplier return_dict
rms_norm_eps rope_freq_constant_scaling rope_interleave rope_interleaved rope_local_base_freq rope_parameters rope_ratio
rope_scaling rope_theta rope_type rotary rotary_dim rotary_emb_base rotary_pct routed_scaling_factor
router_aux_loss_coef router_jitter_noise router_z_loss_coef scale_attention_softmax_in_fp32
scale_attn_by_inverse_layer_idx scale_attn_weights scoring_func sep_token_id seq_aux seq_length skip_bias_add
skip_bias_add_qkv sliding_window sliding_window_pattern sliding_window_size slow_but_exact summary_activation
summary_first_dropout summary_proj_to_labels summary_type summary_use_proj swiglu_alpha swiglu_limit
task_specific_params temperature text_end_id text_start_id tokenizer_class tokenizer_name topk_group torch_dtype
torchscript transformers.js_config transformers_version unk_index unk_token_id use_bidirectional_attention use_cache
use_mixed_mlp_moe use_mrope use_mtp use_parallel_embedding use_parallel_residual use_pos_enc use_rotary_pos_emb
use_sliding_window verbose window_size z_loss_coef z_loss_weight
"""
HARMLESS = frozenset(_HARMLESS.split())
COUNT_IT = "count the torch module itself, on the meta device: distlab.measure.workload_from_module"
Windows = tuple[int | None, ...]
TYPES = MappingProxyType(
    {"sliding_attention": True, "local": True, "full_attention": False, "global": False, "chunked_attention": False}
)


class Fields:
    """The fields of a config.json. A reader takes them one by one; `rest` holds the names not taken yet."""

    def __init__(self, values: Mapping[str, object], where: str) -> None:
        self.values, self.where, self.rest = values, where, set(values) - HARMLESS
        self.names: dict[str, str] = {}

    def call(self, **names: str) -> Fields:
        """Say which names this family has for fields."""
        self.names |= names
        return self

    def assume(self, **defaults: int) -> Fields:
        """Give values to fields that the file leaves out or sets to null."""
        for name, value in defaults.items():
            if self.values.get(own := self.names.get(name, name)) is None:
                self.values = {**self.values, own: value}
        return self

    def inner(self, name: str) -> Fields:
        """Return the fields of a table inside of this one; there are none where it is missing.

        Raises:
            ValueError: it is not a table.
        """
        self.rest.discard(name)
        table = self.values.get(name) or {}
        if not isinstance(table, dict):
            raise ValueError(f"{self.where}: {name} is {table!r}; write a table of fields")
        return Fields(table, f"{self.where}: {name}")

    def count(self, name: str, default: int | None = None, *, least: int = 1) -> int:
        """Return a whole number; without a default the field must be there.

        Raises:
            ValueError: it is not there, or no whole number of at least `least`.
        """
        name = self.names.get(name, name)
        self.rest.discard(name)
        value = self.values.get(name)
        if isinstance(value, list) and value and all(each == value[0] for each in value):
            value = value[0]  # one number for each layer
        if value is None and default is not None:
            return default
        if name not in self.values:
            raise ValueError(f"{self.where}: {name} is missing; write a whole number of at least {least}")
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(f"{self.where}: {name} is {reprlib.repr(value)}; write a whole number of at least {least}")
        if value > MOST:
            raise ValueError(f"{self.where}: {name} is {shown(value)}; write at most {MOST:,}")
        return value

    def flag(self, name: str, default: bool = False) -> bool:
        """Return a field that is true or false.

        Raises:
            ValueError: it is neither.
        """
        self.rest.discard(name)
        value = self.values.get(name, default)
        if not isinstance(value, bool):
            raise ValueError(f"{self.where}: {name} is {value!r}; write true or false")
        return value

    def only(self, **modelled: object) -> Fields:
        """Refuse fields with a value that is not modelled; a tuple is several values, the first of them the default.

        Raises:
            ValueError: one has a different value.
        """
        for name, values in modelled.items():
            known = values if isinstance(values, tuple) else (values,)
            self.rest.discard(name)
            if (value := self.values.get(name, known[0])) not in known:
                words = [reprlib.repr(each) if isinstance(each, list) else json.dumps(each) for each in (value, *known)]
                what = f"{self.where}: {name} is {words[0]}; only {' or '.join(words[1:])} is modelled"
                raise ValueError(f"{what}: change it, or {COUNT_IT}")
        return self

    def finish(self) -> None:
        """Refuse fields that were not taken.

        Raises:
            ValueError: there are some.
        """
        if self.rest:
            one = len(self.rest) == 1
            fields, they, change = ("field", "it", "it changes") if one else ("fields", "them", "they change")
            raise ValueError(
                f"{self.where}: unknown {fields} {', '.join(map(repr, sorted(self.rest)))} in a "
                f"{self.values['model_type']} configuration; take {they} out if {change} neither sizes nor work"
            )


def windows(fields: Fields, *, pattern: int = 1, default: int | None = None) -> Windows:
    """Return each layer's window, None where it sees all before it; (): no layer has one.

    Args:
        fields: of the file.
        pattern: one layer in `pattern` has no window; 1: all have one.
        default: the family's window where the file does not say.

    Raises:
        ValueError: a window or a pattern is not a whole number, or layer_types do not fit the layers.
    """
    said = fields.values.get("layer_types")
    if fields.values.get("sliding_window", default) is None:
        return ()
    if said is None:
        pattern = fields.count("sliding_window_pattern", fields.count("_sliding_window_pattern", pattern))
        slides = [pattern == 1 or (layer + 1) % pattern > 0 for layer in range(fields.count("num_hidden_layers"))]
    else:
        slides = _types(fields, "layer_types", said)
    return _of_layers(slides, fields.count("sliding_window", default))


def windows_behind(fields: Fields) -> Windows:
    """Return the windows of Qwen's kind: of layers behind the first max_window_layers, where the file wants any."""
    if not fields.flag("use_sliding_window"):
        return ()
    if fields.values.get("layer_types") is not None:
        return windows(fields, default=4096)
    first, layers = fields.count("max_window_layers", 28, least=0), fields.count("num_hidden_layers")
    if fields.values.get("sliding_window", 4096) is None:
        return ()
    return _of_layers([layer >= first for layer in range(layers)], fields.count("sliding_window", 4096))


def windows_of_neo(fields: Fields) -> Windows:
    """Return the windows of GPT-Neo: `attention_types` says which layers are local, as [[["global", "local"], 12]]."""
    layers = fields.count("num_hidden_layers")
    groups: Any = fields.values.get("attention_types") or [[["global", "local"], layers // 2]]
    try:
        each = (kind for kinds, count in groups for _ in range(count) for kind in kinds)
        said = list(islice(each, layers + 1))  # a count may be huge
    except (TypeError, ValueError):
        raise ValueError(f"{fields.where}: attention_types is {groups!r}; write [[[types], count]]") from None
    return _of_layers(_types(fields, "attention_types", said), fields.count("window_size", 256))


def _types(fields: Fields, name: str, said: object) -> list[bool]:
    """Return which layers have a window, from the type of each."""
    layers = fields.count("num_hidden_layers")
    if not isinstance(said, list) or len(said) != layers:
        count = f"{len(said)} types" if isinstance(said, list) else repr(said)
        raise ValueError(f"{fields.where}: {name} has {count} for {layers} layers; write one for each")
    for each in said:
        if not isinstance(each, str) or each not in TYPES:
            raise ValueError(f"{fields.where}: {name} has {each!r}; only {', '.join(TYPES)} are modelled")
    return [TYPES[each] for each in said]


def _of_layers(slides: Sequence[bool], window: int) -> Windows:
    return tuple(window if each else None for each in slides) if any(slides) else ()
