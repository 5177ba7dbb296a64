"""Meshes as data: the axes that strategies ask for, laid over the ranks."""

from __future__ import annotations

import pytest

from hp_core import MeshAxis, PlanError
from hp_core.mesh import MeshSpec, plan_mesh

TP = MeshAxis("tp", "model", "tp_size")
CP = MeshAxis("cp", "sequence", "cp_size")
SHARD = MeshAxis("dp_shard", "data", "dp_shard_size")


def demo() -> MeshSpec:
    """The reference demo: 8 ranks, tp 2, cp 2, dp_shard_size 2."""
    return plan_mesh(8, [(TP, 2), (CP, 2), (SHARD, 2)])


def test_the_reference_demo_has_its_groups() -> None:
    mesh = demo()
    assert mesh.compute.groups("tp") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert mesh.compute.groups("cp") == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert mesh.compute.groups("dp") == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert mesh.storage.groups("dp_shard") == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert mesh.storage.groups("dp_replicate") == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert mesh.compute.groups("dp", "cp") == mesh.storage.groups("dp_replicate", "dp_shard")


def test_the_order_of_requests_does_not_move_model_axes_outwards() -> None:
    assert plan_mesh(8, [(SHARD, 2), (CP, 2), (TP, 2)]) == demo()


def test_coordinates_invert_the_row_major_order() -> None:
    mesh = demo()
    assert mesh.compute.coordinates(5) == {"dp": 1, "cp": 0, "tp": 1}
    assert mesh.storage.coordinates(6) == {"dp_replicate": 1, "dp_shard": 1, "tp": 0}


@pytest.mark.parametrize("size", [None, -1, 4])
def test_storage_shards_over_all_data_and_sequence_ranks_by_default(size: int | None) -> None:
    mesh = plan_mesh(8, [(TP, 2), (CP, 2), (SHARD, size)])
    assert mesh.storage.axes == (("dp_replicate", 1), ("dp_shard", 4), ("tp", 2))


def test_without_strategies_all_ranks_are_data_parallel_replicas() -> None:
    mesh = plan_mesh(3, [])
    assert mesh.compute.axes == (("dp", 3),)
    assert mesh.storage.axes == (("dp_replicate", 3),)


def test_axes_over_which_tokens_differ() -> None:
    assert demo().batch_axes == ("dp", "cp")
    assert demo().storage_batch_axes == ("dp_replicate", "dp_shard")


def test_describe_names_the_groups_of_rank_0() -> None:
    assert demo().describe() == (
        "mesh of 8 ranks\n"
        "  compute: dp 2 x cp 2 x tp 2; groups of rank 0: dp [0, 4], cp [0, 2], tp [0, 1]\n"
        "  storage: dp_replicate 2 x dp_shard 2 x tp 2; "
        "groups of rank 0: dp_replicate [0, 4], dp_shard [0, 2], tp [0, 1]"
    )


@pytest.mark.parametrize(
    ("world", "requests", "message"),
    [
        (6, [(TP, 4)], "6 ranks cannot be divided into tp 4 = 4. Start a multiple of 4 ranks."),
        (8, [(SHARD, 3)], "dp_shard: 3 does not divide the 8 data and sequence ranks. Use 1, 2, 4, 8 or -1."),
        (8, [(SHARD, 0)], "dp_shard: 0 does not divide the 8 data and sequence ranks. Use 1, 2, 4, 8 or -1."),
        (8, [(TP, 0)], 'mesh axis "tp" (tp_size): expected a size of at least 1, found 0'),
        (8, [(TP, 2), (TP, 2)], 'mesh axis "tp" is asked for twice; two strategies cannot share one axis'),
        (
            8,
            [(SHARD, 2), (MeshAxis("zero", "data", "size"), 2)],
            'mesh axes "dp_shard" and "zero" both shard storage over the data ranks',
        ),
    ],
)
def test_impossible_meshes_are_refused(world: int, requests: list[tuple[MeshAxis, int | None]], message: str) -> None:
    with pytest.raises(PlanError) as error:
        plan_mesh(world, requests)
    assert str(error.value) == message
