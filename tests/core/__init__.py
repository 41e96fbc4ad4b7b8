"""Tests of everything below the transports: store, match, space and recovery on real directories."""
