# %% [markdown]
# # What ε means: attack it yourself
#
# A number like ε = 3 says little until one has seen an attack fail. In this notebook you are the
# attacker. You hold a record and want to know one thing: **was it in the training data?** This is
# called *membership inference*. (ε, δ)-differential privacy is a promise about exactly this game:
#
# > whatever the attacker knows and does, the rate of true alarms is at most e^ε times the rate of
# > false alarms, plus δ.
#
# Half a minute on two cores, no download.

# %%
import logging
import warnings

import lightning as L
import matplotlib.pyplot as plt
import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_dp import DifferentialPrivacy
from lightning_dp.accounting import Gaussian, epsilon, epsilon_text
from lightning_dp.audit import audit

warnings.filterwarnings("ignore")
for name in ("", ".utilities.rank_zero", ".accelerators.cuda"):
    about = logging.getLogger(f"lightning.pytorch{name}")
    about.addFilter(lambda record: record.getMessage().startswith("privacy"))
quiet = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "devices": 1,
}

# %% [markdown]
# ## The smallest case: one number
#
# A hospital tells how many of its patients have an illness, with noise. Say the true number is 100
# with you and 99 without you. The attacker knows everything about all others, so only these two
# worlds are left. Here are both, with noise of standard deviation z = 1.5:

# %% alt="Two bell curves that overlap for the most part, one around 99 and one around 100"
z, rng = 1.5, np.random.default_rng()
without, with_you = 99 + z * rng.standard_normal(200_000), 100 + z * rng.standard_normal(200_000)
fig, ax = plt.subplots(figsize=(7, 2.6), layout="constrained")
bins = np.linspace(93, 106, 105)
ax.hist(without, bins, alpha=0.6, label="without you")
ax.hist(with_you, bins, alpha=0.6, label="with you")
ax.set(xlabel="the number that is published", yticks=[])
ax.legend()
plt.show()

# %% [markdown]
# The best attack is to say "in" above some threshold. Take any threshold: how many true alarms for
# how many false ones? δ caps the rare outcomes that give you away, far out in the tails.

# %%
delta = 1e-2  # large, so that 200,000 draws can show it
promised = epsilon([(Gaussian(z), 1)], delta=delta)
for threshold in (99, 100, 101, 102, 103):
    false, true = (without > threshold).mean(), (with_you > threshold).mean()
    print(f"above {threshold}: {true:.4f} <= {np.exp(promised) * false + delta:.4f}")
    assert true <= np.exp(promised) * false + delta + 0.005
print(f"promised: ε = {epsilon_text(promised)} at δ = {delta:g}")

# %% [markdown]
# ## A model that remembers
#
# Now a network. We take 300 digits and give **half of them a wrong label**. A wrong label cannot be
# guessed, only remembered. A coin decides for each record whether the network is trained on it.
# The attack is simple: if the network is sure of the given label, the record was in.

# %%
digits = load_digits()
generator = torch.Generator().manual_seed(0)
chosen = torch.randperm(len(digits.target), generator=generator)[:600]
pixels = torch.tensor(digits.images / 8 - 1).float().flatten(1)[chosen]
labels = torch.tensor(digits.target)[chosen]
wrong = torch.rand(600, generator=generator) < 0.5
labels[wrong] = torch.randint(10, (int(wrong.sum()),), generator=generator)
inside = torch.rand(600, generator=generator) < 0.5


class Network(L.LightningModule):
    def __init__(self, learning_rate):
        super().__init__()
        self.learning_rate = learning_rate
        self.net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), self.learning_rate)


def train(privacy, epochs, learning_rate):
    torch.manual_seed(0)
    network = Network(learning_rate)
    records = TensorDataset(pixels[inside], labels[inside])
    trainer = L.Trainer(max_epochs=epochs, callbacks=privacy, **quiet)
    trainer.fit(network, DataLoader(records, batch_size=100, shuffle=True))
    return network


def alarms(network):
    """Rates of false and of true alarms, for every threshold on the loss."""
    with torch.no_grad():
        loss = F.cross_entropy(network.net(pixels), labels, reduction="none")
    member = inside[loss.argsort()].double()
    true, false = member.cumsum(0) / member.sum(), (1 - member).cumsum(0) / (1 - member).sum()
    return false.numpy(), true.numpy()


