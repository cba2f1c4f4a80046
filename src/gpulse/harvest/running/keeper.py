"""The program that stands between harvest and one program; `keeping` says what it does.

It is started by its path, without the environment's and the site's settings, so that it is there at once.
"""

from __future__ import annotations

import sys
from os.path import abspath, dirname

if __name__ == "__main__":
    sys.path.append(dirname(dirname(dirname(dirname(abspath(__file__))))))
    from gpulse.harvest.running.keeping import keep

    keep(int(sys.argv[1]))
