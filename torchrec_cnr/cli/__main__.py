"""Makes ``python -m torchrec_cnr.cli`` the same as ``cnr``."""

from torchrec_cnr.cli import main

main()
