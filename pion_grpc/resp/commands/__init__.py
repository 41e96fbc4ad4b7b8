"""Commands, one module per family; `table` puts them together."""
