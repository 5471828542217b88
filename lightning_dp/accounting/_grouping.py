"""Many distinct steps as mixtures of few: a pessimistic interpolation of the privacy profile.

Let D(epsilon; mu, q) be the profile of one subsampled Gaussian, mu = 1/z. At every epsilon it is

- convex in q: both distributions of the pair are linear in q and the hockey-stick divergence is
  jointly convex;
- convex in the total variation ``TV(mu) = 2 Phi(k mu / 2) - 1`` of the Gaussian pair, k = 1 for
  add/remove and 2 for replace-one. add/remove: D is a multiple of a Gaussian profile G(s; mu) with
  s free of mu, and ``dG/dmu = phi(s/mu - mu/2)`` over ``dTV/dmu = phi(mu/2)`` has the logarithmic
  derivative ``s^2/mu^3 >= 0``. replace-one, ``g = e^epsilon``, in units where the noise is 1: with
  the threshold y of the better set, ``dD/dmu = q phi(y - mu) + g q phi(y + mu)`` (the derivative in y
  vanishes); over ``dTV/dmu = 2 phi(mu)`` it is ``q sqrt(g) e^(-y^2/2) cosh w``, with
  ``w = mu y - epsilon/2`` and ``sinh w = (1-q)/q sinh(epsilon/2) e^(mu^2/2)``. So ``w' = mu tanh w``,
  and the logarithmic derivative is ``(y^2 - y mu tanh w + (mu tanh w)^2) / mu >= 0``.

So a step inside a rectangle of the (TV, q) plane is dominated by the mixture of the rectangle's
corners with bilinear weights. The error is of second order in the size of the rectangle, whereas
rounding z down and q up would cost the first order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr

from lightning_dp.accounting._pmf import GaussianNode, Node
from lightning_dp.accounting.steps import FloatArray, Steps, merge_arrays

IntArray = NDArray[np.intp]

_ROUND_UP = 1e-11  # of a weight, for its rounding
_MOST_CELLS = 4096
_FEW_RATES = 4  # so few are kept apart
_UNIT = 2.0**-52


@dataclass(frozen=True)
class Cell:
    """Steps that share their corners: step t is corner ``2 i + j`` with weight ``U_i(t) V_j(t)``.

    ``U_1(t) = u[t]`` is the weight of the smaller noise multiplier, ``V_1(t) = v[t]`` that of the
    larger sample rate; ``U_0 = 1 - U_1``, ``V_0 = 1 - V_1``. ``members`` are the places of the
    steps in the merged history (none for other releases), ``counts`` their numbers.
    """

    corners: tuple[int, int, int, int]
    u: FloatArray
    v: FloatArray
    counts: FloatArray
    members: IntArray

    @property
    def total(self) -> float:
        """Number of steps."""
        return float(self.counts.sum())

    @property
    def is_single(self) -> bool:
        """True if all steps equal the first corner."""
        return self.u.size == 1 and self.u[0] == 0.0 and self.v[0] == 0.0

    def weights(self) -> FloatArray:
        """Weight of every corner (column) in every step (row)."""
        u, v = self.u, self.v
        return np.stack([(1 - u) * (1 - v), (1 - u) * v, u * (1 - v), u * v], axis=1)

    def part(self, which: NDArray[np.bool_]) -> Cell:
        """Some of the steps."""
        return Cell(
            self.corners, self.u[which], self.v[which], self.counts[which], self.members[which]
        )


@dataclass(frozen=True)
class Mixture:
    """Nodes ``(z, q)`` and the cells between them: a pessimistic reading of some steps.

    Other releases stand next to them, as separate nodes and cells.
    """

    nodes: list[Node]
    cells: list[Cell]

    @property
    def is_exact(self) -> bool:
        """True if every step is a node."""
        return all(cell.is_single for cell in self.cells)

    @property
    def total(self) -> float:
        """Number of steps."""
        return math.fsum(cell.total for cell in self.cells)

    def beside(self, others: Sequence[tuple[Node, int]]) -> Mixture:
        """Return it with other releases and their counts, which are no members of the steps."""
        cells = [
            _single(len(self.nodes) + i, np.array([float(count)]), np.zeros(0, dtype=int))
            for i, (_, count) in enumerate(others)
        ]
        return Mixture([*self.nodes, *(node for node, _ in others)], [*self.cells, *cells])


def as_mixture(steps: Steps, relation: str, spacing: float, exact: int) -> Mixture:
    """Return the steps themselves if they are few, else cells of a lattice.

    Args:
        steps: merged steps with z > 0.
        relation: fixes the coordinate in which the profile is convex.
        spacing: relative distance of neighbouring nodes.
        exact: the most distinct steps that are kept as they are.
    """
    if steps.counts.size <= exact:
        return _singles(steps)
    rates = np.unique(steps.sample_rates)
    if 1 < rates.size <= _FEW_RATES:  # nothing is gained by reading one rate as others
        places = [np.flatnonzero(steps.sample_rates == rate) for rate in rates]
        parts = [as_mixture(steps.at(at), relation, spacing, 1) for at in places]
        return _side_by_side(parts, places)
    k = 2.0 if relation == "replace_one" else 1.0
    mu = 1.0 / steps.noise_multipliers
    # The lattice may be placed at will. The weights must be linear in the coordinates in which
    # the profile is convex: q, and TV(mu) = 1 - 2 Phi(-k mu / 2), up to a linear map.
    rows = _lattice(_flatten(mu), spacing, _unflatten)
    columns = _lattice(np.log(steps.sample_rates), 1.4 * spacing, np.exp)
    # Rounding must not leave a step outside: beyond the last node it would be read as cheaper.
    rows[-1] = max(rows[-1], float(mu.max()))
    columns[-1] = min(max(columns[-1], float(steps.sample_rates.max())), 1.0)
    i, u = _locate(-ndtr(-k * mu / 2), -ndtr(-k * rows / 2))
    j, v = _locate(steps.sample_rates, columns)
    lattice = _cells(steps, rows, columns, (i, j), (u, v))
    return lattice if len(lattice.nodes) < steps.counts.size else _singles(steps)


def rounded(steps: Steps, spacing: float) -> Steps:
    """Fewer distinct steps that cost more: noise multipliers rounded down, and rates up."""
    with np.errstate(over="ignore"):
        z = np.exp(spacing * np.floor(np.log(steps.noise_multipliers) / spacing))
        q = np.exp(spacing * np.ceil(np.log(steps.sample_rates) / spacing))
    few = np.unique(steps.sample_rates).size <= _FEW_RATES
    # exp and log round either way: 1e-12 more, and never beyond the step itself.
    z = np.minimum(z * (1 - 1e-12), steps.noise_multipliers)
    q = steps.sample_rates if few else np.clip(q * (1 + 1e-12), steps.sample_rates, 1.0)
    return merge_arrays(z, q, steps.counts)


def _singles(steps: Steps) -> Mixture:
    """Every distinct step is a node and a cell."""
    pairs = zip(steps.noise_multipliers.tolist(), steps.sample_rates.tolist(), strict=True)
    nodes: list[Node] = [GaussianNode(z, q) for z, q in pairs]
    counts = steps.counts.reshape(-1, 1)
    return Mixture(nodes, [_single(c, counts[c], np.array([c])) for c in range(len(nodes))])


def _single(node: int, count: FloatArray, members: IntArray) -> Cell:
    """A cell that is one node."""
    return Cell((node,) * 4, np.zeros(1), np.zeros(1), count, members)


def _side_by_side(mixtures: list[Mixture], places: list[IntArray]) -> Mixture:
    """Several mixtures as one; ``places`` says where the steps of each are in all."""
    nodes: list[Node] = []
    cells: list[Cell] = []
    for mixture, at in zip(mixtures, places, strict=True):
        for cell in mixture.cells:
            a, b, c, d = (len(nodes) + corner for corner in cell.corners)
            cells.append(replace(cell, corners=(a, b, c, d), members=at[cell.members]))
        nodes += mixture.nodes
    return Mixture(nodes, cells)


def _flatten(mu: FloatArray) -> FloatArray:
    """Return a coordinate along which equal distances give similar relative errors.

    The cost of a step goes as a power of mu for small mu, and as e^(mu^2) for large ones.
    """
    return np.asarray(np.where(mu <= 1, np.log(mu), (np.square(mu) - 1) / 2))


def _unflatten(y: FloatArray) -> FloatArray:
    """The inverse of :func:`_flatten`."""
    return np.asarray(np.where(y <= 0, np.exp(np.minimum(y, 0)), np.sqrt(1 + 2 * np.maximum(y, 0))))


def _lattice(
    y: FloatArray, spacing: float, inverse: Callable[[FloatArray], FloatArray]
) -> FloatArray:
    """Nodes that are evenly spaced in ``y`` and cover it."""
    low, high = float(y.min()), float(y.max())
    if high - low < 1e-9:
        return np.asarray(inverse(np.array([high])), dtype=float)
    points = min(max(1, math.ceil((high - low) / spacing)), _MOST_CELLS) + 1
    return np.asarray(inverse(np.linspace(low, high, points)), dtype=float)


def _locate(values: FloatArray, nodes: FloatArray) -> tuple[IntArray, FloatArray]:
    """Index of the cell and the weight of its upper node, rounded up, for each value."""
    if nodes.size == 1:
        return np.zeros(values.size, dtype=int), np.zeros(values.size)
    index = np.clip(np.searchsorted(nodes, values, side="right") - 1, 0, nodes.size - 2)
    # The upper node is the more expensive one, so its weight is rounded up.
    distance = values - nodes[index] + 8 * _UNIT * np.abs(nodes[index])
    weight = distance / (nodes[index + 1] - nodes[index])
    return index, np.clip(weight + _ROUND_UP, 0.0, 1.0)


def _cells(
    steps: Steps,
    rows: FloatArray,
    columns: FloatArray,
    index: tuple[IntArray, IntArray],
    weight: tuple[FloatArray, FloatArray],
) -> Mixture:
    """Collect the steps of each rectangle; only corners in use become nodes."""
    n_columns = columns.size
    key = index[0] * n_columns + index[1]
    order = np.argsort(key, kind="stable")
    starts = np.flatnonzero(np.diff(key[order], prepend=-1))
    below, right = (n_columns if rows.size > 1 else 0), (1 if n_columns > 1 else 0)
    numbers: dict[int, int] = {}
    cells = []
    for members in np.split(order, starts[1:]):
        first = int(key[members[0]])
        a, b, c, d = (
            numbers.setdefault(corner, len(numbers))
            for corner in (first, first + right, first + below, first + below + right)
        )
        u, v = weight[0][members], weight[1][members]
        cells.append(Cell((a, b, c, d), u, v, steps.counts[members], members))
    nodes: list[Node] = [
        GaussianNode(1.0 / float(rows[p // n_columns]), float(columns[p % n_columns]))
        for p in numbers
    ]
    return Mixture(nodes, cells)
