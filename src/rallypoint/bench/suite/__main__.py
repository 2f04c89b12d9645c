"""`python -m rallypoint.bench.suite`: see `command`."""

from rallypoint.bench.suite.command import main

if __name__ == "__main__":
    main()
