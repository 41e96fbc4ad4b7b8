"""The RESP adapter: the only place that knows the Redis protocol."""
