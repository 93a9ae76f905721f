"""Meshes, shapes and placements for hypothesis."""

from hypothesis import strategies as st

from shardwise import Replicate, Shard

#: All fit into a world of 12 ranks.
MESH_SHAPES = [
    (1,), (2,), (3,), (4,), (2, 2), (2, 3), (3, 2), (1, 4), (4, 3), (2, 2, 2), (2, 3, 2), (3, 1, 4),
]  # fmt: skip


@st.composite
def cases(draw, mesh_shapes=MESH_SHAPES, max_dims=4):
    """`(mesh shape, tensor shape, placements, order)` of a tensor that is sharded somehow."""
    mesh_shape = draw(st.sampled_from(mesh_shapes))
    shape = tuple(draw(st.lists(st.integers(0, 9), min_size=1, max_size=max_dims)))
    order = tuple(draw(st.permutations(range(len(mesh_shape)))))
    placements = [Replicate()] * len(mesh_shape)
    taken = set()
    for axis in order:
        dim = draw(st.none() | st.integers(0, len(shape) - 1))
        if dim is None:
            continue
        # Explicit sizes are for the outermost axis of a dim.
        explicit = dim not in taken and draw(st.booleans())
        placements[axis] = Shard(
            dim, draw(_sizes(shape[dim], mesh_shape[axis])) if explicit else None
        )
        taken.add(dim)
    return mesh_shape, shape, tuple(placements), order


@st.composite
def _sizes(draw, size, parts):
    cuts = sorted(draw(st.lists(st.integers(0, size), min_size=parts - 1, max_size=parts - 1)))
    return tuple(b - a for a, b in zip([0, *cuts], [*cuts, size], strict=True))
