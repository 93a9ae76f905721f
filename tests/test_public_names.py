"""What may be imported, and what importing it brings along."""

import subprocess
import sys

import pytest

import shardwise
import shardwise.debug
import shardwise.shard


def test_shardwise():
    assert shardwise.__all__ == [
        "ArgumentError",
        "CheckpointError",
        "CollectiveError",
        "DTensor",
        "DeviceMesh",
        "LaunchError",
        "LayoutError",
        "LocalTensor",
        "MaskPartial",
        "MixedTensorsError",
        "Partial",
        "Placement",
        "RankMismatchError",
        "RedistributionError",
        "Replicate",
        "ReplicationWarning",
        "Shard",
        "ShardwiseError",
        "TorchVersionError",
        "UnsupportedError",
        "WorldError",
        "distribute_module",
        "distribute_tensor",
        "empty",
        "explicit_redistribution",
        "fallback",
        "full",
        "implicit_replication",
        "init_device_mesh",
        "local_map",
        "ones",
        "rand",
        "randint",
        "randn",
        "randperm",
        "reduce_gradients",
        "register_rule",
        "register_sharding",
        "rng",
        "simulate",
        "zeros",
    ]


def test_debug():
    assert shardwise.debug.__all__ == [
        "CacheStats",
        "CommDebugMode",
        "CommEvent",
        "Explanation",
        "PlannedCall",
        "ShardingPicture",
        "cache_stats",
        "check_rng",
        "explain",
        "visualize_sharding",
    ]


def test_shard():
    assert shardwise.shard.__all__ == [
        "ChunkShardingSpec",
        "EnumerableShardingSpec",
        "PlanReport",
        "Shard",
        "ShardMetadata",
        "ShardedOptimizer",
        "ShardedTensor",
        "ShardedTensorMetadata",
        "Sharder",
        "ShardingPlan",
        "ShardingPlanner",
        "ShardingSpec",
        "TensorProperties",
        "custom_sharded_op_impl",
        "empty",
        "full",
        "init_from_local_shards",
        "load_plan",
        "load_with_process_group",
        "ones",
        "pre_load_state_dict_hook",
        "rand",
        "randn",
        "save_plan",
        "shard_module",
        "shard_parameter",
        "shard_tensor",
        "state_dict_hook",
        "zeros",
    ]


@pytest.mark.parametrize(
    "module", [shardwise, shardwise.debug, shardwise.shard], ids=lambda m: m.__name__
)
def test_every_name_is_there(module):
    for name in module.__all__:
        assert getattr(module, name, None) is not None, name


def test_the_mesh_is_torchs_own():
    from torch.distributed import device_mesh

    assert shardwise.DeviceMesh is device_mesh.DeviceMesh
    assert shardwise.init_device_mesh is device_mesh.init_device_mesh


def test_errors_are_caught_as_the_builtins_that_ordinary_code_names():
    assert issubclass(shardwise.LayoutError, ValueError)
    assert issubclass(shardwise.ArgumentError, TypeError)
    assert issubclass(shardwise.UnsupportedError, NotImplementedError)
    assert issubclass(shardwise.WorldError, RuntimeError)
    assert issubclass(shardwise.RankMismatchError, RuntimeError)
    assert issubclass(shardwise.MixedTensorsError, NotImplementedError)
    assert issubclass(shardwise.RedistributionError, RuntimeError)
    for name in shardwise.__all__:
        if name.endswith("Error"):
            assert issubclass(getattr(shardwise, name), shardwise.ShardwiseError)


def test_what_shardwise_replaces_is_not_imported():
    """Nor torch's compiler, which takes longer to import than all the rest."""
    program = """
import sys, shardwise, shardwise.debug, shardwise.shard
for name in ("torch.distributed.tensor", "torch.distributed._shard", "torch._dynamo"):
    assert name not in sys.modules, name
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_a_first_call_does_not_import_the_compiler():
    program = """
import sys, torch, shardwise
with shardwise.simulate(2):
    mesh = shardwise.init_device_mesh("cpu", (2,))
    x = shardwise.distribute_tensor(torch.ones(4, 3), mesh, [shardwise.Shard(0)])
    y = torch.relu(x + x) * 2.0
    y.add_(x).mul_(y > 1)
    assert y.full_tensor().tolist() == [[5.0] * 3] * 4
assert "torch._dynamo" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_packages_need_no_import_of_their_own():
    program = """
import sys, shardwise
assert "torch" not in sys.modules
for name in ("checkpoint", "debug", "embedding", "interop", "parallel", "shard", "testing"):
    assert getattr(shardwise, name) is sys.modules[f"shardwise.{name}"]
    assert name in dir(shardwise)
assert not hasattr(shardwise, "tensors")
for name in ("torch.distributed.tensor", "torch.distributed._shard"):
    assert name not in sys.modules, name
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
