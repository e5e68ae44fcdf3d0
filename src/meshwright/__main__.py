"""``python -m meshwright`` is the command ``meshwright``."""

from meshwright.cli.main import main

main()
