"""Models of ``transformers`` for pictures and for sound, and CLIP's two towers."""

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

CLASSES, WORDS = 5, 64


def _model(head: str, sizes: Callable[[int, float], dict[str, Any]]) -> Any:
    def make(width: int, dropout: float) -> nn.Module:
        kind = getattr(transformers, head)
        return kind(kind.config_class(num_labels=CLASSES, **sizes(width, dropout)))

    return make


def _vit(width: int, dropout: float) -> dict[str, Any]:
    return {
        **{"hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": 2},
        **{"num_attention_heads": 4, "image_size": 16, "patch_size": 8},
        **{"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout},
    }


def _beit(width: int, dropout: float) -> dict[str, Any]:
    more = {"use_relative_position_bias": True, "drop_path_rate": dropout}
    return {**_vit(width, dropout), **more, "layer_scale_init_value": 0.1, "vocab_size": 8}


def _swin(width: int, dropout: float) -> dict[str, Any]:
    return {
        **{"image_size": 32, "patch_size": 4, "embed_dim": width // 2, "depths": [2, 2]},
        **{"num_heads": [2, 4], "window_size": 4, "hidden_dropout_prob": dropout},
        **{"drop_path_rate": dropout, "attention_probs_dropout_prob": dropout},
    }


def _convnext(width: int, dropout: float) -> dict[str, Any]:
    sizes = {"hidden_sizes": [width // 2, width], "depths": [2, 2], "num_stages": 2}
    return {**sizes, "drop_path_rate": dropout}


def _segformer(width: int, dropout: float) -> dict[str, Any]:
    return {
        **{"num_encoder_blocks": 2, "depths": [1, 1], "hidden_sizes": [width // 2, width]},
        **{"num_attention_heads": [1, 2], "sr_ratios": [2, 1], "mlp_ratios": [2, 2]},
        **{"patch_sizes": [7, 3], "strides": [4, 2], "drop_path_rate": dropout},
        **{"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout},
        **{"classifier_dropout_prob": dropout},
    }


def _wav2vec2(width: int, dropout: float) -> dict[str, Any]:
    rates = ("hidden_dropout", "attention_dropout", "activation_dropout", "feat_proj_dropout")
    return {
        **{"hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": 2},
        **{"num_attention_heads": 4, "conv_dim": (16, 16), "conv_stride": (5, 4)},
        **{"conv_kernel": (10, 8), "num_conv_pos_embeddings": 16, "pad_token_id": 0},
        **{"num_conv_pos_embedding_groups": 4, "vocab_size": 12, "classifier_proj_size": 16},
        **{"ctc_loss_reduction": "mean", "layerdrop": 0.0, "apply_spec_augment": False},
        **dict.fromkeys(rates, dropout),
        **{"final_dropout": dropout},
    }


def _whisper(width: int, dropout: float) -> dict[str, Any]:
    parts = two_towers(width)
    sizes = {"d_model": width, "num_mel_bins": 8, "max_source_positions": 8, "vocab_size": WORDS}
    ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "decoder_start_token_id": 1}
    more = {"max_target_positions": 12, "dropout": dropout, "use_cache": False}
    return {**parts, **sizes, **ids, **more, "suppress_tokens": [], "begin_suppress_tokens": []}


def _tower(width: int, dropout: float) -> dict[str, Any]:
    return {
        **{"hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": 2},
        **{"num_attention_heads": 4, "projection_dim": 16, "attention_dropout": dropout},
    }


class ClipVision(nn.Module):
    """CLIP's vision tower under a linear head."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        sizes = {"image_size": 16, "patch_size": 8}
        config = transformers.CLIPVisionConfig(**_tower(width, dropout), **sizes)
        self.tower = transformers.CLIPVisionModel(config)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.tower(pixel_values=x).pooler_output)


class ClipText(nn.Module):
    """CLIP's text tower under a linear head."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        sizes = {"vocab_size": WORDS, "max_position_embeddings": 16, "eos_token_id": 2}
        config = transformers.CLIPTextConfig(**_tower(width, dropout), **sizes)
        self.tower = transformers.CLIPTextModel(config)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.tower(input_ids=x).pooler_output)


def _clip(width: int, dropout: float) -> nn.Module:
    text = {"vocab_size": WORDS, "max_position_embeddings": 16, "eos_token_id": 2}
    config = transformers.CLIPConfig(
        text_config={**_tower(width, dropout), **text},
        vision_config={**_tower(width, dropout), "image_size": 16, "patch_size": 8},
        projection_dim=16,
    )
    return transformers.CLIPModel(config)


def _head(net: Any, batch: Batch) -> Tensor:
    return F.cross_entropy(net(batch["x"]), batch["y"])


def _contrastive(net: Any, batch: Batch) -> Tensor:
    return net(input_ids=batch["x"], pixel_values=batch["pixels"], return_loss=True).loss


def _pictures(size: int) -> Callable[[int], Batch]:
    return lambda n: {
        "pixel_values": torch.randn(n, 3, size, size),
        "labels": torch.randint(CLASSES, (n,)),
    }


def _segments(n: int) -> Batch:
    return {
        "pixel_values": torch.randn(n, 3, 32, 32),
        "labels": torch.randint(CLASSES, (n, 32, 32)),
    }


def _picture_rows(n: int) -> Batch:
    return {"x": torch.randn(n, 3, 16, 16), "y": torch.randint(CLASSES, (n,))}


def _text_rows(n: int) -> Batch:
    ids = torch.randint(3, WORDS, (n, 6))
    ids[:, -1] = 2  # the end, whose state is pooled
    return {"x": ids, "y": torch.randint(CLASSES, (n,)), "pixels": torch.randn(n, 3, 16, 16)}


def _waves(n: int) -> Batch:
    return {"input_values": torch.randn(n, 600), "labels": torch.randint(CLASSES, (n,))}


def _letters(n: int) -> Batch:
    return {"input_values": torch.randn(n, 600), "labels": torch.randint(1, 12, (n, 4))}


def _speech(n: int) -> Batch:
    return {"input_features": torch.randn(n, 8, 16), "labels": torch.randint(3, WORDS, (n, 5))}


def _case(name: str, make: Any, records: Any, loss: Any = model_loss, **more: Any) -> Case:
    return Case(name, "transformers", make, records, loss, **more)


CASES = (
    _case("ViT", _model("ViTForImageClassification", _vit), _pictures(16)),
    _case("DeiT", _model("DeiTForImageClassification", _vit), _pictures(16)),
    _case("BEiT", _model("BeitForImageClassification", _beit), _pictures(16)),
    _case("Swin", _model("SwinForImageClassification", _swin), _pictures(32)),
    _case("ConvNeXt", _model("ConvNextForImageClassification", _convnext), _pictures(32)),
    _case("ConvNeXt V2", _model("ConvNextV2ForImageClassification", _convnext), _pictures(32)),
    _case("DINOv2", _model("Dinov2ForImageClassification", lambda w, p: {
        k: v for k, v in _vit(w, p).items() if k != "intermediate_size"}), _pictures(16)),
    _case("SegFormer, classes", _model("SegformerForImageClassification", _segformer),
          _pictures(32)),
    _case("CLIP vision", ClipVision, _picture_rows, _head),
    _case("CLIP text", ClipText, _text_rows, _head),
    _case("CLIP, contrastive", _clip, _text_rows, _contrastive, refused="change each other"),
    _case("Whisper", _model("WhisperForConditionalGeneration", _whisper), _speech),
    _case("wav2vec 2.0, classes", _model("Wav2Vec2ForSequenceClassification", _wav2vec2), _waves),
    _case("wav2vec 2.0, CTC", _model("Wav2Vec2ForCTC", _wav2vec2), _letters),
    _case("HuBERT", _model("HubertForSequenceClassification", _wav2vec2), _waves),
)  # fmt: skip
