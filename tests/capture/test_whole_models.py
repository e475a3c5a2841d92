"""Whole models under the limit, as a user has them: on the command line, resumed after a kill, given back with their names."""

import copy
import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn

from seqpart import Trainer
from tests.command import call, end, run, start
from tests.model.test_packs import MODELS, made
from tests.whole_models import Dense

COMMAND = ["--mem-limit", "2GB", "--method", "streamed", "--partitions", "3", "--batch-size", "8", "--epochs", "1"]


def trainer(model, folder, **options):
    given = {"mem_limit": "2GB", "method": "streamed", "batch_size": 8, "epochs": 2, "lr": 0.01, "quiet": True, **options}
    return Trainer(model, options.pop("loss", None), "sgd", output_dir=folder, **given)


@pytest.mark.parametrize("name", ["unet", "dense", "bands"])
@pytest.mark.few(1)
def test_a_given_model_has_the_weights_of_a_plain_loop_when_fit_returns(name, tmp_path):
    kind, data = MODELS[name]
    (x, y), test = data()
    model, plain = made(kind), made(kind)
    for module in (*model.modules(), *plain.modules()):
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    trainer(model, tmp_path / "run", partitions=3, micro_batch_size=8, shuffle=False).fit((x, y), test)
    step = torch.optim.SGD(plain.train().parameters(), lr=0.01, fused=True)
    for _ in range(2):
        for first in range(0, len(x), 8):
            F.cross_entropy(plain(x[first : first + 8]), y[first : first + 8]).backward()
            step.step()
            step.zero_grad()
    expected, ours = plain.state_dict(), model.state_dict()
    assert list(ours) == list(expected)
    assert [key for key in expected if not torch.equal(ours[key], expected[key])] == []
    assert set(load_file(tmp_path / "run" / "model.safetensors")) == set(expected)
    model(x)


