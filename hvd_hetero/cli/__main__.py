"""``python -m hvd_hetero.cli``."""

import sys

from hvd_hetero.cli.commands import main

if __name__ == "__main__":
    sys.exit(main())
