"""`python -m llamatrain`."""

from llamatrain.cli.main import main

main()
