"""Does noise that decreases over the run beat constant noise at equal privacy?

    python examples/papers/dynamic_noise.py --data DIR [--quick] [--output DIR]

Reproduces the experiments of "On Dynamic Noise Influence in Differential Private Learning"
(anonymous submission, Appendix D) with this package's own pieces, and then goes beyond them:

1. Full batches: final training loss of exponential and dynamic noise relative to uniform noise,
   over data scales, at the paper's budget (R = 0.3927, there called (4, 1e-8)-DP) and at the one
   that (4, 1e-8) really allows. Squared and logistic loss and a 2-layer network on MNIST35
   (1000 images of 3 and 5, PCA to 60 dimensions), logistic loss on two synthetic clusters.
   "One std" divides all components by one number instead of each by its own; "retrained" estimates
   the influence by retraining, as for the other losses, instead of from the Hessian.
2. Poisson minibatches, calibrated by PLD accounting, through an ordinary Trainer: MNIST-10
   logistic regression and a small CNN at ε = 0.5, 1 and 3.
3. Figure 1: descent on parabolas of different curvature, 100 repeats.
4. Figure 2, right: a network of 2 x 100 with momentum, two forms of the influence; with --records
   50000 the same on 50,000 digits (50 s a run, 324 runs).
5. The same two forms with momentum on minibatches, through the Trainer.

DIR holds mnist.npz or torchvision's MNIST/raw; LIGHTNING_DP_DATA does the same. Pictures go to
./outputs/dynamic_noise. As in the paper, preprocessing, the choice of T and the estimates of the
influence look at the data and are not paid for: these are experiments on public data. Seeds are
fixed so that the tables can be made again, which no private run may do.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import matplotlib
import torch

matplotlib.use("Agg")
import dynamic_noise_figures as figures
import dynamic_noise_minibatches as minibatches
from archives import DATA_VARIABLE, folder_of, mnist
from common import NOISES, finished, print_heading
from dynamic_noise_report import draw, print_table, print_verdict
from dynamic_noise_run import (
    DELTA,
    EPSILON,
    HESSIAN,
    PAPER_BUDGET,
    Size,
    Task,
    exact_budget,
    run_task,
)

from lightning_dp.accounting.gdp import gdp_epsilon

OUTPUT = Path("outputs/dynamic_noise")
FULL = Size(
    data_scales=(2, 5, 10, 15, 20, 30),
    network_scales=(2, 10, 25),
    grid=(1, 2, 3, 5, 8, 12, 18, 27, 40, 60, 80, 100),
    repeats=30,
    choosing_repeats=6,
    probes=9,
    probe_repeats=16,
)
QUICK = Size((5, 15), (10,), (3, 10, 30, 100), 20, 3, 4, 4)


def protocol(pool: ProcessPoolExecutor, folder: str, size: Size, output: Path) -> None:
    """Part 1."""
    linear = (*HESSIAN, "squared, retrained", "logistic", "synthetic, logistic")
    tasks = [Task("network", folder, scale, size) for scale in size.network_scales]
    tasks += [Task(name, folder, scale, size) for name in linear for scale in size.data_scales]
    cells = list(pool.map(partial(finished, run_task), tasks))
    cells = [cell for name in (*linear, "network") for cell in cells if cell.name == name]
    exact = exact_budget()
    paper = gdp_epsilon(math.sqrt(PAPER_BUDGET), DELTA)
    print("\n## 1. Full batches, the paper's protocol")
    print(
        f"\nR = {PAPER_BUDGET} is ({paper:.3f}, {DELTA:g})-DP exactly; ({EPSILON:g}, {DELTA:g}) "
        f"allows R = {exact:.4f} (add/remove)."
    )
    for budget, value in (("paper", PAPER_BUDGET), ("exact", exact)):
        print(f"\n## Budget: {budget}, R = {value:.4f}")
        for name in (*linear, "network"):
            of_name = [cell for cell in cells if cell.name == name]
            print_table(name, of_name, budget, size.repeats)
        print_verdict(cells, budget)
    draw(cells, output / "full_batch.png")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", help=f"folder of MNIST (or set {DATA_VARIABLE})")
    parser.add_argument("--quick", action="store_true", help="a small part, in about 2 minutes")
    parser.add_argument("--parts", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--repeats", type=int, default=FULL.repeats, help="noises of part 1")
    parser.add_argument("--records", type=int, default=1000, help="of part 4")
    parser.add_argument(
        "--seeds", type=int, help="of parts 2 and 5; default: 20, or 2 with --quick"
    )
    parser.add_argument(
        "--epsilons", type=float, nargs="+", default=[0.5, 1.0, 3.0], help="of part 2"
    )
    networks = minibatches.NETWORKS
    parser.add_argument(
        "--networks", nargs="+", choices=networks, default=list(networks), help="of parts 2 and 5"
    )
    parser.add_argument("--output", type=Path, default=OUTPUT, help="folder of the pictures")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    options = parser.parse_args()
    folder = folder_of(options.data)
    mnist(folder)
    options.output.mkdir(parents=True, exist_ok=True)
    print_heading("Dynamic noise", sys.argv[1:], options.data)
    start = time.perf_counter()
    seeds = options.seeds or (2 if options.quick else NOISES)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.jobs, mp_context=context) as pool:
        if 1 in options.parts:
            size = QUICK if options.quick else replace(FULL, repeats=options.repeats)
            protocol(pool, folder, size, options.output)
            print(f"\n({time.perf_counter() - start:.0f} s)", flush=True)
        if 2 in options.parts:
            which = seeds, options.epsilons, options.networks
            minibatches.compare(pool, folder, options.output, *which, quick=options.quick)
    torch.set_num_threads(1)
    if 3 in options.parts:
        figures.curvature_part(options.output, quick=options.quick)
    if 4 in options.parts:
        figures.momentum_part(folder, options.records, options.jobs, quick=options.quick)
    if 5 in options.parts:
        which = folder, seeds, options.networks, options.jobs
        minibatches.momentum_part(*which, quick=options.quick)
    print(f"\n({time.perf_counter() - start:.0f} s in all; pictures in {options.output})")


if __name__ == "__main__":
    main()
