"""Keys of ``model`` of MindFormers, legacy and mcore names alike, to the flat names of our ``model.model_config``.

One name of ours may have several of theirs; what only some family means by a key stands in ``architecture.py``.
"""

from __future__ import annotations

from mindllm.mindformers.experts import keys_below
from mindllm.mindformers.reading import Table, decided, idle, moved, only, refused, used

WEIGHT_LAYOUT = "it only joins weight matrices; the product is the same"
KERNEL = "the kernel is chosen for the device; the result is the same"
INFERENCE = "run_mode predict and chat have their own static key/value cache"
OTHER_ADAPTERS = "adapters other than LoRA (prefix tuning, P-tuning) are not here"
MODEL_SPECIFIC = "a scaling of one model's own code"
SPARSE = "the attention of DeepSeek-V4 is not here yet"
GENERATION = "generation_config"
PICTURES = "models are of text alone: no pictures, no videos"
SOUND = "models are decoders of text: no encoder, no sound"

WRITING: Table = {  # keys of generation: among the keys of the model, or in a separate section
    "do_sample": decided("generation.do_sample"),
    "temperature": decided("generation.temperature"),
    "top_k": decided("generation.top_k"),
    "top_p": decided("generation.top_p"),
    "num_beams": decided("generation.num_beams"),
    "repetition_penalty": decided("generation.repetition_penalty"),
    "max_decode_length": decided("generation.max_new_tokens"),
    "max_new_tokens": decided("generation.max_new_tokens"),
    "max_length": idle("generation.max_new_tokens applies", "generation.max_new_tokens"),
}

