"""Models and collators of transformers in a LightningModule; nothing is downloaded."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_dp import DifferentialPrivacy, losses_of_records
from lightning_dp._refusals import PrivacyWarning
from lightning_dp.boundary import bounded_sum
from lightning_dp.gradients import EngineChoice, RecordPasses

if not importlib.util.find_spec("transformers"):
    pytest.skip("needs transformers (the extra 'language-models')", allow_module_level=True)

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    DataCollatorForLanguageModeling,
    DataCollatorForSeq2Seq,
    DataCollatorWithPadding,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainingArguments,
)

ROOT = Path(__file__).parents[2]
WORDS = [f"w{i}" for i in range(40)]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """A word is a token."""
    vocabulary = {word: i for i, word in enumerate(SPECIAL + WORDS)}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        eos_token="[SEP]",
        mask_token="[MASK]",
        model_input_names=["input_ids", "attention_mask"],
    )


@pytest.fixture(scope="module")
def texts() -> list[str]:
    """80 texts of 3 to 10 words."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(len(WORDS), (80, 10), generator=generator).tolist()
    return [" ".join(WORDS[w] for w in row[: 3 + i % 8]) for i, row in enumerate(drawn)]


def gpt2(dropout: float = 0.1) -> nn.Module:
    torch.manual_seed(0)
    return GPT2LMHeadModel(
        GPT2Config(
            **{"vocab_size": 45, "n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 2},
            **{"resid_pdrop": dropout, "embd_pdrop": dropout, "attn_pdrop": dropout},
            **{"bos_token_id": 2, "eos_token_id": 3, "pad_token_id": 0},
        )
    )


def bert(head: Any = BertForMaskedLM, dropout: float = 0.1) -> nn.Module:
    torch.manual_seed(0)
    drops = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    sizes = {"vocab_size": 45, "intermediate_size": 64, "max_position_embeddings": 32}
    return head(BertConfig(**SIZES, **sizes, **drops, num_labels=3))


def t5(dropout: float = 0.1) -> nn.Module:
    torch.manual_seed(0)
    sizes = {"vocab_size": 45, "d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2}
    return T5ForConditionalGeneration(
        T5Config(**sizes, num_heads=2, decoder_start_token_id=0, dropout_rate=dropout)
    )


KINDS: dict[str, tuple[Callable[..., nn.Module], bool]] = {
    "causal": (gpt2, True),
    "masked": (bert, False),
    "seq2seq": (t5, False),
}


@pytest.fixture
def data(tokenizer, texts) -> Callable[[str], tuple[list[Any], Any]]:
    """Records and collator of a kind."""

    def of(kind: str) -> tuple[list[Any], Any]:
        records: list[Any] = [tokenizer(text) for text in texts]
        if kind == "seq2seq":
            made = [{**r, "labels": r["input_ids"][: 2 + i % 5]} for i, r in enumerate(records)]
            return made, DataCollatorForSeq2Seq(tokenizer)
        if kind == "classes":
            return [{**r, "labels": i % 3} for i, r in enumerate(records)], (
                DataCollatorWithPadding(tokenizer)
            )
        return records, DataCollatorForLanguageModeling(tokenizer, mlm=kind == "masked")

    return of


class TheirLoss(L.LightningModule):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(**batch).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], 1e-3)


class OfRecords(TheirLoss):
    def __init__(self, net: nn.Module, shift: bool) -> None:
        super().__init__(net)
        self.shift = shift

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        output = self.net(**batch)
        return losses_of_records(output.logits, batch["labels"], shift=self.shift).mean()


class ByConstant(TheirLoss):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(**batch, num_items_in_batch=8 * len(batch["labels"])).loss


@pytest.fixture
def fit(make_trainer, data) -> Callable[..., Any]:
    """Returns the run."""

    def train(module: L.LightningModule, kind: str, *, steps: int = 4, size: int = 8, **more: Any):
        records, collate = data(kind)
        privacy = DifferentialPrivacy(noise_multiplier=1.0, target_delta=1e-5)
        trainer = make_trainer(max_steps=steps, max_epochs=-1, callbacks=[privacy], **more)
        trainer.fit(module, DataLoader(records, size, shuffle=True, collate_fn=collate))
        assert privacy.steps == steps
        return trainer.strategy.private_run

    return train


