"""Models of ``diffusers``: denoisers, and an auto-encoder."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zoo.case import Batch, Case
from zoo.lazy import Library

__all__ = ["CASES"]

diffusers = Library("diffusers")


def _unet(width: int, dropout: float) -> nn.Module:
    return diffusers.UNet2DModel(
        **{"sample_size": 16, "in_channels": 1, "out_channels": 1, "layers_per_block": 1},
        **{"block_out_channels": (width // 2, width), "norm_num_groups": 8, "dropout": dropout},
        **{"down_block_types": ("DownBlock2D", "AttnDownBlock2D"), "attention_head_dim": 8},
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )


def _conditional(width: int, dropout: float) -> nn.Module:
    return diffusers.UNet2DConditionModel(
        **{"sample_size": 16, "in_channels": 1, "out_channels": 1, "layers_per_block": 1},
        **{"block_out_channels": (width // 2, width), "norm_num_groups": 8, "dropout": dropout},
        **{"down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"), "attention_head_dim": 8},
        **{"up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"), "cross_attention_dim": 12},
    )


def _vae(width: int, dropout: float) -> nn.Module:
    return diffusers.AutoencoderKL(
        **{"in_channels": 1, "out_channels": 1, "latent_channels": 2, "norm_num_groups": 8},
        **{"block_out_channels": (width // 2, width), "sample_size": 16},
        **{"down_block_types": ("DownEncoderBlock2D",) * 2, "layers_per_block": 1},
        up_block_types=("UpDecoderBlock2D",) * 2,
    )


def _dit(width: int, dropout: float) -> nn.Module:
    return diffusers.Transformer2DModel(
        **{"sample_size": 8, "in_channels": 2, "num_layers": 1, "patch_size": 2},
        **{"num_attention_heads": 4, "attention_head_dim": width // 4, "dropout": dropout},
        **{"norm_type": "ada_norm_zero", "num_embeds_ada_norm": 1000},
        **{"norm_elementwise_affine": False, "activation_fn": "gelu-approximate"},
    )


def _noisy(batch: Batch) -> Tensor:
    """Pictures with noise, by a linear schedule."""
    keep = (1 - batch["t"] / 1000.0).view(-1, 1, 1, 1)
    return keep.sqrt() * batch["x"] + (1 - keep).sqrt() * batch["noise"]


def _denoise(net: Any, batch: Batch) -> Tensor:
    return F.mse_loss(net(_noisy(batch), batch["t"]).sample, batch["noise"])


def _denoise_given(net: Any, batch: Batch) -> Tensor:
    found = net(_noisy(batch), batch["t"], encoder_hidden_states=batch["given"])
    return F.mse_loss(found.sample, batch["noise"])


def _denoise_class(net: Any, batch: Batch) -> Tensor:
    found = net(_noisy(batch), timestep=batch["t"], class_labels=batch["y"])
    return F.mse_loss(found.sample, batch["noise"])


def _draw_and_denoise(net: Any, batch: Batch) -> Tensor:
    """The same with noise and time drawn in the step."""
    x = batch["x"]
    drawn = {"x": x, "noise": torch.randn_like(x), "t": torch.randint(1000, (len(x),))}
    return F.mse_loss(net(_noisy(drawn), drawn["t"]).sample, drawn["noise"])


def _elbo(net: Any, batch: Batch) -> Tensor:
    posterior = net.encode(batch["x"]).latent_dist
    code = posterior.mean + posterior.std * batch["noise"][:, :, ::2, ::2]
    error = F.mse_loss(net.decode(code).sample, batch["x"])
    return error + 1e-3 * posterior.kl().mean()


def _pictures(channels: int, size: int) -> Any:
    return lambda n: {
        "x": torch.rand(n, channels, size, size),
        "noise": torch.randn(n, channels, size, size),
        "t": torch.randint(1000, (n,)),
        "given": torch.randn(n, 5, 12),
        "y": torch.randint(4, (n,)),
    }


def _case(name: str, make: Any, loss: Any, channels: int = 1, size: int = 16) -> Case:
    return Case(name, "diffusers", make, _pictures(channels, size), loss, timed=(32, 32))


CASES = (
    _case("UNet2D", _unet, _denoise),
    _case("UNet2D, noise drawn in the step", _unet, _draw_and_denoise),
    _case("UNet2D, conditional", _conditional, _denoise_given),
    _case("VAE", _vae, _elbo),
    _case("DiT", _dit, _denoise_class, channels=2, size=8),
)
