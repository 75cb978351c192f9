"""`python -m headrace_monitoring.dashboards [FOLDER]`."""

import sys
from pathlib import Path

from headrace_monitoring.dashboards import write

write(*(Path(argument) for argument in sys.argv[1:2]))