SLOW = pytest.mark.slow
ONE_QUICKLY = ["causal", *(pytest.param(kind, marks=SLOW) for kind in ("masked", "seq2seq"))]


# -- the loss --------------------------------------------------------------------------------------


def labelled(kind: str, data: Any) -> Any:
    """A batch of records of several lengths; of masked ones each has at least one label."""
    torch.manual_seed(1)
    records, collate = data(kind)
    while True:
        batch = collate([dict(record) for record in records[:6]])
        counts = (batch["labels"] != -100).sum(1)
        if bool((counts > 0).all()) and len(counts.unique()) > 1:
            return batch


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_the_models_own_loss_of_each_record_alone(kind, data):
    make, shift = KINDS[kind]
    net, batch = make(dropout=0.0), labelled(kind, data)

    losses = losses_of_records(net(**batch).logits, batch["labels"], shift=shift)
    alone = [net(**{k: v[i : i + 1] for k, v in batch.items()}).loss for i in range(6)]

    torch.testing.assert_close(losses, torch.stack(alone))
    assert not torch.allclose(losses.mean(), net(**batch).loss, rtol=1e-4)  # over all tokens


def parameters(net: nn.Module) -> list[nn.Parameter]:
    return [param for param in net.parameters() if param.requires_grad]


@pytest.mark.parametrize("kind", KINDS)
def test_the_clipped_sum_is_that_of_one_record_at_a_time(kind, data):
    make, shift = KINDS[kind]
    net, batch = make(dropout=0.0), labelled(kind, data)
    params, single = parameters(net), []
    for i in range(6):
        loss = net(**{k: v[i : i + 1] for k, v in batch.items()}).loss
        single.append(nn.utils.parameters_to_vector(torch.autograd.grad(loss, params)))
    norms = torch.stack([g.norm() for g in single])
    clip = float(norms.median()) * 1.01
    expected = sum(g * min(1.0, clip / float(n)) for g, n in zip(single, norms, strict=True))

    passes = RecordPasses(net, params, EngineChoice("auto"))
    found = passes.run(
        lambda b: losses_of_records(net(**b).logits, b["labels"], shift=shift).mean(), batch, 6
    )
    assert found is not None
    assert 0 < int((norms > clip).sum()) < 6
    torch.testing.assert_close(bounded_sum(found, clip).value.float(), expected)


# -- in a private training ---------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_it_trains_with_their_collator(kind, fit):
    make, shift = KINDS[kind]

    run = fit(OfRecords(make(), shift), kind)

    assert run.engine.startswith("records")
    were = "were not compared (" if kind == "masked" else "compared on synthetic"  # masks are drawn
    assert were in run.isolation


@pytest.mark.parametrize("kind", ONE_QUICKLY)
def test_batches_of_no_record_are_nothing_to_them(kind, fit):
    make, shift = KINDS[kind]
    fit(OfRecords(make(), shift), kind, steps=12, size=1)  # e^-12 that none of them is empty


def test_classes_train_with_their_loss(fit):
    fit(TheirLoss(bert(BertForSequenceClassification)), "classes")


@pytest.mark.parametrize("kind", ONE_QUICKLY)
def test_their_loss_is_that_of_each_record_alone(kind, fit):
    """A mean over all tokens of a batch would mix records; of one record it is its own."""
    assert fit(TheirLoss(KINDS[kind][0]()), kind).engine.startswith("records")


def test_their_loss_trains_when_it_is_divided_by_a_constant_for_each_record(fit):
    fit(ByConstant(gpt2()), "causal")


def test_checkpoints_of_activations_and_adapters_in_half_precision(fit):
    peft = pytest.importorskip("peft")
    layers = {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True}
    net = peft.get_peft_model(gpt2(), peft.LoraConfig(r=4, **layers))
    net.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})

    fit(OfRecords(net, shift=True), "causal", precision="bf16-mixed")


