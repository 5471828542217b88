"""Language models of ``transformers`` that were chosen before they were run; see ``chosen.md``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from zoo.case import Batch, Case, model_loss, tokens
from zoo.lazy import Library

__all__ = ["CASES"]

transformers = Library("transformers")

WORDS, LENGTH, CLASSES = 64, 7, 5
IDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
Sizes = Mapping[str, Any]


def _model(head: str, sizes: Callable[[int, float], Sizes]) -> Callable[[int, float], nn.Module]:
    def make(width: int, dropout: float) -> nn.Module:
        kind = getattr(transformers, head)
        return kind(kind.config_class(vocab_size=WORDS, **{**IDS, **sizes(width, dropout)}))

    return make


def _decoder(width: int, dropout: float) -> dict[str, Any]:
    return {
        **{"hidden_size": width, "intermediate_size": 2 * width, "max_position_embeddings": 32},
        **{"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2},
        **{"head_dim": width // 4, "attention_dropout": dropout, "use_cache": False},
    }


def _experts(width: int, dropout: float, **more: Any) -> Sizes:
    return {**_decoder(width, dropout), "num_experts_per_tok": 2, **more}


def _qwen3_moe(width: int, dropout: float) -> Sizes:
    return _experts(width, dropout, num_experts=4, moe_intermediate_size=width, norm_topk_prob=True)


def _olmoe(width: int, dropout: float) -> Sizes:
    sizes = _experts(width, dropout, num_experts=4)
    return {k: v for k, v in sizes.items() if k != "head_dim"}


def _gpt_oss(width: int, dropout: float) -> Sizes:
    windows = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
    return _experts(width, dropout, num_local_experts=4, **windows)


def _deepseek(width: int, dropout: float) -> Sizes:
    sizes = {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "n_shared_experts": 1}
    latent = {"kv_lora_rank": width // 2, "q_lora_rank": width // 2, "v_head_dim": width // 4}
    heads = {"qk_nope_head_dim": width // 4, "qk_rope_head_dim": width // 4}
    more = {"moe_intermediate_size": width, "first_k_dense_replace": 1, "num_key_value_heads": 4}
    found = _experts(width, dropout, **sizes, **latent, **heads, **more)
    return {k: v for k, v in found.items() if k != "head_dim"}


def _jamba(width: int, dropout: float) -> Sizes:
    turns = {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2}
    states = {"mamba_d_state": 4, "mamba_dt_rank": 4, "use_mamba_kernels": False}
    sizes = _experts(width, dropout, num_experts=3, expert_layer_offset=1, **turns, **states)
    return {k: v for k, v in sizes.items() if k != "head_dim"}


def _mamba2(width: int, dropout: float) -> Sizes:
    sizes = {"hidden_size": width, "num_hidden_layers": 2, "state_size": 4, "use_cache": False}
    return {**sizes, "expand": 2, "num_heads": 4, "head_dim": width // 2, "n_groups": 1,
            "chunk_size": 4}  # fmt: skip


def _falcon_mamba(width: int, dropout: float) -> Sizes:
    return {"hidden_size": width, "num_hidden_layers": 2, "state_size": 4, "use_cache": False}


def _rwkv(width: int, dropout: float) -> Sizes:
    sizes = {"hidden_size": width, "attention_hidden_size": width, "num_hidden_layers": 2}
    return {**sizes, "context_length": 32, "intermediate_size": 2 * width, "use_cache": False}


def _switch(width: int, dropout: float) -> Sizes:
    sizes = {"d_model": width, "d_kv": width // 4, "d_ff": 2 * width, "num_heads": 4}
    sparse = {"num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1, "num_experts": 3}
    layers = {"num_layers": 2, "num_decoder_layers": 2, "expert_capacity": 3}
    more = {"dropout_rate": dropout, "use_cache": False, "router_jitter_noise": 0.0}
    return {**sizes, **sparse, **layers, **more, "decoder_start_token_id": 0}


def _gemma3(width: int, dropout: float) -> Sizes:
    windows = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
    return {**_decoder(width, dropout), **windows}


def _cohere(width: int, dropout: float) -> Sizes:
    return {k: v for k, v in _decoder(width, dropout).items() if k != "head_dim"}


def _falcon(width: int, dropout: float) -> Sizes:
    sizes = {"hidden_size": width, "num_hidden_layers": 2, "num_attention_heads": 4}
    rates = {"hidden_dropout": dropout, "attention_dropout": dropout}
    return {**sizes, **rates, "multi_query": True, "parallel_attn": True, "use_cache": False}


def _encoder(width: int, dropout: float) -> dict[str, Any]:
    return {
        **{"hidden_size": width, "intermediate_size": 2 * width, "max_position_embeddings": 32},
        **{"num_hidden_layers": 2, "num_attention_heads": 4, "num_labels": CLASSES},
        **{"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout},
    }


def _modernbert(width: int, dropout: float) -> Sizes:
    sizes = {k: v for k, v in _encoder(width, dropout).items() if not k.endswith("_prob")}
    rates = {"attention_dropout": dropout, "embedding_dropout": dropout, "mlp_dropout": dropout}
    windows = {"global_attn_every_n_layers": 2, "local_attention": 4}
    ids = {"cls_token_id": 1, "sep_token_id": 2}
    return {**sizes, **rates, **windows, **ids, "classifier_dropout": dropout}


def _longformer(width: int, dropout: float) -> Sizes:
    return {**_encoder(width, dropout), "attention_window": 4, "sep_token_id": 2}


def _big_bird(width: int, dropout: float) -> Sizes:
    blocks = {"attention_type": "block_sparse", "block_size": 2, "num_random_blocks": 1}
    return {**_encoder(width, dropout), **blocks, "max_position_embeddings": 64}


def _reformer(width: int, dropout: float) -> Sizes:
    lengths = {"local_attn_chunk_length": 4, "lsh_attn_chunk_length": 4, "num_buckets": 4}
    places = {"axial_pos_shape": [4, 4], "axial_pos_embds_dim": [width // 2, width // 2]}
    sizes = {"hidden_size": width, "feed_forward_size": 2 * width, "num_attention_heads": 2}
    rates = {"hidden_dropout_prob": dropout, "local_attention_probs_dropout_prob": dropout}
    return {
        **{**lengths, **places, **sizes, **rates, "attention_head_size": width // 2},
        **{"attn_layers": ["local", "lsh"], "hash_seed": 3, "is_decoder": True},
        **{
            "max_position_embeddings": 16,
            "use_cache": False,
            "lsh_attention_probs_dropout_prob": 0.0,
        },
    }


def _fnet(width: int, dropout: float) -> Sizes:
    sizes = _encoder(width, dropout)
    return {k: v for k, v in sizes.items() if "attention" not in k} | {"type_vocab_size": 2}


def _xlnet(width: int, dropout: float) -> Sizes:
    sizes = {"d_model": width, "n_layer": 2, "n_head": 4, "d_inner": 2 * width}
    more = {"num_labels": CLASSES, "summary_last_dropout": dropout, "use_mems_train": False}
    return {**sizes, **more, "dropout": dropout}


def _esm(width: int, dropout: float) -> Sizes:
    more = {"token_dropout": True, "mask_token_id": 3, "position_embedding_type": "rotary"}
    return {**_encoder(width, dropout), **more}


def _next_token(n: int) -> Batch:
    ids = torch.randint(3, WORDS, (n, LENGTH))
    return {"input_ids": ids, "labels": ids.clone()}


def _blocks(n: int) -> Batch:
    """Sentences of whole chunks."""
    ids = torch.randint(3, WORDS, (n, 16))
    return {"input_ids": ids, "labels": ids.clone()}


def _classes(n: int, length: int = LENGTH) -> Batch:
    ids = torch.randint(3, WORDS, (n, length))
    return {"input_ids": ids, "labels": torch.randint(CLASSES, (n,))}


def _long_classes(n: int) -> Batch:
    return _classes(n, 32)


def _masked(n: int) -> Batch:
    """Sentences in which the word 3 stands for others, at least once each."""
    ids = torch.randint(4, WORDS, (n, LENGTH))
    hidden = (torch.rand(n, LENGTH) < 0.2).index_fill(1, torch.tensor([2]), True)
    mask = {"attention_mask": torch.ones_like(ids)}
    return {"input_ids": ids.masked_fill(hidden, 3), "labels": ids, **mask}


def _case(name: str, head: str, sizes: Any, records: Any = _next_token) -> Case:
    return Case(name, "transformers", _model(head, sizes), records, model_loss)


_TO_TEXT = tokens(LENGTH, WORDS, labels=(5,))

CASES = (
    _case("Mamba 2", "Mamba2ForCausalLM", _mamba2),
    _case("Falcon-Mamba", "FalconMambaForCausalLM", _falcon_mamba),
    _case("RWKV", "RwkvForCausalLM", _rwkv),
    _case("Jamba", "JambaForCausalLM", _jamba),
    _case("Qwen3-MoE", "Qwen3MoeForCausalLM", _qwen3_moe),
    _case("OLMoE", "OlmoeForCausalLM", _olmoe),
    _case("DeepSeek-V3", "DeepseekV3ForCausalLM", _deepseek),
    _case("GPT-OSS", "GptOssForCausalLM", _gpt_oss),
    _case("Switch Transformers", "SwitchTransformersForConditionalGeneration", _switch, _TO_TEXT),
    _case("Gemma 3", "Gemma3ForCausalLM", _gemma3),
    _case("Cohere", "CohereForCausalLM", _cohere),
    _case("Falcon", "FalconForCausalLM", _falcon),
    _case("ModernBERT", "ModernBertForSequenceClassification", _modernbert, _classes),
    _case("Longformer", "LongformerForSequenceClassification", _longformer, _classes),
    _case("BigBird, block sparse", "BigBirdForSequenceClassification", _big_bird, _long_classes),
    _case("Reformer", "ReformerModelWithLMHead", _reformer, _blocks),
    _case("FNet", "FNetForSequenceClassification", _fnet, _classes),
    _case("XLNet", "XLNetForSequenceClassification", _xlnet, _classes),
    _case("ESM", "EsmForMaskedLM", _esm, _masked),
)
