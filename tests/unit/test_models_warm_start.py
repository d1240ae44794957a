import sys
from pathlib import Path

import pytest

from rlpost.errors import ModelError
from rlpost.models import launcher, warm_start
from rlpost.models.launcher import Launcher, quoted
from rlpost.models.warm_start import WarmStartedModel, WarmStartedModelConfig, last_export

# Stands for launch.py: prints its configuration, or writes an export of two checkpoints.
SCRIPT = """
import pathlib, sys, time
arguments = sys.argv[1:]
if "--cfg" in arguments:
    print([a for a in arguments if not a.startswith("hydra.")])
    sys.exit()
run = pathlib.Path(arguments[-1].removeprefix("hydra.run.dir=").strip("'"))
print("step 1 of 2")
if "fail=1" in arguments:
    sys.exit("the loss is not finite")
if "hang=1" in arguments:
    time.sleep(60)
for step in (9, 10):
    hf = run / f"checkpoints/step_{step}/hf"
    hf.mkdir(parents=True)
    (hf / "config.json").write_text('{"max_position_embeddings": 64}')
    (hf / "model.safetensors").write_text(str(step))
    (hf / "tokenizer.json").write_text("{}")
"""


@pytest.fixture(autouse=True)
def fake_launch(tmp_path, monkeypatch):
    root = tmp_path / "repository"
    (root / "rlpost").mkdir(parents=True)
    (root / "launch.py").write_text(SCRIPT)
    monkeypatch.setattr(launcher.rlpost, "__file__", str(root / "rlpost/__init__.py"))
    return root / "launch.py"


def model(*overrides: str, **changes) -> WarmStartedModel:
    values = {"recipe": "sft_chain", "timeout_s": 60.0, "dtype": "float32", "max_length": 64}
    return WarmStartedModel(WarmStartedModelConfig(overrides=list(overrides), **(values | changes)))


def test_the_last_export_becomes_the_model_and_is_trained_once(tmp_path, capsys):
    folder = model().prepare(tmp_path / "models")
    assert (folder / "model.safetensors").read_text() == "10"
    assert "  | step 1 of 2" in capsys.readouterr().out
    assert model().prepare(tmp_path / "models") == folder
    assert "step 1 of 2" not in capsys.readouterr().out


def test_a_changed_recipe_or_library_is_another_model(tmp_path, monkeypatch):
    folders = {model(*overrides).prepare(tmp_path) for overrides in ([], ["seed=2"])}
    monkeypatch.setattr(warm_start, "versions", lambda: {"torch": "0"})
    folders.add(model().prepare(tmp_path))
    assert len(folders) == 3


def test_a_failed_warm_start_shows_its_last_lines_and_leaves_no_model(tmp_path):
    with pytest.raises(ModelError, match=r"fail=1 ended with 1.*console\.log") as caught:
        model("fail=1").prepare(tmp_path / "models")
    assert str(caught.value).endswith("step 1 of 2\nthe loss is not finite\n")
    assert not list((tmp_path / "models").glob("sft_chain*"))


def test_a_warm_start_that_hangs_is_stopped(tmp_path):
    with pytest.raises(ModelError, match=r"longer than timeout_s \(0\.5\)"):
        model("hang=1", timeout_s=0.5).prepare(tmp_path)


def test_a_run_without_an_export_is_an_error(tmp_path):
    with pytest.raises(ModelError, match=r"left no .*/hf"):
        last_export(tmp_path)


def test_an_installation_without_launch_py_is_an_error(fake_launch):
    fake_launch.unlink()
    with pytest.raises(ModelError, match="pip install -e"):
        Launcher([])


def test_a_run_dir_with_odd_characters_is_one_hydra_value():
    from hydra.core.override_parser.overrides_parser import OverridesParser

    path = Path("/tmp/it's, a=b/x")
    parsed = OverridesParser.create().parse_override(f"hydra.run.dir={quoted(path)}")
    assert parsed.value() == str(path)


def test_models_import_without_heavy_libraries():
    import subprocess

    code = (
        "import sys, rlpost.models.tiny, rlpost.models.smollm2, rlpost.models.hugging_face, "
        "rlpost.models.warm_start\n"
        "print([m for m in ('torch', 'transformers', 'huggingface_hub') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
