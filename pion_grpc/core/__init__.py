"""The domain: prefixes, chains, matches, receipts. Knows no protobuf, no RESP and no files."""
