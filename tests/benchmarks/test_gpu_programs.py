"""The programs of benchmarks/gpu without a GPU: on the processor, or on the simulated device."""

import json
from importlib.util import find_spec

import pytest

from benchmarks import record
from benchmarks.gpu import llama, probe, resumed, verified


@pytest.fixture
def results(monkeypatch, tmp_path):
    monkeypatch.setattr(record, "FOLDER", tmp_path)

    def results(name):
        return json.loads((tmp_path / f"{name}.json").read_text())["result"]

    return results


def test_the_first_look_has_a_row_for_each_thing_that_the_simulated_device_answers(results, tmp_path, capsys):
    assert probe.main(["--device", "sim", "--quick", "--folder", str(tmp_path)]) == 0
    rows = {row["what"]: row for row in results("gpu-probe-sim")["rows"]}
    assert {"packages", "a look at what is held", "copies up, pinned", "copies down, pinned"} < set(rows)
    assert rows["beyond the allocator's cap"]["note"] == "OutOfMemoryError, known as a failed allocation"
    assert "page cache" in rows["a file from and into pinned memory"]["note"]
    assert "failed:" not in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.own_process
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_models_of_every_kind_are_verified_or_left_out_in_words(results, monkeypatch, capsys):
    def missing(small):
        raise ImportError("no bitsandbytes")

    kinds = {"ResNet with BatchNorm": verified.resnet, "LoRA on 4 bits": missing, "Llama, tied embeddings": verified.llama}
    monkeypatch.setattr(verified, "MODELS", kinds)
    assert verified.main(["--device", "cpu", "--quick", "--limit", "1.5GB"]) == 0
    found = results("gpu-verified-cpu")
    assert found["LoRA on 4 bits"] == {"left out": "no bitsandbytes"}
    assert found["ResNet with BatchNorm"]["equal"] > 100 and found["Llama, tied embeddings"]["equal"] > 100


@pytest.mark.slow
def test_a_run_that_was_killed_is_resumed_to_the_same_weights(results):
    assert resumed.main(["--device", "cpu", "--quick"]) == 0
    found = results("gpu-resumed-cpu")
    assert found["equal"] and found["killed"]["killed"] == 1


@pytest.mark.slow
def test_every_arm_of_the_llama_runs(results, tmp_path):
    trace = tmp_path / "trace.json"
    words = ["--device", "cpu", "--quick", "--limits", "1GB,2GB", "--trace", str(trace), "--folder", str(tmp_path)]
    assert llama.main(words) == 0
    found = results("gpu-llama-tiny-cpu")
    arms = found["arms"]
    assert find_spec("ramtorch") or found["left_out"] == ["ramtorch (not installed)"]
    assert set(arms) - {"ramtorch"} == {"1GB", "2GB", "plain", "checkpointed", "fsdp2"}
    assert all(arm["tokens"] > 0 for arm in arms.values())
    assert json.loads(trace.read_text())
