"""Limits of the wire and of what may be stored, each with its unit in its name.

They are checked before anything is allocated, by the client before it sends and by the server before
it believes.
"""

CHUNK_BYTES_MAX = 1 << 20
"""Data in one message of a stream: 1 MiB measured best in CPU seconds per byte."""
MESSAGE_BYTES_MAX = 4 << 20
"""What a gRPC client of any language takes that sets no limit of its own."""
PAGE_BYTES = 256 << 10
"""Bytes of a file under one checksum."""
TOKENS_MAX = 1_000_000
SLOTS_MAX = 1_024
TENSORS_MAX = 2 * SLOTS_MAX
ROW_BYTES_MAX = 65_536
NAMESPACE_BYTES_MAX = 200
TENANT_BYTES_MAX = 64
MODEL_ID_BYTES_MAX = 128
PARTS_MAX = 4_096
PART_BYTES_MAX = 4 << 30
PART_KIND_BYTES_MAX = 64
DESCRIPTION_BYTES_MAX = 4_096
HASHES_MAX = 400_000
"""Block hashes in one message: 3.2 MB, below gRPC's default limit of 4 MiB."""
NAMES_MAX = 1_000
"""Names in one call."""
CHAIN_DEPTH_MAX = 32
CHAIN_TOKENS_MIN = 32
"""A child shorter than this costs more to look up than to store again."""
LEASE_MS_MAX = 60_000
LEASE_MS_DEFAULT = 10_000
PREFILL_MS_MAX = 86_400_000
SCATTERED_ROWS_MAX = 65_536
ATTEND_ENTRIES_MAX = 256
"""Attend entries resident at once; each layer of a session is one."""
ATTEND_COLD_MAX = 1_024
"""Cold ones that are remembered; the oldest are forgotten."""
ATTEND_LAYERS_MAX = 1_024
"""Layers of one Lookup, or named by one Store."""
