"""A private checkpoint that is trained on without the callback: Lightning's warning says so."""

from __future__ import annotations

import warnings

from tests.zoo import private


def test_lightning_names_what_is_missing_in_capital_letters(
    mlp, classifier, loader, make_trainer, tmp_path
):
    trainer = make_trainer(callbacks=[private(advice=False)], max_epochs=1)
    trainer.fit(classifier(mlp()), loader)
    trainer.save_checkpoint(tmp_path / "private.ckpt")
    for callbacks in ([], [private(advice=False)]):
        again = make_trainer(callbacks=callbacks, max_epochs=2)
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            again.fit(classifier(mlp()), loader, ckpt_path=tmp_path / "private.ckpt")
        said = "\n".join(str(each.message) for each in found)
        missing = "DifferentialPrivacy (training goes on WITHOUT PRIVACY"
        assert (missing in said) == (not callbacks)
