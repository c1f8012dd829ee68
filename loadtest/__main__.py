"""`python -m loadtest`: the same as `octavo bench`."""

import sys

from loadtest.cli import main

sys.exit(main())
