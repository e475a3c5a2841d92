"""benchmarks/contract_grid.py: its models are the published ones, and its verdicts are honest. The grid itself takes a GPU."""

import json

import pytest
import torch
import torchvision

from benchmarks import contract_grid, record
from benchmarks.gpu import models
from seqpart.model.blocks import as_chain
from seqpart.profile.blocks import measure_chain


def parameters(model):
    with torch.device("meta"):
        return sum(p.numel() for factory in model for p in factory().parameters())


def test_the_models_have_the_published_numbers_of_parameters():
    with torch.device("meta"):
        published = [
            sum(p.numel() for p in build().parameters()) for build in (torchvision.models.resnet50, torchvision.models.vit_b_16)
        ]
    assert [parameters(models.resnet50()), parameters(models.vit_b16())] == published
    tied, output = 1_557_611_200, 50257 * 1600 + 50257  # GPT-2 XL shares its output's weight with the embedding
    assert parameters(models.gpt2_xl()) == tied + output


@pytest.mark.parametrize(("model", "rows"), [(models.resnet50, models.images), (models.vit_b16, models.images)])
@pytest.mark.few(1)
def test_rows_pass_through_every_block(model, rows):
    (x, _), _ = rows(4)
    costs = measure_chain(as_chain(model()), tuple(x.shape[1:]), 2)
    assert costs[-1].output_shape == (1000,)


def test_a_peak_above_the_limit_is_a_violation_and_a_refusal_is_none(monkeypatch, tmp_path, capsys):
    """The child processes are replaced by what they would have said; one of them claims to fit, and did not."""
    monkeypatch.setattr(record, "FOLDER", tmp_path)
    monkeypatch.setattr(contract_grid.sys, "argv", ["grid", "--models", "mlp", "--limits", "100MB"])

    def cell(model, limit, methods, facts, device):
        row = {"model": model, "limit": 10**8, "predicted": 9 * 10**7, "epoch_seconds": 1.0, "status": "done", "message": ""}
        yield {**row, "method": "streamed", "fits": "yes", "peak": 99_000_000, "violation": False}
        yield {**row, "method": "sil", "fits": "no", "peak": 101_000_000, "violation": True}

    monkeypatch.setattr(contract_grid, "run", cell)
    assert contract_grid.main() == 1
    said = capsys.readouterr().out
    assert "VIOLATION" in said and "2 cells, 1 violations" in said
    (path,) = tmp_path.iterdir()
    assert json.loads(path.read_text())["result"]["violations"] == 1


def test_no_cell_is_started_when_the_time_is_over_and_it_is_said_which(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(record, "FOLDER", tmp_path)
    monkeypatch.setattr(contract_grid.sys, "argv", ["grid", "--models", "mlp", "--limits", "100MB", "--seconds", "0"])
    assert contract_grid.main() == 0
    assert "left out for want of time: mlp 100MB" in capsys.readouterr().out
