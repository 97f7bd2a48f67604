"""Tiny random models of the decoders that transformers can build, and of the forms that checkpoints come in."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

from benchmarks.support.packed_checkpoints import can_rewrite, rewrite

VOCAB = 512
_SIZES: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": VOCAB, "max_position_embeddings": 512,
}  # fmt: skip
_TOKENS: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_DEVIATION = 0.12
"""Of the weights: answers are far from uniform, and no layer's part drowns."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """A transformers model type with the options of a tiny model, and the checkpoints that people run of it."""

    name: str
    kind: str
    options: dict[str, Any] = field(default_factory=dict)
    checkpoints: str = ""
    text: str = ""
    """Model type of the text decoder that a wrapper with towers holds; `options` are the wrapper's."""
    stored: dict[str, Any] | None = None
    """A `quantization_config`: the checkpoint's linears are in this form, or it only claims to be."""

    def save(self, folder: Path, dtype: torch.dtype = torch.float32) -> None:
        """Build the model and save it as a checkpoint, and beside one in another form its plain twin.

        Raises what transformers raises.
        """
        torch.manual_seed(1)
        # None leaves an option to the configuration's class.
        options = {key: value for key, value in {**_SIZES, **_TOKENS, **self.options}.items() if value is not None}
        auto: Any = AutoModelForCausalLM
        if self.text:
            text = {**_SIZES, **_TOKENS, "model_type": self.text, **self.options.get("text_config", {})}
            options, auto = {**_TOKENS, **self.options, "text_config": text}, AutoModelForImageTextToText
        model = auto.from_config(AutoConfig.for_model(self.kind, **options), dtype=dtype)
        _spread(model)
        model.eval().save_pretrained(folder)
        if self.stored is not None and can_rewrite(self.stored):
            rewrite(folder, self.stored)
        elif self.stored is not None:
            path = folder / "config.json"
            path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": self.stored}))


def _spread(model: PreTrainedModel) -> None:
    """Draw matrices anew, wider than transformers does; norms, decays and convolutions keep their values."""
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        matrix = 2 <= parameter.dim() <= 3 and parameter.shape[-1] > 4
        if name.endswith("sinks"):
            nn.init.normal_(parameter, generator=generator)
        elif matrix and not any(part in name for part in ("conv", "A_log", "dt", "norm")):
            nn.init.normal_(parameter, std=_DEVIATION, generator=generator)


def _make(name: str, kind: str = "", checkpoints: str = "", **options: Any) -> Architecture:
    return Architecture(name, kind or name, options, checkpoints)


