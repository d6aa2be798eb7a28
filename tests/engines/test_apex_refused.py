"""What the Apex engines refuse, in the words that they use; and which of them the flags choose."""

import pytest
import torch
from torch import nn

from runnerkit import dl
from tests.fake_apex.use import no_apex, stand_in
from tests.tiny import loader, mlp, quiet, sgd

ENGINES = ["APEXEngine", "DataParallelAPEXEngine", "DistributedDataParallelAPEXEngine"]
BUILD = "NVIDIA builds it from source, with CUDA; release 25.05 or earlier, as later ones have no apex.amp."


@pytest.fixture
def apex(monkeypatch):
    """The stand-in for the package."""
    with stand_in(monkeypatch) as package:
        yield package


@pytest.fixture
def nothing_installed(monkeypatch):
    """No package `apex`, whatever this environment has."""
    with no_apex(monkeypatch):
        yield


def install(folder, *parts):
    """Make a package `apex` of empty parts."""
    for part in ("", *parts):
        (folder / "apex" / part).mkdir(parents=True)
        (folder / "apex" / part / "__init__.py").touch()
    return folder


@pytest.mark.parametrize("name", ENGINES)
def test_a_missing_apex_is_named_with_what_to_use(nothing_installed, name):
    """Before a process is started; the recommended engine exists."""
    native = name.replace("APEX", "AMP")

    with pytest.raises(ImportError) as caught:
        getattr(dl, name)().launch(lambda: None)

    assert str(caught.value) == (
        f"{name} needs NVIDIA Apex, and no package `apex` is installed. {BUILD} "
        f"{native} (amp=True), torch's own mixed precision, needs nothing installed."
    )
    assert hasattr(dl, native)


def test_the_impostor_of_pypi_is_unmasked(nothing_installed, monkeypatch, tmp_path):
    """Without importing it: that would fail for want of a web framework, and say nothing of Apex."""
    folder = install(tmp_path, "lib", "ext", "scaffolds")
    (folder / "apex" / "__init__.py").write_text("from pyramid_mailer.interfaces import IMailer\n")
    monkeypatch.syspath_prepend(folder)

    with pytest.raises(ImportError) as caught:
        dl.APEXEngine().launch(lambda: None)

    assert str(caught.value) == (
        f"APEXEngine needs NVIDIA Apex, but the package `apex` in {folder / 'apex'} is another one: that of PyPI is an "
        f"unrelated web toolkit. Remove it with `pip uninstall apex`. {BUILD} "
        "AMPEngine (amp=True), torch's own mixed precision, needs nothing installed."
    )


def test_an_apex_without_amp_is_told_from_the_impostor(nothing_installed, monkeypatch, tmp_path):
    """The native engine of the same parallelism is named."""
    folder = install(tmp_path, "optimizers", "normalization", "transformer")
    monkeypatch.syspath_prepend(folder)

    with pytest.raises(ImportError) as caught:
        dl.DistributedDataParallelAPEXEngine().launch(lambda: None)

    assert str(caught.value) == (
        "DistributedDataParallelAPEXEngine needs apex.amp, which NVIDIA removed from Apex after release 25.05; the one "
        f"in {folder / 'apex'} is newer. DistributedDataParallelAMPEngine (amp=True), torch's own mixed precision, "
        "needs nothing installed. Apex's fused optimizers are plain optimizers and work with it."
    )


@pytest.mark.parametrize("name", ENGINES)
def test_without_a_gpu_the_native_engine_is_named(apex, monkeypatch, name):
    """Unless the caller named the device; the check comes before processes are started."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    with pytest.raises(RuntimeError, match=f"{name} needs an NVIDIA GPU.*{name.replace('APEX', 'AMP')}"):
        getattr(dl, name)().launch(lambda: None)


def test_what_apex_says_of_a_cpu_comes_with_advice(apex):
    """The stand-in refuses fp16 models; NVIDIA's refuses the CPU in the same way."""
    model = mlp().half()

    with pytest.raises(RuntimeError, match="expected fp32") as caught:
        dl.SupervisedRunner().train(
            model=model,
            criterion=nn.CrossEntropyLoss(),
            optimizer=sgd(model),
            loaders={"train": loader(8, 8)},
            engine=dl.APEXEngine("cpu"),
            **quiet(),
        )

    assert "APEXEngine was told to run on cpu. AMPEngine" in caught.value.__notes__[0]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"opt_level": "02"}, ValueError, "O0, O1, O2, O3 .the letter O., got '02'"),
        ({"opt_level": "O1", "keep_batchnorm_fp32": True}, ValueError, "leave keep_batchnorm_fp32 out"),
        ({"float_functions": [(nn.functional, "sofplus")]}, ValueError, "has no function 'sofplus'"),
        ({"opt_level": "O2", "float_functions": [(nn.functional, "softplus")]}, ValueError, "opt_level is O2"),
        ({"amp_kwargs": {"num_losses": 2}}, ValueError, "leave out num_losses"),
        ({"precision": dl.AMP()}, TypeError, "fixes its precision"),
        ({"compile": True}, ValueError, "torch.compile cannot follow"),
        ({"optlevel": "O2"}, TypeError, "got optlevel"),
    ],
)
def test_bad_arguments_are_refused_by_the_constructor(arguments, error, message):
    """What Apex would say in the middle of a run, in every process."""
    with pytest.raises(error, match=message):
        dl.APEXEngine(**arguments)


@pytest.mark.parametrize(("num_gpus", "ddp", "expected"), [(0, False, 0), (1, False, 0), (4, False, 1), (4, True, 2)])
def test_the_flag_chooses_the_engine_of_the_parallelism(monkeypatch, num_gpus, ddp, expected):
    """apex=True alone takes the GPUs that there are; with ddp=True a process for each."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)

    engine = dl.get_available_engine(apex=True, ddp=ddp)

    assert type(engine).__name__ == ENGINES[expected]
