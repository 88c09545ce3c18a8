"""The primitive table: which columns describe one solid of the ray-cast world.

Owns: index ranges of the three kinds and the column order shared by layouts, walks and renderer.
Invariants: boxes, frustums and ellipsoids always occupy the same index ranges; heights grow
upwards from the ground plane (world y = -height); the world repeats every PERIOD units.
"""

PERIOD = 32.0
"""Edge of the torus in world units; every solid is drawn at its image nearest to the camera."""

BOX_COUNT = 14
FRUSTUM_COUNT = 16
ELLIPSOID_COUNT = 10
FRUSTUM_START = BOX_COUNT
ELLIPSOID_START = BOX_COUNT + FRUSTUM_COUNT
PRIMITIVE_COUNT = BOX_COUNT + FRUSTUM_COUNT + ELLIPSOID_COUNT
POND_COUNT = 3

# Columns of a primitive row. A and B: half widths (box), bottom and top radius (frustum),
# horizontal radii (ellipsoid). TAPER: top width as a share of the bottom width (boxes only).
X, Z, BASE, HEIGHT, A, B, ANGLE, TAPER, COLOUR, BRIGHTNESS, PATTERN, PRESENT = range(12)
COLUMN_COUNT = 12

# Values of PATTERN.
PLAIN, BANDS, WINDOWS, FOLIAGE, LAMP = range(5)

# Values of COLOUR: rows of a style's palette.
STONE, PLASTER, ACCENT, WOOD, LEAF_A, LEAF_B = range(6)
PALETTE_SIZE = 6
