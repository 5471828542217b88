"""Fine-tuning by ``peft``: a frozen model with trained adapters."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from zoo.case import Batch, Case, classify, images, model_loss
from zoo.lazy import Library

__all__ = ["CASES"]

peft = Library("peft")
transformers = Library("transformers")

WORDS, LENGTH, CLASSES = 64, 7, 5
IDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def gpt2(width: int) -> nn.Module:
    sizes = {"n_embd": width, "n_layer": 2, "n_head": 4, "n_positions": 32, "use_cache": False}
    off = {"embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0}
    config = transformers.GPT2Config(vocab_size=WORDS, **sizes, **off, **IDS)
    return transformers.GPT2LMHeadModel(config)


def llama(width: int) -> nn.Module:
    config = transformers.LlamaConfig(
        **{"hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": 2},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32},
        **{"vocab_size": WORDS, "use_cache": False, **IDS},
    )
    return transformers.LlamaForCausalLM(config)


def t5(width: int) -> nn.Module:
    sizes = {"d_model": width, "d_kv": width // 4, "d_ff": 2 * width, "num_heads": 4}
    more = {"num_layers": 2, "dropout_rate": 0.0, "use_cache": False, "decoder_start_token_id": 0}
    config = transformers.T5Config(vocab_size=WORDS, **sizes, **more, **IDS)
    return transformers.T5ForConditionalGeneration(config)


def convolutions(width: int) -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(3, width, 3, padding=1), nn.GroupNorm(4, width), nn.ReLU()),
        *(nn.Conv2d(width, width, 3, stride=2, padding=1), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, CLASSES)),
    )


class Bag(nn.Module):
    """An embedding, a mean, a linear head."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, width), nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.words(x).mean(1))


def _with(
    base: Callable[[int], nn.Module], config: Callable[[float], peft.PeftConfig]
) -> Callable[[int, float], nn.Module]:
    return lambda width, dropout: peft.get_peft_model(base(width), config(dropout))


def _lora(dropout: float, **more: Any) -> peft.PeftConfig:
    return peft.LoraConfig(r=4, lora_alpha=8, lora_dropout=dropout, **more)


def _next_token(n: int) -> Batch:
    ids = torch.randint(3, WORDS, (n, LENGTH))
    return {"input_ids": ids, "labels": ids.clone()}


def _words(n: int) -> Batch:
    return {"x": torch.randint(WORDS, (n, LENGTH)), "y": torch.randint(CLASSES, (n,))}


def _language(name: str, base: Any, config: Any, **more: Any) -> Case:
    return Case(name, "peft", _with(base, config), _next_token, model_loss, **more)


_GPT2 = {"target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True}
_LLAMA = {"target_modules": ["q_proj", "v_proj", "down_proj"]}
_TASK = {"task_type": "CAUSAL_LM"}
_PLAIN = {"target_modules": ["q_proj", "v_proj"]}


def _no_dropout(make: Callable[[], peft.PeftConfig]) -> Callable[[float], peft.PeftConfig]:
    return lambda dropout: make()


CASES = (
    _language("GPT-2, LoRA on Conv1D", gpt2, partial(_lora, **_GPT2, **_TASK)),
    _language("GPT-2, LoRA, n = T", gpt2, partial(_lora, **_GPT2, **_TASK), n=LENGTH),
    _language("Llama, LoRA on linear", llama, partial(_lora, **_LLAMA, **_TASK)),
    _language("Llama, LoRA with biases", llama, partial(_lora, **_LLAMA, lora_bias=True)),
    _language("Llama, rsLoRA, head saved", llama,
              partial(_lora, **_LLAMA, use_rslora=True, modules_to_save=["lm_head"])),
    _language("GPT-2, DoRA", gpt2, partial(_lora, **_GPT2, use_dora=True)),
    _language("Llama, DoRA", llama, partial(_lora, **_LLAMA, use_dora=True)),
    _language("GPT-2, LoRA on embedding", gpt2, partial(_lora, target_modules=["wte", "c_attn"],
              fan_in_fan_out=True)),
    _language("T5, LoRA", t5, partial(_lora, target_modules=["q", "v"])),
    _language("Llama, IA3", llama, _no_dropout(lambda: peft.IA3Config(
        target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"]))),
    _language("GPT-2, IA3", gpt2, _no_dropout(lambda: peft.IA3Config(
        target_modules=["c_attn", "mlp.c_proj"], feedforward_modules=["mlp.c_proj"],
        fan_in_fan_out=True))),
    _language("GPT-2, prompt tuning", gpt2, _no_dropout(lambda: peft.PromptTuningConfig(
        num_virtual_tokens=3, **_TASK))),
    _language("Llama, prompt tuning", llama, _no_dropout(lambda: peft.PromptTuningConfig(
        num_virtual_tokens=3, **_TASK))),
    _language("GPT-2, P-tuning", gpt2, _no_dropout(lambda: peft.PromptEncoderConfig(
        num_virtual_tokens=3, encoder_hidden_size=16, **_TASK))),
    _language("GPT-2, prefix tuning", gpt2, _no_dropout(lambda: peft.PrefixTuningConfig(
        num_virtual_tokens=3, **_TASK))),
    _language("Llama, VeRA", llama, _no_dropout(lambda: peft.VeraConfig(
        r=4, target_modules=["q_proj", "o_proj"]))),
    _language("Llama, LoHa", llama, _no_dropout(lambda: peft.LoHaConfig(r=4, **_PLAIN))),
    _language("Llama, LoKr", llama, _no_dropout(lambda: peft.LoKrConfig(r=4, **_PLAIN))),
    _language("Llama, OFT", llama, _no_dropout(lambda: peft.OFTConfig(
        r=0, oft_block_size=8, **_PLAIN))),
    _language("Llama, layer-norm tuning", llama, _no_dropout(lambda: peft.LNTuningConfig(
        target_modules=["input_layernorm", "norm"]))),
    Case("convolutions, LoRA", "peft", _with(convolutions, partial(
        _lora, target_modules=["0", "3"])), images, classify),
    Case("convolutions, DoRA", "peft", _with(convolutions, partial(
        _lora, target_modules=["0", "3"], use_dora=True)), images, classify),
    Case("embedding, LoRA", "peft", _with(Bag, partial(
        _lora, target_modules=["words"])), _words, classify),
    Case("embedding, DoRA", "peft", _with(Bag, partial(
        _lora, target_modules=["words", "head"], use_dora=True)), _words, classify),
)  # fmt: skip
