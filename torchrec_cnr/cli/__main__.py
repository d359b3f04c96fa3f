"""``python -m torchrec_cnr.cli`` is ``cnr``."""

from torchrec_cnr.cli import main

main()
