"""`python -m tests.fuzz`: processes that share the inputs import what they run by its name, which this file has not."""

import sys

from tests.fuzz.full import main

sys.exit(main())
