"""The copy keeper's process: `keeper.main`. Started by an agent."""

import sys

from ttp.copies.keeper import main

sys.exit(main())
