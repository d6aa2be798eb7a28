"""Export of the trained model, at the end of a stage, to files that run without its code."""

from __future__ import annotations

import copy
import logging
import tempfile
from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from runnerkit.callback import Callback, CallbackNode, CallbackOrder, ICheckpointCallback, innermost
from runnerkit.callbacks.checkpoint import CheckpointCallback
from runnerkit.callbacks.metrics.parts.batch_keys import Keys, pick
from runnerkit.checkpoints.weights import Which, load_weights
from runnerkit.errors import check_component
from runnerkit.models.tracing import needed, onnx_export, quantize_onnx, save_program
from runnerkit.storage.remote.urls import local_path
from runnerkit.support.arguments import check_integers, check_keys, check_names, check_paths, check_strings
from runnerkit.support.torch_internals import is_dtensor
from runnerkit.types import as_dict, each_tensor, like

if TYPE_CHECKING:
    from runnerkit.runner import IRunner

__all__ = ["OnnxCallback", "QuantizationCallback", "TracingCallback"]

logger = logging.getLogger(__name__)


class ExportCallback(Callback):
    """Base class of callbacks that export the model, on rank zero; files are written atomically.

    The model is exported in evaluation mode, in the dtype of its weights, from a copy on the CPU. Example inputs are
    those of the run's first batch; the exported model takes batches of any length.

    Args:
        input_key, logdir, filename, which, model_key: see :class:`TracingCallback`.
    """

    shapes_training = True  # an evaluation writes nothing
    suffix = ""

    def __init__(
        self, input_key: Keys | None, logdir: str | Path | None, filename: str, *, which: Which, model_key: str | None
    ) -> None:
        # After other callbacks averaged, restored or pruned the stage's final weights.
        super().__init__(order=CallbackOrder.External + 1, node=CallbackNode.Master)
        check_keys(self, or_none=True, input_key=input_key)
        check_paths(self, or_none=True, logdir=logdir)
        check_strings(self, filename=filename)
        check_strings(self, or_none=True, model_key=model_key)
        if which not in ("best", "last"):
            raise ValueError(f"{type(self).__name__}: which must be 'best' or 'last', got {which!r}")
        if not filename.endswith(self.suffix):
            raise ValueError(f"{type(self).__name__} writes {self.suffix} files, got filename={filename!r}")
        self.input_key = input_key
        self.logdir = local_path(logdir) if logdir is not None else None
        self.filename = filename
        self.which = which
        self.model_key = model_key
        self._folder: Path | None = None
        self._checkpoints: Path | None = None  # logdir with the best checkpoint
        self._inputs: Any = None  # positional and keyword arguments
        self._hook: Any = None

    @abstractmethod
    def write(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], path: Path) -> None:
        """Write `model`, which is on the CPU and is called as ``model(*args, **kwargs)``."""

    def on_stage_start(self, runner: IRunner) -> None:
        name, models = type(self).__name__, as_dict(runner.model)
        check_component(self, "model", self.model_key, models)
        savers = [each for each in map(innermost, runner.callbacks.values()) if isinstance(each, ICheckpointCallback)]
        logdirs = [each.logdir for each in savers if each.logdir is not None]
        self._folder = self.logdir or next(iter(logdirs), None)
        if self._folder is None:
            raise ValueError(f"{name} needs a folder to write to: pass logdir= to it or to train")
        best = [each.logdir for each in savers if isinstance(each, CheckpointCallback) and each.monitor is not None]
        if self.which == "best" and not best:
            raise ValueError(
                f"{name}(which='best') needs a best checkpoint, but none is kept: pass monitor=, such as "
                "'valid/loss', to train"
            )
        self._checkpoints = next(iter(best), None)
        module = runner.engine.unwrap(models[self.model_key or ""])
        if any(map(is_dtensor, module.parameters())):
            raise ValueError(
                f"{name} cannot copy a sharded model: export it after the run, from runner.load(logdir).model"
            )
        self._inputs = None
        if self.input_key is None:
            self._hook = module.register_forward_pre_hook(self._keep_call, with_kwargs=True)

    def _keep_call(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._keep(args, kwargs)

    def _keep(self, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        self._inputs = each_tensor((tuple(args), kwargs), lambda each: each.detach().to("cpu", copy=True))
        self._remove_hook()

    def _remove_hook(self) -> None:
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def on_batch_end(self, runner: IRunner) -> None:
        if self._inputs is None and self.input_key is not None:
            self._keep(*pick(runner, self.input_key, reader=type(self).__name__))

    def on_stage_end(self, runner: IRunner) -> None:
        inputs, self._inputs = self._inputs, None
        self._remove_hook()
        assert self._folder is not None, "on_stage_start() comes first"
        path = self._folder / self.filename
        if inputs is None:
            logger.warning("%s was not written: export needs the shapes of a batch, but the stage ran none", path)
            return
        models = {
            key: copy.deepcopy(runner.engine.unwrap(each)).cpu().eval() for key, each in as_dict(runner.model).items()
        }
        if self.which == "best":
            assert self._checkpoints is not None
            load_weights(like(runner.model, models), self._checkpoints, which="best")
        args, kwargs = inputs
        model = models[self.model_key or ""]
        try:
            self.write(model, args, kwargs, path)
        except (OSError, ImportError):
            raise  # from the file system or a missing package: already clear
        except Exception as error:
            raise RuntimeError(
                f"{type(self).__name__} cannot export {type(model).__name__}"
                f"{f' (model {self.model_key!r})' * bool(self.model_key)}: torch.export traces one program for all "
                "batches, so `forward` must not branch on values or call code outside torch; or leave out the "
                "callback: the checkpoints hold the weights"
            ) from error
        logger.info("%s holds the %s weights of stage %r", path, self.which, runner.stage_key)

    def on_exception(self, runner: IRunner) -> None:
        self._inputs = None
        self._remove_hook()


class TracingCallback(ExportCallback):
    """Write the model as a ``torch.export`` program; ``torch.export.load(path).module()`` loads it.

    PyTorch recommends ``torch.export``; ``torch.jit.trace`` is deprecated.

    Args:
        input_key: keys of ``runner.batch`` to call the model with; None records the model's first call.
        logdir: folder to write to; None is the run's, which holds the checkpoints.
        filename: name of the file in that folder.
        which: "last", the weights at the end of the stage (the best ones after ``load_best_on_end=True``), or those of
            the "best" checkpoint.
        model_key: which model, if the runner has several.

    >>> TracingCallback().filename
    'traced_model.pt2'
    """

    suffix = ".pt2"

    def __init__(
        self,
        input_key: Keys | None = None,
        logdir: str | Path | None = None,
        filename: str = "traced_model.pt2",
        *,
        which: Which = "last",
        model_key: str | None = None,
    ) -> None:
        super().__init__(input_key, logdir, filename, which=which, model_key=model_key)

    def write(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], path: Path) -> None:
        save_program(model, args, path, **kwargs)


class OnnxCallback(ExportCallback):
    """Write the model as ONNX, with torch's exporter based on ``torch.export``; needs the extra "onnx".

    Args:
        input_key, logdir, filename, which, model_key: see :class:`~runnerkit.dl.TracingCallback`.
        input_names, output_names: names in the file; None is torch's choice.
        opset_version: version of the ONNX operators; None is torch's choice.

    >>> OnnxCallback(input_names=["features"]).filename
    'model.onnx'
    """

    suffix = ".onnx"

    def __init__(
        self,
        input_key: Keys | None = None,
        logdir: str | Path | None = None,
        filename: str = "model.onnx",
        *,
        which: Which = "last",
        model_key: str | None = None,
        input_names: Sequence[str] | None = None,
        output_names: Sequence[str] | None = None,
        opset_version: int | None = None,
    ) -> None:
        super().__init__(input_key, logdir, filename, which=which, model_key=model_key)
        check_names(self, or_none=True, input_names=input_names, output_names=output_names)
        check_integers(self, or_none=True, opset_version=opset_version)
        self.names: dict[str, Any] = {"input_names": input_names, "output_names": output_names}
        self.opset_version = opset_version

    def on_stage_start(self, runner: IRunner) -> None:
        for package in ("onnxscript", "onnxruntime"):
            needed(package, by=type(self).__name__)  # raise here, not after training
        super().on_stage_start(runner)

    def write(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], path: Path) -> None:
        onnx_export(model, args, path, **self.names, opset_version=self.opset_version, **kwargs)


