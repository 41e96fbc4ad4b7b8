"""gRPC services: the only place that builds protobuf messages or names a gRPC status code."""
