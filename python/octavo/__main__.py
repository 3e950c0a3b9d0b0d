"""`python -m octavo`: the same as the `octavo` command."""

import sys

from .cli import main

sys.exit(main())