CONFIG_KEYS: Table = {
    # properties of a family
    "type": decided("model.model_config.type"),
    "model_type": decided("model.arch.type"),
    "architectures": decided("model.arch.type"),
    "net_name": decided("tie_word_embeddings"),
    "auto_register": idle("code of the user is never run; the architecture is one of mindllm's families"),
    # sizes
    "vocab_size": used(),
    "padded_vocab_size": moved("vocab_size"),
    "hidden_size": used(),
    "num_layers": used(),
    "num_hidden_layers": moved("num_layers"),
    "num_heads": used(),
    "num_attention_heads": moved("num_heads"),
    "n_kv_heads": used(),
    "num_key_value_heads": moved("n_kv_heads"),
    "num_query_groups": moved("n_kv_heads"),
    "multi_query_group_num": decided("n_kv_heads"),
    "multi_query_attention": decided("n_kv_heads"),
    "head_dim": used(),
    "kv_channels": decided("head_dim"),
    "intermediate_size": used(),
    "ffn_hidden_size": moved("intermediate_size"),
    "expand_ratio": decided("intermediate_size"),
    "multiple_of": used(),
    "ffn_dim_multiplier": used(),
    "seq_length": used(),
    "max_position_embedding": decided("max_position_embedding"),
    "max_position_embeddings": decided("max_position_embedding"),
    "pretrain_seqlen": idle("only context scaling uses it"),
    "tie_word_embeddings": used(),
    "untie_embeddings_and_output_weights": decided("tie_word_embeddings"),
    # positions
    "theta": used(),
    "rope_theta": moved("theta"),
    "rotary_base": moved("theta"),
    "rotary_emb_base": decided("theta"),
    "rope_ratio": decided("theta"),
    "rotary_pct": only(1, None, reason="the whole head is turned", otherwise="the whole head is turned in this family"),
    "rotary_percent": only(
        1, None, reason="the whole head is turned", otherwise="the whole head is turned in this family"
    ),
    "rope_scaling": used(),
    "extend_method": decided("rope_scaling"),
    "scaling_factor": decided("rope_scaling"),
    "rotary_scaling_factor": decided("rope_scaling"),
    "position_embedding_type": decided("rope_scaling"),
    "beta_fast": decided("rope_scaling"),
    "beta_slow": decided("rope_scaling"),
    "mscale": decided("rope_scaling"),
    "mscale_all_dim": decided("rope_scaling"),
    "use_llama_rope": only(
        True, None, reason="the only form of this family", otherwise="rotary halves are turned here"
    ),
    # norms, biases, activation
    "rms_norm_eps": used(),
    "layernorm_epsilon": moved("rms_norm_eps"),
    "norm_epsilon": moved("rms_norm_eps"),
    "rmsnorm": decided(),
    "normalization": decided(),
    "post_layer_norm": only(True, None, reason="a norm before the head", otherwise="a decoder ends with a norm here"),
    "apply_residual_connection_post_layernorm": only(
        False,
        None,
        reason="the residual is taken before the norm",
        otherwise="the residual is taken before the norm here",
    ),
    "qk_layernorm": decided(),
    "qkv_has_bias": used(),
    "add_qkv_bias": moved("qkv_has_bias"),
    "attn_proj_has_bias": used(),
    "wo_has_bias": moved("attn_proj_has_bias"),
    "attention_bias": decided("qkv_has_bias"),
    "has_bias": decided("qkv_has_bias"),
    "add_bias_linear": decided(),
    "hidden_act": decided(),
    "gated_linear_unit": decided(),
    "activation_func": decided(),
    # dtypes and initial weights
    "compute_dtype": used(),
    "layernorm_compute_type": used(),
    "layernorm_compute_dtype": moved("layernorm_compute_type"),
    "softmax_compute_type": used(),
    "softmax_compute_dtype": moved("softmax_compute_type"),
    "attention_softmax_in_fp32": decided("softmax_compute_type"),
    "rotary_dtype": used(),
    "param_init_type": decided("param_init_type"),
    "params_dtype": decided("param_init_type"),
    "embedding_init_type": decided("param_init_type"),
    "res_dtype": decided(),
    "residual_dtype": decided(),
    "fp32_residual_connection": decided(),
    "initializer_range": used(),
    "init_method_std": moved("initializer_range"),
    "sigma": moved("initializer_range"),
    "mean": only(0, None, reason="initial weights have mean 0", otherwise="initial weights have mean 0"),
    # distribution
    "offset": decided("offset"),
    "pp_interleave_num": decided("pp_interleave_num"),
    "fine_grain_interleave": decided("fine_grain_interleave"),
    "parallel_optimizer": idle("enable_parallel_optimizer shards the embedding's state as every other"),
    "lm_head_dp": idle("vocab_emb_dp decides how the tables are sharded"),
    "no_recompute_layers": refused("recompute_config has the layers of every stage"),
    "compute_in_2d": idle(KERNEL),
    "rmsnorm_compute_2d": idle(KERNEL),
    "use_flash_attention": decided("use_flash_attention"),
    "use_attn_mask_compression": idle("a causal mask is always compressed"),
    "use_eod_attn_mask_compression": idle("masks follow from where documents begin"),
    "use_ring_attention": decided("parallel_config.context_parallel_algo"),
    "use_fused_rope": idle(KERNEL),
    "use_fused_swiglu": idle(KERNEL),
    "fused_rms_norm": idle(KERNEL),
    "fused_norm": idle(KERNEL),
    "apply_rope_fusion": idle(KERNEL),
    "bias_swiglu_fusion": idle(KERNEL),
    "bias_dropout_fusion": idle(KERNEL),
    "apply_query_key_layer_scaling": idle("attention is scaled once, by the root of head_dim"),
    "qkv_concat": idle(WEIGHT_LAYOUT),
    "mlp_concat": idle(WEIGHT_LAYOUT),
    "mla_qkv_concat": decided(),
    "use_contiguous_weight_layout": idle(WEIGHT_LAYOUT),
    "use_contiguous_weight_layout_attention": idle(WEIGHT_LAYOUT),
    "use_interleaved_weight_layout_mlp": idle(WEIGHT_LAYOUT),
    "input_sliced_sig": decided(),
    "calculate_per_token_loss": idle("a token weighs the same wherever it falls"),
    "return_extra_loss": idle("a dense model has one loss"),
    "use_pad_tokens": idle("padding follows the text and is not attended to"),
    # dropout
    "hidden_dropout": used(),
    "attention_dropout": used(),
    "hidden_dropout_prob": moved("hidden_dropout"),
    "hidden_dropout_rate": moved("hidden_dropout"),
    "attention_dropout_prob": moved("attention_dropout"),
    "attention_dropout_rate": moved("attention_dropout"),
    "emb_dropout_prob": moved("embedding_dropout"),
    "embed_dropout_prob": moved("embedding_dropout"),
    # tokens
    "bos_token_id": used(),
    "eos_token_id": used(),
    "pad_token_id": decided("pad_token_id"),
    "ignore_token_id": only(
        -100, None, reason="labels of -100 have no loss", otherwise="labels without loss are -100 here"
    ),
    "batch_size": idle("runner_config.batch_size applies", "runner_config.batch_size"),
    # weights
    "checkpoint_name_or_path": idle("load_checkpoint applies", "load_checkpoint"),
    # generation
    "use_past": idle(INFERENCE),
    "use_cache": idle(INFERENCE),
    "use_past_shard": idle(INFERENCE),
    "is_dynamic": idle(INFERENCE),
    "block_size": idle(INFERENCE),
    "num_blocks": idle(INFERENCE),
    "num_block": idle(INFERENCE),
    "use_prompt_flash_attention": idle(INFERENCE),
    "use_incre_flash_attention": idle(INFERENCE),
    "quantization_bit": only(0, None, reason="weights are not quantized", otherwise="weights are not quantized here"),
    **WRITING,
    "auto_map.*": idle("code of the user is never run"),
    # not supported
    **keys_below("model.model_config"),
    **{f"pet_config.{key}": used() for key in ["pet_type", "lora_rank", "lora_alpha", "lora_dropout"]},
    "pet_config.target_modules": decided("pet_config.target_modules"),
    "pet_config.freeze_exclude": decided("pet_config.modules_to_save"),
    "pet_config.freeze_include": refused("adapters freeze the complete model"),
    **{
        f"pet_config.{key}": refused(OTHER_ADAPTERS)
        for key in [
            "dropout_prob",
            "dropout_rate",
            "mid_dim",
            "pre_seq_len",
            "prefix_projection",
            "prefix_token_num",
            "projection_dim",
        ]
    },
    "pre_seq_len": only(None, "None", reason="no prefix", otherwise=OTHER_ADAPTERS),
    "prefix_projection": only(False, None, reason="no prefix", otherwise=OTHER_ADAPTERS),
    "num_labels": refused("models are language models"),
    **{
        key: refused(PICTURES)
        for key in ["freeze_vision", "freeze_adapter", "freeze_llm", "num_queries", "vision_model.*", "llm_model.*"]
    },
    **{
        key: refused(SOUND)
        for key in [
            "activation_dropout",
            "activation_function",
            "d_model",
            "decoder_attention_heads",
            "decoder_ffn_dim",
            "decoder_layerdrop",
            "decoder_layers",
            "decoder_start_token_id",
            "dropout",
            "encoder_attention_heads",
            "encoder_ffn_dim",
            "encoder_layerdrop",
            "encoder_layers",
            "is_encoder_decoder",
            "max_source_positions",
            "max_target_positions",
            "num_layers_of_each_stage",
            "num_mel_bins",
        ]
    },
    **{key: refused(MODEL_SPECIFIC) for key in ["alpha", "beta", "mup_scale_factor", "output_mult", "use_mup"]},
    **{
        key: refused(SPARSE)
        for key in [
            "activation_func_clamp_value",
            "apply_dsa_kernel_fusion",
            "compress_ratios",
            "compress_rope_theta",
            "csa_dense_mode",
            "csa_window_size",
            "dsa_indexer_loss_coeff",
            "dsa_indexer_use_sparse_loss",
            "enable_hyper_connections",
            "experimental_attention_variant",
            "index_head_dim",
            "index_n_heads",
            "index_topk",
            "mhc_init_gating_factor",
            "mhc_sinkhorn_iterations",
            "num_hash_layers",
            "num_residual_streams",
            "o_groups",
            "o_lora_rank",
        ]
    },
}

MODEL_KEYS: Table = {
    "model.arch.type": decided("model.arch.type"),
    "model.arch.auto_register": idle("code of the user is never run; the architecture is one of mindllm's families"),
    **{f"model.model_config.{key}": rule for key, rule in CONFIG_KEYS.items()},
    **{f"{GENERATION}.{key}": rule for key, rule in WRITING.items()},
    **{
        f"{GENERATION}.{name}_token_id": idle(
            "that of the model or its tokenizer counts", f"model.model_config.{name}_token_id"
        )
        for name in ("bos", "eos", "pad")
    },
    **{
        f"model.{key}": decided(f"model.model_config.{key}") for key in CONFIG_KEYS if key != "type"
    },  # the PyNative form
}