_ALTERNATING: dict[str, Any] = {"sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"] * 2}
_GEMMA: dict[str, Any] = {**_ALTERNATING, "query_pre_attn_scalar": 16}
_LOCAL: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}
_EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
_ROUTED: dict[str, Any] = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "n_shared_experts": 1,
    "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
}  # fmt: skip
_LATENT: dict[str, Any] = {
    "num_key_value_heads": 4, "head_dim": 8, "q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16, "v_head_dim": 16,
}  # fmt: skip
_DELTA: dict[str, Any] = {
    "linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
}  # fmt: skip
_MAMBA: dict[str, Any] = {
    "mamba_n_heads": 8, "mamba_d_state": 16, "mamba_n_groups": 1, "mamba_d_head": 16, "mamba_chunk_size": 16,
}  # fmt: skip
_CONV: dict[str, Any] = {"layer_types": ["conv", "conv", "full_attention", "conv"]}
_NEMOTRON_H: dict[str, Any] = {
    "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention"], "ssm_state_size": 16,
    "mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 2, "chunk_size": 16,
}  # fmt: skip
_GEMMA4: dict[str, Any] = {
    **_ALTERNATING, "head_dim": 16, "global_head_dim": 32, "vocab_size_per_layer_input": VOCAB,
    "hidden_size_per_layer_input": 8,
}  # fmt: skip
_LINEAR3 = ["linear_attention", "linear_attention", "full_attention", "linear_attention"]
_GPT: dict[str, Any] = {"n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 512}


def _rope(kind: str, theta: float, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": theta, **more}}


_LLAMA3 = _rope(
    "llama3", 5e5, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=128
)
_YARN = _rope("yarn", 1e6, factor=16.0, original_max_position_embeddings=128, llama_4_scaling_beta=0.1)
_TOWER: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 14,
}  # fmt: skip
_QWEN_TOWER: dict[str, Any] = {
    "depth": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "patch_size": 14, "spatial_merge_size": 2,
    "out_hidden_size": 64,
}  # fmt: skip
_QWEN2_TOWER: dict[str, Any] = {
    "depth": 1, "hidden_size": 64, "embed_dim": 32, "mlp_ratio": 2, "num_heads": 2, "patch_size": 14,
    "spatial_merge_size": 2,
}  # fmt: skip
_QWEN3_TOWER: dict[str, Any] = {**_QWEN_TOWER, "deepstack_visual_indexes": [0], "num_position_embeddings": 16}
_SECTIONS = _rope("default", 1e6, mrope_section=[2, 3, 3])
PLACEHOLDERS = range(500, VOCAB)
"""Tokens that wrappers with towers replace by images, or that surround these."""
_IDS = dict(
    zip(
        ("image_token_id", "image_token_index", "video_token_id", "vision_start_token_id", "vision_end_token_id",
         "boi_token_id", "eoi_token_id", "boi_token_index", "eoi_token_index", "boa_token_id", "eoa_token_index",
         "audio_token_id"),
        PLACEHOLDERS,
        strict=True,
    )
)  # fmt: skip


def _wrap(
    name: str, kind: str, text: str, checkpoints: str, vision: Any, inner: Any = None, **more: Any
) -> Architecture:
    options = {**_IDS, "vision_config": vision, "text_config": inner or {}, **more}
    return Architecture(name, kind, options, checkpoints, text)


def _stored(architecture: str = "llama", options: dict[str, Any] | None = None, **config: Any) -> Architecture:
    name = config.get("format") or config["quant_method"]
    return Architecture(f"stored as {name}", architecture, options or {}, "", stored=config)


def _w4a16(**weights: Any) -> dict[str, Any]:
    return {"group_0": {"weights": {"num_bits": 4, "type": "int", **weights}, "targets": ["Linear"]}}


ARCHITECTURES: tuple[Architecture, ...] = (
    # -- what people run on Jetsons
    _make("llama (3.x rope)", "llama", "Llama 3.1, 3.2, 3.3", **_LLAMA3),
    _make(
        "llama (yarn)",
        "llama",
        "Llama with YaRN",
        **_rope("yarn", 1e4, factor=4.0, original_max_position_embeddings=128),
    ),
    _make("llama", "", "Llama 2, SmolLM 1 and 2, TinyLlama, DeepSeek-R1-Distill-Llama"),
    _make("smollm3", "", "SmolLM 3"),
    _make("qwen2", "", "Qwen 2, Qwen 2.5, DeepSeek-R1-Distill-Qwen"),
    _make("qwen3", "", "Qwen 3 dense"),
    _make("qwen3_moe", "", "Qwen3-30B-A3B", **_EXPERTS),
    _make("qwen3_5_text", "", "Qwen 3.5, text alone", **_DELTA),
    _wrap("qwen3_5 (as released)", "qwen3_5", "qwen3_5_text", "Qwen 3.5, as released", _QWEN_TOWER, _DELTA),
    _make("qwen3_5_moe_text", "", "Qwen3.5-35B-A3B", shared_expert_intermediate_size=64, **_DELTA, **_EXPERTS),
    _make("qwen3_next", "", "Qwen3-Next", shared_expert_intermediate_size=64, **_DELTA, **_EXPERTS),
    _make(
        "gemma",
        "",
        "Gemma 1",
    ),
    _make("gemma2", "", "Gemma 2", sliding_window=24, query_pre_attn_scalar=16),
    _make("gemma3_text", "", "Gemma 3 270M and 1B", **_GEMMA),
    _wrap(
        "gemma3 (with towers)",
        "gemma3",
        "gemma3_text",
        "Gemma 3 from 4B",
        {**_TOWER, "model_type": "siglip_vision_model"},
        _GEMMA,
        mm_tokens_per_image=4,
    ),
    _make(
        "gemma3n_text",
        "",
        "Gemma 3n",
        sliding_window=24,
        num_kv_shared_layers=2,
        layer_types=["sliding_attention", "full_attention"] * 2,
        vocab_size_per_layer_input=VOCAB,
        hidden_size_per_layer_input=8,
        laurel_rank=8,
    ),
    _make("gemma4_text (E2B, E4B)", "gemma4_text", "Gemma 4 E2B, E4B", num_kv_shared_layers=2, **_GEMMA4),
    _make(
        "gemma4_text (31B)",
        "gemma4_text",
        "Gemma 4 31B",
        attention_k_eq_v=True,
        num_global_key_value_heads=1,
        **{**_GEMMA4, "hidden_size_per_layer_input": 0},
    ),
    _make("phi3", "", "Phi-3, Phi-4, Phi-4-mini"),
    _make(
        "phi3 (longrope)",
        "phi3",
        "Phi-3.5-mini",
        **_rope("longrope", 1e4, short_factor=[1.0] * 8, long_factor=[4.0] * 8, original_max_position_embeddings=256),
    ),
    _make("phimoe", "", "Phi-3.5-MoE", **_LOCAL),
    _make("phi", "", "Phi-1.5, Phi-2", num_key_value_heads=4),
    _make("mistral", "", "Mistral 7B, Mistral NeMo", sliding_window=24),
    _make("ministral", "", "Ministral 8B", **_ALTERNATING),
    _make("ministral3", "", "Ministral 3, text alone", **_YARN),
    _wrap(
        "mistral3 (with towers)",
        "mistral3",
        "ministral3",
        "Ministral 3 and Mistral Small 3.2, as released",
        {**_TOWER, "model_type": "pixtral", "head_dim": 16},
        _YARN,
        spatial_merge_size=2,
    ),
    _make("mixtral", "", "Mixtral", **_LOCAL),
    _make("gpt_oss", "", "gpt-oss", **_ALTERNATING, **_LOCAL),
    _make("lfm2", "", "LFM2, LFM2.5", block_auto_adjust_ff_dim=False, **_CONV),
    _make("lfm2_moe", "", "LFM2-8B-A1B", num_dense_layers=1, **_CONV, **_EXPERTS),
    _make(
        "granite",
        "",
        "Granite 3, Granite 4 micro",
        embedding_multiplier=12.0,
        residual_multiplier=0.22,
        attention_multiplier=0.25,
        logits_scaling=8.0,
    ),
    _make(
        "granitemoehybrid (mamba)",
        "granitemoehybrid",
        "Granite 4 h",
        num_local_experts=4,
        shared_intermediate_size=64,
        layer_types=_LINEAR3,
        **_MAMBA,
    ),
    _make(
        "granitemoehybrid (dense)",
        "granitemoehybrid",
        "Granite 4 without Mamba",
        num_local_experts=0,
        num_experts_per_tok=0,
        shared_intermediate_size=128,
        layer_types=["full_attention"] * 4,
        position_embedding_type="rope",
        **_MAMBA,
    ),
    _make("nemotron", "", "Minitron, Nemotron 4"),
    _make("nemotron_h", "", "Nemotron 2, Nemotron Nano 3", **_NEMOTRON_H),
    _make("falcon_h1", "", "Falcon-H1", mamba_d_ssm=128, **_MAMBA),
    _make("exaone4", "", "EXAONE 4", **_ALTERNATING),
    _make("glm4", "", "GLM 4"),
    _make("glm4_moe_lite", "", "GLM-4.7-Flash", **_LATENT, **_ROUTED),
    _make("deepseek_v2", "", "DeepSeek-V2-Lite", **_LATENT, **_ROUTED),
    _make("olmo2", "", "OLMo 2"),
    _make("olmo3", "", "OLMo 3", **_ALTERNATING),
    _make("hunyuan_v1_dense", "", "Hunyuan 0.5B to 7B"),
    _make("hunyuan_v1_moe", "", "Hunyuan-A13B", num_experts=4, moe_topk=2),
    _make("ernie4_5", "", "ERNIE 4.5 0.3B"),
    _wrap("qwen2_vl", "qwen2_vl", "qwen2_vl_text", "Qwen2-VL", _QWEN2_TOWER, _SECTIONS),
    _wrap("qwen2_5_vl", "qwen2_5_vl", "qwen2_5_vl_text", "Qwen2.5-VL, Cosmos-Reason 1", _QWEN_TOWER, _SECTIONS),
    _wrap("qwen3_vl", "qwen3_vl", "qwen3_vl_text", "Qwen3-VL, Cosmos-Reason 2", _QWEN3_TOWER, _SECTIONS),
    _wrap(
        "qwen3_vl_moe",
        "qwen3_vl_moe",
        "qwen3_vl_moe_text",
        "Qwen3-VL-30B-A3B",
        _QWEN3_TOWER,
        {**_SECTIONS, **_EXPERTS, "moe_intermediate_size": 48},
    ),
    _wrap("smolvlm", "smolvlm", "llama", "SmolVLM", {**_TOWER, "model_type": "smolvlm_vision"}, scale_factor=2),
    _wrap("llava", "llava", "llama", "LLaVA", {**_TOWER, "model_type": "clip_vision_model"}),
    _make("gpt_neox", "", "Pythia"),
    _make("starcoder2", "", "StarCoder 2", sliding_window=24),
    # -- others
    *(
        _make(kind)
        for kind in (
            "olmo",
            "apertus",
            "seed_oss",
            "arcee",
            "helium",
            "bitnet",
            "internlm3",
            "glm",
            "nanochat",
            "diffllama",
            "doge",
            "jais2",
            "hyperclovax",
            "rwkv",
            "hrm_text",
            "biogpt",
        )
    ),
    _make("stablelm", use_qkv_bias=True),
    _make("cohere", logit_scale=0.25),
    _make("cohere2", logit_scale=0.25, **_ALTERNATING),
    _make("vaultgemma", sliding_window=24, query_pre_attn_scalar=16),
    _make("cwm", sliding_window=24),
    _make("granite_swa", **_ALTERNATING),
    _make("persimmon", num_key_value_heads=4),
    _make("gpt2", **_GPT),
    _make("gptj", rotary_dim=8, **_GPT),
    _make("codegen", rotary_dim=8, **_GPT),
    _make("gpt_bigcode", **_GPT),
    _make("gpt_neo", num_layers=4, attention_types=[[["global", "local"], 2]], window_size=24),
    _make("opt", ffn_dim=128, word_embed_proj_dim=64),
    _make("bloom", n_layer=4, n_head=4),
    _make("falcon", new_decoder_architecture=True, num_kv_heads=2, head_dim=None),
    _make("mpt", d_model=64, n_heads=4, n_layers=4, max_seq_len=512, expansion_ratio=2),
    _make("qwen2_moe", shared_expert_intermediate_size=64, **_EXPERTS),
    _make("olmoe", **_EXPERTS),
    _make("flex_olmo", **_EXPERTS),
    _make("laguna", **_EXPERTS),
    _make("granitemoe", **_LOCAL),
    _make("granitemoeshared", shared_intermediate_size=64, **_LOCAL),
    _make("minimax_m2", **_LOCAL),
    _make("jetmoe", kv_channels=16, **_LOCAL),
    _make("llama4_text", intermediate_size_mlp=128, **_LOCAL),
    _make("granitemoe_swa", **_ALTERNATING, **_LOCAL),
    _make("minimax_m3_vl_text", **_LOCAL),
    _make("glm4_moe", **_ROUTED),
    _make("dots1", **{"num_key_value_heads": 4, **_ROUTED}),
    _make("solar_open", **_ROUTED),
    _make("ernie4_5_moe", moe_num_experts=4, moe_k=2, moe_intermediate_size=64),
    _make(
        "exaone_moe", num_shared_experts=1, first_k_dense_replace=1, n_group=1, topk_group=1, **_ALTERNATING, **_EXPERTS
    ),
    _make("afmoe", sliding_window=24, num_shared_experts=1, num_dense_layers=1, **_EXPERTS),
    _make("mellum", **_ALTERNATING, **_EXPERTS),
    _make("cohere2_moe", sliding_window=24, **_EXPERTS),
    _make("hy_v3", num_shared_experts=1, first_k_dense_replace=1, **_EXPERTS),
    _make("flint", shared_expert_intermediate_size=64, mlp_only_layers=[0], **_ALTERNATING, **_EXPERTS),
    _make("kolibri1", shared_expert_intermediate_size=64, **_ALTERNATING, **_EXPERTS),
    _make("olmo_hybrid", **{"num_key_value_heads": 4, **_DELTA}),
    _make("lfm3", sliding_window=24, layer_types=["conv", "conv", "full_attention", "sliding_attention"]),
    _make(
        "kimi_linear",
        **{**_LATENT, "q_lora_rank": None},
        layer_types=_LINEAR3,
        linear_head_dim=16,
        linear_num_heads=4,
        num_experts=4,
        num_experts_per_token=2,
        moe_intermediate_size=64,
        num_shared_experts=1,
        num_expert_group=1,
        topk_group=1,
    ),
    _make(
        "nemotron_h (moe)",
        "nemotron_h",
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        moe_shared_expert_intermediate_size=64,
        **{**_NEMOTRON_H, "layers_block_type": ["linear_attention", "moe", "full_attention", "linear_attention"]},
    ),
    _make("bamba", attn_layer_indices=[2], **_MAMBA),
    _make(
        "jamba",
        attn_layer_period=2,
        attn_layer_offset=1,
        expert_layer_period=2,
        expert_layer_offset=1,
        num_experts=4,
        num_experts_per_tok=2,
        mamba_d_state=8,
    ),
    _make(
        "zamba2",
        layers_block_type=["linear_attention", "hybrid"] * 2,
        num_key_value_heads=4,
        n_mamba_heads=8,
        mamba_d_state=16,
        chunk_size=16,
    ),
    _make("falcon_mamba", state_size=8),
    _make("mamba", state_size=8),
    _make("mamba2", num_heads=8, head_dim=16, state_size=16, n_groups=1, chunk_size=16),
    _make("recurrent_gemma", lru_width=64, attention_window_size=24),
    _make("xlstm", num_heads=4),
    _make("minimax", block_size=16, **_LOCAL),
    _make(
        "bailing_hybrid",
        layer_group_size=4,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        **_LATENT,
    ),
    _make("zaya", num_experts=4, moe_intermediate_size=64, router_hidden_size=16),
    _make(
        "qwen4_exp_text",
        shared_expert_intermediate_size=64,
        hc_lowrank=16,
        layer_types=["linear_attention"] * 3 + ["indexed_attention"],
        indexer_n_heads=2,
        indexer_kv_heads=1,
        indexer_head_dim=16,
        indexer_budget=16,
        indexer_compress_ratio=4,
        **_DELTA,
        **_EXPERTS,
    ),
    _make("deepseek_v3", **_LATENT, **_ROUTED),
    _make("minicpm3", **_LATENT),
    _make("youtu", **_LATENT),
    _make("deepseek_v32", index_n_heads=2, index_head_dim=16, index_topk=16, **_LATENT, **_ROUTED),
    _make(
        "mimo_v2_flash",
        v_head_dim=8,
        sliding_window=24,
        layer_types=["full_attention", "sliding_attention"] * 2,
        **_ROUTED,
    ),
    _make(
        "gemma4_text (26B-A4B)",
        "gemma4_text",
        enable_moe_block=True,
        attention_k_eq_v=True,
        num_global_key_value_heads=1,
        num_experts=4,
        top_k_experts=2,
        moe_intermediate_size=64,
        **{**_GEMMA4, "hidden_size_per_layer_input": 0},
    ),
    _make(
        "gemma4_unified_text", attention_k_eq_v=True, num_global_key_value_heads=1, **_ALTERNATING, global_head_dim=32
    ),
    _wrap(
        "gemma4 (as released)",
        "gemma4",
        "gemma4_text",
        "",
        {
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "position_embedding_size": 64,
        },
        {"num_kv_shared_layers": 2, **_GEMMA4},
    ),
    _wrap(
        "mistral3 (around mistral)",
        "mistral3",
        "mistral",
        "",
        {**_TOWER, "model_type": "pixtral", "head_dim": 16},
        spatial_merge_size=2,
    ),
    _wrap(
        "lfm2_vl",
        "lfm2_vl",
        "lfm2",
        "",
        {**_TOWER, "model_type": "siglip2_vision_model", "num_patches": 4},
        {"block_auto_adjust_ff_dim": False, **_CONV},
    ),
    _wrap(
        "muse_glimmer",
        "muse_glimmer",
        "muse_glimmer_text",
        "",
        {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2},
        {"sliding_window": 24},
    ),
    _wrap(
        "internvl",
        "internvl",
        "qwen3",
        "",
        {**_TOWER, "model_type": "internvl_vision", "image_size": [28, 28], "patch_size": [14, 14]},
    ),
    # -- forms of checkpoints; of those that are refused only what is said at start counts, their weights are plain here
    _stored(
        quant_method="compressed-tensors",
        format="pack-quantized",
        config_groups=_w4a16(symmetric=False, strategy="group", group_size=32),
    ),
    _stored(quant_method="compressed-tensors", format="float-quantized"),
    _stored(quant_method="compressed-tensors", format="nvfp4-pack-quantized", config_groups={}),
    _stored(quant_method="modelopt", quant_algo="NVFP4"),
    _stored("gpt_oss", {**_ALTERNATING, **_LOCAL}, quant_method="mxfp4"),
    _stored(quant_method="fp8", weight_block_size=[48, 40]),
    _stored(quant_method="gptq", bits=4, group_size=64, sym=False),
    _stored(quant_method="awq", bits=4, group_size=32),
    _stored(quant_method="bitnet"),
    _stored(quant_method="auto-round", bits=4, group_size=128),
)
"""Every architecture and form, those that people run on Jetsons first."""
