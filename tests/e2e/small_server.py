"""`rallypoint serve` as it is, but with snapshots after a few hundred changes: a kill must meet them, too.

    python small_server.py ENTRIES honest|forgetful serve ...

A forgetful one writes nothing of what it says it has written.
"""

import faulthandler
import sys
from functools import partial

from rallypoint.cli import main
from rallypoint.server.durability import journal

if __name__ == "__main__":
    faulthandler.dump_traceback_later(30, exit=False)  # no server of a campaign lives for so long, or starts so slowly
    journal.Bounds = partial(journal.Bounds, log_entries=int(sys.argv.pop(1)))
    if sys.argv.pop(1) == "forgetful":
        journal._write = lambda file, data, and_sync: None
    main()
