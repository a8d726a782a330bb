"""The entry point: `kvchat`, and `python -m kvchat`."""

import gc
import os
import sys

ENVIRONMENT = {"GOMP_SPINCOUNT": "10000"}
"""By default torch's idle threads (GNU OpenMP) spin for milliseconds, on the cores that the attention loops want."""


def main() -> None:
    """Run the command line; a Ctrl-C ends it with 130 also while it is still being imported."""
    gc.disable()  # imports leave no garbage, and looking for it took a fifth of their time; a loaded model enables it
    # a standard stream that is closed would be the next file that is opened, and None in sys
    while (handle := os.open(os.devnull, os.O_RDWR)) <= 2:
        name, mode = (("stdin", "r"), ("stdout", "w"), ("stderr", "w"))[handle]
        setattr(sys, name, os.fdopen(handle, mode, encoding="utf-8"))
    os.close(handle)
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        from kvchat.cli import main

        main()
    except KeyboardInterrupt:
        sys.stderr.write("kvchat: interrupted\n")
        sys.exit(130)


if __name__ == "__main__":
    main()
