"""Three hospitals train together, and each protects its patients with all of their visits.

    python examples/federated/users.py [--unit record]

No network: messages go by hand. Patients came once to twenty times, and their visits are alike, so
that ε of a visit promises them little. Prints every hospital's ε, and the accuracy on new patients.
"""

from __future__ import annotations

import argparse
import tempfile
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lightning_dp import Constant, MeanGradient, Poisson, UserLevel
from lightning_dp.accounting import calibrate, epsilon_text
from lightning_dp.federated.ledger import ReleaseLedger
from lightning_dp.federated.local import LocalRecords
from lightning_dp.federated.synchronous import QueryClient, SynchronousServer
from lightning_dp.noise_plan import NoisePlan

HOSPITALS, PATIENTS, RATE, ROUNDS, EPSILON, DELTA = 3, 400, 0.1, 30, 3.0, 1e-4


class Diagnosis(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(8, 2)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.layer(batch[0]), batch[1])


class Visits(TensorDataset):
    """Measurements of each visit, and the patient who came."""

    def __init__(self, patients: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        person = torch.randn(patients, 8, generator=generator)
        counts = torch.randint(1, 21, (patients,), generator=generator)
        self.patient = torch.arange(patients).repeat_interleave(counts)
        x = person[self.patient]
        x = x + 0.1 * torch.randn(x.shape, generator=generator)
        super().__init__(x, (person[:, 0] > person[:, 1]).long()[self.patient])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--unit", choices=["user", "record"], default="user")
    unit: Any = parser.parse_args().unit
    if unit == "user":
        unit = UserLevel(ids="patient", most_rows=4)

    records = [
        LocalRecords(Diagnosis(), Visits(PATIENTS, seed), unit=unit) for seed in range(HOSPITALS)
    ]
    z = calibrate(lambda step: 1.0, RATE, ROUNDS, EPSILON, DELTA)
    plan = NoisePlan(z, Constant(), Poisson(), RATE, MeanGradient(max_grad_norm=1.0))
    number = sum(each.num_records for each in records)  # of patients, or of visits
    server = SynchronousServer(
        "trial", plan, records[0].point, ROUNDS, HOSPITALS, number, 1.0, "client"
    )
    budget = {"target_epsilon": EPSILON, "target_delta": DELTA}
    with tempfile.TemporaryDirectory() as folder:
        clients = [
            QueryClient(
                each,
                plan,
                ReleaseLedger(folder, f"hospital {c}"),
                run="trial",
                rounds=ROUNDS,
                **budget,
            )
            for c, each in enumerate(records)
        ]
        while not server.is_done:
            for c, client in enumerate(clients):
                if (request := server.request(c)) is not None:
                    server.receive(c, client.answer(request))
        for c, client in enumerate(clients):
            facts = f"{client.records.num_records} {client.records.unit}s"
            print(
                f"hospital {c}: {facts}, ε = {epsilon_text(client.epsilon)} of a {client.records.unit}"
            )

    module, (x, y) = Diagnosis(), Visits(PATIENTS, seed=HOSPITALS).tensors
    torch.nn.utils.vector_to_parameters(server.point, module.parameters())
    accuracy = (module.layer(x).argmax(1) == y).float().mean()
    print(f"{server.round} rounds: accuracy {accuracy:.2f}")


if __name__ == "__main__":
    main()