delta = 1e-5
plain = train([], epochs=60, learning_rate=3e-3)
privacy = DifferentialPrivacy(target_epsilon=1.0, target_delta=delta)
private = train([privacy], epochs=20, learning_rate=1e-2)

# %% alt="Rates of true against false alarms: the plain network is far above the private one"
fig, ax = plt.subplots(figsize=(4.5, 4.2), layout="constrained")
ax.plot(*alarms(plain), label="without privacy")
ax.plot(*alarms(private), label=f"ε = {epsilon_text(privacy.epsilon)}")
grid = np.linspace(0, 1, 200)
e = np.exp(privacy.epsilon)
limit = np.minimum(e * grid + delta, 1 - (1 - delta - grid) / e)
ax.fill_between(grid, limit, 1, color="0.85", label="no attack gets here at ε = 1")
ax.plot(grid, grid, ":", color="0.5", label="a coin")
ax.set(xlabel="false alarms", ylabel="true alarms", xlim=(0, 1), ylim=(0, 1))
ax.legend(loc="lower right", fontsize=8)
plt.show()

advantage = {
    name: max(t - f for f, t in zip(*alarms(m), strict=True))
    for name, m in (("without privacy", plain), ("private", private))
}
print({name: f"{value:.2f}" for name, value in advantage.items()})
assert advantage["private"] < 0.5 * advantage["without privacy"]

# %% [markdown]
# The curve of the private network keeps out of the grey area. That holds for *every* attack, also
# for one that nobody has thought of yet. This simple one does not even come near. A curve near the
# diagonal proves nothing, though: perhaps the attack was bad.
#
# ## A strong attack: canaries
#
# An attacker can do better if he may look at every step, and if he may choose the records. `audit`
# gives him both. It adds *canaries*: records whose gradients are as long as the clip norm allows,
# each in a direction of its own. A coin decides which of them are in. Then it guesses from the
# released gradients, and computes which ε is needed to explain so many right guesses. The result
# is a **lower bound**: a proof that ε is at least so large.

# %%
training_set = TensorDataset(pixels, labels)
loader = DataLoader(training_set, batch_size=150, shuffle=True)


def attack(noise_multiplier):
    privacy = DifferentialPrivacy(noise_multiplier=noise_multiplier, target_delta=delta)
    steps = {"max_steps": 30, "max_epochs": -1}
    return audit(Network(1e-2), loader, privacy.config, trainer=steps, num_canaries=1000)


honest = attack(noise_multiplier=2.0)
print(honest)

# %% [markdown]
# The attack finds a good part of what is claimed, and not more. So the claim is not far too large
# either: somebody who may look at every step really learns about that much.
#
# Now suppose that somebody makes a mistake, and adds half of the noise: z = 1, but the report says
# z = 2. Training looks the same, even better. The audit sees it:

# %%
mistaken = attack(noise_multiplier=1.0)
print(f"claimed: ε = {epsilon_text(honest.epsilon)}, shown: ε >= {mistaken.lower_bound:.2f}")
assert mistaken.lower_bound > honest.epsilon

# %% [markdown]
# The claim is refuted. [An audit](../isolation.md#audit-a-run) does this with your model and data. An
# audit is one more training on the records, so use public ones, or count it.
#
# ## What ε does not promise
#
# - **It is about one record.** A person with k records has k times the ε and a larger δ, and at the
#   same δ more than k times the ε. In the first example: you, two of you, you with five relatives.

# %%
for k in (1, 2, 6):  # records that move the number together
    print(k, epsilon_text(epsilon([(Gaussian(z / k), 1)], delta=1e-5)))

# %% [markdown]
# - **It does not hide what is true of everybody.** If smoking causes cancer, a study shows it with you
#   and without you. That is learning, and not a leak.
# - **It is about what is released**: the weights and the gradients with noise. A `train_loss` that you
#   publish is not covered. [What ε means here](../epsilon.md) has the whole list.
# - **It adds up.** Two trainings on the same records cost more than one
#   ([searching](../planning.md#searching-for-hyper-parameters)).
