"""The Python client of pion-grpc."""
