"""`python -m quorate.bench.suite`: see `command`."""

from quorate.bench.suite.command import main

if __name__ == "__main__":
    main()
