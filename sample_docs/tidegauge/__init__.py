"""Read the float gauges of small harbours."""

__version__ = "2.4.1"
