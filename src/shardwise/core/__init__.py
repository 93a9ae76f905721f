"""Values: placements, sizes, meshes, layouts, worlds.

Computes which rank holds which box of a tensor. Nothing here communicates or runs an op;
collectives are in `comm`, steps between layouts in `redistribute`.
"""
