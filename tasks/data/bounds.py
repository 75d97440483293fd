"""Limits on what a data file may ask of the machine that reads it."""

GIBIBYTE = 1 << 30
MAX_PIXELS = 40_000_000  # of an image, width x height
MAX_RATIO = 200  # of an image's sides; image processors of the Qwen family take no more
PILLOWS_LIMIT = 2 * 89_478_485  # of the same, which no option changes
PARQUET_GIB = 2.0  # of row groups that are kept unpacked
MAX_GROUP = 2 * GIBIBYTE  # bytes that one row group may unpack to
MAX_ROWS = 100_000_000  # of a Parquet file; a few bytes can claim any number
MAX_GROUP_ROWS = 4_000_000  # of one of its row groups
MAX_FRAMES = 16  # of a video that are kept
# Pixels of all frames of a video, which are decoded one after the other: half a minute. A kilobyte can claim hours.
MAX_ANIMATED = 4_000_000_000  # of GIF, WebP and PNG; 720p at 30 frames a second: two and a half minutes
MAX_FILMED = 100_000_000_000  # of MP4, MOV and WebM; the same: one hour
