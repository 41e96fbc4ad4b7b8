"""Generated from protos/pion/v1; `make proto` writes everything here but this line."""