def test_what_save_pretrained_writes_are_the_released_weights_and_known_again(fit, tmp_path):
    net = gpt2()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    fit(OfRecords(net, shift=True), "causal")
    net.save_pretrained(tmp_path / "saved")

    again = GPT2LMHeadModel.from_pretrained(tmp_path / "saved")
    assert again.lm_head.weight is again.transformer.wte.weight  # tied, and stored once
    found, released = again.state_dict(), net.state_dict()
    assert found.keys() == released.keys()
    for name, value in found.items():
        assert torch.equal(value, released[name]) and not torch.equal(value, before[name])
    files = {path.name for path in (tmp_path / "saved").iterdir()}
    assert files == {"config.json", "generation_config.json", "model.safetensors"}
    with pytest.warns(PrivacyWarning, match="was trained before under another privacy ledger"):
        fit(OfRecords(again, shift=True), "causal", steps=1)


def test_padding_on_the_left_is_refused(tokenizer, fit):
    tokenizer.padding_side = "left"
    try:
        with pytest.raises(MisconfigurationException, match="the batch itself, made by collate_fn"):
            fit(OfRecords(gpt2(), shift=True), "causal")
    finally:
        tokenizer.padding_side = "right"


def test_padding_on_the_left_moves_the_others_in_gpt2(tokenizer, texts):
    """By as much as the page says."""
    net = gpt2(dropout=0.0)
    collate = DataCollatorForLanguageModeling(tokenizer, mlm=False)
    short, long = (tokenizer(text) for text in (texts[0], texts[7]))

    def gradient(*records: Any) -> Tensor:
        batch = collate([dict(record) for record in records])
        loss = losses_of_records(net(**batch).logits, batch["labels"], shift=True)[0]
        return nn.utils.parameters_to_vector(torch.autograd.grad(loss, parameters(net)))

    moves = {}
    for side in ("right", "left"):
        tokenizer.padding_side = side
        alone, beside = gradient(short), gradient(short, long)
        moves[side] = float((alone - beside).norm() / alone.norm())
    tokenizer.padding_side = "right"
    assert moves["right"] < 1e-5
    assert moves["left"] > 0.1


# -- the page ----------------------------------------------------------------------------------------


def test_the_snippets_of_the_page_run(tokenizer, texts, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tokenizer.save_pretrained("gpt2")
    gpt2().save_pretrained("gpt2")
    names: dict[str, Any] = {"texts": texts[:60]}
    names["held_out"] = [tokenizer(text) for text in texts[60:]]
    page = (ROOT / "docs/models.md").read_text("utf-8").partition("\n## Hugging Face\n")[2]

    for snippet in re.findall(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE):
        exec(compile(snippet, "models.md", "exec"), names)

    assert 0 < names["privacy"].epsilon <= 8
    # The training that moved has the steps, schedule and rates of the one it came from.
    arguments = TrainingArguments(
        "outputs",
        per_device_train_batch_size=16,
        gradient_accumulation_steps=4,
        num_train_epochs=3,
        learning_rate=1e-4,
        weight_decay=0.01,
        lr_scheduler_type="linear",
        warmup_steps=3,
        max_grad_norm=1.0,
        report_to=[],
    )
    plain = Trainer(
        gpt2(), arguments, train_dataset=names["records"], data_collator=names["collate"]
    )
    plain.train()
    moved = names["trainer"]
    assert moved.global_step == plain.state.global_step == names["privacy"].steps
    schedule = moved.lr_scheduler_configs[0].scheduler
    assert schedule.base_lrs == plain.lr_scheduler.base_lrs[:1]
    assert schedule.get_last_lr() == plain.lr_scheduler.get_last_lr()[:1] == [0.0]


def test_their_trainer_is_refused_before_it_trains(tmp_path, data):
    pytest.importorskip("accelerate")
    records, collate = data("causal")
    arguments = TrainingArguments(str(tmp_path), report_to=[], use_cpu=True)
    privacy = DifferentialPrivacy(noise_multiplier=1.0, target_delta=1e-5)
    with pytest.raises(MisconfigurationException, match=r"transformers\.Trainer.*LightningModule"):
        Trainer(
            gpt2(), arguments, train_dataset=records, data_collator=collate, callbacks=[privacy]
        )
