"""The version, in the one place where it is written: the build, the command line and the wire's hello read it here."""

__version__ = "0.1.0"
SOFTWARE = f"rallypoint {__version__}"
