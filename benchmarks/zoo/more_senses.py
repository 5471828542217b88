"""Series, pictures and sound of ``transformers``, chosen before they were run; see ``chosen.md``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zoo.case import Batch, Case, model_loss, two_towers
from zoo.lazy import Library

__all__ = ["CASES"]

transformers = Library("transformers")

CLASSES, WORDS, QUERIES = 5, 64, 4


def _model(head: str, sizes: Callable[[int, float], dict[str, Any]]) -> Any:
    def make(width: int, dropout: float) -> nn.Module:
        kind = getattr(transformers, head)
        return kind(kind.config_class(**sizes(width, dropout)))

    return make


def _encoder(width: int, dropout: float, **more: Any) -> dict[str, Any]:
    return {
        **{"hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": 2},
        **{"num_attention_heads": 4, "hidden_dropout_prob": dropout},
        **{"attention_probs_dropout_prob": dropout, **more},
    }


def _series(width: int, dropout: float, **more: Any) -> dict[str, Any]:
    parts = two_towers(width)
    parts = {k: 1 if k.endswith("_layers") else v for k, v in parts.items()}
    rates = ("dropout", "attention_dropout", "activation_dropout")
    return {
        **{**parts, "d_model": width, "prediction_length": 4, "context_length": 12},
        **{"lags_sequence": [1, 2], "num_time_features": 2, "use_cache": False, **more},
        **{"encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0, **dict.fromkeys(rates, dropout)},
    }


def _autoformer(width: int, dropout: float) -> dict[str, Any]:
    return _series(width, dropout, label_length=4, moving_average=3)


def _informer(width: int, dropout: float) -> dict[str, Any]:
    return _series(width, dropout, distil=False, sampling_factor=1)


def _patchtst(width: int, dropout: float) -> dict[str, Any]:
    rates = ("attention_dropout", "positional_dropout", "path_dropout", "ff_dropout")
    return {
        **{"num_input_channels": 3, "context_length": 24, "patch_length": 4, "patch_stride": 4},
        **{"d_model": width, "ffn_dim": 2 * width, "num_hidden_layers": 2, "prediction_length": 4},
        **{"norm_type": "layernorm", "head_dropout": dropout, **dict.fromkeys(rates, dropout)},
    }


def _sound(width: int, dropout: float) -> dict[str, Any]:
    """Features that SEW and SpeechT5 make of waves."""
    rates = ("hidden_dropout", "attention_dropout", "activation_dropout", "feat_proj_dropout")
    return {
        **{"hidden_size": width, "conv_dim": (16, 16), "conv_stride": (5, 4)},
        **{"conv_kernel": (10, 8), "num_conv_pos_embeddings": 16, "pad_token_id": 0},
        **{"num_conv_pos_embedding_groups": 4, "apply_spec_augment": False},
        **dict.fromkeys(rates, dropout),
    }


def _sew(width: int, dropout: float) -> dict[str, Any]:
    sizes = {"intermediate_size": 2 * width, "num_hidden_layers": 2, "num_attention_heads": 4}
    more = {"num_labels": CLASSES, "classifier_proj_size": 16, "layerdrop": 0.0}
    return {**_sound(width, dropout), **sizes, **more, "final_dropout": dropout}


def _speech_t5(width: int, dropout: float) -> dict[str, Any]:
    drops = {"encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0, "positional_dropout": dropout}
    ids = {"vocab_size": WORDS, "bos_token_id": 1, "decoder_start_token_id": 2}
    more = {"encoder_max_relative_position": 8, "max_text_positions": 16, "use_cache": False}
    return {**_sound(width, dropout), **two_towers(width), **drops, **ids, **more}


def _ast(width: int, dropout: float) -> dict[str, Any]:
    strides = {"patch_size": 4, "frequency_stride": 3, "time_stride": 3, "num_labels": CLASSES}
    return _encoder(width, dropout, max_length=16, num_mel_bins=8, **strides)


def _detr(width: int, dropout: float) -> dict[str, Any]:
    backbone = transformers.ResNetConfig(
        **{"embedding_size": width // 2, "hidden_sizes": [width // 2, width], "depths": [1, 1]},
        **{"layer_type": "basic", "out_features": ["stage2"]},
    )
    more = {"d_model": width, "num_queries": QUERIES, "dropout": dropout, "num_labels": CLASSES}
    return {**two_towers(width), **more, "backbone_config": backbone, "auxiliary_loss": True}


def _yolos(width: int, dropout: float) -> dict[str, Any]:
    sizes = {"image_size": [32, 32], "patch_size": 8, "num_detection_tokens": QUERIES}
    return _encoder(width, dropout, num_labels=CLASSES, **sizes)


def _mask2former(width: int, dropout: float) -> dict[str, Any]:
    backbone = transformers.SwinConfig(
        **{"image_size": 64, "patch_size": 4, "embed_dim": width // 2, "depths": [1, 1, 1, 1]},
        **{"num_heads": [2, 2, 2, 2], "window_size": 4, "drop_path_rate": 0.0},
        out_features=["stage1", "stage2", "stage3", "stage4"],
    )
    sizes = {"feature_size": width, "mask_feature_size": width, "hidden_dim": width}
    layers = {"encoder_layers": 1, "decoder_layers": 2, "num_attention_heads": 4}
    return {
        **{**sizes, **layers, "encoder_feedforward_dim": width, "dim_feedforward": width},
        **{"num_queries": QUERIES, "dropout": dropout, "train_num_points": 32},
        **{"num_labels": CLASSES, "backbone_config": backbone},
    }


def _dpt(width: int, dropout: float) -> nn.Module:
    sizes = {"image_size": 32, "patch_size": 8, "backbone_out_indices": [0, 1, 2, 3]}
    neck = {"neck_hidden_sizes": [width // 2] * 4, "fusion_hidden_size": width // 2}
    config = {**_encoder(width, dropout, **sizes, **neck), "num_hidden_layers": 4}
    net = transformers.DPTForDepthEstimation(transformers.DPTConfig(**config))
    nn.init.ones_(net.head.head[4].bias)  # above zero, where the last ReLU has a gradient
    return net


def _decoder(width: int) -> dict[str, Any]:
    """The decoder of a masked auto-encoder."""
    sizes = {"hidden_size": width // 2, "intermediate_size": width, "num_hidden_layers": 1}
    return {f"decoder_{name}": size for name, size in sizes.items()}


def _vit_mae(width: int, dropout: float) -> dict[str, Any]:
    more = {"image_size": 32, "patch_size": 8, "decoder_num_attention_heads": 4}
    return _encoder(width, dropout, **_decoder(width), **more)


def _video_mae(width: int, dropout: float) -> dict[str, Any]:
    sizes = {"image_size": 16, "patch_size": 8, "num_frames": 4, "tubelet_size": 2}
    return _encoder(width, dropout, **_decoder(width), decoder_num_attention_heads=4, **sizes)


def _swin2sr(width: int, dropout: float) -> dict[str, Any]:
    return {
        **{"image_size": 16, "embed_dim": width, "depths": [2, 2], "num_heads": [4, 4]},
        **{"window_size": 4, "drop_path_rate": dropout, "hidden_dropout_prob": dropout},
        "attention_probs_dropout_prob": dropout,
    }


def _trocr(width: int, dropout: float) -> nn.Module:
    decoder = transformers.TrOCRConfig(
        **{"vocab_size": WORDS, "d_model": width, "decoder_layers": 2, "decoder_ffn_dim": width},
        **{"decoder_attention_heads": 4, "max_position_embeddings": 16, "dropout": dropout},
        **{"attention_dropout": dropout, "use_cache": False, "pad_token_id": 0},
    )
    encoder = transformers.ViTConfig(**_encoder(width, dropout, image_size=16, patch_size=8))
    config = transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder)
    config.decoder_start_token_id, config.pad_token_id = 1, 0
    return transformers.VisionEncoderDecoderModel(config)


def _layout(width: int, dropout: float) -> dict[str, Any]:
    places = {"max_2d_position_embeddings": 32, "coordinate_size": width // 8}
    shapes = {"shape_size": width // 4, "input_size": 16, "patch_size": 8}
    ids = {"vocab_size": WORDS, "pad_token_id": 1, "max_position_embeddings": 32}
    return _encoder(width, dropout, num_labels=CLASSES, **places, **shapes, **ids)


def _perceiver(width: int, dropout: float) -> dict[str, Any]:
    return {
        **{"num_latents": 4, "d_latents": width, "d_model": width, "vocab_size": WORDS},
        **{"num_self_attends_per_block": 2, "num_self_attention_heads": 4},
        **{"num_cross_attention_heads": 4, "qk_channels": width, "v_channels": width},
        **{"max_position_embeddings": 7, "attention_probs_dropout_prob": dropout},
    }


def _tower(width: int, dropout: float, **more: Any) -> dict[str, Any]:
    return {
        **{"hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": 2},
        **{"num_attention_heads": 4, "attention_dropout": dropout, **more},
    }


_PATCHES = {"image_size": 16, "patch_size": 8}


def _blip(width: int, dropout: float) -> dict[str, Any]:
    ids = {"bos_token_id": 1, "sep_token_id": 2, "eos_token_id": 2, "pad_token_id": 0}
    words = {"vocab_size": WORDS, "encoder_hidden_size": width, "max_position_embeddings": 16}
    text = _encoder(width, dropout, **ids, **words, use_cache=False, projection_dim=width)
    vision = _tower(width, dropout, initializer_range=0.02, **_PATCHES)
    return {"text_config": text, "vision_config": vision, "projection_dim": width}


def _clipseg(width: int, dropout: float) -> dict[str, Any]:
    ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    words = {"vocab_size": WORDS, "max_position_embeddings": 16}
    return {
        "text_config": _tower(width, dropout, **ids, **words),
        "vision_config": _tower(width, dropout, **_PATCHES),
        **{"projection_dim": width, "extract_layers": [0, 1], "reduce_dim": width // 2},
        **{"decoder_intermediate_size": width, "decoder_attention_dropout": dropout},
    }


def _llava(width: int, dropout: float) -> nn.Module:
    ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    words = {"vocab_size": WORDS, "max_position_embeddings": 32, "num_key_value_heads": 2}
    text = transformers.LlamaConfig(**_tower(width, dropout, **words, **ids, use_cache=False))
    vision = transformers.CLIPVisionConfig(**_tower(width, dropout, **_PATCHES))
    config = transformers.LlavaConfig(
        vision_config=vision, text_config=text, image_token_index=3, image_seq_length=4
    )
    return transformers.LlavaForConditionalGeneration(config)


def _decisions(width: int, dropout: float) -> dict[str, Any]:
    sizes = {"state_dim": 6, "act_dim": 3, "hidden_size": width, "max_ep_len": 16, "n_head": 4}
    more = {"n_layer": 2, "n_positions": 32, "use_cache": False, "attn_pdrop": dropout}
    return {**sizes, **more, "resid_pdrop": dropout, "embd_pdrop": dropout}


def _pvt(width: int, dropout: float) -> dict[str, Any]:
    return {
        **{"image_size": 32, "num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [2, 1]},
        **{"hidden_sizes": [width // 2, width], "patch_sizes": [7, 3], "strides": [4, 2]},
        **{"num_attention_heads": [1, 2], "mlp_ratios": [2, 2], "num_labels": CLASSES},
        **{"hidden_dropout_prob": dropout, "drop_path_rate": dropout},
        "attention_probs_dropout_prob": dropout,
    }


def _past_and_future(n: int) -> Batch:
    return {
        **{"past_values": 1 + torch.rand(n, 14), "future_values": 1 + torch.rand(n, 4)},
        **{"past_time_features": torch.randn(n, 14, 2), "past_observed_mask": torch.ones(n, 14)},
        "future_time_features": torch.randn(n, 4, 2),
    }


def _channels(n: int) -> Batch:
    return {"past_values": torch.randn(n, 24, 3), "future_values": torch.randn(n, 4, 3)}


def _pictures(size: int) -> Callable[[int], Batch]:
    return lambda n: {"pixel_values": torch.randn(n, 3, size, size)}


def _labelled(size: int) -> Callable[[int], Batch]:
    return lambda n: {**_pictures(size)(n), "labels": torch.randint(CLASSES, (n,))}


def _waves(n: int) -> Batch:
    return {"input_values": torch.randn(n, 600), "labels": torch.randint(CLASSES, (n,))}


def _spoken(n: int) -> Batch:
    return {"input_values": torch.randn(n, 600), "labels": torch.randint(3, WORDS, (n, 5))}


def _spectra(n: int) -> Batch:
    return {"input_values": torch.randn(n, 16, 8), "labels": torch.randint(CLASSES, (n,))}


def _boxes(n: int) -> Batch:
    """Two things a picture: with other numbers for each, the loss would weigh records by them."""
    middle, size = 0.3 + 0.4 * torch.rand(n, 2, 2), 0.1 + 0.3 * torch.rand(n, 2, 2)
    kinds = torch.randint(CLASSES, (n, 2))
    return {**_pictures(32)(n), "kinds": kinds, "boxes": torch.cat([middle, size], -1)}


def _masks(n: int) -> Batch:
    masks = (torch.rand(n, 2, 64, 64) < 0.5).float()
    return {**_pictures(64)(n), "masks": masks, "kinds": torch.randint(CLASSES, (n, 2))}


def _depths(n: int) -> Batch:
    return {**_pictures(32)(n), "depth": torch.rand(n, 64, 64)}


def _noised(n: int) -> Batch:
    return {**_pictures(32)(n), "noise": torch.rand(n, 16)}


def _films(n: int) -> Batch:
    hidden = torch.rand(n, 8).argsort(1) < 4
    return {"pixel_values": torch.randn(n, 4, 3, 16, 16), "bool_masked_pos": hidden}


def _small_and_large(n: int) -> Batch:
    return {**_pictures(16)(n), "large": torch.rand(n, 3, 32, 32)}


def _read(n: int) -> Batch:
    return {**_pictures(16)(n), "labels": torch.randint(3, WORDS, (n, 5))}


def _pages(n: int) -> Batch:
    corners = torch.randint(0, 15, (n, 6, 2))
    ids = {"input_ids": torch.randint(3, WORDS, (n, 6)), "bbox": torch.cat([corners] * 2, -1)}
    ids["bbox"][..., 2:] += torch.randint(1, 15, (n, 6, 2))
    return {**ids, **_labelled(16)(n)}


def _words(n: int) -> Batch:
    return {"input_ids": torch.randint(3, WORDS, (n, 7)), "labels": torch.randint(WORDS, (n, 7))}


def _questions(n: int) -> Batch:
    ids = torch.randint(3, WORDS, (n, 6))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), **_read(n)}


def _named_things(n: int) -> Batch:
    ids = torch.randint(3, WORDS, (n, 6))
    ids[:, -1] = 2  # the end, whose state is pooled
    mask = {"attention_mask": torch.ones_like(ids), **_pictures(16)(n)}
    return {"input_ids": ids, "labels": (torch.rand(n, 16, 16) < 0.5).float(), **mask}


def _dialogues(n: int) -> Batch:
    """Four places for the patches of the picture among the words."""
    ids = torch.randint(4, WORDS, (n, 9))
    ids[:, 2:6] = 3
    return {"input_ids": ids, "labels": ids.clone(), **_pictures(16)(n)}


def _episodes(n: int) -> Batch:
    return {
        **{"states": torch.randn(n, 5, 6), "actions": torch.randn(n, 5, 3)},
        **{"rewards": torch.randn(n, 5, 1), "returns_to_go": torch.randn(n, 5, 1)},
        "timesteps": torch.randint(16, (n, 5)),
    }


def _detect(net: Any, batch: Batch) -> Tensor:
    labels = [
        {"class_labels": kinds, "boxes": boxes}
        for kinds, boxes in zip(batch["kinds"], batch["boxes"], strict=True)
    ]
    return net(pixel_values=batch["pixel_values"], labels=labels).loss


def _segment(net: Any, batch: Batch) -> Tensor:
    more = {"mask_labels": list(batch["masks"]), "class_labels": list(batch["kinds"])}
    return net(pixel_values=batch["pixel_values"], **more).loss.mean()


def _measure(net: Any, batch: Batch) -> Tensor:
    return F.mse_loss(net(pixel_values=batch["pixel_values"]).predicted_depth, batch["depth"])


def _enlarge(net: Any, batch: Batch) -> Tensor:
    return F.l1_loss(net(pixel_values=batch["pixel_values"]).reconstruction, batch["large"])


def _act(net: Any, batch: Batch) -> Tensor:
    return F.mse_loss(net(**batch).action_preds, batch["actions"])


def _case(name: str, make: Any, records: Any, loss: Any = model_loss, **more: Any) -> Case:
    return Case(name, "transformers", make, records, loss, **more)


_FEW = {"timed": (64, 32)}

CASES = (
    _case("time series transformer", _model("TimeSeriesTransformerForPrediction", _series),
          _past_and_future),
    _case("Informer", _model("InformerForPrediction", _informer), _past_and_future),
    _case("Autoformer", _model("AutoformerForPrediction", _autoformer), _past_and_future,
          refused="change each other"),
    _case("PatchTST (transformers)", _model("PatchTSTForPrediction", _patchtst), _channels),
    _case("SEW", _model("SEWForSequenceClassification", _sew), _waves),
    _case("SpeechT5, speech to text", _model("SpeechT5ForSpeechToText", _speech_t5), _spoken),
    _case("audio spectrogram transformer", _model("ASTForAudioClassification", _ast), _spectra),
    _case("DETR", _model("DetrForObjectDetection", _detr), _boxes, _detect, **_FEW),
    _case("YOLOS", _model("YolosForObjectDetection", _yolos), _boxes, _detect, **_FEW),
    _case("Mask2Former", _model("Mask2FormerForUniversalSegmentation", _mask2former), _masks,
          _segment, **_FEW),
    _case("DPT", _dpt, _depths, _measure, **_FEW),
    _case("ViTMAE", _model("ViTMAEForPreTraining", _vit_mae), _noised),
    _case("VideoMAE", _model("VideoMAEForPreTraining", _video_mae), _films),
    _case("Swin2SR", _model("Swin2SRForImageSuperResolution", _swin2sr), _small_and_large,
          _enlarge, **_FEW),
    _case("TrOCR", _trocr, _read),
    _case("LayoutLMv3", _model("LayoutLMv3ForSequenceClassification", _layout), _pages),
    _case("Perceiver", _model("PerceiverForMaskedLM", _perceiver), _words),
    _case("BLIP, answers", _model("BlipForQuestionAnswering", _blip), _questions),
    _case("CLIPSeg", _model("CLIPSegForImageSegmentation", _clipseg), _named_things),
    _case("LLaVA", _llava, _dialogues),
    _case("Decision Transformer", _model("DecisionTransformerModel", _decisions), _episodes, _act),
    _case("PVT v2", _model("PvtV2ForImageClassification", _pvt), _labelled(32)),
)  # fmt: skip
