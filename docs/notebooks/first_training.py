# %% [markdown]
# # Your first private training
#
# We train a small network on pictures of handwritten digits, first as usual, then with
# differential privacy. Then we look at what the tool tells us. It takes half a minute on two cores
# and downloads nothing.
#
# What you need: `pip install -e ".[examples]"` in a checkout, and some PyTorch Lightning.

# %%
import csv
import logging
import warnings
from pathlib import Path

import lightning as L
import matplotlib.pyplot as plt
import torch
from lightning.pytorch.loggers import CSVLogger
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_dp import DifferentialPrivacy
from lightning_dp.accounting import epsilon_text

# Lightning says much about the machine. Here we only want what is said about privacy.
warnings.filterwarnings("ignore")
for name in ("", ".utilities.rank_zero", ".accelerators.cuda"):
    about = logging.getLogger(f"lightning.pytorch{name}")
    about.addFilter(lambda record: record.getMessage().startswith("privacy"))
plain_trainer = {"enable_progress_bar": False, "enable_model_summary": False, "devices": 1}

# %% [markdown]
# ## The data
#
# 1,797 pictures of 8 x 8 pixels. We hold out 360 of them. The held-out pictures play the part of
# *public* data: we may look at them as often as we like. Each of the other 1,437 pictures is one
# *record*, and stands for one person who gave it.

# %% alt="Ten grey pictures of handwritten digits"
digits = load_digits()
pixels = torch.tensor(digits.images / 8 - 1).float().flatten(1)
labels = torch.tensor(digits.target)
order = torch.randperm(len(pixels), generator=torch.Generator().manual_seed(0))
private, public = order[360:], order[:360]

fig, axes = plt.subplots(1, 10, figsize=(8, 1))
for ax, i in zip(axes, public, strict=False):
    ax.imshow(pixels[i].reshape(8, 8), cmap="gray_r")
    ax.axis("off")
plt.show()

# %% [markdown]
# ## The model
#
# An ordinary `LightningModule`. Nothing in it knows about privacy, and this stays so.


# %%
class Network(L.LightningModule):
    def __init__(self, learning_rate=1e-3):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return nn.functional.cross_entropy(self(x), y)

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("accuracy", (self(x).argmax(1) == y).float().mean())

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.hparams.learning_rate)


def loaders(batch_size):
    training = TensorDataset(pixels[private], labels[private])
    held_out = TensorDataset(pixels[public], labels[public])
    return DataLoader(training, batch_size, shuffle=True), DataLoader(held_out, 360)


# %% [markdown]
# ## Without privacy
#
# Settings that one would try first: batches of 32, Adam with 0.001, ten epochs.

# %%
torch.manual_seed(0)
trainer = L.Trainer(max_epochs=10, logger=CSVLogger("logs", "plain"), **plain_trainer)
trainer.fit(Network(), *loaders(batch_size=32))
print(f"accuracy {trainer.callback_metrics['accuracy']:.1%}")

# %% [markdown]
# ## With privacy
#
# One callback more. `target_epsilon` is the budget: ε will not exceed it. `target_delta` should be
# well below 1 / (number of records); here it is 140 times below. `max_grad_norm` is left at 1.

# %%
torch.manual_seed(0)  # the weights at the start; noise and batches never depend on a seed
privacy = DifferentialPrivacy(target_epsilon=3.0, target_delta=1e-5)
logger = CSVLogger("logs", "first", flush_logs_every_n_steps=1)
trainer = L.Trainer(
    max_epochs=10, callbacks=[privacy], logger=logger, log_every_n_steps=5, **plain_trainer
)
trainer.fit(Network(), *loaders(batch_size=32))
first = float(trainer.callback_metrics["accuracy"])
print(f"accuracy {first:.1%} at ε = {epsilon_text(privacy.epsilon)}")

# %% [markdown]
# The privacy is there, and the accuracy is much lower. That is how most first private trainings
# end: **settings that are good without privacy are bad with it.** Before we mend it, let us see
# what happened.
#
# ## What to look at
#
# **The last line.** It says ε, the target, δ, how many noised steps were made, and where the report
# is. You can ask the callback for the same:

# %%
print(privacy.epsilon)  # at target_delta
print(privacy.epsilon_at(1e-4))  # at another δ
print(privacy.noise_multiplier)  # z: the noise on the sum of gradients is z times max_grad_norm
print(privacy.steps)

# %% [markdown]
# **The noise, next to the signal.** Each step takes the gradient of every record in the batch, cuts
# it to a norm of at most C = 1, adds them up, adds noise, and divides by the batch size B.
# So the *mean* gradient has at most norm 1. The noise in it has one random number for each of
# the d weights, and its norm is about z · C · √d / B:

# %%
weights = sum(p.numel() for p in Network().parameters())
print(f"noise {privacy.noise_multiplier * weights**0.5 / 32:.2f}, gradient at most 1")

# %% [markdown]
# The noise norm is above anything that the gradient can have. That alone is not fatal: noise points in
# another direction each time and averages out over many steps, and the gradient does not. But the steps
# have to be many, and the noise not too large.
#
# **The loggers.** ε is in every logger that the Trainer has, next to your own metrics:

# %% alt="Two curves over the steps: epsilon rises to the budget of 3, and the accuracy rises slowly"
with (Path(logger.log_dir) / "metrics.csv").open() as file:
    rows = list(csv.DictReader(file))
print([name for name in rows[0] if name.startswith("privacy/")])


def curve(metric):
    found = [(int(row["step"]), float(row[metric])) for row in rows if row[metric]]
    return zip(*found, strict=True)


fig, (left, right) = plt.subplots(1, 2, figsize=(9, 3), layout="constrained")
left.plot(*curve("privacy/epsilon"))
left.axhline(3, color="C3", linestyle="--")
left.set(title="ε spent (dashed: the budget)", xlabel="noised steps", ylim=(0, 3.2))
right.plot(*curve("accuracy"))
right.set(title="accuracy on held-out pictures", xlabel="noised steps", ylim=(0, 1))
plt.show()

# %% [markdown]
# **The report.** It says what may be claimed, and what may not. A copy is in the folder of the
# logger, and in every checkpoint.

# %%
print(privacy.report())
print(*privacy.report().not_covered, sep="\n")

# %% [markdown]
# Read what is *not covered* once with care. It is no small print: a `train_loss` that you publish, or
# a person who is in the data twice, is outside of ε.
#
# ## The same ε, better settings
#
# Larger batches have less noise in the mean, and a larger learning rate makes use of it.

# %%
torch.manual_seed(0)
privacy = DifferentialPrivacy(target_epsilon=3.0, target_delta=1e-5)
trainer = L.Trainer(max_epochs=30, callbacks=[privacy], logger=False, **plain_trainer)
trainer.fit(Network(learning_rate=1e-2), *loaders(batch_size=256))
better = float(trainer.callback_metrics["accuracy"])
noise = privacy.noise_multiplier * weights**0.5 / 256
print(f"accuracy {better:.1%} at ε = {epsilon_text(privacy.epsilon)}; noise {noise:.2f}")
assert better > max(first, 0.85)

# %% [markdown]
# Of this run alone the guarantee is the same, and the model is a useful one. But look at the first
# line: the tool found the journal of our first attempt, and says what both cost **together**, if
# they used the same records. They did. Every run on the records counts, also the ones that
# nobody liked. So try things out on public data, as far as you can.
#
# [More out of the same ε](better.ipynb) shows how to find such settings, and
# [What ε means: attack it yourself](attack.ipynb) what the number protects against.