class HeadFirst(nn.Module):
    """Its layers are registered in another order than they are called in."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(16, 5)
        self.body = nn.ModuleList([nn.Linear(16, 16) for _ in range(9)])

    def forward(self, x):
        for layer in reversed(self.body):
            x = x + layer(x).relu()
        return self.head(x)


@pytest.mark.parametrize("method", ["full", "streamed"])
@pytest.mark.few(1)
def test_gradients_are_clipped_by_the_norm_of_a_plain_loop_whatever_order_layers_run_in(method, tmp_path):
    """Norms were added up in the order in which layers run: 26 of 26 tensors had other last bits."""
    torch.manual_seed(0)
    model, x, y = HeadFirst(), torch.randn(96, 16), torch.randint(0, 5, (96,))
    plain = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, weight_decay=0.0, fused=True)
    for rows in range(0, 96, 16):
        optimizer.zero_grad()
        nn.functional.cross_entropy(plain(x[rows : rows + 16]), y[rows : rows + 16]).backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        optimizer.step()
    Trainer(
        model, mem_limit="2GB", method=method, optimizer="adamw", lr=1e-2, batch_size=16, micro_batch_size=16, epochs=1,
        shuffle=False, clip_grad_norm=0.1, output_dir=tmp_path / "run", quiet=True,
        **({"partitions": 4} if method == "streamed" else {}),
    ).fit((x, y), (x, y))  # fmt: skip
    for name, tensor in plain.state_dict().items():
        assert torch.equal(tensor, model.state_dict()[name]), name


def test_a_buffer_that_no_layer_has_is_the_model_s_again_behind_the_run(tmp_path):
    class Counts(Dense):
        def forward(self, x):
            self.scale += 0.5
            return super().forward(x)

    (x, y), test = MODELS["dense"][1]()
    model = Counts()
    trainer(model, tmp_path / "run", partitions=2, micro_batch_size=8, epochs=1).fit((x, y), test)
    assert torch.equal(model.scale, torch.tensor([2.0, 0.5]) + 0.5 * 4), "three updates, and one pass over the test rows"
    assert "scale" in dict(model.named_buffers())


def test_evaluation_leaves_a_whole_model_as_it_came(tmp_path):
    kind, data = MODELS["decoder"]
    model, (_, test) = made(kind), data()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    found = trainer(model, tmp_path / "run").evaluate(test)
    with torch.no_grad():
        output = model.eval()(test[0])["logits"]
    assert found.loss == pytest.approx(float(F.cross_entropy(output.transpose(1, 2), test[1])), rel=1e-5)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.slow
def test_sil_trains_a_whole_model_where_one_value_passes(tmp_path):
    torchvision = pytest.importorskip("torchvision.models")
    model = torchvision.resnet18(num_classes=3)
    x, y = torch.randn(16, 3, 32, 32), torch.arange(16) % 3
    result = trainer(model, tmp_path / "run", method="sil", partitions=2, epochs=1).fit((x, y), (x, y))
    assert len(result.plan.partitions) == 2


@pytest.fixture
def pictures(tmp_path):
    generator = np.random.default_rng(0)
    arrays = {}
    for name, count in (("train", 40), ("test", 8)):
        arrays[f"x_{name}"] = generator.normal(size=(count, 3, 32, 32)).astype("float32")
        arrays[f"y_{name}"] = generator.integers(0, 4, count)
    np.savez(tmp_path / "pictures.npz", **arrays)
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize("model", ["torchvision:resnet18", "timm:vit_tiny_patch16_224"])
def test_a_model_of_a_library_is_trained_by_its_name(model, pictures, monkeypatch, capsys):
    if importlib.util.find_spec("timm") is None:
        pytest.skip("timm is not installed: seqpart[hf]")
    monkeypatch.chdir(pictures)
    ran = call(capsys, "--model", model, "--data", "npz:pictures.npz", *COMMAND)
    assert ran.code == 0, ran.err
    assert "violations 0" in ran.out


TEXT = ["--data", "text:text.txt", "--context", "16", "--output-dir", "out", *COMMAND]


@pytest.fixture
def llama(tmp_path, monkeypatch):
    """The class of a small Llama, and its configuration; a text lies where the test is run."""
    transformers = pytest.importorskip("transformers", reason="pip install 'seqpart[hf]'")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("to be or not to be, that is the question. " * 60)
    config = transformers.LlamaConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        vocab_size=128,
        tie_word_embeddings=True,
    )
    return transformers.LlamaForCausalLM, config


@pytest.mark.slow
def test_a_directory_of_transformers_comes_in_and_goes_out(llama, capsys):
    kind, config = llama
    kind(config).save_pretrained("mine")
    ran = call(capsys, "--model", "hf:mine", *TEXT)
    assert ran.code == 0, ran.err
    Path("out", "config.json").write_text(Path("mine", "config.json").read_text())
    model, told = kind.from_pretrained("out", output_loading_info=True)
    assert not told["missing_keys"] and not told["unexpected_keys"], told
    assert model.generate(torch.tensor([[5, 6]]), max_new_tokens=4).shape == (1, 6)


@pytest.mark.slow
def test_a_directory_with_two_values_for_what_its_configuration_ties_comes_in_as_from_pretrained_has_it(llama, tmp_path):
    """One of them was lost without a word. A resumed run has the two parameters too."""
    kind, config = llama
    kind(config).save_pretrained("mine")
    untied = load_file("mine/model.safetensors") | {"lm_head.weight": torch.randn(128, 32) / 9}
    save_file(untied, "mine/model.safetensors", metadata={"format": "pt"})
    words = ["--model", "hf:mine", *TEXT, "--lr", "0", "--weight-decay", "0", "--epochs", "4", "--save-every", "1"]
    end(start(tmp_path, *words, until="epoch 2"), 9)
    again = run(tmp_path, "--resume", "out")
    assert again.code == 0, again.err
    came, left = (load_file(tmp_path / name / "model.safetensors") for name in ("mine", "out"))
    assert [name for name in came if not torch.equal(came[name], left[name])] == []


@pytest.mark.slow
def test_a_configuration_alone_is_a_model_where_the_data_say_which(llama, capsys):
    """config.json of a configuration names no class: the run ended after all imports, with "the architectures None"."""
    llama[1].save_pretrained("bare")
    ran = call(capsys, "--model", "hf:bare", *TEXT)
    assert ran.code == 0, ran.err
    assert json.loads(Path("out", "pretrained", "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    np.savez("rows.npz", x_train=np.ones((8, 16)), y_train=np.arange(8) % 2)
    refused = call(capsys, "--model", "hf:bare", "--data", "npz:rows.npz", *COMMAND)
    assert refused.code == 2 and "the class of a llama is known without where --data is text:FILE" in refused.err
    config = json.loads(Path("bare", "config.json").read_text())
    Path("bare", "config.json").write_text(json.dumps({**config, "architectures": ["LlamaForCausalLM"]}))
    named = call(capsys, "--model", "hf:bare", *TEXT, "--overwrite")
    assert named.code == 0, named.err


@pytest.mark.slow
def test_a_whole_model_goes_on_behind_a_kill_to_the_same_bits(pictures):
    words = ["--model", "torchvision:resnet18", "--data", "npz:pictures.npz", *COMMAND, "--epochs", "3", "--save-every", "1"]
    whole = run(pictures, *words, "--output-dir", "whole")
    assert whole.code == 0, whole.err
    process = start(pictures, *words, "--output-dir", "cut", until="epoch 1")
    end(process, 9)
    again = run(pictures, "--resume", "cut")
    assert again.code == 0, again.err
    one, other = (load_file(pictures / name / "model.safetensors") for name in ("whole", "cut"))
    assert [key for key in one if not torch.equal(one[key], other[key])] == []
