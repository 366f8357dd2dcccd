"""The command as ``python -m hvd_hetero.tools.cli``."""

import sys

from hvd_hetero.tools.cli.commands import main

if __name__ == "__main__":
    sys.exit(main())
