"""Small models of random weights, one of each family that mlx-lm has a kind of cache for.

Equal names give equal bits in every process. Every parameter gets noise, because what a family starts
with (zeros, ones) often switches off the very state that its cache keeps.
"""

import importlib
import importlib.util

import mlx.core as mx
from mlx.utils import tree_map

VOCAB = 128
WINDOW = 16

_SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": False,
}
_MLA = {
    **_SMALL,
    "num_hidden_layers": 2,
    "moe_intermediate_size": 16,
    "num_key_value_heads": 4,
    "n_shared_experts": 1,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "qk_nope_head_dim": 8,
}

CONFIGS = {
    "llama": {**_SMALL, "num_hidden_layers": 2},
    "qwen3": {**_SMALL, "num_hidden_layers": 2, "head_dim": 16},
    "qwen3_next": {
        **_SMALL,
        "num_hidden_layers": 4,
        "head_dim": 16,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "linear_conv_kernel_dim": 4,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "decoder_sparse_step": 1,
        "shared_expert_intermediate_size": 16,
        "moe_intermediate_size": 16,
        "mlp_only_layers": [],
        "partial_rotary_factor": 0.5,
    },
    "gemma3_text": {
        **_SMALL,
        "num_hidden_layers": 4,
        "head_dim": 16,
        "sliding_window": WINDOW,
        "sliding_window_pattern": 2,
    },
    "gemma4_text": {
        **_SMALL,
        "num_hidden_layers": 4,
        "head_dim": 16,
        "global_head_dim": 32,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCAB,
        "num_kv_shared_layers": 2,
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "tie_word_embeddings": True,
    },
    "mamba": {
        **_SMALL,
        "num_hidden_layers": 2,
        "state_size": 4,
        "conv_kernel": 4,
        "use_bias": False,
        "use_conv_bias": True,
        "time_step_rank": 4,
    },
    "mamba2": {
        **_SMALL,
        "num_hidden_layers": 2,
        "num_heads": 8,
        "head_dim": 8,
        "state_size": 8,
        "conv_kernel": 4,
        "n_groups": 2,
        "layer_norm_epsilon": 1e-5,
        "use_bias": False,
        "use_conv_bias": True,
        "time_step_limit": (0.0, float("inf")),
        "time_step_rank": 4,
    },
    "rwkv7": {
        **_SMALL,
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "head_dim": 32,
        "norm_eps": 1e-5,
        "a_low_rank_dim": 8,
        "v_low_rank_dim": 8,
        "gate_low_rank_dim": 8,
        "decay_low_rank_dim": 8,
    },
    "nemotron_h": {
        **_SMALL,
        "num_hidden_layers": 4,
        "attention_bias": False,
        "mamba_num_heads": 4,
        "mamba_head_dim": 8,
        "mamba_proj_bias": False,
        "ssm_state_size": 8,
        "conv_kernel": 4,
        "n_groups": 2,
        "mlp_bias": False,
        "layer_norm_epsilon": 1e-5,
        "use_bias": False,
        "use_conv_bias": True,
        "hybrid_override_pattern": ["M", "-", "*", "M"],
    },
    "lfm2": {
        **_SMALL,
        "num_hidden_layers": 3,
        "norm_eps": 1e-5,
        "conv_bias": False,
        "conv_L_cache": 3,
        "block_dim": 32,
        "block_ff_dim": 48,
        "block_multiple_of": 8,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
        "full_attn_idxs": [1],
    },
    "jamba": {
        **_SMALL,
        "num_hidden_layers": 4,
        "attn_layer_offset": 1,
        "attn_layer_period": 4,
        "expert_layer_offset": 1,
        "expert_layer_period": 2,
        "mamba_d_conv": 4,
        "mamba_d_state": 8,
        "mamba_expand": 2,
        "num_experts": 2,
        "num_experts_per_tok": 1,
    },
    "falcon_h1": {
        **_SMALL,
        "num_hidden_layers": 2,
        "head_dim": 16,
        "mamba_d_head": 8,
        "mamba_d_ssm": 32,
        "mamba_d_state": 8,
        "mamba_n_heads": 4,
        "mamba_n_groups": 1,
    },
    "baichuan_m1": {
        **_SMALL,
        "num_hidden_layers": 2,
        "conv_window": 2,
        "sliding_window": WINDOW,
        "sliding_window_layers": [0],
    },
    "deepseek_v3": _MLA,
    "deepseek_v32": {**_MLA, "index_head_dim": 16, "index_n_heads": 4, "index_topk": 8},
    "deepseek_v41": {
        **_SMALL,
        "num_hidden_layers": 4,
        "head_dim": 32,
        "q_lora_rank": 24,
        "qk_rope_head_dim": 8,
        "o_groups": 2,
        "o_lora_rank": 16,
        "moe_intermediate_size": 16,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": WINDOW,
        "compress_ratios": (0, 4, 4, 1),
        "kv_source_layer_ids": (1, 3),
        "index_source_layer_ids": (1, 2, 3),
        "index_n_heads": 4,
        "index_head_dim": 32,
        "index_topk": 3,
        "candidate_source_layer_id": 3,
        "candidate_topk_blocks": 2,
        "candidate_block_size": 2,
    },
    "longcat_flash_ngram": {
        **_SMALL,
        "num_layers": 2,
        "ffn_hidden_size": 32,
        "expert_ffn_hidden_size": 16,
        "moe_topk": 2,
        "n_routed_experts": 4,
        "zero_expert_num": 1,
        "zero_expert_type": "identity",
        "kv_lora_rank": 16,
        "q_lora_rank": 24,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "routed_scaling_factor": 1.0,
        "mla_scale_q_lora": True,
        "mla_scale_kv_lora": True,
        "attention_bias": False,
        "ngram_vocab_size_ratio": 2,
        "emb_neighbor_num": 4,
        "emb_split_num": 2,
    },
    "gpt_oss": {
        **_SMALL,
        "num_hidden_layers": 2,
        "head_dim": 16,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "llama4": {
        "text_config": {
            **_SMALL,
            "model_type": "llama4_text",
            "num_hidden_layers": 4,
            "head_dim": 16,
            "attention_bias": False,
            "attention_chunk_size": WINDOW,
            "interleave_moe_layer_step": 4,
            "intermediate_size_mlp": 48,
            "num_experts_per_tok": 1,
            "num_local_experts": 2,
            "rope_scaling": None,
            "use_qk_norm": True,
        }
    },
    "recurrent_gemma": {
        **_SMALL,
        "num_hidden_layers": 3,
        "head_dim": 8,
        "num_key_value_heads": 1,
        "attention_bias": False,
        "conv1d_width": 4,
        "logits_soft_cap": 30.0,
        "attention_window_size": WINDOW,
        "embeddings_scale_by_sqrt_dim": True,
        "block_types": ["recurrent", "recurrent", "attention"],
    },
}
"""By the name of the family's module in mlx-lm."""
CONFIGS = {
    name: CONFIGS[name] for name in CONFIGS if importlib.util.find_spec(f"mlx_lm.models.{name}")
}


def build(family, dtype="float32", **changes):
    """A model of a family, its parameters cast; one that is not in `CONFIGS` needs `changes`."""
    module = importlib.import_module(f"mlx_lm.models.{family}")
    config = {"model_type": family, **CONFIGS.get(family, _SMALL), **changes}
    mx.random.seed(7)
    model = module.Model(module.ModelArgs.from_dict(config))

    def noisy(parameter):
        if not mx.issubdtype(parameter.dtype, mx.floating):
            return parameter
        return parameter + 0.2 * mx.random.normal(parameter.shape)

    model.update(tree_map(noisy, model.parameters()))
    model.set_dtype(getattr(mx, dtype))
    mx.eval(model.parameters())
    return model


def tokens(count, seed=1):
    """Token ids that a model of these has."""
    return [(7919 * (index + 13 * seed) ** 2 + index) % VOCAB for index in range(count)]
