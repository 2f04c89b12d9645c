"""`python -m bench.suite`: see `command`."""

from bench.suite.command import main

if __name__ == "__main__":
    main()
