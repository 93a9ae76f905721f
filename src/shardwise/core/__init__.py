"""Values: placements, sizes, meshes, layouts, worlds.

The arithmetic of which rank holds which box of a tensor. Nothing here sends anything or runs an
op; collectives are in `comm`, steps between layouts in `redistribute`.
"""
