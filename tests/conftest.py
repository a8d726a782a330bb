"""Every test has a home of its own and no network; those marked `default_model` use the real home."""

import os
import sys
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # tiny tensors: threads only cost, and they would vary the sums
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRITON_INTERPRET"] = "1"  # the GPU's kernels run on the CPU; read when triton is first imported


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "default_model: uses the real KVCHAT_HOME and the default model in it")


@pytest.fixture(autouse=True)
def home(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path | None:
    if request.node.get_closest_marker("default_model"):
        return None
    monkeypatch.setenv("KVCHAT_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    if constants := sys.modules.get("huggingface_hub.constants"):  # it reads HF_HOME only once
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub" / "hub"))
    return tmp_path / "home"
