"""The wavelet scattering transform of images: features that nobody's data had a part in.

An image x becomes the local means of x, of |x * ψ_a| and of ||x * ψ_a| * ψ_b|, for Morlet wavelets ψ_a of
two sizes and several directions, and ψ_b of the larger size where ψ_a has the smaller one (Mallat,
arXiv:1101.2286; Oyallon and Mallat, arXiv:1412.8659). Then groups of features are brought to mean 0 and
variance 1 within each image: that an image is normalised by its own values costs no privacy.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

BANDWIDTH, FREQUENCY = 0.8, 0.75 * math.pi  # of the smaller wavelets; pixels, radians per pixel
STRIDE = 4  # of the local means: pixels


def morlet(size: int, scale: int, angle: float, directions: int) -> Tensor:
    """A wavelet of mean 0: real and imaginary part (2, size, size)."""
    axis = torch.arange(size) - size // 2
    down, right = torch.meshgrid(axis.float(), axis.float(), indexing="ij")
    along = right * math.cos(angle) + down * math.sin(angle)
    across = (down * math.cos(angle) - right * math.sin(angle)) * 4 / directions
    bump = torch.exp(-(along**2 + across**2) / (2 * (BANDWIDTH * scale) ** 2))
    phase = FREQUENCY / scale * along
    wave = bump * torch.stack([phase.cos(), phase.sin()])
    mean = wave.sum((1, 2), keepdim=True) / bump.sum()
    return (wave - mean * bump) / bump.sum()


def wavelets(size: int, scale: int, directions: int) -> Tensor:
    """Filters of all directions (2 * directions, 1, size, size): real parts, then imaginary ones."""
    angles = [math.pi * k / directions for k in range(directions)]
    both = torch.stack([morlet(size, scale, angle, directions) for angle in angles], dim=1)
    return both.flatten(0, 1).unsqueeze(1)


def moduli(maps: Tensor, filters: Tensor, stride: int) -> Tensor:
    """|x * ψ| of every map x (n, h, w) and direction: (n, directions, h / stride, w / stride)."""
    edge = filters.shape[-1] // 2
    padded = F.pad(maps.unsqueeze(1), [edge] * 4, mode="reflect")
    real, imaginary = F.conv2d(padded, filters, stride=stride).chunk(2, dim=1)
    return torch.hypot(real, imaginary)


def means(maps: Tensor, stride: int) -> Tensor:
    """Local means of maps (n, channels, h, w), each over a Gaussian window."""
    width = BANDWIDTH * stride / 2
    axis = torch.arange(2 * stride + 1) - stride
    bump = torch.exp(-(axis.float() ** 2) / (2 * width**2))
    bump /= bump.sum()
    single = maps.flatten(0, 1).unsqueeze(1)
    padded = F.pad(single, [stride] * 4, mode="reflect")
    rows = F.conv2d(padded, bump.reshape(1, 1, -1, 1), stride=(stride, 1))
    columns = F.conv2d(rows, bump.reshape(1, 1, 1, -1), stride=(1, stride))
    return columns.reshape(*maps.shape[:2], *columns.shape[2:])


def scattering(images: Tensor, directions: int = 8) -> Tensor:
    """Features of images (n, channels, h, w): (n, channels * (1 + 2 L + L²), h / 4, w / 4)."""
    count, maps = len(images), images.flatten(0, 1)
    small, large = wavelets(7, 1, directions), wavelets(13, 2, directions)
    first = moduli(maps, small, 1)
    wide = moduli(maps, large, 2)
    second = moduli(first.flatten(0, 1), large, 2).unflatten(0, first.shape[:2]).flatten(1, 2)
    parts = [means(maps.unsqueeze(1), STRIDE), means(first, STRIDE)]
    parts += [means(half, STRIDE // 2) for half in (wide, second)]
    found = torch.cat(parts, dim=1)
    return found.reshape(count, -1, *found.shape[2:])


def features(images: Tensor, groups: int, directions: int = 8, chunk: int = 500) -> Tensor:
    """Scattering features, each group of channels of each image with mean 0 and variance 1: (n, d)."""
    with torch.no_grad():
        parts = [
            F.group_norm(scattering(part, directions), groups).flatten(1)
            for part in images.split(chunk)
        ]
    return torch.cat(parts)
