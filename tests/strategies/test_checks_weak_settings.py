"""Settings that are allowed and promise little are said, with what follows from them."""

from __future__ import annotations

import warnings

import pytest
from torch.utils.data import DataLoader

from lightning_dp import FullBatch
from lightning_dp._warnings import PrivacyWarning
from lightning_dp.callbacks import DifferentialPrivacy


@pytest.fixture
def said(blobs, classifier, mlp, make_trainer):
    """The privacy warnings of a fit on 240 records."""

    def run(batch_size=24, callbacks=(), accumulate=1, **privacy):
        settings = {"noise_multiplier": 1.0, "target_delta": 1e-5, "isolation_probe": False}
        callback = DifferentialPrivacy(**{**settings, **privacy})
        options = {"max_epochs": 2, "accumulate_grad_batches": accumulate}
        trainer = make_trainer(callbacks=[callback, *callbacks], **options)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer.fit(classifier(mlp()), DataLoader(blobs, batch_size))
        return [str(each.message) for each in caught if each.category is PrivacyWarning]

    return run


@pytest.mark.parametrize(("delta", "warned"), [(0.01, True), (1 / 240, True), (1 / 241, False)])
def test_a_delta_that_may_publish_a_record_warns_once(said, delta, warned):
    messages = said(target_delta=delta)

    assert len(messages) == warned
    for message in messages:
        assert f"target_delta={delta:g} is not below 1/N = 0.00417 for the N = 240" in message
        assert "publishes a record" in message and "Choose δ well below 1/N, 0.0001 say" in message


@pytest.mark.parametrize(
    ("batch_size", "accumulate", "warned"),
    [(240, 1, True), (1000, 1, True), (24, 10, True), (24, 9, False), (239, 1, False)],
)
def test_a_batch_of_all_records_warns_once(said, batch_size, accumulate, warned):
    messages = said(batch_size, accumulate=accumulate)

    assert len(messages) == warned
    for message in messages:
        assert "reaches the 240 records" in message and "each step uses all of them" in message
        assert "FullBatch()" in message and "smaller batch_size" in message


def test_full_batches_that_were_asked_for_do_not_warn(said):
    assert said(240, sampling=FullBatch()) == said(100, sampling=FullBatch()) == []


def test_both_come_before_anything_is_charged(blobs, classifier, mlp, make_trainer, tmp_path):
    privacy = DifferentialPrivacy(noise_multiplier=1.0, target_delta=0.1, isolation_probe=False)
    trainer = make_trainer(max_epochs=1, callbacks=[privacy])

    with warnings.catch_warnings(), pytest.raises(PrivacyWarning, match="not below 1/N"):
        warnings.simplefilter("error", PrivacyWarning)
        trainer.fit(classifier(mlp()), DataLoader(blobs, 24))

    assert privacy.steps == 0 and list(tmp_path.iterdir()) == []
