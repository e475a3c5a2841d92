"""transformers' Trainer and ours: guides of its documentation with one line changed, to the same bits."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate", reason="TrainingArguments need it: pip install accelerate")
pytest.importorskip("datasets", reason="the guides need it: pip install datasets")

from tests.hugging_face import history, same_history, same_weights  # noqa: E402
from tests.integrations.hf_scripts.little import make_checkpoints  # noqa: E402

SCRIPTS = Path(__file__).parent / "hf_scripts"
IMPORT = "from transformers import Trainer"
FULL = {"    model__model": "    model=model, method='full'"}
"""The quickest to plan."""

pytestmark = [
    pytest.mark.usefixtures("known_machine"),
    pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true:UserWarning"),
]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hub")
    make_checkpoints(folder)
    return folder


@pytest.fixture
def run(checkpoints, tmp_path, monkeypatch):
    def run(name, whose, **replaced):
        """The script's variables, and the weights that it saved."""
        text = (SCRIPTS / f"{name}.py").read_text()
        assert text.count(IMPORT) == 1
        if whose == "ours":
            text = text.replace(IMPORT, "from seqpart.integrations.hf import Trainer")
        for old, new in replaced.items():
            old = old.replace("__", "=")
            assert old in text
            text = text.replace(old, new)
        folder = tmp_path / whose
        folder.mkdir(exist_ok=True)
        for hub in checkpoints.iterdir():
            if not (folder / hub.name).exists():
                (folder / hub.name).symlink_to(hub)
        monkeypatch.chdir(folder)
        torch.manual_seed(7)  # of heads that no checkpoint has
        found = {"__name__": name}
        exec(compile(text, name, "exec"), found)
        return found["trainer"], load_file(folder / "final" / "model.safetensors"), found

    return run


def test_text_classification_has_the_same_bits_where_rows_are_padded_to_one_length(run):
    # Ours pads to the longest of all rows, transformers' to that of each batch, unless it is told to.
    padded = "DataCollatorWithPadding(tokenizer=tokenizer, padding='max_length', max_length=9)"
    by_batch = run("text_classification", "theirs")[1]
    theirs, their_weights, _ = run("text_classification", "theirs", **{"DataCollatorWithPadding(tokenizer__tokenizer)": padded})
    ours, our_weights, _ = run("text_classification", "ours")
    same_weights(our_weights, their_weights)
    same_history(history(ours), history(theirs))
    assert all(torch.allclose(our_weights[name], by_batch[name], atol=1e-5) for name in by_batch)
    assert ours.result.proof.violations == 0


def test_language_modelling_has_the_same_bits(run):
    llama = {'distilbert/distilgpt2")\ntraining': 'little/llama")\ntraining'}
    theirs, their_weights, _ = run("language_modeling", "theirs", **llama)
    ours, our_weights, found = run("language_modeling", "ours", **llama)
    same_weights(our_weights, their_weights)
    same_history(history(ours), history(theirs))
    assert transformers.AutoModelForCausalLM.from_pretrained("final").num_parameters() == found["model"].num_parameters()
    assert len(transformers.AutoTokenizer.from_pretrained("final")) == len(found["tokenizer"])


def test_of_gpt2_transformers_counts_the_first_label_of_a_row_which_nothing_predicts(run):
    """So its losses are 15 of 16 parts of what they are a mean of; Adam steps do not see it."""
    short = {'eval_strategy__"epoch",': "max_steps=2, logging_steps=1,", "trainer.evaluate()": "{'eval_loss': 0.0}"}
    theirs, ours = run("language_modeling", "theirs", **short)[0], run("language_modeling", "ours", **short, **FULL)[0]
    for one, other in zip(history(ours), history(theirs), strict=True):
        losses = [name for name in one if name.endswith("loss")]
        assert losses and all(one[name] * 15 / 16 == pytest.approx(other[name], rel=1e-3) for name in losses)


def test_image_classification_has_the_same_bits_where_micro_batches_are_the_same(run):
    # Random crops have draws of their own here; and transformers loads the best of a ViT without its attention.
    same = {"Compose([crop": "Compose([whole", "load_best_model_at_end__True": "load_best_model_at_end=False"}
    theirs, their_weights, _ = run("image_classification", "theirs", **same)
    ours, our_weights, _ = run(
        "image_classification", "ours", **same, **{"    model__model": "    model=model, method='full', micro_batch_size=4"}
    )
    same_weights(our_weights, their_weights)
    same_history(history(ours), history(theirs))


def test_image_classification_leaves_the_weights_of_the_best_evaluation(run):
    trainer, _, found = run("image_classification", "ours", **FULL)
    best = trainer.state.best_metric
    assert trainer.evaluate()["eval_accuracy"] == best == max(logs.get("eval_accuracy", 0) for logs in history(trainer))
    again = transformers.AutoModelForImageClassification.from_pretrained("final")
    same_weights(dict(again.state_dict()), dict(found["model"].state_dict()))
