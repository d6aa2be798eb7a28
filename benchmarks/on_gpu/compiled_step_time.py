"""Part b: the time of a step of compiled models, and of those that replay CUDA graphs."""

from benchmarks.on_gpu.parity import GRAPHS
from benchmarks.on_gpu.step_time import checks

LIMIT_S = 120  # compiling ResNet-50 takes most of it

CHECKS = (*checks({}, ", compile", limit_s=LIMIT_S), *checks(GRAPHS, ", CUDA graphs", limit_s=LIMIT_S))
