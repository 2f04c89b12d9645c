"""`python -m rallypoint`: the same as the `rallypoint` command."""

from rallypoint.cli import main

if __name__ == "__main__":
    main()
