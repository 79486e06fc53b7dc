"""The demo's architecture: Qwen3.6-MoE with the real head sizes, everything else small."""
import torch
from transformers import Qwen3_5MoeConfig, Qwen3_5MoeForConditionalGeneration

WORDS = 3488  # BPE entries; 33 added tokens follow
ROWS = 3584  # rows of embedding and head; those beyond the addressable ids are padding, as in the real model
CONTEXT = 2048


def text_config(first_added: int) -> dict:
    end_of_text = first_added
    return dict(
        vocab_size=ROWS,
        hidden_size=256,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=256,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        linear_conv_kernel_dim=4,
        moe_intermediate_size=128,
        shared_expert_intermediate_size=128,
        num_experts=16,
        num_experts_per_tok=4,
        max_position_embeddings=CONTEXT,
        rms_norm_eps=1e-6,
        tie_word_embeddings=False,
        bos_token_id=end_of_text,
        eos_token_id=end_of_text,
        router_aux_loss_coef=0.001,
        output_router_logits=False,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10000000,
            "partial_rotary_factor": 0.25,
            "mrope_interleaved": True,
            "mrope_section": [11, 11, 10],
        },
    )


def make_config(first_added: int) -> Qwen3_5MoeConfig:
    # The vision tower is left out of the checkpoint; the smallest one keeps the class happy while training.
    vision = dict(depth=1, hidden_size=32, intermediate_size=32, num_heads=2, out_hidden_size=256,
                  num_position_embeddings=16)
    return Qwen3_5MoeConfig(text_config=text_config(first_added), vision_config=vision, tie_word_embeddings=False,
                            image_token_id=first_added + 12, video_token_id=first_added + 13,
                            vision_start_token_id=first_added + 9, vision_end_token_id=first_added + 10)


def make_model(first_added: int, seed: int):
    torch.manual_seed(seed)
    model = Qwen3_5MoeForConditionalGeneration(make_config(first_added))
    model.model.visual = None
    return model
