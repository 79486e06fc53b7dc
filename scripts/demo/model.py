"""The demo model: Qwen3.6-MoE's architecture with its real head sizes, few and narrow layers."""
import math

import torch

from .tokenizer import ADDRESSABLE, IDS, ROWS

TEXT_CONFIG = {
    "attention_bias": False, "attention_dropout": 0.0, "attn_output_gate": True, "bos_token_id": IDS["<|endoftext|>"], "dtype": "bfloat16",
    "eos_token_id": IDS["<|endoftext|>"], "full_attention_interval": 4, "head_dim": 256, "hidden_act": "silu", "hidden_size": 256,
    "initializer_range": 0.02, "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 2, "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_value_head_dim": 128,
    "mamba_ssm_dtype": "float32", "max_position_embeddings": 4096, "mlp_only_layers": [], "model_type": "qwen3_5_moe_text",
    "moe_intermediate_size": 128, "mtp_num_hidden_layers": 0, "mtp_use_dedicated_embeddings": False, "num_attention_heads": 4,
    "num_experts": 16, "num_experts_per_tok": 4, "num_hidden_layers": 8, "num_key_value_heads": 2, "output_router_logits": False,
    "pad_token_id": None, "partial_rotary_factor": 0.25, "rms_norm_eps": 1e-06,
    "rope_parameters": {"mrope_interleaved": True, "mrope_section": [11, 11, 10], "partial_rotary_factor": 0.25, "rope_theta": 10000000, "rope_type": "default"},
    "router_aux_loss_coef": 0.001, "shared_expert_intermediate_size": 128, "tie_word_embeddings": False, "use_cache": True, "vocab_size": ROWS,
}  # fmt: skip

ROOT_CONFIG = {
    "architectures": ["Qwen3_5MoeForConditionalGeneration"], "model_type": "qwen3_5_moe", "language_model_only": True,
    "image_token_id": IDS["<|image_pad|>"], "video_token_id": IDS["<|video_pad|>"], "vision_start_token_id": IDS["<|vision_start|>"],
    "vision_end_token_id": IDS["<|vision_end|>"], "tie_word_embeddings": False, "transformers_version": "5.17.0",
}  # fmt: skip

GENERATION_CONFIG = {
    "bos_token_id": IDS["<|endoftext|>"], "do_sample": True, "eos_token_id": [IDS["<|im_end|>"], IDS["<|endoftext|>"]], "pad_token_id": IDS["<|endoftext|>"],
    "temperature": 0.3, "top_k": 20, "top_p": 0.95, "transformers_version": "5.17.0",
}  # fmt: skip


def build(seed: int = 0):
    """transformers' own text model, with a start that suits training from scratch."""
    from transformers import Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig

    torch.manual_seed(seed)
    skip = ("attn_output_gate", "mlp_only_layers", "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings", "mamba_ssm_dtype", "full_attention_interval")
    config = Qwen3_5MoeTextConfig(**{k: v for k, v in TEXT_CONFIG.items() if k not in skip})
    config.dtype = "float32"
    model = Qwen3_5MoeForCausalLM(config)
    with torch.no_grad():
        for layer in model.model.layers:
            if layer.block_type == "linear_attention":
                # transformers' initial decay forgets within a token or two; start with memories of 10 to 1000 tokens.
                gdn = layer.linear_attn
                heads = gdn.A_log.shape[0]
                step = torch.exp(torch.rand(heads) * (math.log(0.1) - math.log(0.001)) + math.log(0.001))
                gdn.dt_bias.copy_(step + torch.log(-torch.expm1(-step)))
                gdn.A_log.copy_(torch.log(torch.empty(heads).uniform_(1, 8)))
        model.model.embed_tokens.weight[ADDRESSABLE:].normal_(std=0.02)
    return model


def is_nvfp4(name: str) -> bool:
    """The AEON recipe: full attention, experts and shared expert in NVFP4; everything else stays BF16."""
    return ".self_attn." in name and name.endswith("_proj.weight") or ".mlp.experts." in name or ".mlp.shared_expert." in name
