"""load_from_json(): a file's settings reach a wrapped module, or are named."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from gradd import DebugOptions, LogLevel, ORTModule
from gradd.errors import GraddError
from gradd.legacy.json_config import load_from_json
from gradd.spec import CaptureError


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "settings.json"


def written(file: Path, **settings: Any) -> str:
    file.write_text(json.dumps(settings))
    return str(file)


class Cut(torch.nn.Module):
    """A layer, and behind it what the daemon has no operator for."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.linalg.qr(self.layer(x)).Q


def test_settings_hold_from_the_next_call_on(
    daemon: object, file: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = ORTModule(Cut(), DebugOptions(finite_check=True))
    model(torch.rand(4, 4)).sum().backward()
    assert model.gradd_stats()["in_torch"]
    graphs = {"SaveONNX": True, "ONNXPrefix": "cut", "SaveONNXPath": str(tmp_path)}
    debug = {"LogLevel": "INFO", **graphs}
    with caplog.at_level(logging.WARNING, "gradd"):
        load_from_json(
            model,
            written(
                file,
                DebugOptions=debug,
                FallbackPolicy=["FALLBACK_DISABLE"],
                SkipCheck=["SKIP_CHECK_DEVICE"],
                PropagateCastOps={"Level": 1},
                OnnxOpsetVersion=17,
            ),
        )
    logging.getLogger("gradd").setLevel(logging.NOTSET)
    said = [r.getMessage() for r in caplog.records if "without effect" in r.getMessage()]
    assert len(said) == 1
    assert all(key in said[0] for key in ("SkipCheck", "PropagateCastOps", "OnnxOpsetVersion"))
    assert "FallbackPolicy" not in said[0] and "DebugOptions" not in said[0]
    assert model._gradd_options.log_level == LogLevel.INFO
    assert model._gradd_options.finite_check
    with pytest.raises((CaptureError, GraddError), match="qr"):
        model(torch.rand(5, 4))
    model.layer(torch.rand(2, 4)).sum().backward()  # a part, which is made with the file's settings
    assert (tmp_path / "cut_torch_exported_training.onnx").exists()


@pytest.mark.quick
def test_the_variable_goes_before_the_argument(
    daemon: object, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = ORTModule(torch.nn.Linear(4, 4))
    other = written(tmp_path / "other.json", DebugOptions={"SaveONNX": False})
    monkeypatch.setenv("ORTMODULE_JSON_CONFIG_PATH", written(file, NoSuchKey=1))
    with pytest.raises(ValueError, match=f"{file}: unknown key NoSuchKey: expected DebugOptions"):
        load_from_json(model, other)
    monkeypatch.delenv("ORTMODULE_JSON_CONFIG_PATH")
    load_from_json(model, other)
    with pytest.raises(ValueError, match="set ORTMODULE_JSON_CONFIG_PATH"):
        load_from_json(model)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"UseStaticShape": 1}, "UseStaticShape is 1, expected true or false"),
        ({"OnnxOpsetVersion": True}, "OnnxOpsetVersion is True, expected a whole number"),
        ({"SkipCheck": [1]}, r"SkipCheck is \[1\], expected a list of texts"),
        ({"FallbackPolicy": ["FALLBACK_NEVER"]}, "FALLBACK_NEVER.*expected FALLBACK_DISABLE"),
        ({"DebugOptions": {"Level": 1}}, "unknown key DebugOptions.Level: expected LogLevel"),
        ({"DebugOptions": {"LogLevel": "LOUD"}}, "'LOUD', expected one of VERBOSE"),
        ({"DebugOptions": {"SaveONNX": True}}, "onnx_prefix must be provided"),
        ({"DebugOptions": "INFO"}, "DebugOptions is 'INFO', expected an object"),
    ],
)
def test_a_wrong_file_changes_nothing(
    daemon: object, file: Path, settings: dict[str, Any], says: str
) -> None:
    model = ORTModule(torch.nn.Linear(4, 4))
    before = model._gradd_options
    with pytest.raises(ValueError, match=says):
        load_from_json(model, written(file, **settings))
    assert model._gradd_options is before


@pytest.mark.quick
def test_other_objects_and_files_are_refused(daemon: object, file: Path) -> None:
    with pytest.raises(TypeError, match="takes an ORTModule, got Linear"):
        load_from_json(torch.nn.Linear(4, 4), written(file))  # type: ignore[arg-type]
    model = ORTModule(torch.nn.Linear(4, 4))
    file.write_text("[1]")
    with pytest.raises(ValueError, match="expected an object, got list"):
        load_from_json(model, file)
    file.write_text("{")
    with pytest.raises(ValueError, match="no JSON"):
        load_from_json(model, file)