class QuantizationCallback(OnnxCallback):
    """Write the model as ONNX with 8-bit weights, by ``onnxruntime.quantization.quantize_dynamic``.

    No calibration data is needed: activations are quantized dynamically. PyTorch's ``torch.ao`` is deprecated. Check
    the outputs of the quantized model before you use it. Needs the extra "onnx".

    Args:
        input_key, logdir, filename, which, model_key, input_names, output_names, opset_version: see
            :class:`~runnerkit.dl.OnnxCallback`.

    >>> QuantizationCallback().filename
    'quantized_model.onnx'
    """

    def __init__(
        self,
        input_key: Keys | None = None,
        logdir: str | Path | None = None,
        filename: str = "quantized_model.onnx",
        *,
        which: Which = "last",
        model_key: str | None = None,
        input_names: Sequence[str] | None = None,
        output_names: Sequence[str] | None = None,
        opset_version: int | None = None,
    ) -> None:
        super().__init__(
            input_key, logdir, filename, which=which, model_key=model_key, input_names=input_names,
            output_names=output_names, opset_version=opset_version,
        )  # fmt: skip

    def write(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], path: Path) -> None:
        with tempfile.TemporaryDirectory() as folder:
            floats = Path(folder, "floats.onnx")
            super().write(model, args, kwargs, floats)
            quantize_onnx(floats, path)
