"""Run ``hvd-hetero`` as ``python -m hvd_hetero.cli``."""

import sys

from hvd_hetero.cli.commands import main

sys.exit(main())
