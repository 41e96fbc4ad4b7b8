"""The `pion-grpc` command; the only part of the server that imports the client."""
