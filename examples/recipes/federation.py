"""A federation: five clients share a9a; each clips and noises its own sums and books its own ε.

    python examples/recipes/federation.py --data DIR

Each client has a fifth of the records of a9a_linear.py and adds its own noise: the server sees noised
sums alone. This process plays all clients; docs/federated.md moves the same messages between machines.
"""

from __future__ import annotations

import time

import torch
from common import QUICK, Classifier, Options, Way, read_options, zero_linear
from data import a9a, problems
from table import Measured, Row, save, table

from lightning_dp.accounting import calibrate
from lightning_dp.federated import AsyncPlan, ClientPrivacy, PolynomialSizes
from lightning_dp.federated.asynchronous import InverseSteps
from lightning_dp.federated.local import LocalRecords

DELTA, CLIP = 1e-5, 0.5
CLIENTS, ROUNDS, BATCH = 5, 100, 800  # records of each client in a round
STEP = 10 / (CLIENTS * BATCH)  # on sums of clipped gradients
PLAIN_STEP = 1 / (CLIENTS * BATCH)  # on sums that nothing bounds


def play(options: Options, seed: int, *, private: bool) -> tuple[float, float]:
    """Accuracy on the test set, and the largest ε of a client."""
    from async_federated_run import NO_PRIVACY, federate

    problem = problems.PROBLEMS["a9a"]
    rounds, batch = (3, QUICK // CLIENTS) if options.quick else (ROUNDS, BATCH)
    step = STEP if private else PLAIN_STEP
    model = Classifier(zero_linear(123, 2), Way(1, batch, step))
    shares = [problem.records(client, CLIENTS, options.data) for client in range(CLIENTS)]
    rate = batch / min(len(share) for share in shares)
    z = calibrate(lambda i: 1.0, lambda i: rate, rounds, epsilon=options.epsilon, delta=DELTA)
    point, epsilon = federate(
        [LocalRecords(model, share) for share in shares],
        torch.zeros(sum(p.numel() for p in model.parameters())),
        AsyncPlan(rounds, PolynomialSizes(a=0, b=batch), InverseSteps(step), lag=1),
        ClientPrivacy(CLIP, z, options.epsilon, DELTA) if private else NO_PRIVACY,
        seed,
    )
    torch.nn.utils.vector_to_parameters(point, model.parameters())
    accuracy = problem.accuracy(model, options.data)
    print(f"  seed {seed}: {accuracy:.4f}", flush=True)
    return accuracy, epsilon if private else 0.0


def main() -> None:
    options = read_options(__file__, __doc__)
    _, y, _, y_test = a9a(options.data, None)
    begin = time.process_time(), time.perf_counter()
    runs = [play(options, seed, private=True) for seed in range(options.seeds)]
    cost = [
        (now - before) / options.seeds
        for now, before in zip((time.process_time(), time.perf_counter()), begin, strict=True)
    ]
    start = float((y_test == 0).float().mean())
    private = Measured(start, [run[0] for run in runs], max(run[1] for run in runs), *cost)
    plain = Measured(start, [play(options, 0, private=False)[0]])
    row = Row(
        f"a9a, {CLIENTS} clients, logistic regression",
        "accuracy",
        options.command,
        len(y),
        DELTA,
        private,
        plain,
    )
    path = save(row, options.output / "federation.json")
    print(f"{table([row])}\nsaved: {path}")


if __name__ == "__main__":
    main()
