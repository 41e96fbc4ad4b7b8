"""The wire: generated stubs, layouts, codecs, block hashes, checksums and chunk framing. Pure NumPy."""
