"""Picture models of ``timm`` and ``torchvision``."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn

from zoo.case import Case, classify, images
from zoo.lazy import Library

__all__ = ["CASES"]

timm = Library("timm")
torchvision = Library("torchvision")

CLASSES = 5


def _timm_vit(kind: str, **more: Any) -> Any:
    def make(width: int, dropout: float) -> nn.Module:
        return timm.create_model(
            kind,
            **{"img_size": 16, "patch_size": 8, "embed_dim": width, "depth": 2},
            **{"num_classes": CLASSES, "drop_rate": dropout, "drop_path_rate": dropout},
            **{"attn_drop_rate": dropout, "num_heads": 4, **more},
        )

    return make


def _timm_convnext(width: int, dropout: float, **more: Any) -> nn.Module:
    kind = timm.models.convnext.ConvNeXt
    sizes = {"depths": (1, 1, 1, 1), "dims": (width // 2, width // 2, width, width)}
    return kind(num_classes=CLASSES, drop_rate=dropout, drop_path_rate=dropout, **sizes, **more)


def _timm_swin(kind: str) -> Any:
    def make(width: int, dropout: float) -> nn.Module:
        return timm.create_model(
            kind,
            **{"img_size": 32, "patch_size": 4, "embed_dim": width // 2, "depths": (2, 2)},
            **{"num_heads": (2, 4), "window_size": 4, "num_classes": CLASSES},
            **{"drop_rate": dropout, "drop_path_rate": dropout, "attn_drop_rate": dropout},
        )

    return make


def _timm_mixer(width: int, dropout: float) -> nn.Module:
    return timm.models.mlp_mixer.MlpMixer(
        **{"img_size": 16, "patch_size": 8, "embed_dim": width, "num_blocks": 2},
        **{"num_classes": CLASSES, "drop_rate": dropout, "drop_path_rate": dropout},
    )


def _timm_resnet(width: int, dropout: float, **more: Any) -> nn.Module:
    kind = timm.models.resnet.ResNet
    return kind(
        timm.models.resnet.BasicBlock,
        **{"layers": (1, 1, 1, 1), "channels": (width // 2, width // 2, width, width)},
        **{"num_classes": CLASSES, "drop_rate": dropout, "drop_path_rate": dropout},
        **{"norm_layer": partial(timm.layers.GroupNorm, num_groups=8), **more},
    )


def _timm_resnet_v2(width: int, dropout: float) -> nn.Module:
    """ResNet V2 with weight-standardised convolutions and GroupNorm (BiT)."""
    kind = timm.models.resnetv2.ResNetV2
    return kind(
        **{"layers": (1, 1), "channels": (width, 2 * width), "num_classes": CLASSES},
        **{"stem_chs": width, "stem_type": "fixed", "drop_path_rate": dropout},
        norm_layer=partial(timm.layers.GroupNormAct, num_groups=8),
        conv_layer=timm.layers.StdConv2d,
    )


def _timm_nfnet(width: int, dropout: float) -> nn.Module:
    """A network without normalisation: scaled, standardised convolutions."""
    config = timm.models.nfnet.NfCfg(
        depths=(1, 1), channels=(width, 2 * width), stem_type="3x3", stem_chs=width,
        group_size=8, attn_layer="se", attn_kwargs={"rd_ratio": 0.5},
        num_features=2 * width,
    )  # fmt: skip
    return timm.models.nfnet.NormFreeNet(
        config, num_classes=CLASSES, drop_rate=dropout, drop_path_rate=dropout
    )


def _torchvision_vit(width: int, dropout: float) -> nn.Module:
    return torchvision.models.VisionTransformer(
        **{"image_size": 16, "patch_size": 8, "num_layers": 2, "num_heads": 4},
        **{"hidden_dim": width, "mlp_dim": 2 * width, "num_classes": CLASSES},
        **{"dropout": dropout, "attention_dropout": dropout},
    )


def _torchvision_swin(width: int, dropout: float, kind: str = "") -> nn.Module:
    block = torchvision.models.swin_transformer
    more = {"block": block.SwinTransformerBlockV2, "downsample_layer": block.PatchMergingV2}
    return torchvision.models.SwinTransformer(
        **{"patch_size": [4, 4], "embed_dim": width // 2, "depths": [2, 2], "num_heads": [2, 4]},
        **{"window_size": [4, 4], "num_classes": CLASSES, "stochastic_depth_prob": dropout},
        **{"dropout": dropout, "attention_dropout": dropout, **(more if kind == "v2" else {})},
    )


def _torchvision_convnext(width: int, dropout: float) -> nn.Module:
    setting = torchvision.models.convnext.CNBlockConfig
    return torchvision.models.ConvNeXt(
        [setting(width // 2, width, 1), setting(width, None, 1)],
        stochastic_depth_prob=dropout,
        num_classes=CLASSES,
        layer_scale=0.1,
    )


def _groups(channels: int) -> nn.Module:
    return nn.GroupNorm(4, channels)


def _torchvision_resnet(width: int, dropout: float) -> nn.Module:
    return torchvision.models.ResNet(
        torchvision.models.resnet.BasicBlock, [1, 1, 1, 1], num_classes=CLASSES,
        norm_layer=_groups, width_per_group=64,
    )  # fmt: skip


def _torchvision_mobilenet(width: int, dropout: float) -> nn.Module:
    setting = [[1, width // 2, 1, 1], [4, width, 2, 2], [4, 2 * width, 1, 2]]
    return torchvision.models.MobileNetV2(
        num_classes=CLASSES,
        inverted_residual_setting=setting,
        norm_layer=_groups,
        dropout=dropout,
    )


def _torchvision_efficientnet(width: int, dropout: float) -> nn.Module:
    setting = torchvision.models.efficientnet.MBConvConfig
    return torchvision.models.EfficientNet(
        [setting(1, 3, 1, width // 2, width // 2, 1, 1, 1),
         setting(4, 3, 2, width // 2, width, 1, 1, 1)],
        dropout=dropout, stochastic_depth_prob=dropout, num_classes=CLASSES, norm_layer=_groups,
    )  # fmt: skip


def _batch_norm(width: int, dropout: float) -> nn.Module:
    return torchvision.models.resnet18(num_classes=CLASSES)


def _weight_standardised(width: int, dropout: float) -> nn.Module:
    """Own convolutions that standardise their weight, under GroupNorm."""

    class Standardised(nn.Conv2d):
        def forward(self, x: Any) -> Any:
            weight = self.weight
            mean = weight.mean((1, 2, 3), keepdim=True)
            deviation = weight.std((1, 2, 3), keepdim=True) + 1e-5
            return self._conv_forward(x, (weight - mean) / deviation, self.bias)

    return nn.Sequential(
        *(Standardised(3, width, 3, padding=1), nn.GroupNorm(4, width), nn.ReLU()),
        *(Standardised(width, width, 3, 2, 1), nn.GroupNorm(4, width), nn.ReLU()),
        *(nn.Dropout2d(dropout), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, CLASSES)),
    )


def _case(name: str, library: str, make: Any, size: int = 32, **more: Any) -> Case:
    return Case(name, library, make, partial(images, size=size), classify, timed=(64, 32), **more)


CASES = (
    _case("timm ViT", "timm", _timm_vit("vit_tiny_patch16_224"), 16),
    _case("timm ViT, n = T", "timm", _timm_vit("vit_tiny_patch16_224"), 16, n=5),
    _case("timm ViT, layer scale, registers", "timm",
          _timm_vit("vit_tiny_patch16_224", init_values=0.1, reg_tokens=2), 16),
    _case("timm ViT, relative bias (BEiT)", "timm",
          _timm_vit("beit_base_patch16_224", use_abs_pos_emb=False, use_rel_pos_bias=True,
                    init_values=0.1, attn_drop_rate=0.0), 16),
    _case("timm ViT, rotary (EVA)", "timm",
          _timm_vit("eva02_tiny_patch14_224", num_heads=2), 16),
    _case("timm DeiT, distilled", "timm", _timm_vit("deit_tiny_distilled_patch16_224"), 16),
    _case("timm ViT, attention pooling", "timm",
          _timm_vit("vit_tiny_patch16_224", global_pool="map", class_token=False), 16),
    _case("timm CaiT", "timm", _timm_vit("cait_xxs24_224"), 16),
    _case("timm ConvNeXt", "timm", _timm_convnext),
    _case("timm ConvNeXt V2", "timm", partial(_timm_convnext, use_grn=True, ls_init_value=None)),
    _case("timm Swin", "timm", _timm_swin("swin_tiny_patch4_window7_224")),
    _case("timm Swin V2", "timm", _timm_swin("swinv2_tiny_window8_256")),
    _case("timm MLP-Mixer", "timm", _timm_mixer, 16),
    _case("timm ResNet, GroupNorm", "timm", _timm_resnet),
    _case("timm ResNet V2, standardised", "timm", _timm_resnet_v2),
    _case("timm NFNet", "timm", _timm_nfnet),
    _case("torchvision ViT", "torchvision", _torchvision_vit, 16),
    _case("torchvision Swin", "torchvision", _torchvision_swin),
    _case("torchvision Swin V2", "torchvision", partial(_torchvision_swin, kind="v2")),
    _case("torchvision ConvNeXt", "torchvision", _torchvision_convnext),
    _case("torchvision ResNet, GroupNorm", "torchvision", _torchvision_resnet),
    _case("torchvision MobileNet V2, GroupNorm", "torchvision", _torchvision_mobilenet),
    _case("torchvision EfficientNet, GroupNorm", "torchvision", _torchvision_efficientnet),
    _case("torchvision ResNet, BatchNorm", "torchvision", _batch_norm, refused="(?i)batch_?norm"),
    _case("own ResNet, standardised", "torch", _weight_standardised),
)  # fmt: skip
