"""``python -m moe_cpu.cli`` is ``moe-cpu``."""

import sys

from moe_cpu.cli import main

sys.exit(main())
