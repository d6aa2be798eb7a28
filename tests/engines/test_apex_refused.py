"""Errors of the Apex engines, and the engine that each flag chooses."""

import sys

import pytest
import torch
from torch import nn

from runnerkit import dl
from tests.fake_apex.use import stand_in
from tests.tiny import mlp

ENGINES = ["APEXEngine", "DataParallelAPEXEngine", "DistributedDataParallelAPEXEngine"]
FOUND = {  # what is installed: its folders, words of the message
    "none": ((), "NVIDIA Apex, and no package `apex` is installed. NVIDIA builds it from source"),
    "PyPI's": (("lib", "ext", "scaffolds"), "Remove it with `pip uninstall apex`. NVIDIA builds it from source"),
    "a newer one": (("optimizers", "normalization"), "apex.amp, which NVIDIA removed from Apex after release 25.05"),
}


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize(("parts", "message"), FOUND.values(), ids=FOUND)
def test_a_package_without_amp_is_refused_with_the_engine_to_use_instead(monkeypatch, tmp_path, name, parts, message):
    """The error comes before processes start and without importing the package, whose import may fail for other
    reasons."""
    folder, native = tmp_path / "apex", name.replace("APEX", "AMP")
    monkeypatch.delitem(sys.modules, "apex", raising=False)
    if not parts:
        monkeypatch.setattr("runnerkit.engines.adapters.apex_package.find_spec", lambda name: None)
    else:
        for part in parts:
            (folder / part).mkdir(parents=True)
        (folder / "__init__.py").write_text("import pyramid_mailer")
        monkeypatch.syspath_prepend(tmp_path)

    with pytest.raises(ImportError, match=f"^{name} needs ") as caught:
        getattr(dl, name)().launch(lambda: None)

    assert message in str(caught.value) and f"{native} (amp=True)" in str(caught.value)
    assert not parts or f" {folder} is " in str(caught.value)
    assert hasattr(dl, native)


@pytest.mark.parametrize("name", ENGINES)
def test_without_a_gpu_the_native_engine_is_named(monkeypatch, name):
    """The error is raised before processes start, unless the caller passed a device."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    with stand_in(monkeypatch), pytest.raises(RuntimeError) as caught:
        getattr(dl, name)().launch(lambda: None)

    assert f"{name} needs an NVIDIA GPU" in str(caught.value) and name.replace("APEX", "AMP") in str(caught.value)


def test_an_error_of_apex_on_a_cpu_comes_with_advice(monkeypatch):
    """The recording package refuses fp16 models; NVIDIA's refuses the CPU in the same way."""
    engine = dl.APEXEngine("cpu")

    with stand_in(monkeypatch):
        engine.setup()
        with pytest.raises(RuntimeError, match="expected fp32") as caught:
            engine.prepare({"": mlp().half()}, {})

    assert "APEXEngine was asked to run on cpu. AMPEngine" in caught.value.__notes__[0]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"opt_level": "02"}, ValueError, "O0, O1, O2, O3 .the letter O., got '02'"),
        ({"opt_level": "O1", "keep_batchnorm_fp32": True}, ValueError, "omit keep_batchnorm_fp32"),
        ({"float_functions": [(nn.functional, "sofplus")]}, ValueError, "lacks a function 'sofplus'"),
        ({"opt_level": "O2", "float_functions": [(nn.functional, "softplus")]}, ValueError, "opt_level is O2"),
        ({"amp_kwargs": {"num_losses": 2}}, ValueError, "must not contain num_losses"),
        ({"precision": dl.AMP()}, TypeError, "fixes its precision"),
        ({"compile": True}, ValueError, "torch.compile does not support"),
        ({"optlevel": "O2"}, TypeError, "got optlevel"),
        ({"op": "adasum"}, ValueError, "op must be 'average' with Apex"),  # unscaling would break the others
    ],
)
def test_bad_arguments_are_refused_by_the_constructor(arguments, error, message):
    """Apex would raise in the middle of a run, in every process."""
    with pytest.raises(error, match=message):
        (dl.HorovodAPEXEngine if "op" in arguments else dl.APEXEngine)(**arguments)


@pytest.mark.parametrize(("num_gpus", "ddp", "expected"), [(0, False, 0), (1, False, 0), (4, False, 1), (4, True, 2)])
def test_the_flag_chooses_the_engine_of_the_parallelism(monkeypatch, num_gpus, ddp, expected):
    """`apex=True` uses all GPUs from one process; with `ddp=True` each GPU gets a process."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)

    assert type(dl.get_available_engine(apex=True, ddp=ddp)).__name__ == ENGINES[expected]
