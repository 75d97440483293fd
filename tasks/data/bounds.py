"""Limits on what a data file may ask of the machine that reads it."""

GIBIBYTE = 1 << 30
MAX_PIXELS = 40_000_000  # width x height of an image
MAX_RATIO = 200  # longer side / shorter side of an image; image processors of the Qwen family accept no more
PILLOW_MAX_PIXELS = 2 * 89_478_485  # Pillow refuses larger images, whatever max_pixels is
PARQUET_GIB = 2.0  # decompressed row groups of a Parquet file that stay in memory
MAX_GROUP_BYTES = 2 * GIBIBYTE  # decompressed size of one row group
MAX_ROWS = 100_000_000  # rows of a Parquet file; the header of a tiny file can claim any number
MAX_GROUP_ROWS = 4_000_000  # rows of one row group
MAX_FRAMES = 16  # frames of a video that are kept
# Pixels of all frames of a video together. Frames are decoded one after the other, which takes half a minute at these
# limits; the header of a tiny file can claim hours of video.
MAX_ANIMATION_PIXELS = 4_000_000_000  # GIF, WebP and PNG: two and a half minutes of 720p at 30 frames a second
MAX_VIDEO_PIXELS = 100_000_000_000  # MP4, MOV and WebM: one hour of the same
