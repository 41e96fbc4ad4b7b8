"""`python -m pion_grpc` is `pion-grpc`."""

import sys

from pion_grpc.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
