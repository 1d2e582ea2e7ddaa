"""``python -m pipeline.cli``: the command of this checkout, whatever is installed."""

import sys

from pipeline.cli.main import main

sys.exit(main())
