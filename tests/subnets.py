"""Runs of method ist, as small as their tests take them."""

from seqpart import Trainer

BATCH = 8


def trained(folder, model, train, test, **options):
    options = {
        "mem_limit": "2GB", "method": "ist", "epochs": 2, "batch_size": BATCH, "lr": 1e-2, "optimizer": "adam", "seed": 5,
        **options,
    }  # fmt: skip
    trainer = Trainer(model, None, options.pop("optimizer"), output_dir=folder, quiet=True, **options)
    return trainer.fit(train, test)
