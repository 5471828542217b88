"""Models of ``timm`` and ``diffusers`` that were chosen before they were run; see ``chosen.md``."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zoo.case import Batch, Case, classify, images
from zoo.lazy import Library

__all__ = ["CASES"]

timm = Library("timm")
diffusers = Library("diffusers")

CLASSES = 5


def _with_groups(module: nn.Module) -> nn.Module:
    """Put GroupNorm into the place of BatchNorm; timm's own also has an activation."""
    for name, child in module.named_children():
        if isinstance(child, nn.BatchNorm2d):
            norm: nn.Module = nn.GroupNorm(1, child.num_features)
            after = getattr(child, "act", None)
            setattr(module, name, norm if after is None else nn.Sequential(norm, after))
        else:
            _with_groups(child)
    return module


def _timm(kind: str, rate: str = "drop_path_rate", **more: Any) -> Any:
    def make(width: int, dropout: float) -> nn.Module:
        rates = {"drop_rate": dropout, rate: dropout}
        return _with_groups(timm.create_model(kind, num_classes=CLASSES, **rates, **more))

    return make


def _edgenext(width: int, dropout: float) -> nn.Module:
    return timm.models.edgenext.EdgeNeXt(
        **{"dims": (width // 2, width // 2, width, width), "depths": (1, 1, 2, 2)},
        **{"global_block_counts": (0, 1, 1, 1), "heads": (4, 4, 4, 4), "num_classes": CLASSES},
        **{"drop_rate": dropout, "drop_path_rate": dropout},
    )


def _maxxvit(kinds: tuple[Any, ...]) -> Any:
    """Return CoAtNet or MaxViT of two stages, by the kinds of their blocks."""

    def make(width: int, dropout: float) -> nn.Module:
        models = timm.models.maxxvit
        config = models.MaxxVitCfg(
            embed_dim=(width, 2 * width), depths=(1, 1), block_type=kinds, stem_width=width // 2,
            transformer_cfg=models.MaxxVitTransformerCfg(dim_head=width // 4, window_size=(4, 4)),
        )  # fmt: skip
        rates = {"drop_rate": dropout, "drop_path_rate": dropout}
        return _with_groups(models.MaxxVit(config, 32, num_classes=CLASSES, **rates))

    return make


def _gmlp(width: int, dropout: float) -> nn.Module:
    models = timm.models.mlp_mixer
    return models.MlpMixer(
        **{"img_size": 16, "patch_size": 8, "embed_dim": width, "num_blocks": 2, "mlp_ratio": 4},
        **{"block_layer": models.SpatialGatingBlock, "mlp_layer": timm.layers.GatedMlp},
        **{"num_classes": CLASSES, "drop_rate": dropout, "drop_path_rate": dropout},
    )


def _xcit(width: int, dropout: float) -> nn.Module:
    net = timm.models.xcit.Xcit(
        **{"img_size": 32, "patch_size": 8, "embed_dim": width, "depth": 2, "num_heads": 4},
        **{"num_classes": CLASSES, "drop_rate": dropout, "drop_path_rate": dropout, "eta": 0.1},
        **{"cls_attn_layers": 1, "attn_drop_rate": dropout},
    )
    return _with_groups(net)


def _regnet(width: int, dropout: float) -> nn.Module:
    models = timm.models.regnet
    config = models.RegNetCfg(
        depth=6, w0=width // 2, wa=width // 2, wm=2.0, group_size=8, se_ratio=0.25, stem_width=16
    )
    rates = {"drop_rate": dropout, "drop_path_rate": dropout}
    return _with_groups(models.RegNet(config, num_classes=CLASSES, **rates))


def _resnest(width: int, dropout: float) -> nn.Module:
    models = timm.models
    net = models.resnet.ResNet(
        models.resnest.ResNestBottleneck,
        **{"layers": (1,) * 4, "channels": (width // 2, width) * 2, "num_classes": CLASSES},
        **{"stem_type": "deep", "stem_width": width // 4, "avg_down": True, "base_width": 64},
        **{"cardinality": 1, "block_args": {"radix": 2, "avd": True, "avd_first": False}},
        **{"drop_rate": dropout, "drop_path_rate": dropout},
    )
    return _with_groups(net)


def _hiera(width: int, dropout: float) -> nn.Module:
    return timm.models.hiera.Hiera(
        **{"img_size": (32, 32), "embed_dim": width // 2, "num_heads": 2, "stages": (1, 1)},
        **{"q_pool": 1, "mask_unit_size": (4, 4), "mask_unit_attn": (True, False)},
        **{"num_classes": CLASSES, "drop_path_rate": dropout, "head_init_scale": 1.0},
    )


def _unet1d(width: int, dropout: float) -> nn.Module:
    return diffusers.UNet1DModel(
        **{"sample_size": 32, "in_channels": 2, "out_channels": 2, "layers_per_block": 1},
        **{"block_out_channels": (width, width), "extra_in_channels": 2 * width},
        **{"down_block_types": ("DownBlock1DNoSkip", "AttnDownBlock1D")},
        up_block_types=("AttnUpBlock1D", "UpBlock1DNoSkip"),
    )


def _pixart(width: int, dropout: float) -> nn.Module:
    return diffusers.PixArtTransformer2DModel(
        **{"sample_size": 8, "in_channels": 2, "out_channels": 2, "num_layers": 2},
        **{"num_attention_heads": 4, "attention_head_dim": width // 4, "dropout": dropout},
        **{
            "cross_attention_dim": width,
            "caption_channels": 12,
            "use_additional_conditions": False,
        },
    )


def _vq(width: int, dropout: float) -> nn.Module:
    return diffusers.VQModel(
        **{"in_channels": 1, "out_channels": 1, "latent_channels": 2, "norm_num_groups": 8},
        **{"block_out_channels": (width // 2, width), "num_vq_embeddings": 16},
        **{"down_block_types": ("DownEncoderBlock2D",) * 2, "layers_per_block": 1},
        up_block_types=("UpDecoderBlock2D",) * 2,
    )


def _sd3(width: int, dropout: float) -> nn.Module:
    return diffusers.SD3Transformer2DModel(
        **{"sample_size": 8, "in_channels": 2, "out_channels": 2, "num_layers": 2, "patch_size": 2},
        **{"num_attention_heads": 4, "attention_head_dim": width // 4, "pos_embed_max_size": 8},
        **{"joint_attention_dim": 12, "pooled_projection_dim": 6, "caption_projection_dim": width},
    )


def _noisy(batch: Batch) -> Tensor:
    """Pictures or series with noise, by a linear schedule."""
    keep = (1 - batch["t"] / 1000.0).view(-1, *[1] * (batch["x"].dim() - 1))
    return keep.sqrt() * batch["x"] + (1 - keep).sqrt() * batch["noise"]


def _denoise(net: Any, batch: Batch) -> Tensor:
    return F.mse_loss(net(_noisy(batch), batch["t"]).sample, batch["noise"])


def _denoise_given(net: Any, batch: Batch) -> Tensor:
    more = {"timestep": batch["t"], "encoder_hidden_states": batch["given"]}
    if "pooled" in batch:
        more["pooled_projections"] = batch["pooled"]
    return F.mse_loss(net(_noisy(batch), **more).sample, batch["noise"])


def _codes(net: Any, batch: Batch) -> Tensor:
    code = net.encode(batch["x"]).latents
    found, kept = net.decode(code, return_dict=False)
    return F.mse_loss(found, batch["x"]) + kept.mean()


def _noised(*shape: int, **more: tuple[int, ...]) -> Any:
    return lambda n: {
        "x": torch.rand(n, *shape), "noise": torch.randn(n, *shape), "t": torch.randint(1000, (n,)),
        **{name: torch.randn(n, *size) for name, size in more.items()},
    }  # fmt: skip


def _picture(name: str, make: Any, size: int = 32) -> Case:
    records = partial(images, size=size)
    return Case(f"timm {name}", "timm", make, records, classify, timed=(64, 32))


def _diffusion(name: str, make: Any, records: Any, loss: Any) -> Case:
    return Case(f"diffusers {name}", "diffusers", make, records, loss, timed=(32, 32))


CASES = (
    _picture("MobileViT, GroupNorm", _timm("mobilevit_xxs"), 64),
    _picture("EdgeNeXt", _edgenext),
    _picture("CoAtNet, GroupNorm", _maxxvit(("C", "T"))),
    _picture("MaxViT, GroupNorm", _maxxvit(("M", "M"))),
    _picture("gMLP", _gmlp, 16),
    _picture("XCiT, GroupNorm", _xcit),
    _picture("RegNet, GroupNorm", _regnet),
    _picture("MobileNet V3, GroupNorm", _timm("mobilenetv3_small_050")),
    _picture("ResNeSt, GroupNorm", _resnest),
    _picture("Hiera", _hiera),
    _diffusion("UNet1D", _unet1d, _noised(2, 32), _denoise),
    _diffusion("PixArt", _pixart, _noised(2, 8, 8, given=(5, 12)), _denoise_given),
    _diffusion("VQModel", _vq, _noised(1, 16, 16), _codes),
    _diffusion("SD3", _sd3, _noised(2, 8, 8, given=(5, 12), pooled=(6,)), _denoise_given),
)
