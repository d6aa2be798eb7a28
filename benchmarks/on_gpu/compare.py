"""Comparisons with plain PyTorch that a check passes or fails by."""

import statistics
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from benchmarks.on_gpu.check import Failed, Figures

MOVED = 10  # training must change weights by this multiple of the tolerance, or a comparison could not fail


def weights(model: nn.Module) -> Tensor:
    """Return a model's weights and running statistics as one float64 vector in host memory."""
    state = [each.detach() for each in model.state_dict().values() if each.is_floating_point()]
    return torch.cat([each.cpu().double().flatten() for each in state])


def largest_difference(ours: Tensor, theirs: Tensor) -> float:
    """Return the largest absolute difference of two (N,) tensors; infinite if any value is not finite."""
    if ours.shape != theirs.shape:
        raise Failed(f"{ours.numel()} values were compared with {theirs.numel()}")
    difference = (ours - theirs).abs().max().item()
    return difference if difference == difference else float("inf")


def require_close(ours: Tensor, theirs: Tensor, *, tolerance: float, start: Tensor) -> Figures:
    """Compare trained weights with those of plain PyTorch.

    Args:
        tolerance: absolute; 0 requires the same bits.
        start: the weights before training.
    Raises:
        Failed: they differ by more than the tolerance, or training changed so little that nothing is compared.
    """
    moved, difference = largest_difference(theirs, start), largest_difference(ours, theirs)
    figures: Figures = {"difference": difference, "tolerance": tolerance, "moved": moved}
    if not moved > MOVED * tolerance:
        raise Failed(f"plain PyTorch changed weights by only {moved:.1e}, tolerance {tolerance:.0e}", figures)
    if not difference <= tolerance:
        raise Failed(f"weights differ by {difference:.1e} from plain PyTorch, tolerance {tolerance:.0e}", figures)
    return figures


def require_equal(ours: Figures, theirs: Figures) -> Figures:
    """Compare counts and settings that must be the same in both, such as the number of skipped steps.

    Raises:
        Failed: a value differs.
    """
    different = [
        f"{key} is {ours.get(key)!r} instead of {theirs[key]!r}" for key in theirs if ours.get(key) != theirs[key]
    ]
    if different:
        raise Failed("; ".join(different), ours)
    return ours


def timings(ours_us: Sequence[float], raw_us: Sequence[float]) -> Figures:
    """Summarize pairs that were measured in turns: both medians, and the median and range of the ratios."""
    ratios = [own / raw for own, raw in zip(ours_us, raw_us, strict=True)]
    return {
        "raw, µs a step": statistics.median(raw_us),
        "runnerkit, µs a step": statistics.median(ours_us),
        "ratio": statistics.median(ratios),
        "ratios": f"{min(ratios):.3f} to {max(ratios):.3f}",
    }


def require_same_loss(ours: float, raw: float, figures: Figures, *, tolerance: float) -> Figures:
    """Check that both did the same work, by their mean losses.

    Args:
        tolerance: relative.
    Raises:
        Failed: the losses differ, or one is not a number.
    """
    figures = {**figures, "loss": ours}
    if not abs(ours - raw) <= tolerance * abs(raw):
        raise Failed(f"did different work: the mean loss is {ours:.6g} instead of {raw:.6g}", figures)
    return figures
