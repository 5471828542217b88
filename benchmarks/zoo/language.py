"""Language models of ``transformers``, with heads for the next token, for masks and for classes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from zoo.case import Batch, Case, model_loss, tokens, two_towers
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


def _decoder(width: int, dropout: float) -> Sizes:
    return {
        **{"hidden_size": width, "intermediate_size": 2 * width, "max_position_embeddings": 32},
        **{"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2},
        **{"attention_dropout": dropout, "use_cache": False},
    }


def _gpt2(width: int, dropout: float) -> Sizes:
    sizes = {"n_embd": width, "n_layer": 2, "n_head": 4, "n_positions": 32, "use_cache": False}
    return {**sizes, "embd_pdrop": dropout, "attn_pdrop": dropout, "resid_pdrop": dropout}


def _plain_heads(width: int, dropout: float) -> Sizes:
    sizes = {k: v for k, v in _decoder(width, dropout).items() if k != "num_key_value_heads"}
    return {**sizes, "hidden_dropout": dropout}


def _opt(width: int, dropout: float) -> Sizes:
    sizes = {"hidden_size": width, "ffn_dim": 2 * width, "num_hidden_layers": 2}
    more = {"num_attention_heads": 4, "max_position_embeddings": 32, "use_cache": False}
    return {**sizes, **more, "dropout": dropout, "word_embed_proj_dim": width}


def _bloom(width: int, dropout: float) -> Sizes:
    sizes = {"hidden_size": width, "n_layer": 2, "n_head": 4, "use_cache": False}
    return {**sizes, "hidden_dropout": dropout, "attention_dropout": dropout}


def _mixtral(width: int, dropout: float) -> Sizes:
    return {**_decoder(width, dropout), "num_local_experts": 3, "num_experts_per_tok": 2}


def _mamba(width: int, dropout: float) -> Sizes:
    return {"hidden_size": width, "num_hidden_layers": 2, "state_size": 4, "use_cache": False}


def _gpt_neo(width: int, dropout: float) -> Sizes:
    sizes = {"hidden_size": width, "num_layers": 2, "num_heads": 4, "use_cache": False}
    kinds = {"attention_types": [[["global", "local"], 1]], "max_position_embeddings": 32}
    return {**sizes, **kinds, "resid_dropout": dropout, "embed_dropout": dropout}


def _encoder(width: int, dropout: float) -> Sizes:
    return {
        **{"hidden_size": width, "intermediate_size": 2 * width, "max_position_embeddings": 32},
        **{"num_hidden_layers": 2, "num_attention_heads": 4, "num_labels": CLASSES},
        **{"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout},
    }


def _albert(width: int, dropout: float) -> Sizes:
    return {**_encoder(width, dropout), "embedding_size": 16, "classifier_dropout_prob": dropout}


def _electra(width: int, dropout: float) -> Sizes:
    return {**_encoder(width, dropout), "embedding_size": 16}


def _deberta(width: int, dropout: float) -> Sizes:
    relative = {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]}
    return {**_encoder(width, dropout), **relative, "max_relative_positions": 16}


def _distilbert(width: int, dropout: float) -> Sizes:
    sizes = {"dim": width, "hidden_dim": 2 * width, "n_layers": 2, "n_heads": 4}
    more = {"max_position_embeddings": 32, "num_labels": CLASSES, "seq_classif_dropout": dropout}
    return {**sizes, **more, "dropout": dropout, "attention_dropout": dropout}


def _t5(width: int, dropout: float) -> Sizes:
    sizes = {"d_model": width, "d_kv": width // 4, "d_ff": 2 * width, "num_heads": 4}
    more = {"num_layers": 2, "dropout_rate": dropout, "use_cache": False}
    return {**sizes, **more, "decoder_start_token_id": 0}


def _bart(width: int, dropout: float) -> Sizes:
    layers = two_towers(width)
    more = {"d_model": width, "max_position_embeddings": 32, "dropout": dropout, "use_cache": False}
    return {**layers, **more, "decoder_start_token_id": 2, "forced_eos_token_id": None}


def _next_token(n: int) -> Batch:
    ids = torch.randint(3, WORDS, (n, LENGTH))
    return {"input_ids": ids, "labels": ids.clone()}


def _with_mask(n: int) -> Batch:
    """Sentences of several lengths, padded; every label counts."""
    batch = _next_token(n)
    lengths = torch.randint(3, LENGTH + 1, (n, 1))
    return {**batch, "attention_mask": (torch.arange(LENGTH) < lengths).long()}


def _classes(n: int) -> Batch:
    ids = torch.randint(3, WORDS, (n, LENGTH))
    return {"input_ids": ids, "labels": torch.randint(CLASSES, (n,))}


def _tags(n: int) -> Batch:
    ids = torch.randint(3, WORDS, (n, LENGTH))
    return {"input_ids": ids, "labels": torch.randint(CLASSES, (n, LENGTH))}


def _spans(n: int) -> Batch:
    ids = torch.randint(3, WORDS, (n, LENGTH))
    ends = {f"{end}_positions": torch.randint(LENGTH, (n,)) for end in ("start", "end")}
    return {"input_ids": ids, **ends}


def _choices(n: int) -> Batch:
    ids = torch.randint(3, WORDS, (n, 3, LENGTH))
    return {"input_ids": ids, "labels": torch.randint(3, (n,))}


def _case(name: str, head: str, sizes: Any, records: Any = _next_token, n: int = 4) -> Case:
    return Case(name, "transformers", _model(head, sizes), records, model_loss, n)


_TO_TEXT = tokens(LENGTH, WORDS, labels=(5,))

CASES = (
    _case("Llama", "LlamaForCausalLM", _decoder),
    _case("Llama, padded", "LlamaForCausalLM", _decoder, _with_mask),
    _case("Llama, n = T", "LlamaForCausalLM", _decoder, n=LENGTH),
    _case("Llama, classes", "LlamaForSequenceClassification",
          lambda w, p: {**_decoder(w, p), "num_labels": CLASSES}, _classes),
    _case("Mistral", "MistralForCausalLM", _decoder),
    _case("Qwen2", "Qwen2ForCausalLM", _decoder),
    _case("Qwen3", "Qwen3ForCausalLM", lambda w, p: {**_decoder(w, p), "head_dim": w // 4}),
    _case("Gemma 2", "Gemma2ForCausalLM", lambda w, p: {**_decoder(w, p), "head_dim": w // 4}),
    _case("Phi", "PhiForCausalLM", _decoder),
    _case("GPT-2", "GPT2LMHeadModel", _gpt2),
    _case("GPT-2, padded", "GPT2LMHeadModel", _gpt2, _with_mask),
    _case("GPT-2, n = T", "GPT2LMHeadModel", _gpt2, n=LENGTH),
    _case("GPT-NeoX", "GPTNeoXForCausalLM", _plain_heads),
    _case("GPT-Neo", "GPTNeoForCausalLM", _gpt_neo),
    _case("OPT", "OPTForCausalLM", _opt),
    _case("BLOOM", "BloomForCausalLM", _bloom),
    _case("Mixtral", "MixtralForCausalLM", _mixtral),
    _case("Mamba", "MambaForCausalLM", _mamba),
    _case("BERT, masked words", "BertForMaskedLM", _encoder),
    _case("BERT, classes", "BertForSequenceClassification", _encoder, _classes),
    _case("BERT, n = T", "BertForSequenceClassification", _encoder, _classes, n=LENGTH),
    _case("BERT, tags", "BertForTokenClassification", _encoder, _tags),
    _case("BERT, answers", "BertForQuestionAnswering",
          lambda w, p: {**_encoder(w, p), "num_labels": 2}, _spans),
    _case("BERT, choices", "BertForMultipleChoice", _encoder, _choices),
    _case("RoBERTa, masked words", "RobertaForMaskedLM", _encoder),
    _case("RoBERTa, classes", "RobertaForSequenceClassification", _encoder, _classes),
    _case("DistilBERT, masked words", "DistilBertForMaskedLM", _distilbert),
    _case("DistilBERT, classes", "DistilBertForSequenceClassification", _distilbert, _classes),
    _case("ALBERT", "AlbertForSequenceClassification", _albert, _classes),
    _case("ELECTRA", "ElectraForSequenceClassification", _electra, _classes),
    _case("DeBERTa", "DebertaV2ForSequenceClassification", _deberta, _classes),
    _case("T5", "T5ForConditionalGeneration", _t5, _TO_TEXT),
    _case("BART", "BartForConditionalGeneration", _bart, _TO_TEXT),
)  # fmt: skip
