"""`python -m hp_core.cli`: the command `hp` without its script, as torchrun's `-m` wants it."""

import sys

from hp_core.cli import main

sys.exit(main())
