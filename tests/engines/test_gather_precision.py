"""FSDP2's precision and mesh of processes, without processes."""

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from runnerkit import dl
from runnerkit.engines.sharding.gather_precision import GatherPrecision
from runnerkit.engines.sharding.shard_policy import mesh_sizes

BF16 = torch.bfloat16


def part(dtype):
    return GatherPrecision(dtype, precision=dl.FP32(), engine="FullyShardedDataParallelEngine")


def test_without_a_dtype_torchs_default_policy_acts_on_every_unit():
    """Batch norms need no unit of their own."""
    full_precision = part(None)

    assert full_precision.policy() == full_precision.policy(is_root=True) == MixedPrecisionPolicy()
    assert full_precision.full_precision_units(nn.Sequential(nn.BatchNorm1d(2))) == []


def test_sums_of_gradients_outputs_and_batch_norms_stay_in_float32():
    """Only what is gathered and computed with is in bf16; a batch norm without weights has nothing to gather."""
    half, model = part(BF16), nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.BatchNorm1d(2, affine=False))
    unit, root = half.policy(), half.policy(is_root=True)

    assert (unit.param_dtype, unit.reduce_dtype, unit.output_dtype) == (BF16, torch.float32, None)
    assert (root.param_dtype, root.reduce_dtype, root.output_dtype) == (BF16, torch.float32, torch.float32)
    assert half.full_precision_units(model) == [model[1]]
    assert half.policy(is_full=True) == MixedPrecisionPolicy(cast_forward_inputs=False)


@pytest.mark.parametrize(("replicas", "tensor_parallel"), [(1, 1), (2, 1), (1, 4), (2, 2)])
def test_a_mesh_has_the_dimensions_that_are_larger_than_one(replicas, tensor_parallel):
    """The shards are the processes that are left."""
    sizes = {"replicas": replicas, "shards": -1, "tensor": tensor_parallel}

    found = mesh_sizes(8, replicas=replicas, tensor_parallel=tensor_parallel)

    assert found == {name: size for name, size in sizes.items() if size != 1}
