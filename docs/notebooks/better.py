# %% [markdown]
# # More out of the same ε
#
# A private model can be bad for three reasons: too much noise, a learning rate that does not fit the
# noise, or too much to learn. Here we look at the three in turn, with ε = 1 and δ = 1e-5 from the
# first line to the last. Half a minute on two cores, no download.
#
# We search on scikit-learn's digits and act as if they were public: a *rehearsal*. On private
# records every trial costs ([how much](../planning.md#searching-for-hyper-parameters)).

# %%
import logging
import warnings

import lightning as L
import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_dp import DifferentialPrivacy
from lightning_dp.plan import learning_rate, plan_training, suggest, weight_size

warnings.filterwarnings("ignore")
for name in ("", ".utilities.rank_zero", ".accelerators.cuda"):
    logging.getLogger(f"lightning.pytorch{name}").setLevel(logging.ERROR)

digits = load_digits()
pictures, labels = torch.tensor(digits.images / 16).float(), torch.tensor(digits.target)
order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
private, public = order[360:], order[:360]
records, epsilon, delta = len(private), 1.0, 1e-5
results = {}


class Classifier(L.LightningModule):
    def __init__(self, net, learning_rate):
        super().__init__()
        self.net, self.learning_rate = net, learning_rate

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), self.learning_rate)


def train(name, inputs, net, plan, rate):
    """Train with the batch size and the epochs of a plan; the accuracy on held-out pictures."""
    trainer = L.Trainer(
        max_epochs=round(plan.epochs),
        callbacks=[DifferentialPrivacy(target_epsilon=epsilon, target_delta=delta)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        devices=1,
    )
    data = TensorDataset(inputs[private], labels[private])
    trainer.fit(Classifier(net, rate), DataLoader(data, plan.batch_size, shuffle=True))
    with torch.no_grad():
        results[name] = float((net(inputs[public]).argmax(1) == labels[public]).float().mean())
    print(f"{name}: accuracy {results[name]:.1%}")


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


# %% [markdown]
# ## The first attempt
#
# Batches of 32, three epochs, Adam with 0.001: nobody would think twice, without privacy.

# %%
pixels = 2 * pictures.flatten(1) - 1
first = plan_training(records, 32, epochs=3, target_epsilon=epsilon, target_delta=delta)
train("first attempt", pixels, network(), first, 1e-3)

# %% [markdown]
# ## 1. Less noise: batch and epochs
#
# ε is fixed, so the noise is calibrated to it: larger batches and more epochs get a larger noise
# multiplier z. What counts is how much noise is left *over the whole run*. It cannot be less than
# with full batches. `plan_training` computes `excess`, the noise of the run in units of that limit.
# All of this comes from public numbers, before any record is read, so it costs nothing.

# %% alt="A table of batch sizes and epochs, in colours: the noise over the run falls with both"
table = suggest(records, epsilon, target_delta=delta).table
fig, ax = plt.subplots(figsize=(6, 4), layout="constrained")
image = ax.imshow([[plan.excess for plan in row] for row in table], cmap="viridis_r", aspect="auto")
for i, row in enumerate(table):
    for j, plan in enumerate(row):
        colour = "white" if plan.excess > 2 else "black"
        ax.text(j, i, f"{plan.excess:.2f}", ha="center", va="center", color=colour, fontsize=8)
ax.set_xticks(range(len(table[0])), [f"{plan.epochs:g}" for plan in table[0]])
ax.set_yticks(range(len(table)), [row[0].batch_size for row in table])
ax.set(xlabel="epochs", ylabel="batch size", title="noise over the run (1: full batches)")
fig.colorbar(image)
plt.show()

# %% [markdown]
# Down and to the right there is less noise, and the gain fades: from about 1.2 on, more epochs cost
# time and bring little. But large batches with few epochs leave few *steps*, and a network needs
# some hundred of them. So we take batches of 256 and 32 epochs.

# %%
plan = first.changed(batch_size=256, epochs=32)
for each in (first, plan):
    z = each.noise_multiplier
    print(f"batch {each.batch_size}: z = {z:.2f}, {each.steps} steps, excess {each.excess:.2f}")
train("less noise", pixels, network(), plan, 1e-3)

# %% [markdown]
# Better, and still not good. The noise is not the only reason.
#
# ## 2. A learning rate that fits the noise
#
# With Adam a weight moves by about the learning rate in a step, and the noise makes it walk at
# random: over T steps by √T times the rate. A rate that is too small ends the training near the
# first weights. The budget is spent then, and hardly used. `learning_rate` gives the rate at which
# the noise moves a weight about as far as a weight is long:

# %%
rate = learning_rate(plan, weight_size([(128, 64), (10, 128)]))
print(f"learning rate {rate:.3f}")
train("rate alone", pixels, network(), first, rate)
train("less noise and rate", pixels, network(), plan, rate)

# %% [markdown]
# ## 3. Less to learn: features that need no private data
#
# Our network learns from noise-covered gradients how pictures look in general. That is known
# already. Features that are fixed in advance, or learnt from *public* data, cost no privacy. Here
# they are the directions of edges, eight directions in 4 x 4 places, and a linear layer on top of
# them. Their mean is taken from the public pictures; the mean of the private ones would be a release
# that nobody has charged.


# %%
def edges(pictures):
    padded = F.pad(pictures, (1, 1, 1, 1))
    across = padded[:, 1:-1, 2:] - padded[:, 1:-1, :-2]
    down = padded[:, 2:, 1:-1] - padded[:, :-2, 1:-1]
    directions = torch.arange(8) * torch.pi / 4
    angle = torch.atan2(down, across)[:, None] - directions[None, :, None, None]
    strength = torch.hypot(across, down)[:, None] * angle.cos().clamp(min=0) ** 2
    return F.avg_pool2d(strength, 2).flatten(1)


features = edges(pictures)
features = features - features[public].mean(0)  # public numbers
features = F.normalize(features) * 128**0.5  # of each record alone; entries are about 1 in size
torch.manual_seed(0)
linear = nn.Linear(128, 10)
rate = learning_rate(plan, weight_size([linear.weight.shape]))
train("features as well", features, linear, plan, rate)

# %% alt="Bars of the accuracies: each of the changes makes the model better"
fig, ax = plt.subplots(figsize=(7, 2.6), layout="constrained")
bars = ax.barh(list(results)[::-1], [100 * value for value in results.values()][::-1])
ax.bar_label(bars, fmt="%.0f %%", padding=3)
ax.set(xlim=(0, 105), xlabel="accuracy, the same ε = 1 for all of them")
plt.show()
assert results["first attempt"] < results["less noise and rate"] - 0.2
assert results["features as well"] > 0.88

# %% [markdown]
# ## In short
#
# 1. Plan batch and epochs with `python -m lightning_dp.plan`, before any data is read.
# 2. Take the learning rate from the plan. Try a third of it and three times as much, on public data.
# 3. Do not learn from private data what can be had without: features, pre-trained weights, adapters.
#
# The clip norm comes after these three. What else there is:
# [Choosing a method](../recipes.md#choosing-a-method). Next:
# [What ε means: attack it yourself](attack.ipynb).
