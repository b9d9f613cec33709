"""`python -m minineo.cli`: the command without its script."""

from . import main

main()
